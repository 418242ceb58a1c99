"""Shares on the node: their sum, whole against share, and what one share comes to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.claim import AllocatedDevice
from dra.api.gpu_settings import parse_sharing
from dra.prepare.shares import share_of
from dra.values import Quantity
from tests.unit.inventory.inventory_samples import PROFILE
from tests.unit.prepare.prepare_fakes import Node, make_gpu, result

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def shared(tmp_path):
    """Give a maker of nodes on which GPUs are shared; the settings may be changed later."""

    def make(sharing):
        node = Node(tmp_path)
        node.sharing = parse_sharing(sharing)
        node.ports["settings"] = lambda: node.sharing
        node.restart()
        return node

    return make


def share(node, number, device="gpu-0", **consumed):
    share_id = f"{number:08x}-1111-4111-8111-111111111111"
    return node.claim(number, result(device, shareID=share_id, consumedCapacity=consumed))


def test_shares_of_several_claims_lie_on_one_card_each_with_a_cdi_id_of_its_own(shared):
    node = shared("10")
    found = [node.prepared(share(node, n, shares="2", memory="0"))[0] for n in range(1, 6)]
    assert len({device.cdi_ids for device in found}) == 5
    assert found[0].cdi_ids[0].endswith("-gpu-0-00000001")
    assert found[0].share_id == "00000001-1111-4111-8111-111111111111"


def test_a_share_that_is_one_too_many_is_refused_and_its_neighbours_are_named(shared):
    node = shared("4")
    held = [share(node, n, shares="2", memory="0") for n in (1, 2)]
    for ref in held:
        node.prepared(ref)
    late = share(node, 3, shares="1", memory="0")
    error = node.refused(late)
    assert error.code == "DRA-SHARE-OVERBOOKED"
    assert error.retryable
    assert "default/claim-1" in error.message
    assert "default/claim-2" in error.message
    node.unprepare(held[0])
    node.prepared(late)


def test_memory_is_added_up_too_over_a_restart_of_the_driver(shared):
    node = shared("memory")
    node.prepared(share(node, 1, memory="50Gi"))
    node.restart()
    assert node.refused(share(node, 2, memory="31Gi")).code == "DRA-SHARE-OVERBOOKED"
    node.prepared(share(node, 3, memory="30Gi"))


def test_one_claim_with_two_shares_of_a_card_is_added_up_with_itself(shared):
    node = shared("4")
    parts = [
        result("gpu-0", request=f"r{n}", shareID=f"{n:08x}-1111-4111-8111-111111111111", consumedCapacity={"shares": "3"})
        for n in (1, 2)
    ]  # fmt: skip
    assert node.refused(node.claim(1, *parts)).code == "DRA-SHARE-OVERBOOKED"


def test_whole_and_share_never_meet_on_one_card(shared):
    node = shared("4")
    whole, part = node.claim(1, "gpu-0"), share(node, 2, shares="1")
    node.prepared(whole)
    assert node.refused(part).code == "DRA-DEVICE-HELD"
    node.unprepare(whole)
    node.prepared(part)
    assert node.refused(node.claim(3, "gpu-0")).code == "DRA-DEVICE-HELD"


def test_a_share_and_a_partition_never_meet_on_one_card(shared):
    node = shared("4")
    node.prepared(share(node, 1, shares="1"))
    assert node.refused(node.claim(2, "gpu-0-mig-1g10gb-19-0")).code == "DRA-DEVICE-HELD"


def test_fewer_shares_than_are_held_end_no_claim_and_let_nobody_in(shared):
    node = shared("4")
    held = share(node, 1, shares="3")
    node.prepared(held)
    node.sharing = parse_sharing("2")
    node.prepared(held)
    assert node.refused(share(node, 2, shares="1")).code == "DRA-SHARE-OVERBOOKED"


def test_what_a_share_takes_stands_in_the_record(shared):
    node = shared("10")
    ref = share(node, 1, shares="2", memory="5Gi")
    node.prepared(ref)
    assert node.record(ref)["results"][0]["consumed_capacity"] == {"shares": "2", "memory": "5Gi"}


def part(sharing, gpu=None, device="gpu-0", **consumed):
    amounts = {name: Quantity.parse(text) for name, text in consumed.items()}
    found = AllocatedDevice("r", "gpu.nvidia.com", "p", device, "s", consumed_capacity=amounts)
    return share_of(found, gpu or make_gpu(0, memory_bytes=24 * GIB), parse_sharing(sharing))


@pytest.mark.parametrize(
    ("sharing", "consumed", "mib", "percent"),
    [
        ("100", {"shares": "20", "memory": "0"}, 4915, 20),
        ("5", {"shares": "1", "memory": "0"}, 4915, 20),
        ("3", {"shares": "1"}, 8192, 33),
        # Memory that is named counts in place of the part.
        ("10", {"shares": "1", "memory": "6Gi"}, 6144, 10),
        ("memory", {"memory": "4Gi"}, 4096, None),
        ("unlimited", {"memory": "0"}, None, None),
        ("unlimited", {"memory": "1Gi"}, 1024, None),
        ("1000", {"shares": "1"}, 24, 1),
    ],
)
def test_a_share_is_bytes_and_percent_of_its_card(sharing, consumed, mib, percent):
    found = part(sharing, **consumed)
    assert (found.memory_bytes, found.percent) == (None if mib is None else mib * MIB, percent)
    assert found.limited is not (mib is None and percent is None)


@pytest.mark.parametrize(
    ("sharing", "consumed", "whole"),
    [
        ("memory", {"memory": "24Gi"}, True),
        ("memory", {"memory": "23Gi"}, False),
        ("4", {"shares": "4", "memory": "0"}, True),
        ("4", {"shares": "4", "memory": "1Gi"}, False),
        ("1", {"shares": "1"}, True),
        # Others may be on the card, with no amount.
        ("unlimited", {"memory": "24Gi"}, False),
    ],
)
def test_a_share_that_is_the_whole_card_has_nothing_to_be_held_to(sharing, consumed, whole):
    found = part(sharing, **consumed)
    assert (found.whole, found.limited) == (whole, not whole)


def test_a_share_of_a_partition_is_a_part_of_the_partitions_memory():
    cut = make_gpu(0, mig_profiles=(PROFILE,))
    found = part("4", gpu=cut, device="gpu-0-mig-1g5gb-19-2", shares="1")
    assert found.memory_bytes == 4864 // 4 * MIB


def test_a_claims_own_device_is_no_share():
    found = AllocatedDevice("r", "gpu.nvidia.com", "p", "gpu-0")
    assert share_of(found, make_gpu(0), parse_sharing("4")) is None


def test_a_card_without_memory_of_its_own_has_parts_of_its_processors_only():
    found = part("4", gpu=replace(make_gpu(0), memory_bytes=None), shares="1")
    assert (found.memory_bytes, found.percent) == (None, 25)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 100), st.integers(1 << 30, 1 << 38)
)
def test_the_limits_of_shares_that_fit_never_add_up_to_more_than_the_card(wanted, shares, memory):
    card = make_gpu(0, memory_bytes=memory)
    given_out, parts = 0, []
    for count in wanted:
        if given_out + count <= shares:
            given_out += count
            parts.append(part(str(shares), gpu=card, shares=str(count)))
    assert sum(each.memory_bytes for each in parts) <= memory
    assert sum(each.percent for each in parts) <= 100
