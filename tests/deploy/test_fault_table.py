"""Every fault of docs/faults.md is shown by a test that carries its number."""

from __future__ import annotations

import importlib.util

import pytest

from tests.deploy.chart import ROOT

# Faults that no test shows. There are none, and whoever adds one says why here.
GAPS: dict[str, str] = {}


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("fault_table", ROOT / "docs/fault_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_all_fifty_in_order_and_says_of_each_what_is_done(table):
    assert list(table.FAULTS) == [f"F{number}" for number in range(1, 51)]
    for fault, does in table.FAULTS.values():
        assert len(fault) > 10
        assert does.endswith(".")
        assert "|" not in fault + does


def test_every_fault_is_shown_by_a_test(table):
    shown = table.shown_by()
    assert set(shown) <= set(table.FAULTS), "a marker names a fault that the table does not have"
    missing = {fault for fault in table.FAULTS if not shown.get(fault)}
    assert missing == set(GAPS), "no test is marked with these: @pytest.mark.fault(…)"


def test_markers_are_found_as_pytest_finds_them(table):
    """Read from the source: a list, a number in a variable or a marker on a module would be overlooked."""
    found = {each for tests in table.shown_by().values() for each in tests}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if path.name == "test_fault_table.py" or "mark.fault" not in text:
            continue
        name = str(path.relative_to(ROOT / "tests"))
        marks = text.count("mark.fault(")
        functions = {each for each in found if each.startswith(f"{name}::")}
        assert len(functions) == marks == text.count("@pytest.mark.fault("), name
