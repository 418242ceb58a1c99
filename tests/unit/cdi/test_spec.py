"""The rules of the specification: names, versions, and everything we refuse to write."""

import copy
import json

import pytest

from dra.cdi.spec import (
    FLOOR,
    check,
    device_name,
    encode,
    is_device_name,
    is_kind,
    kind_of,
    minimum_version,
    parse,
    problems_of,
    qualified_name,
    version_for,
)
from dra.errors import BugError, HostError
from tests.unit.cdi.node import UID
from tests.yaml_text import read

NODE = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438, "permissions": "rw"}
MOUNT = {
    "hostPath": "/usr/bin/nvidia-smi",
    "containerPath": "/usr/bin/nvidia-smi",
    "options": ["ro", "rbind"],
}
HOOK = {
    "hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"], "env": ["A=b"]
}  # fmt: skip


def good():
    return {
        "cdiVersion": "0.5.0",
        "kind": "k8s.gpu.nvidia.com/claim",
        "devices": [{"name": f"{UID}-gpu-0", "containerEdits": {"deviceNodes": [dict(NODE)]}}],
        "containerEdits": {"env": ["A=b"], "mounts": [dict(MOUNT)], "hooks": [dict(HOOK)]},
    }


def test_a_good_spec_has_no_problems_and_survives_a_round_trip():
    check(good())
    assert parse(encode(good())) == good()


def test_what_is_written_is_json_and_means_the_same_as_yaml():
    spec = good()
    spec["containerEdits"]["env"] = [
        "NAME=Grün 🙂 \u2028 \u0085 \x7f \ufeff \x07 tab\t \"quoted\" 'x': y #z",
        "EMPTY=",
    ]
    data = encode(spec)
    assert json.loads(data) == read(data) == spec
    assert encode(copy.deepcopy(spec)) == data


EDITS = ("containerEdits",)
DEVICE = ("devices", 0)
FIRST_NODE = ("devices", 0, "containerEdits", "deviceNodes", 0)
FIRST_MOUNT = (*EDITS, "mounts", 0)
FIRST_HOOK = (*EDITS, "hooks", 0)
DELETE = object()


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("cdiVersion",), "0.5", "cdiVersion is no known version"),
        (("cdiVersion",), DELETE, "has no cdiVersion"),
        (("cdiVersion",), "0.3.0", "is below 0.5.0"),
        (("kind",), "nvidia", "kind is no vendor/class"),
        (("kind",), "n/claim", "kind is no vendor/class"),
        (("devices",), [], "devices is empty"),
        (("devices",), {}, "devices is no list"),
        (("annotations",), {}, "annotations is unknown"),
        ((*DEVICE, "name"), "a/b", "is no device name"),
        ((*DEVICE, "name"), "-a", "is no device name"),
        ((*DEVICE, "containerEdits"), {}, "containerEdits is empty"),
        ((*DEVICE, "containerEdits"), DELETE, "has no containerEdits"),
        ((*EDITS, "env"), ["=x"], "is not NAME=VALUE"),
        ((*EDITS, "env"), ["x"], "is not NAME=VALUE"),
        ((*EDITS, "env"), ["A=\udcff"], "is not NAME=VALUE"),
        ((*FIRST_MOUNT, "hostPath"), "/usr/\udcff", "is no absolute path"),
        ((*EDITS, "additionalGIDs"), [44], "additionalGIDs is unknown"),
        ((*FIRST_NODE, "path"), "dev/nvidia0", "is no absolute path"),
        ((*FIRST_NODE, "path"), "/dev/../etc", "is no absolute path"),
        ((*FIRST_NODE, "hostPath"), "", "is no absolute path"),
        ((*FIRST_NODE, "type"), DELETE, "has no type"),
        ((*FIRST_NODE, "major"), DELETE, "has no major"),
        ((*FIRST_NODE, "major"), 0, "is no major number"),
        ((*FIRST_NODE, "minor"), -1, "is no number of 32 bits"),
        ((*FIRST_NODE, "minor"), True, "is no number of 32 bits"),
        ((*FIRST_NODE, "fileMode"), "0666", "is no permission bits"),
        ((*FIRST_NODE, "fileMode"), 0o4666, "is no permission bits"),
        ((*FIRST_NODE, "permissions"), "none", "is not of r, w and m"),
        ((*FIRST_NODE, "permissions"), "rr", "is not of r, w and m"),
        ((*FIRST_MOUNT, "hostPath"), "usr/bin", "is no absolute path"),
        ((*FIRST_MOUNT, "containerPath"), "/proc/driver/nvidia/params", "outside /proc"),
        ((*FIRST_MOUNT, "containerPath"), "/proc", "outside /proc"),
        ((*FIRST_MOUNT, "type"), "bind", "type is unknown"),
        ((*FIRST_MOUNT, "options"), DELETE, "has no options"),
        ((*FIRST_HOOK, "env"), [], "env is empty"),
        ((*FIRST_HOOK, "env"), DELETE, "has no env"),
        ((*FIRST_HOOK, "hookName"), "createcontainer", "is no stage"),
        ((*FIRST_HOOK, "path"), "nvidia-cdi-hook", "is no absolute path"),
    ],
)
def test_what_an_engine_or_our_rules_would_refuse_is_named_with_its_place(place, value, says):
    spec = good()
    target = spec
    for step in place[:-1]:
        target = target[step]
    if value is DELETE:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    assert any(says in problem for problem in problems_of(spec)), list(problems_of(spec))
    with pytest.raises(BugError, match="DRA-CDI-INVALID"):
        check(spec)
    with pytest.raises(HostError, match="DRA-CDI-UNREADABLE"):
        parse(json.dumps(spec).encode())


def test_a_path_that_only_starts_like_proc_is_fine():
    spec = good()
    spec["containerEdits"]["mounts"][0]["containerPath"] = "/processes/x"
    check(spec)


def test_a_device_name_twice_is_refused():
    spec = good()
    spec["devices"] *= 2
    with pytest.raises(BugError, match=f"device {UID}-gpu-0 is there twice"):
        check(spec)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b'{"kind": "a", "kind": "b"}', b"[" * 100_000]
)
def test_what_is_no_spec_is_an_error_with_a_code(data):
    with pytest.raises(HostError, match="DRA-CDI-UNREADABLE"):
        parse(data)


@pytest.mark.parametrize(
    ("change", "version"),
    [
        (lambda spec: spec["devices"][0].update(name="gpu0"), "0.3.0"),
        (lambda spec: None, "0.5.0"),
        (lambda spec: spec["devices"][0].update(annotations={"a": "b"}), "0.6.0"),
        (lambda spec: spec.update(kind="vendor.com/cla.im"), "0.6.0"),
        (lambda spec: spec["containerEdits"].update(additionalGids=[44]), "0.7.0"),
        (lambda spec: spec["containerEdits"].update(intelRdt={"closID": "a"}), "0.7.0"),
        (lambda spec: spec["containerEdits"].update(intelRdt={"schemata": ["x"]}), "1.1.0"),
        (
            lambda spec: spec["containerEdits"].update(netDevices=[{"hostInterfaceName": "a", "name": "b"}]),
            "1.1.0",
        ),
    ],
)
def test_the_version_needed_follows_from_the_newest_feature_used(change, version):
    spec = good()
    change(spec)
    assert minimum_version(spec) == version


def test_mount_types_need_0_4_and_host_paths_of_nodes_0_5():
    spec = good()
    spec["devices"][0]["name"] = "gpu0"
    spec["containerEdits"]["mounts"][0]["type"] = "bind"
    assert minimum_version(spec) == "0.4.0"
    spec["devices"][0]["containerEdits"]["deviceNodes"][0]["hostPath"] = "/dev/nvidia0"
    assert minimum_version(spec) == "0.5.0"


def test_the_version_written_does_not_hang_on_the_first_character_of_a_uid():
    for uid in (UID, "f" + UID[1:]):
        spec = good()
        spec["devices"][0]["name"] = f"{uid}-gpu-0"
        assert version_for(spec) == FLOOR == "0.5.0"


def test_names_are_nvidia_s():
    assert kind_of("gpu.nvidia.com") == "k8s.gpu.nvidia.com/claim"
    assert device_name(UID, "gpu-0") == f"{UID}-gpu-0"
    assert device_name(UID, "gpu-0", "abcdef0123456789") == f"{UID}-gpu-0-abcdef01"
    assert qualified_name("gpu.nvidia.com", UID, "gpu-0") == f"k8s.gpu.nvidia.com/claim={UID}-gpu-0"


@pytest.mark.parametrize("text", ["a/bb", "aa/b", "1a/bb", "aa/bb-", "aa", "aa/b_", "é1/bb", "aa/bb/cc", ""])
def test_kinds_that_break_readers_are_none(text):
    assert not is_kind(text)


@pytest.mark.parametrize("text", ["0", "0:1", "a", "a.b_c-d:e", UID])
def test_device_names_may_hold_what_the_grammar_allows(text):
    assert is_device_name(text)
    assert not is_device_name(text + "-")
    assert not is_device_name(text + "\n")
