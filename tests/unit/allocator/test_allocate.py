"""What the allocator decides, by cases of our own; the recorded ones of the real allocator are a contract test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.allocator.allocate import Allocator, allocated_state
from dra.allocator.model import AllocatedState, AllocatorError, DeviceId
from dra.cel import compile_selector

DRIVER = "gpu.nvidia.com"
CLASS = {
    "metadata": {"name": "gpu"},
    "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
}


def device(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def pool(node: str, *devices: dict[str, Any], name: str = "", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name or f"0-{node}"},
        "spec": {
            "driver": DRIVER,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "nodeName": node,
            "devices": list(devices),
            **spec,
        },
    }


def claim(*requests: dict[str, Any], name: str = "c", **devices: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"devices": {"requests": list(requests), **devices}}}


def request(name: str = "r", **exactly: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": "gpu", **exactly}}


def node(name: str = "n1") -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}


def allocate(slices, claims, *, allocated=AllocatedState(), at="n1"):
    allocator = Allocator(
        slices=slices, classes=[CLASS], allocated=allocated, compile_selector=compile_selector
    )
    found = allocator.allocate(node(at), claims)
    if found is None:
        return None
    return [[item["device"] for item in one["devices"]["results"]] for one in found]


def held(*names: str, at: str = "n1") -> AllocatedState:
    return AllocatedState(frozenset(DeviceId(DRIVER, at, name) for name in names))


def test_the_first_free_device_in_published_order_is_taken():
    slices = [pool("n1", device("gpu-3"), device("gpu-0"), device("gpu-1"))]
    assert allocate(slices, [claim(request())]) == [["gpu-3"]]
    assert allocate(slices, [claim(request())], allocated=held("gpu-3")) == [["gpu-0"]]


def test_a_node_gets_only_its_own_devices():
    slices = [pool("n1"), pool("n2", device("gpu-0"))]
    assert allocate(slices, [claim(request())], at="n1") is None
    assert allocate(slices, [claim(request())], at="n2") == [["gpu-0"]]


def test_two_drivers_with_pools_of_one_name_do_not_mix_their_counters():
    """kube-scheduler 1.36.2 caches counters by pool name alone and gives the second driver's devices out twice."""
    counters = [{"name": "set", "counters": {"memory": {"value": "1"}}}]
    eats = [{"counterSet": "set", "counters": {"memory": {"value": "1"}}}]

    def both(driver: str) -> list[dict[str, Any]]:
        spec = {
            "driver": driver,
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 2},
            "nodeName": "n1",
        }
        devices = [device("a", consumesCounters=eats), device("b", consumesCounters=eats)]
        return [
            {"metadata": {"name": f"{driver}-0"}, "spec": {**spec, "sharedCounters": counters}},
            {"metadata": {"name": f"{driver}-1"}, "spec": {**spec, "devices": devices}},
        ]

    classes = [
        {
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{name}'"}}]},
        }
        for name in ("one.example.com", "two.example.com")
    ]
    allocator = Allocator(
        slices=both("one.example.com") + both("two.example.com"),
        classes=classes,
        allocated=AllocatedState(),
        compile_selector=compile_selector,
    )
    one = request("one", deviceClassName="one.example.com")
    two = request("two", deviceClassName="two.example.com", count=2)
    assert allocator.allocate(node(), [claim(one, two)]) is None


def test_distinct_attributes_are_compared_between_all_devices_of_a_request():
    """kube-scheduler 1.36 compares with the last device of the request only."""
    color = "gpu.nvidia.com/color"
    slices = [
        pool(
            "n1",
            *[
                device(f"gpu-{i}", attributes={color: {"string": text}})
                for i, text in enumerate(["red", "blue", "red"])
            ],
        )
    ]
    three = claim(request(count=3), constraints=[{"distinctAttribute": color}])
    two = claim(request(count=2), constraints=[{"distinctAttribute": color}])
    assert allocate(slices, [three]) is None
    assert allocate(slices, [two]) == [["gpu-0", "gpu-1"]]


def test_a_taint_keeps_claims_away_that_do_not_tolerate_it():
    taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
    slices = [pool("n1", device("gpu-0", taints=[taint]), device("gpu-1"))]
    assert allocate(slices, [claim(request())]) == [["gpu-1"]]
    tolerant = request(tolerations=[{"key": "gpu.nvidia.com/xid", "operator": "Exists"}])
    assert allocate(slices, [claim(tolerant)]) == [["gpu-0"]]
    harmless = [pool("n1", device("gpu-0", taints=[{**taint, "effect": "None"}]))]
    assert allocate(harmless, [claim(request())]) == [["gpu-0"]]


def test_admin_access_takes_devices_in_use_and_holds_nothing():
    slices = [pool("n1", device("gpu-0"))]
    admin = claim(request(allocationMode="All", adminAccess=True))
    assert allocate(slices, [admin], allocated=held("gpu-0")) == [["gpu-0"]]
    results = [{"driver": DRIVER, "pool": "n1", "device": "gpu-0", "adminAccess": True}]
    state = allocated_state([{"status": {"allocation": {"devices": {"results": results}}}}])
    assert allocate(slices, [claim(request())], allocated=state) == [["gpu-0"]]


def test_an_incomplete_pool_gives_nothing_and_stops_a_claim_for_all():
    slices = [pool("n1", device("gpu-0"))]
    slices[0]["spec"]["pool"]["resourceSliceCount"] = 2
    assert allocate(slices, [claim(request())]) is None
    with pytest.raises(AllocatorError, match="currently being updated"):
        allocate(slices, [claim(request(allocationMode="All"))])


def test_first_available_falls_back_and_says_which_alternative_was_taken():
    memory = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) >= 0"
    slices = [pool("n1", device("gpu-0", capacity={"memory": {"value": "24Gi"}}))]
    wanted = {
        "name": "r",
        "firstAvailable": [
            {"name": "big", "deviceClassName": "gpu", "selectors": [{"cel": {"expression": memory}}]},
            {"name": "any", "deviceClassName": "gpu"},
        ],
    }
    allocator = Allocator(
        slices=slices, classes=[CLASS], allocated=AllocatedState(), compile_selector=compile_selector
    )
    found = allocator.allocate(node(), [claim(wanted)])
    assert found is not None
    assert found[0]["devices"]["results"][0]["request"] == "r/any"


def test_a_selector_that_fails_on_a_device_fails_the_attempt_and_names_claim_and_selector():
    bad = request(selectors=[{"cel": {"expression": "device.attributes['gpu.nvidia.com'].nothing == 1"}}])
    with pytest.raises(AllocatorError, match=r"claim c: selector #0: CEL runtime error: .*no such key"):
        allocate([pool("n1", device("gpu-0"))], [claim(bad)])


@settings(max_examples=60)
@given(
    free=st.lists(st.booleans(), min_size=1, max_size=8),
    counts=st.lists(st.integers(min_value=1, max_value=3), min_size=1, max_size=4),
)
def test_whole_devices_fit_exactly_when_there_are_enough_and_none_is_given_twice(free, counts):
    slices = [pool("n1", *[device(f"gpu-{i}") for i in range(len(free))])]
    taken = held(*[f"gpu-{i}" for i, is_free in enumerate(free) if not is_free])
    claims = [claim(request(count=count), name=f"c{i}") for i, count in enumerate(counts)]
    found = allocate(slices, claims, allocated=taken)
    assert (found is not None) == (sum(counts) <= sum(free))
    if found is not None:
        flat = [name for names in found for name in names]
        assert len(set(flat)) == len(flat) == sum(counts)
        assert not {DeviceId(DRIVER, "n1", name) for name in flat} & taken.devices
