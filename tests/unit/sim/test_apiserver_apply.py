"""Server-side apply, patches and field managers of the simulated API server."""

from __future__ import annotations

from typing import Any

import pytest

from dra.api.rules.schema import Type
from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.fieldset import from_json, to_json
from dra.sim.apiserver.patch import json_patch, merge_patch, strategic_patch
from dra.sim.apiserver.status import ApiFailure

SLICE = "/apis/resource.k8s.io/v1/resourceslices/s"
APPLY = "application/apply-patch+yaml"


def slice_of(*, generation: int = 1, labels: dict[str, str] | None = None) -> dict[str, Any]:
    pool = {"name": "p", "generation": generation, "resourceSliceCount": 1}
    meta: dict[str, Any] = {"name": "s"}
    if labels:
        meta["labels"] = labels
    spec = {"driver": "d.example", "nodeName": "n", "pool": pool, "devices": [{"name": "gpu-0"}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": meta, "spec": spec}


def apply(
    server: SimApiServer, body: dict[str, Any], manager: str, *, force: bool = False
) -> tuple[int, Any]:
    forced = "&force=true" if force else ""
    return server.request("PATCH", f"{SLICE}?fieldManager={manager}{forced}", body, content_type=APPLY)


def test_applying_creates_and_applying_again_changes_nothing() -> None:
    server = SimApiServer()
    first = apply(server, slice_of(), "m")
    second = apply(server, slice_of(), "m")
    assert (first[0], second[0]) == (201, 200)
    assert first[1]["metadata"]["resourceVersion"] == second[1]["metadata"]["resourceVersion"]


def test_a_second_manager_that_wants_another_value_is_told_the_owner() -> None:
    server = SimApiServer()
    apply(server, slice_of(generation=1), "first")
    status, answer = apply(server, slice_of(generation=2), "second")
    assert (status, answer["reason"]) == (409, "Conflict")
    assert answer["details"]["causes"] == [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "first"',
            "field": ".spec.pool.generation",
        }
    ]


def test_force_takes_the_field_over() -> None:
    server = SimApiServer()
    apply(server, slice_of(generation=1), "first")
    status, answer = apply(server, slice_of(generation=2), "second", force=True)
    assert status == 200
    owners = {entry["manager"]: entry["fieldsV1"] for entry in answer["metadata"]["managedFields"]}
    assert "f:generation" not in owners["first"]["f:spec"]["f:pool"]
    assert "f:generation" in owners["second"]["f:spec"]["f:pool"]


def test_what_a_manager_no_longer_applies_goes() -> None:
    server = SimApiServer()
    apply(server, slice_of(labels={"a": "1", "b": "2"}), "m")
    _, answer = apply(server, slice_of(labels={"a": "1"}), "m")
    assert answer["metadata"]["labels"] == {"a": "1"}


def test_what_another_manager_also_applies_stays() -> None:
    server = SimApiServer()
    apply(server, slice_of(labels={"a": "1"}), "m")
    apply(server, slice_of(labels={"a": "1"}), "n")
    _, answer = apply(server, slice_of(), "m")
    assert answer["metadata"]["labels"] == {"a": "1"}


def test_an_applied_field_without_a_manager_or_with_an_unknown_field_is_refused() -> None:
    server = SimApiServer()
    assert server.request("PATCH", SLICE, slice_of(), content_type=APPLY)[0] == 422
    body = slice_of()
    body["spec"]["nope"] = 1
    status, answer = apply(server, body, "m")
    assert status == 500
    assert ".spec.nope: field not declared in schema" in answer["message"]


def test_field_sets_read_back_as_they_were_written() -> None:
    fields = {
        "f:metadata": {"f:labels": {".": {}, "f:a": {}}},
        "f:spec": {'k:{"name":"x"}': {".": {}, "f:v": {}}},
    }
    assert to_json(from_json(fields)) == fields


def test_a_merge_patch_removes_with_null_and_replaces_lists() -> None:
    assert merge_patch({"a": 1, "b": {"c": [1, 2]}}, {"a": None, "b": {"c": [3]}}) == {"b": {"c": [3]}}


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ({"op": "add", "path": "/l/-", "value": 3}, {"l": [1, 2, 3]}),
        ({"op": "remove", "path": "/l/0"}, {"l": [2]}),
        ({"op": "replace", "path": "/l/1", "value": 9}, {"l": [1, 9]}),
        ({"op": "copy", "from": "/l/0", "path": "/x"}, {"l": [1, 2], "x": 1}),
        ({"op": "move", "from": "/l/0", "path": "/x"}, {"l": [2], "x": 1}),
    ],
)
def test_a_json_patch_operation_does_what_it_says(operation: dict[str, Any], result: Any) -> None:
    assert json_patch({"l": [1, 2]}, [operation]) == result


def test_a_json_patch_whose_test_fails_is_refused() -> None:
    with pytest.raises(ApiFailure):
        json_patch({"a": 1}, [{"op": "test", "path": "/a", "value": 2}])


def test_a_strategic_patch_merges_containers_by_name_and_deletes_by_directive() -> None:
    pod = {"spec": {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]}}
    patch = {"spec": {"containers": [{"name": "b", "image": "2"}, {"name": "a", "$patch": "delete"}]}}
    assert strategic_patch(pod, patch, Type("struct", ref="core_v1.Pod")) == {
        "spec": {"containers": [{"name": "b", "image": "2"}]}
    }
