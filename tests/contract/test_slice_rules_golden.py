"""Our rules for slices against the recorded answers of a real API server."""

import json
import os
from pathlib import Path

import pytest

from dra.slices.validate import validate_slices

GOLDEN = Path(os.environ.get("DRA_GOLDEN") or Path(__file__).parents[3] / "shared/golden")
FILE = GOLDEN / "apiserver/resourceslices.json"

# What the server takes and we never send: we refuse it.
STRICTER = {
    "counter without value",
    "capacity no value",
    "attribute key 'a/b/c'",
    "attribute key 'Dom.Example/x'",
    "driver uppercase",
    # Fine for one slice; the scheduler refuses the pool.
    "consumesCounters, set not in this slice",
    "consumes from 2 sets",
    "consumes 32 counters",
}
# What the server refuses for reasons that are not the content's, or in fields that we never write.
OUT_OF_SCOPE = {"attribute list type (gate off)", "nodeSelector bad operator"}


def steps():
    if not FILE.is_file():
        return []
    scenarios = {each["name"]: each for each in json.loads(FILE.read_text())["scenarios"]}
    return [
        step
        for step in scenarios["validation"]["steps"]
        if step["method"] == "POST" and isinstance(step.get("body"), dict) and step["status"]
    ]


def verdict(step):
    spec = step["body"]["spec"]
    count = (spec.get("pool") or {}).get("resourceSliceCount")
    # A slice of a larger pool: the count is the pool's affair, not this slice's.
    return [
        each for each in validate_slices([spec]) if not ("is not 1" in each.message and count and count > 1)
    ]


@pytest.mark.skipif(not FILE.is_file(), reason=f"no golden data at {FILE} (set DRA_GOLDEN)")
@pytest.mark.parametrize("step", steps(), ids=lambda step: step["do"])
def test_a_slice_is_valid_exactly_when_the_server_stores_it(step):
    if step["do"] in OUT_OF_SCOPE:
        pytest.skip("not about what we write")
    found = verdict(step)
    if step["status"] == 201 and step["do"] not in STRICTER:
        assert found == []
    else:
        assert found
