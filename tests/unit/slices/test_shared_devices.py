"""Devices that several claims may hold: what NVIDIA's driver publishes, and what tells how they are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.gpu_settings import NodeSettings, parse_sharing
from dra.slices.features import NEWEST, ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.sharing import mps_clients
from dra.slices.validate import validate_slices
from tests.unit.inventory.inventory_samples import gpu, inventory, mig
from tests.unit.slices.mig_machines import Scheduler, machine, slices_of

GIB = 1 << 30
# A card of 24 GiB less what the driver keeps, which is no whole number of MiB.
L4 = gpu(0, memory_bytes=24 * GIB - 1000, compute_capability=(8, 9))


def published(sharing, *gpus, features=NEWEST, mps=False, **options):
    made = build_pool(
        inventory(*(gpus or (L4,))), node_name="node-1", features=features, settings=parse_sharing(sharing), mps=mps,
        **options,
    )  # fmt: skip
    assert validate_slices(made.specs(generation=1), counters_apart=features.counters_apart) == []
    return made


def only(made):
    (device,) = made.devices
    return device


@pytest.mark.parametrize(
    ("sharing", "policy"),
    [
        ("unlimited", {"default": "0", "validRange": {"min": "0", "step": "1Mi", "max": "24575Mi"}}),
        ("memory", {"default": "24575Mi", "validRange": {"min": "1Mi", "step": "1Mi", "max": "24575Mi"}}),
        ("10", {"default": "0", "validRange": {"min": "0", "step": "1Mi", "max": "24575Mi"}}),
    ],
)
def test_memory_has_the_policy_that_nvidias_driver_gives_it(sharing, policy):
    device = only(published(sharing))
    assert device["allowMultipleAllocations"] is True
    assert device["capacity"]["memory"] == {"value": "24575Mi", "requestPolicy": policy}


def test_shares_are_a_capacity_of_their_own_and_one_is_taken_by_whoever_names_none():
    device = only(published("10"))
    assert device["capacity"]["shares"] == {
        "value": "10",
        "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1", "max": "10"}},
    }
    assert "shares" not in only(published("memory"))["capacity"]
    assert "shares" not in only(published("unlimited"))["capacity"]


def test_what_is_shared_tells_how_and_what_is_not_is_as_nvidias_driver_publishes_it():
    attributes = only(published("10", mps=True))["attributes"]
    assert {name: value for name, value in attributes.items() if "/" in name and "gpudra" in name} == {
        "gpudra.dev/sharing": {"string": "shares"},
        "gpudra.dev/replicas": {"int": 10},
        "gpudra.dev/memoryPerShare": {"int": 24575 * (1 << 20) // 10},
        "gpudra.dev/enforcement": {"string": "per-process"},
    }
    assert only(published("memory"))["attributes"]["gpudra.dev/sharing"] == {"string": "memory"}
    plain = build_pool(inventory(L4), node_name="node-1", features=NEWEST)
    assert published("exclusive").slices == plain.slices
    assert not [name for name in only(plain)["attributes"] if "gpudra" in name]


@pytest.mark.parametrize(
    ("sharing", "mps", "capability", "holds"),
    [
        ("10", True, (8, 9), "per-process"),
        ("10", False, (8, 9), "none"),
        ("10/none", True, (8, 9), "none"),
        ("memory/cooperative", True, (8, 9), "cooperative"),
        ("memory/cooperative", False, (8, 9), "none"),
        # No claim is prepared without, so it holds whatever runs at the moment.
        ("10/required", False, (8, 9), "per-process"),
        # Pascal's MPS knows no limits.
        ("10/required", True, (6, 1), "none"),
    ],
)
def test_enforcement_says_what_really_holds(sharing, mps, capability, holds):
    device = only(published(sharing, replace(L4, compute_capability=capability), mps=mps))
    assert device["attributes"]["gpudra.dev/enforcement"] == {"string": holds}


@pytest.mark.parametrize(
    ("device", "cuda", "clients"),
    [
        ("gpu-0", (13, 0), 48),
        ("gpu-0", (13, 1), 60),
        ("gpu-0", None, 48),
        ("gpu-0-mig-1g10gb-19-0", (12, 8), 6),
        ("gpu-0-mig-3g40gb-9-0", (12, 8), 20),
        ("gpu-0-mig-3g40gb-9-0", (13, 1), 25),
        ("gpu-0-mig-7g80gb-0-0", (12, 8), 48),
        # A name of an old claim: the profile by its id only.
        ("gpu-0-mig-9-0-4", (12, 8), 20),
    ],
)
def test_a_partition_serves_its_part_of_the_clients(device, cuda, clients):
    (first, *_) = machine("dgx-h100").gpus
    assert mps_clients(first, device, cuda) == clients


def test_more_shares_than_one_server_has_clients_are_told_where_claims_have_one_server():
    (problem,) = published("100/cooperative", mps=True).problems
    assert (problem.device, problem.code) == ("gpu-0", "DRA-SLICE-CLIENTS")
    assert "48" in problem.message
    assert problem.remedy
    assert published("48/cooperative", mps=True).problems == ()
    assert published("100/cooperative", mps=False).problems == ()
    assert published("100", mps=True).problems == ()


def test_each_gpu_is_shared_as_its_own_settings_say():
    made = published("exclusive,GPU-00000000-0000-0000-0000-000000000001=4", gpu(0), gpu(1))
    assert [device.get("allowMultipleAllocations", False) for device in made.devices] == [False, True]


def test_a_server_that_keeps_no_shares_gets_exclusive_devices_and_the_problem_is_told():
    old = replace(NEWEST, consumable=False)
    made = published("10", features=old)
    assert made.slices == build_pool(inventory(L4), node_name="node-1", features=old).slices
    (problem,) = made.problems
    assert (problem.code, problem.device) == ("DRA-SLICE-NOT-SHARED", "gpu-0")
    assert "DRAConsumableCapacity" in problem.remedy


def test_partitions_are_shared_too_and_a_plain_share_takes_no_engines():
    parent = gpu(
        0,
        mig_enabled=True,
        mig_devices=(mig(2),),
        addressing_mode="None",
        numa_node=0,
        pcie_root="pci0000:00",
    )
    made = published("4", parent)
    device = only(made)
    assert device["attributes"]["gpudra.dev/memoryPerShare"] == {"int": 4864 * (1 << 20) // 4}
    assert device["capacity"]["multiprocessors"]["value"] == "14"
    scheduler = Scheduler(slices_of(made))
    assert [scheduler.ask() for _ in range(5)][3:] == [("c4", "gpu-0-mig-1g5gb-19-2"), None]


def test_shares_of_a_partition_on_demand_stand_beside_other_partitions_and_not_beside_the_whole():
    h100 = replace(machine("dgx-h100"), gpus=machine("dgx-h100").gpus[:1])
    made = build_pool(
        h100, node_name="node-1", features=NEWEST, settings=parse_sharing("4"), mig_mode="dynamic", mps=True
    )
    assert made.problems == ()
    assert all(device["allowMultipleAllocations"] and device["consumesCounters"] for device in made.devices)
    scheduler = Scheduler(slices_of(made))
    first = scheduler.ask(profile="3g.40gb")
    assert scheduler.ask(profile="3g.40gb")[1] == first[1]
    assert scheduler.ask(profile="4g.40gb") is not None
    assert scheduler.ask(kind="gpu") is None


def test_shares_of_a_whole_gpu_keep_partitions_of_it_away():
    h100 = replace(machine("dgx-h100"), gpus=machine("dgx-h100").gpus[:1])
    made = build_pool(
        h100, node_name="node-1", features=NEWEST, settings=parse_sharing("2"), mig_mode="dynamic"
    )
    scheduler = Scheduler(slices_of(made))
    assert scheduler.ask(kind="gpu") is not None
    assert scheduler.ask(profile="1g.10gb") is None
    assert scheduler.ask(kind="gpu") is not None
    assert scheduler.ask(kind="gpu") is None


@pytest.mark.parametrize("sharing", ["1", "2", "1000", "memory", "unlimited"])
@pytest.mark.parametrize("memory", [None, 0, 1, 1 << 20, (2 << 20) - 1, 2 << 20, 180 * GIB])
def test_any_size_of_memory_is_something_that_the_server_takes(sharing, memory):
    device = only(published(sharing, gpu(0, memory_bytes=memory)))
    assert device["allowMultipleAllocations"] is True
    assert (
        ("memory" in device["capacity"]) is (memory is not None) if "capacity" in device else memory is None
    )


@given(shares=st.integers(1, 12))
def test_never_more_shares_are_given_than_there_are(shares):
    scheduler = Scheduler(slices_of(published(str(shares))))
    assert [scheduler.ask(kind="gpu") is not None for _ in range(shares + 2)] == [True] * shares + [False] * 2


def test_settings_that_say_nothing_change_nothing():
    every = ServerFeatures.of_version(1, 34)
    one = build_pool(inventory(L4), node_name="n", features=every)
    other = build_pool(inventory(L4), node_name="n", features=every, settings=NodeSettings(), mps=True)
    assert one == other
