"""Write the pages of the docs that come from the code: `make docs`. Each page says so in its first lines."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = "This page is made from the code by `make docs`; it is not edited by hand.\n"
_CODE = re.compile(r"DRA-[A-Z0-9]+(?:-[A-Z0-9]+)*", re.ASCII)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- configuration -----------------------------------------------------------------------------------------


def configuration() -> str:
    """Give the page of what can be set: the plugin's flags, the chart's values, claims' opaque configurations."""
    from dra.cli.plugin import _FLAGS
    from dra.plugin.settings import GATES

    lines = ["# Configuration\n", MADE]
    lines.append("Effective for a GPU: a claim's own configuration over its DeviceClass's, over a GpuNodePolicy\n"
                 "([policies.md](policies.md)), over flags, over what is built in; a whole block replaces a whole block.\n")  # fmt: skip
    lines.append("## Flags of `dra plugin`\n\nA flag wins over its environment variable.\n")
    lines.append("| flag | environment | default | what |\n|---|---|---|---|")
    for flag in _FLAGS:
        choices = f" ({', '.join(f'`{each}`' for each in flag.choices if each)})" if any(flag.choices) else ""
        default = f"`{flag.default}`" if flag.default else ""
        lines.append(
            f"| `{flag.name}` | {', '.join(f'`{e}`' for e in flag.env)} | {default} | {_cell(flag.help)}{choices} |"
        )
    here = [name for name, ours in GATES.items() if ours]
    lines.append(
        f"\nNVIDIA's feature gates that mean something here: {', '.join(f'`{name}`' for name in here)}. The others are\naccepted with a warning.\n"
    )
    lines.append(
        "## Values of the chart\n\n`deploy/helm/dra-driver-nvidia-gpu/values.yaml`; keys that NVIDIA's chart has mean the same.\n"
    )
    lines.append("| key | default | what |\n|---|---|---|")
    lines += [
        f"| `{key}` | {f'`{default}`' if default else ''} | {_cell(text)} |"
        for key, default, text in chart_values()
    ]
    lines.append("\n## Opaque configuration of claims and classes\n")
    lines.append(
        "`opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: …}}`. An unknown field is\nan error; `dra validate` tells before it is applied.\n"
    )
    lines += list(_opaque())
    return "\n".join(lines).rstrip() + "\n"


def chart_values() -> Iterator[tuple[str, str, str]]:
    """Give (key, default, text) of the chart's values that have a text."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (ROOT / "deploy/helm/dra-driver-nvidia-gpu/values.yaml").read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped[5:]]
        elif stripped.startswith("#") and comment:
            comment.append(stripped[1:].strip())
        elif match := re.match(r"^( *)([A-Za-z][\w.-]*):(?: (.*))?$", line):
            indent = len(match[1])
            path = [each for each in path if each[0] < indent] + [(indent, match[2])]
            if comment:
                yield (
                    ".".join(name for _, name in path),
                    (match[3] or "").strip().strip('"'),
                    " ".join(comment),
                )
            comment = []


def _opaque() -> Iterator[str]:
    from dra.api import config_models

    for kind in ("GpuConfig", "MigDeviceConfig"):
        model = getattr(config_models, kind)
        yield f"### {kind}\n"
        yield "| field | type | default |\n|---|---|---|"
        yield from _fields(model, "")
        yield ""


def _fields(model: Any, prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name in ("apiVersion", "kind"):
            continue
        inner = _model_in(field.annotation)
        default = "" if field.is_required() or field.default is None else f"`{field.default}`"
        kind = "object" if inner is not None else _type_text(field.annotation)
        yield f"| `{prefix}{name}` | {_cell(kind)} | {default} |"
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _model_in(annotation: Any) -> Any:
    import typing

    for part in (annotation, *typing.get_args(annotation)):
        if hasattr(part, "model_fields"):
            return part
    return None


def _type_text(annotation: Any) -> str:
    import typing

    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if typing.get_origin(annotation) in (dict, list) or "Mapping" in str(annotation):
        return "map of index or UUID to quantity"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type_text(parts[0])
    if parts:
        return ", ".join(dict.fromkeys(_type_text(part) for part in parts))
    return {"str": "text", "int": "integer", "bool": "true or false", "float": "number"}.get(
        getattr(annotation, "__name__", ""), "text"
    )


# -- attributes --------------------------------------------------------------------------------------------


def attributes() -> str:
    """Give the page of attributes and capacities, from the pools of all simulated machines."""
    from dra.inventory.gfd import ATTRIBUTE_OF

    found = _seen()
    lines = ["# Attributes and capacities of devices\n", MADE]
    lines.append("What a device has in its ResourceSlice, and so what a CEL selector can ask for, as in\n"
                 '`device.attributes["gpu.nvidia.com"].productName` and `device.capacity["gpu.nvidia.com"].memory`. Names without a domain are\n'
                 "in the driver's own, `gpu.nvidia.com`. An attribute that a device does not have makes a selector fail: guard it\n"
                 "with `has(…)` or `.?name.orValue(…)` where the table names only some machines. Devices of type `vfio` come with a\n"
                 "feature gate: [vfio.md](vfio.md).\n")  # fmt: skip
    for what in ("attribute", "capacity"):
        plural = {"attribute": "Attributes", "capacity": "Capacities"}[what]
        lines.append(
            f"## {plural}\n\n| {what} | type | of | example | on all such devices |\n|---|---|---|---|---|"
        )
        for (kind, name), entry in sorted(found.items(), key=lambda item: item[0][1].lower()):
            if kind == what:
                everywhere = "yes" if entry["devices"] == entry["of"] else "no"
                lines.append(
                    f"| `{name}` | {entry['type']} | {', '.join(sorted(entry['kinds']))} | `{_cell(str(entry['example']))}` | {everywhere} |"
                )
        lines.append("")
    lines.append(
        "## From node labels of GPU feature discovery\n\nWhat a `nodeSelector` said for the device plugin, a claim says itself.\n"
    )
    lines.append("| label | attribute or capacity | in a selector |\n|---|---|---|")
    for label, (name, how) in ATTRIBUTE_OF.items():
        lines.append(
            f"| `{label}` | {f'`{name}`' if name else ''} | {'`' + _cell(how) + '`' if 'device.' in how else how} |"
        )
    return "\n".join(lines).rstrip() + "\n"


def _seen() -> dict[tuple[str, str], dict[str, Any]]:
    import tempfile

    from dra.host.paths import HostPaths
    from dra.host.pci_binding import PciBus
    from dra.inventory.passthrough import scan_with_passthrough
    from dra.inventory.scan import scan
    from dra.nvml.node import session_of
    from dra.sim.node import SimulatedNode
    from dra.sim.profiles import PROFILES
    from dra.slices.features import NEWEST
    from dra.slices.pool import build_pool
    from dra.telemetry.log import configure

    configure(level="error", console=True)

    found: dict[tuple[str, str], dict[str, Any]] = {}
    counts: dict[str, int] = {}
    for profile in sorted(PROFILES):
        with tempfile.TemporaryDirectory(prefix="dra-docs-") as root:
            node = SimulatedNode(profile, Path(root), real_nodes=False)
            if profile == "dgx-h100":
                # Partitions made by hand have more: they exist.
                node.control.set_mig_layout(0, [("1g.10gb", 0), ("3g.40gb", 4)])
            paths = HostPaths(**node.paths_kwargs())
            session = session_of(paths, library=node.library)
            try:
                look = scan_with_passthrough(
                    lambda: scan(session, paths, profiles=True),  # noqa: B023 - called in this round
                    PciBus(paths),
                    paths,
                )
                pool = build_pool(look(), node_name="node", features=NEWEST, mig_mode="dynamic")
            finally:
                session.close()
        for device in _devices(pool):
            kind = next(iter(device["attributes"]["type"].values()))
            counts[kind] = counts.get(kind, 0) + 1
            named = [("attribute", *pair) for pair in device["attributes"].items()]
            named += [
                ("capacity", name, {"quantity": value["value"]})
                for name, value in (device.get("capacity") or {}).items()
            ]
            for what, name, value in named:
                shown = re.sub(r"\d+$", "N", name) if name.startswith("memorySlice") else name
                entry = found.setdefault(
                    (what, shown),
                    {
                        "type": next(iter(value)),
                        "example": next(iter(value.values())),
                        "kinds": set(),
                        "by": {},
                    },
                )
                entry["kinds"].add(kind)
                entry["by"][kind] = entry["by"].get(kind, 0) + 1
    for entry in found.values():
        entry["devices"] = sum(entry["by"].values())
        entry["of"] = sum(counts[kind] for kind in entry["kinds"])
    return found


def _devices(pool: Any) -> Iterator[dict[str, Any]]:
    from dra.controller.shape import contents_of

    devices = [device for content in contents_of(pool) for device in content.get("devices") or []]
    # An example is the first that is met: one of a GPU as containers get it.
    yield from sorted(devices, key=lambda device: device["attributes"]["type"]["string"] == "vfio")


# -- errors ------------------------------------------------------------------------------------------------


def errors() -> str:
    """Give the page of error codes, from the calls that make them."""
    known = dict(sorted(error_codes().items()))
    lines = ["# Error codes\n", MADE]
    lines.append("The same text with the same code stands in a pod's event, in an event on the claim, in the log (`error_code`), in\n"
                 "`dra doctor`, `dra explain` and `dra validate`. A code keeps its meaning. `…` stands for names and values.\n")  # fmt: skip
    lines.append("| code | says | to do | in |\n|---|---|---|---|")
    for code, (message, remedy, module) in known.items():
        lines.append(f"| `{code}` | {_cell(message)} | {_cell(remedy)} | `{module}` |")
    return "\n".join(lines).rstrip() + "\n"


@cache
def error_codes() -> dict[str, tuple[str, str, str]]:
    """Give each code with (message, remedy, module); the text of the first call that has one."""
    found: dict[str, tuple[str, str, str]] = {}
    for path in sorted((ROOT / "dra").rglob("*.py")):
        module = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, str)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value):
                found.setdefault(node.value, ("", "", module))
            if not isinstance(node, ast.Call):
                continue
            texts = [_text(argument, names) for argument in node.args]
            at = next((index for index, text in enumerate(texts) if _CODE.fullmatch(text)), None)
            if at is None:
                continue
            message = texts[at + 1] if len(texts) > at + 1 else ""
            said = next((_text(k.value, names) for k in node.keywords if k.arg == "remedy"), "")
            remedy = said or (texts[at + 2] if len(texts) > at + 2 else "")
            known = found.get(texts[at], ("", "", ""))
            if (message and not known[0]) or (said and not any(known[:2])):
                found[texts[at]] = (message, remedy, module)
    return found


def _text(node: ast.AST, names: Mapping[str, str]) -> str:
    """Give a text with `…` for what is put in; empty for what is no text. `names`: the module's constants."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names) or "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, names), _text(node.right, names)
        return f"{left}{right or '…'}" if left else ""
    return ""


# -- faults ------------------------------------------------------------------------------------------------


def faults() -> str:
    """Give the page of faults, from the table and the markers of the tests."""
    path = DOCS / "fault_table.py"
    spec = importlib.util.spec_from_file_location("fault_table", path)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return str(table.page(MADE))


PAGES = {
    "configuration.md": configuration,
    "attributes.md": attributes,
    "error-codes.md": errors,
    "faults.md": faults,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    sys.exit(0)
