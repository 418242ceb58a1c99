"""No module of the driver imports another in a circle, not even for types: each can be read before what uses it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import dra

ROOT = Path(dra.__file__).parent


def imported(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules of the driver that a file names in its imports, wherever they stand."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                if (found := whole if whole in modules else node.module) in modules:
                    yield found


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_another_in_a_circle():
    files = {name_of(path): path for path in ROOT.rglob("*.py")}
    graph = {name: set(imported(path, set(files))) - {name} for name, path in files.items()}
    assert sum(map(len, graph.values())) > 1000
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
