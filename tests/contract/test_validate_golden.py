"""`dra validate` agrees with a recorded real API server about what can be created.

The recordings are read from `DRA_GOLDEN` (default `../shared/golden` beside the repository).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_object import SHAPES
from dra.diagnose.validate_source import manifest_of

GOLDEN = (
    Path(os.environ.get("DRA_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")).resolve()
    / "apiserver"
)
GROUPS = ("resourceclaims", "pods", "versions", "generic", "core")
# What kubectl asks for with --validate=true, and a recorded client that asked for nothing did not.
STRICT = {"DRA-SCHEMA-UNKNOWN-FIELD", "DRA-SCHEMA-DUPLICATE"}
# (scenario, step): why the two need not agree.
NAMESPACE = "whether the namespace has the label stands in the cluster"
APART = {
    ("resourceclaims/create-defaulting", 23): "the namespace of the request's path is no part of the object",
    ("resourceclaims/validation", 64): NAMESPACE,
    ("resourceclaims/templates", 15): NAMESPACE,
}


def _creates(group: str) -> Iterator[tuple[str, int, dict[str, Any], int, str]]:
    for scenario in json.loads((GOLDEN / f"{group}.json").read_text(encoding="utf-8"))["scenarios"]:
        for number, step in enumerate(scenario["steps"]):
            body = step.get("body")
            if step["method"] != "POST" or not isinstance(body, dict) or "?" in step["path"]:
                continue
            if (body.get("apiVersion"), body.get("kind")) in SHAPES and step["status"] in {201, 400, 422}:
                text = json.dumps(step.get("response", {}).get("message", ""))
                yield f"{group}/{scenario['name']}", number, body, step["status"], text


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no recordings at {GOLDEN}")
@pytest.mark.parametrize("group", GROUPS)
def test_what_the_real_server_creates_is_clean_and_what_it_refuses_is_an_error(group):
    wrong, seen = [], 0
    for scenario, number, body, status, message in _creates(group):
        report = validate_manifests([manifest_of(body)], known_devices=tuple)
        lenient = STRICT if status == 201 else set()
        errors = [f for f in report.findings if f.severity == "error" and f.code not in lenient]
        seen += 1
        if ((status == 201) == (not errors)) == ((scenario, number) in APART):
            wrong.append(
                f"{scenario} step {number}: {status} {message[:200]}; found {[str(e) for e in errors]}"
            )
    assert not wrong, "\n".join(wrong)
    assert seen > 0
