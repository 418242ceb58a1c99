"""Partitions of a simulated GPU through the port that the prepare room uses."""

from __future__ import annotations

import pytest

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.errors import DeviceError
from dra.host.paths import HostPaths
from dra.inventory.scan import Scanner
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.plugin.mig_port import MigPort
from dra.plugin.ports import GpuUsers
from dra.prepare.partitions import Look, Partition
from dra.prepare.record import JournalEntry, Record
from dra.sim.node import SimulatedNode


class Rig:
    def __init__(self, root):
        self.node = SimulatedNode("gh200", root, real_nodes=False)
        self.session = NvmlSession(InjectedLibrary(self.node.library))
        self.scanner = Scanner(self.session, HostPaths(**self.node.paths_kwargs()))
        self.gpu = self.node.profile.gpus[0].uuid
        self.look()
        self.port = MigPort(self.session, lambda: self.inventory)

    def look(self):
        self.inventory = self.scanner.scan(profiles=True)


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.session.close()


PLACE = {"profile_id": 19, "start": 1}


def test_a_partition_is_made_seen_and_destroyed_with_its_mode(rig):
    assert rig.port.look(rig.gpu, **PLACE) == Look(mode_on=False)
    made = rig.port.create(rig.gpu, **PLACE)
    assert rig.port.look(rig.gpu, **PLACE) == Look(mode_on=True, partition=made)
    assert rig.port.look(rig.gpu, profile_id=19, start=2) == Look(mode_on=True)
    assert rig.port.destroy(rig.gpu, made, **PLACE)
    assert not rig.port.destroy(rig.gpu, made, **PLACE)
    rig.port.leave_mode(rig.gpu)
    assert rig.port.look(rig.gpu, **PLACE) == Look(mode_on=False)


def test_another_partition_at_the_place_is_not_destroyed(rig):
    made = rig.port.create(rig.gpu, **PLACE)
    assert not rig.port.destroy(
        rig.gpu, Partition(made.gpu_instance, made.compute_instance, "MIG-another"), **PLACE
    )
    assert rig.port.look(rig.gpu, **PLACE).partition == made


def test_what_is_in_the_way_is_described_by_profile_and_slices(rig):
    rig.node.control.set_mig_layout(0, [("3g.48gb", 4)])
    rig.look()
    [(start, size, text)] = rig.port.neighbours(rig.gpu)
    assert (start, size) == (4, 4)
    assert "3g.48gb in memory slices 4 to 7" in text
    with pytest.raises(DeviceError, match="DRA-MIG-OCCUPIED"):
        rig.port.create(rig.gpu, profile_id=19, start=5)


def test_half_a_partition_counts_as_none_and_can_be_cleared(rig):
    rig.port.create(rig.gpu, **PLACE)
    rig.node.control._change(lambda state: state.gpus[0].instances[0].computes.clear())
    assert rig.port.look(rig.gpu, **PLACE) == Look(mode_on=True)
    assert rig.port.clear_half_made(rig.gpu, **PLACE)
    assert rig.port.neighbours(rig.gpu) == []


def record(device, **outcome):
    entry = JournalEntry("mig-device", {"device": device}, "applied", outcome)
    results = (AllocatedDevice("r", "d", "p", device),)
    return Record(ClaimRef("ns", "c", "uid"), "prepared", "b", results=results, journal=(entry,))


def test_a_claim_on_a_partition_is_in_use_only_by_processes_of_that_partition(rig):
    rig.node.control.set_mig_layout(0, [("1g.12gb", 0), ("1g.12gb", 1)])
    rig.look()
    users = GpuUsers(rig.session, lambda: rig.inventory)
    first, second = rig.inventory.gpus[0].mig_devices
    rig.node.control.add_process(0, 1, gi=first.gpu_instance_id, ci=0)
    assert users.in_use(record("gpu-0-mig-1g12gb-19-0"))
    assert not users.in_use(record("gpu-0-mig-1g12gb-19-1"))
    # What the journal says of a partition that was made counts before what was seen of the hardware.
    assert users.in_use(record("gpu-0-mig-1g12gb-19-1", gi=first.gpu_instance_id))
    assert not users.in_use(record("gpu-0-mig-1g12gb-19-0", gi=second.gpu_instance_id))
