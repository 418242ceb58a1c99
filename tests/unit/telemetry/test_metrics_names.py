"""Names, labels and help of all metrics: what promtool would complain about, and the page that lists them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from dra.telemetry import families
from dra.telemetry.metrics import Family

ALL = [family for _, group in families.GROUPS for family in group]
PAGE = Path(__file__).parents[3] / "docs"

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UNITS = {"bytes", "seconds", "ratio", "celsius", "watts", "joules", "hertz"}
# Source: promtool check metrics, which asks for base units written out, and for no type in a name.
ABBREVIATED = {
    "s",
    "ms",
    "us",
    "ns",
    "sec",
    "b",
    "kb",
    "mb",
    "gb",
    "kib",
    "mib",
    "w",
    "mw",
    "j",
    "mj",
    "hz",
    "mhz",
    "pct",
}
NOT_BASE = {
    "milliseconds", "minutes", "hours", "kilobytes", "megabytes", "mebibytes", "percent", "percentage", "milliwatts",
    "millijoules", "megahertz", "kilohertz", "fahrenheit", "kelvin",
}  # fmt: skip
TYPES = {"counter", "gauge", "histogram", "summary"}


def test_every_family_is_listed_once():
    defined = {value.name for value in vars(families).values() if isinstance(value, Family)}
    assert len(ALL) == len({family.name for family in ALL})
    assert {family.name for family in ALL} == defined


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_names_labels_and_help_are_as_promtool_wants_them(family):
    words = set(family.name.split("_"))
    assert NAME.fullmatch(family.name)
    assert family.name.startswith(
        ("nvidia_dra_", "dra_node_", "dra_gpu_", "dra_claim_", "dra_fleet_", "process_")
    )
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert not family.name.endswith(("_count", "_sum", "_bucket"))
    assert not words & (ABBREVIATED | NOT_BASE | TYPES)
    if unit := words & UNITS:
        assert family.name.removesuffix("_total").endswith(tuple(unit))
    assert family.help.endswith(".")
    assert family.help[0].isupper()
    assert "\n" not in family.help
    assert len(set(family.labels)) == len(family.labels)
    for label in family.labels:
        assert NAME.fullmatch(label)
        assert label not in {"le", "quantile", "job", "instance"}
        assert not label.startswith("__")
    assert (family.kind == "histogram") == bool(family.buckets)
    assert list(family.buckets) == sorted(set(family.buckets))


def test_dcgm_names_have_the_form_of_dcgm_exporter_and_mean_one_family_each():
    named = [name for family in ALL for name in family.dcgm]
    assert all(re.fullmatch(r"DCGM_FI_(DEV|PROF)_[A-Z0-9_]+", name) for name in named)
    assert len(named) == len(set(named))


def test_the_page_of_the_docs_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("metrics_page", PAGE / "metrics_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (PAGE / "metrics.md").read_text(encoding="utf-8") == module.page(), "run: make docs"


def test_the_dashboard_of_the_chart_asks_for_metrics_that_there_are():
    file = PAGE.parent / "deploy/helm/dra-driver-nvidia-gpu/files/dashboard.json"
    text = file.read_text(encoding="utf-8")
    asked = set(re.findall(r"\b(?:nvidia_dra|dra_node|dra_gpu|dra_claim)_[a-z0-9_]+", text))
    known = {family.name for family in ALL}
    for family in ALL:
        if family.kind == "histogram":
            known |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    assert asked
    assert asked <= known
