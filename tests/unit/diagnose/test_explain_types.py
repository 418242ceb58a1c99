"""Dumps whose values have types that no API server writes."""

from __future__ import annotations

import copy

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra.cli.main import main
from dra.diagnose.explain import explain
from dra.diagnose.explain.files import read_files
from dra.errors import ConfigError
from tests.examples import examples
from tests.unit.diagnose.explain_world import claim, device_class, gpus, held, holder_pod, node, pod

WORLD = [
    node("n1"),
    device_class(),
    gpus("n1", count=1),
    held("busy", "n1", "gpu-0"),
    holder_pod("busy", "n1"),
    pod("train", namespace="team-a"),
    claim("data", namespace="team-a"),
]


def paths(value, path=()):
    """Give the way to each value of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def replaced(path, odd):
    """Give the world with another value at one place."""
    world = copy.deepcopy(WORLD)
    place = world
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = odd
    return world


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from(sorted(set(paths(WORLD)), key=str)),
    odd=st.sampled_from([None, [], {}, [None], [[]], [{}], "x", "", 3, -1, 1.5, True, {"a": []}, {"": None}]),
)
def test_any_value_of_another_type_is_named_or_harmless(tmp_path, path, odd):
    file = tmp_path / "dump.yaml"
    body = {"kind": "List", "apiVersion": "v1", "items": replaced(path, odd)}
    file.write_text(yaml.safe_dump(body))
    for subject in ("pod/train", "claim/data"):
        try:
            explain(read_files([str(file)]), subject, namespace="team-a")
        except ConfigError as refused:
            assert refused.remedy


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ("a", "spec.devices.requests must be a list, is the text 'a'"),
        ("[[]]", "spec.devices.requests[0] must be an object (fields with values), is a list"),
        ("[{name: {}}]", "spec.devices.requests[0].name must be a text, is an object"),
    ],
)
@pytest.mark.parametrize("command", [["explain", "claim/c"], ["doctor", "cluster"]])
def test_the_object_and_the_field_are_named(tmp_path, capsys, command, requests, words):
    file = tmp_path / "claims.yaml"
    file.write_text(
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c},"
        f" spec: {{devices: {{requests: {requests}}}}}}}"
    )
    assert main([*command, "-f", str(file)]) in {1, 2}
    text = capsys.readouterr().err
    assert "DRA-DUMP-FORMAT" in text
    assert f"ResourceClaim c: {words}" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: List\napiVersion: v1\nitems: &a [{kind: List, items: *a}]\n", "a value holds itself"),
        ("&a {kind: List, apiVersion: v1, items: [*a]}\n", "a value holds itself"),
    ],
)
def test_a_list_that_holds_itself_ends(tmp_path, capsys, text, words):
    file = tmp_path / "list.yaml"
    file.write_text(text)
    assert main(["explain", "pod/a", "-f", str(file)]) == 2
    assert words in capsys.readouterr().err
