"""The publisher's check of a device and the API server's rules come to one verdict, device by device.

They stand twice on purpose: the daemon's is fast, takes any JSON, and says which attribute to leave out; the server's
gives its causes in its words and order, and is not loaded by the daemon.
"""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dra.api.rules.decode import DecodeError, Findings, decode
from dra.api.rules.slices import validate
from dra.slices.rules import check_device

Json = dict[str, Any]


class Rules:
    cel_check = None
    minor = 36


def mostly(good: list[Any], wrong: list[Any]) -> st.SearchStrategy[Any]:
    """Values at the edges of what is allowed: so often right that a device of many is right now and then."""
    return st.sampled_from([*good * 12, *wrong])


# A name with two slashes is taken by the server, and is none to us.
NAMES = mostly(
    ["a", "memory", "gpudra.dev/rail", "a" * 32, "d" * 63 + "/x", "A_b"],
    ["a" * 33, "e" * 64 + "/x", "9x", "a-b", ""],
)
LABELS = mostly(["gpu-0", "a" * 63, "0"], ["a" * 64, "A", "a.b", "-a", ""])
AMOUNTS = mostly(["0", "1", "2", "3", "10", "10Gi", "5Gi", "15Gi", "80Gi", "1e3", "0.5"], ["-1", "x", ""])
VERSIONS = mostly(
    ["1.2.3", "1.2.3-rc.1+b", f"1.{2**64 - 1}.0"], ["1.2", "01.2.3", f"1.{2**64}.0", "1.2.3-" + "a" * 60]
)
TEXTS = mostly(["", "x", "é" * 32, "a" * 64, "\n"], ["é" * 33, "a" * 65])
VALUES = st.one_of(
    st.builds(lambda value: {"string": value}, TEXTS),
    st.builds(lambda value: {"version": value}, VERSIONS),
    st.builds(lambda value: {"int": value}, st.sampled_from([0, -(2**63), 2**63 - 1])),
    st.builds(lambda value: {"bool": value}, st.booleans()),
    mostly([{"bool": True}], [{}, {"int": 1, "string": "x"}]),
)
POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "default": AMOUNTS,
        "validValues": st.lists(AMOUNTS, max_size=3) | st.just([f"{n}" for n in range(1, 12)]),
        "validRange": st.fixed_dictionaries({}, optional={"min": AMOUNTS, "max": AMOUNTS, "step": AMOUNTS}),
    },
)
CAPACITIES = st.fixed_dictionaries({"value": AMOUNTS}, optional={"requestPolicy": POLICIES})
TAINTS = st.fixed_dictionaries(
    {"key": mostly(["a", "gpu.nvidia.com/xid"], ["a/b/c", "", "A.B/x", "a" * 64]),
     "effect": mostly(["NoSchedule", "NoExecute", "None"], ["Maybe"])},
    optional={"value": mostly(["", "79"], ["a b", "x" * 64])},
)  # fmt: skip
COUNTERS = st.fixed_dictionaries(
    {"counterSet": LABELS, "counters": st.dictionaries(LABELS, st.just({"value": "1"}), max_size=2)}
)
CONDITIONS = st.lists(mostly(["a.example.com/ready", "b", "c"], ["not one"]), max_size=5)
DEVICES = st.fixed_dictionaries(
    {"name": LABELS},
    optional={
        "attributes": st.dictionaries(NAMES, VALUES, max_size=3) | st.just({f"a{n}": {"bool": True} for n in range(33)}),
        "capacity": st.dictionaries(NAMES, CAPACITIES, max_size=2),
        "allowMultipleAllocations": st.booleans(),
        "taints": st.lists(TAINTS, max_size=2) | st.lists(TAINTS, min_size=16, max_size=17),
        "consumesCounters": st.lists(COUNTERS, max_size=3),
        "bindingConditions": CONDITIONS,
        "bindingFailureConditions": CONDITIONS,
    },
)  # fmt: skip


def server_takes(device: Json) -> bool:
    """Whether the API server would store a slice with this device."""
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": [device],
    }
    slice_ = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "s"},
        "spec": spec,
    }
    try:
        obj = decode(slice_, "resource_v1.ResourceSlice", Findings())
    except DecodeError:
        return False
    return not validate(obj, Rules())  # type: ignore[arg-type]


@settings(max_examples=150)
@example(
    {
        "name": "a",
        "allowMultipleAllocations": True,
        "capacity": {"m": {"value": "2", "requestPolicy": {"default": "1", "validRange": {}}}},
    }
)
@given(DEVICES)
def test_what_the_publisher_takes_the_server_takes_and_the_other_way_round(device):
    found = [violation.message for violation in check_device(device, "d")]
    assert (not found) == server_takes(device), found
