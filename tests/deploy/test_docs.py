"""The docs are true where that can be checked: links, commands, error codes, values, and the pages made from the code."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
from functools import cache

import pytest

from dra.cli.main import COMMANDS, _parser
from dra.diagnose.doctor.model import EXIT_CODES
from tests.deploy.chart import CHART, ROOT
from tests.yaml_text import read

PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@cache
def made():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES_MADE = made().PAGES


@pytest.mark.parametrize("name", sorted(PAGES_MADE))
def test_pages_made_from_the_code_are_current(name):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES_MADE[name](), "run: make docs"


def anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), (page.name, target)
        if anchor:
            assert anchor in anchors(path), (page.name, target)


def commands_in(page):
    """Lines of code blocks that call `dra`, without comments and prompts; continued lines are joined."""
    for block in _FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"^\$? ?(?:\S*/)?dra (.*)$", line.strip())
            if match and "…" not in match[1]:
                yield re.split(r"\s+#|\s+\|\s+|\s+>\s*\S+$|\s+&$", match[1])[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_is_one_that_the_command_line_takes(page, capsys):
    for text in commands_in(page):
        words = shlex.split(text)
        try:
            _parser(words).parse_args(words)
        except SystemExit as end:
            assert end.code == 0, (page.name, text, capsys.readouterr().err)


def test_the_flags_and_commands_that_the_docs_name_exist():
    known = set()
    for name, (module, _) in COMMANDS.items():
        subparsers = argparse.ArgumentParser().add_subparsers()
        importlib.import_module(module).add_parser(subparsers)
        known |= flags_of(subparsers.choices[name])
    foreign = {
        # Of kubectl, helm, git, docker, containerd, pytest, make.
        "--namespace", "--create-namespace", "--set", "--no-hooks", "--image", "--profile", "--platform", "--watch",
        "--version", "--help", "--all", "--wait", "--timeout", "--for", "--field-selector", "--selector", "--build-arg",
    }  # fmt: skip
    for name in (
        "quickstart.md",
        "operations.md",
        "troubleshooting.md",
        "migration.md",
        "security.md",
        "comparison.md",
    ):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known - foreign
        assert not unknown, (name, unknown)


def flags_of(parser):
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found |= flags_of(inner)
    return found


def test_error_codes_in_the_docs_are_codes_of_the_code():
    known = set(made().error_codes())
    for page in PAGES:
        if page.name == "error-codes.md":
            continue
        found = set(re.findall(r"DRA-[A-Z0-9]+(?:-[A-Z0-9]+)*(?!-?…)\b", page.read_text(encoding="utf-8")))
        unknown = {
            code
            for code in found
            if code not in known and not any(each.startswith(f"{code}-") for each in known)
        }
        assert not unknown, (page.name, unknown)


_CODE = re.compile(r"\bDRA-[A-Z0-9]+(?:-[A-Z0-9]+)*")


def texts_of(tree):
    """(text, part of an f-string or sum) for each text of a module that is no docstring."""
    spoken = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    joined = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.BinOp)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in spoken:
            yield node.value, id(node) in joined


@pytest.mark.parametrize(
    "room", sorted(each.name for each in (ROOT / "dra").iterdir() if each.suffix in ("", ".py"))
)
def test_every_error_code_of_the_code_stands_on_the_page(room):
    listed = set(_CODE.findall((ROOT / "docs/error-codes.md").read_text(encoding="utf-8")))
    place = ROOT / "dra" / room
    for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
        for text, joined in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            # A code that is put together stands nowhere in full, and nobody finds it.
            assert not (joined and re.search(r"\bDRA-(?:[A-Z0-9]+-)*$", text)), (str(path), text)
            for code in _CODE.findall(text):
                family = any(each.startswith(f"{code}-") for each in listed)
                assert code in listed or family, (str(path), code)


def test_the_exit_codes_of_the_doctor_stand_in_the_docs():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for rung, code in EXIT_CODES.items():
        assert re.search(rf"\| {code} \| {rung}\b", text), (rung, code)


def test_values_of_the_chart_that_the_docs_name_exist():
    values = read((CHART / "values.yaml").read_text())
    top = "|".join(values)
    for page in PAGES:
        if page.name in ("configuration.md", "error-codes.md"):
            continue  # made from the code; errors name fields of pods
        for dotted in re.findall(
            rf"(?<![\w./-])((?:{top})(?:\.[a-zA-Z]+)+)(?=[=:`\s,;)])", page.read_text(encoding="utf-8")
        ):
            if page.suffix != ".md" or dotted.endswith((".md", ".yaml", ".sh")):
                continue
            found = values
            for part in dotted.split("."):
                assert isinstance(found, dict) and (part in found or not found), (page.name, dotted)
                found = found.get(part, {})


def test_every_value_of_the_chart_is_explained():
    explained = {key for key, _, _ in made().chart_values()}

    def leaves(value, path=""):
        for key, item in value.items():
            at = f"{path}.{key}".lstrip(".")
            if at not in explained and isinstance(item, dict) and item:
                yield from leaves(item, at)
            else:
                yield at

    missing = [key for key in leaves(read((CHART / "values.yaml").read_text())) if key not in explained]
    assert missing == []


def test_the_chinese_readme_is_chinese_and_tells_the_same_commands():
    text = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 500
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "README.zh.md" in english and "README.md" in text
    for command in ("make demo", "make test", "helm install dra-driver-nvidia-gpu"):
        assert command in text and command in english


def test_files_and_manifests_that_the_docs_apply_are_there():
    for page in PAGES:
        for block in _FENCE.findall(page.read_text(encoding="utf-8")):
            for path in re.findall(r"(?<![\w/])((?:deploy|examples|crds)/[\w./-]+\.yaml)", block):
                assert (ROOT / path).is_file(), (page.name, path)
