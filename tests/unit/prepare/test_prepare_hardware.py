"""What stands behind the devices of a claim: GPUs, partitions made for it, partitions made by hand."""

from __future__ import annotations

import pytest
from mig_node import MigNode

from dra.prepare.hardware import hardware_of
from dra.prepare.record import decode_record


@pytest.fixture
def node(tmp_path):
    made = MigNode(tmp_path, profile="h100-nvl-x2")
    yield made
    made.close()


def told(node, ref, inventory=None):
    record = decode_record(node.record_file(ref).read_bytes(), uid=ref.uid)
    return hardware_of(record, inventory or node.inventory)


def test_a_whole_gpu_and_a_partition_of_one_claim(node):
    device = node.name(0, "2g.24gb", 4)
    ref = node.claim(1, "gpu-1", device)
    node.prepared(ref)
    whole, part = told(node, ref)
    one, zero = node.inventory.gpus[1], node.inventory.gpus[0]
    assert (whole.device, whole.uuid, whole.parent_uuid, whole.mig) == ("gpu-1", one.uuid, "", None)
    assert (whole.gpu_minor, whole.pci_address, whole.product_name) == (1, one.pci_address, one.product_name)
    # The inventory is from before the partition was made: the record knows it all the same.
    assert zero.mig_devices == ()
    (made,) = node.look().gpus[0].mig_devices
    assert (part.device, part.uuid, part.parent_uuid) == (device, made.uuid, zero.uuid)
    mig = part.mig
    assert (mig.profile, mig.profile_id, mig.start, mig.size) == ("2g.24gb", 14, 4, 2)
    assert (mig.gpu_instance, mig.compute_instance) == (made.gpu_instance_id, made.compute_instance_id)
    assert mig.ours
    assert told(node, ref, node.inventory) == (whole, part)


def test_a_partition_made_by_hand_is_known_from_the_inventory(node):
    node.sim.set_mig_layout(0, [("3g.47gb", 4)])
    node.look()
    ref = node.claim(1, node.name(0, "3g.47gb", 4))
    node.prepared(ref)
    (part,) = told(node, ref)
    assert part.uuid == node.inventory.gpus[0].mig_devices[0].uuid
    assert (part.mig.size, part.mig.ours) == (4, False)


def test_after_a_reboot_it_is_the_partition_of_this_boot(node):
    device, other = node.name(0, "1g.12gb", 0), node.name(0, "1g.12gb", 1)
    ref, late = node.claim(1, device), node.claim(2, other)
    node.prepared(late)
    node.prepared(ref)
    (before,) = told(node, ref)
    node.reboot()
    node.prepared(ref)
    (after,) = told(node, ref)
    assert after.device == before.device
    assert after.uuid == node.look().gpus[0].mig_devices[0].uuid
    # It came first this time, and so got other ids.
    assert after.uuid != before.uuid


def test_shares_requests_and_monitoring_are_told_apart_and_what_is_gone_is_left_out(node):
    from prepare_fakes import result

    device = node.name(0, "1g.12gb", 0)
    node.prepared(node.claim(1, device))
    ref = node.claim(2, result(device, request="watch", adminAccess=True))
    node.prepared(ref)
    node.look()
    (part,) = told(node, ref)
    assert (part.request, part.admin_access) == ("watch", True)
    without = type(node.inventory)()
    assert told(node, ref, without) == ()
