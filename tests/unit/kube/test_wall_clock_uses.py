"""Who asks for the time of day, and why: it can be set at any moment, so that no duration may be taken from it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "dra"
# What a module needs it for. The simulation plays the world outside and is not listed.
ALLOWED = {
    "cli/top.py": "the age of a claim's record, beside the time that the file system gave it",
    "diagnose/explain/cluster.py": "the age of objects, beside the times that the API server gave them",
    "health/monitor.py": "taints' `timeAdded`, and what an older version of the state file knew alone",
    "host/driver_catalog.py": "whether directories changed a moment ago, beside the times of the file system",
    "inventory/sampling.py": "when a reading was taken, for people",
    "kube/clock.py": "the clock that others are given",
    "plugin/claim_status.py": "`lastTransitionTime` of conditions",
    "plugin/health_service.py": "when health was updated, which the kubelet compares with its own time of day",
    "plugin/registration.py": "a line of the log",
    "prepare/set_aside.py": "the age of files that nobody waits for, over restarts, beside the time of the file system",
    "prepare/store.py": "whether a directory changed a moment ago, beside the time of the file system",
    "webhook/certificate.py": "whether a certificate has expired",
}
NAMES = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "dt.datetime.now"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


@pytest.mark.fault("F42")
def test_each_use_of_the_time_of_day_has_a_reason() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name.startswith("sim/"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        uses = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & NAMES
        assert not (uses and name not in ALLOWED), f"{name}: {uses}: take durations from time.monotonic"
        if uses:
            found.add(name)
    assert found == ALLOWED.keys()
