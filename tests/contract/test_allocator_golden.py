"""The allocator decides as the real one did on each recorded case: same devices, same order, same kind of error.

The cases stay outside the repository (their inputs follow Kubernetes' own test tables); without them the test
skips and says so. Cases of our own are in tests/unit/allocator.
"""

from __future__ import annotations

import copy
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dra.allocator.allocate import Allocator
from dra.allocator.model import AllocatedState, AllocatorError, DeviceId, Features
from dra.cel import CelFeatures, compile_selector
from dra.values import Quantity

GOLDEN = Path(os.environ.get("DRA_GOLDEN") or Path(__file__).parents[2].parent / "shared/golden")
CASES = GOLDEN / "allocator/cases.json"
GATES = {
    "AdminAccess": "admin_access",
    "PrioritizedList": "prioritized_list",
    "PartitionableDevices": "partitionable_devices",
    "DeviceTaints": "device_taints",
    "ConsumableCapacity": "consumable_capacity",
    "DeviceBindingAndStatus": "device_binding",
    "ListTypeAttributes": "list_type_attributes",
}


def load() -> list[dict[str, Any]]:
    return json.loads(CASES.read_text(encoding="utf-8")) if CASES.is_file() else []


ALL = load()


def ids(entries: list[dict[str, str]]) -> frozenset[DeviceId]:
    return frozenset(DeviceId(entry["driver"], entry["pool"], entry["device"]) for entry in entries)


def comparable(allocation: dict[str, Any]) -> dict[str, Any]:
    """Only whether there is a share id counts; quantities compare by amount."""
    result = copy.deepcopy(allocation)
    for device in result["devices"]["results"]:
        if "shareID" in device:
            device["shareID"] = True
        if "consumedCapacity" in device:
            device["consumedCapacity"] = {
                name: Quantity.of(amount).nano for name, amount in device["consumedCapacity"].items()
            }
    return result


def decide(case: dict[str, Any]) -> list[dict[str, Any]] | None:
    features = Features(**{GATES[name]: on for name, on in case["features"].items()})
    capacity = {
        DeviceId(entry["driver"], entry["pool"], entry["device"]): {
            name: Quantity.of(amount).nano for name, amount in entry["capacity"].items()
        }
        for entry in case["aggregatedCapacity"]
    }
    cel = CelFeatures(
        consumable_capacity=features.consumable_capacity, list_type_attributes=features.list_type_attributes
    )
    allocator = Allocator(
        slices=case["slices"],
        classes=case["classes"],
        allocated=AllocatedState(
            ids(case["allocatedDevices"]),
            capacity,
            ids(case["allocatedSharedDeviceIDs"]) | frozenset(capacity),
        ),
        compile_selector=partial(compile_selector, features=cel),
        features=features,
    )
    return allocator.allocate(case["node"], case["claimsToAllocate"])


def test_all_recorded_cases_are_there():
    if not ALL:
        pytest.skip(f"no recorded allocator cases at {CASES} (set DRA_GOLDEN)")
    assert len(ALL) == 220


@pytest.mark.parametrize("case", ALL, ids=[case["name"] for case in ALL])
def test_the_decision_is_the_recorded_one(case):
    result = case["result"]
    if "error" in result:
        with pytest.raises(AllocatorError) as caught:
            decide(case)
        assert case["expected"].get("errorContains", result["error"]) in caught.value.message
        assert caught.value.on_node_only == result["errorOnNodeOnly"]
    elif result.get("none"):
        assert decide(case) is None
    else:
        found = decide(case)
        assert found is not None
        assert [comparable(item) for item in found] == [comparable(item) for item in result["allocations"]]
