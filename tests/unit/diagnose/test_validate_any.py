"""Whatever stands in a manifest, validation gives findings and does not fall over."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_fit import KnownDevice
from dra.diagnose.validate_source import manifest_of, read_manifests
from tests.yaml_text import read_all

ROOT = Path(__file__).parents[3]
GOOD = [
    document
    for file in [
        *sorted((ROOT / "examples").glob("*.yaml")),
        *sorted((ROOT / "tests/data/bad-manifests").glob("*.yaml")),
    ]
    for document in read_all(file.read_text(encoding="utf-8"))
]
DEVICE = KnownDevice(
    "box",
    {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "productName": {"string": "X"}}, "capacity": {"memory": {"value": "8Gi"}}},
)  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


@settings(max_examples=250)
@given(data=st.data())
def test_any_value_at_any_place_gives_findings_and_never_an_exception(data):
    document = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    place = data.draw(st.sampled_from([one for one in _places(document) if one]))
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = data.draw(VALUES)
    report = validate_manifests([manifest_of(document)], known_devices=lambda: [DEVICE])
    for finding in report.findings:
        assert finding.code.startswith("DRA-")
        assert finding.message


def test_the_daemon_imports_neither_the_rules_nor_validation():
    code = (
        "import sys, dra.plugin.daemon; "
        "print([m for m in sys.modules if m.startswith(('dra.api.rules', 'dra.diagnose.validate'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LOOSE = "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: a}, spec: {devices: {requests: []}}}\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_yaml_in_braces_is_read_in_the_encodings_that_shells_write(tmp_path, encoding):
    file = tmp_path / "one.yaml"
    file.write_text(LOOSE, encoding=encoding)
    manifests, findings, _ = read_manifests([str(file)])
    assert [manifest.value["kind"] for manifest in manifests] == ["ResourceClaim"]
    assert findings == []


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("apiVersion: v1\nkind: List\nitems: {a: b}\n", 3, "the items of a list are no list"),
        ("apiVersion: v1\nkind: List\nitems:\n- 5\n", 4, "item 0 of a list is no object"),
        (
            "apiVersion: v1\nkind: List\nitems:\n- kind: List\n  items: [x]\n",
            5,
            "item 0 of a list is no object",
        ),
    ],
)
def test_what_stands_in_a_list_and_is_no_object_is_an_error_in_its_line(tmp_path, text, line, why):
    file = tmp_path / "list.yaml"
    file.write_text(text)
    _, (finding,), _ = read_manifests([str(file)])
    assert (finding.line, finding.code) == (line, "DRA-MANIFEST-KIND")
    assert why in finding.message


def test_a_folder_without_manifests_is_an_error(tmp_path):
    (tmp_path / "readme.txt").write_text("x")
    _, (finding,), _ = read_manifests([str(tmp_path)])
    assert (finding.code, finding.message) == (
        "DRA-MANIFEST-UNREADABLE", "the folder holds no .json, .yaml, .yml file",
    )  # fmt: skip


def test_a_device_without_end_is_no_text():
    _, (finding,), _ = read_manifests(["/dev/zero"])
    assert finding.message == "cannot read it: it is not text in UTF-8"
