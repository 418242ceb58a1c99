"""Compute modes through NVML and time-slices through nvidia-smi, on simulated nodes of each layout."""

from __future__ import annotations

import pytest

from dra.errors import DraError
from dra.host.paths import HostPaths
from dra.inventory.scan import Scanner
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.plugin.sharing_ports import ComputeModePort, SmiTimeSlices
from dra.sim.node import SimulatedNode

FUNCTION = "nvidia-smi compute-policy"


class Box:
    def __init__(self, root, layout="host"):
        self.machine = SimulatedNode("t4-x1", root, layout=layout, real_nodes=False)
        self.sim = self.machine.control
        self.paths = HostPaths(**self.machine.paths_kwargs())
        self.session = NvmlSession(InjectedLibrary(self.machine.library))
        self.inventory = Scanner(self.session, self.paths).scan()
        self.uuid = self.inventory.gpus[0].uuid
        self.modes = ComputeModePort(self.session, lambda: self.inventory)
        self.slices = SmiTimeSlices(self.paths, seconds=60)

    @property
    def gpu(self):
        return self.sim.state.gpus[0]


@pytest.fixture
def box(tmp_path):
    made = Box(tmp_path)
    yield made
    made.session.close()


def code_of(call, *args):
    with pytest.raises(DraError) as caught:
        call(*args)
    assert caught.value.message
    return caught.value.code


@pytest.mark.parametrize("layout", ["host", "operator", "cos"])
def test_a_time_slice_is_set_wherever_the_driver_is_installed(tmp_path, layout):
    box = Box(tmp_path, layout)
    try:
        box.slices.set(box.uuid, 3)
        assert box.gpu.timeslice == 3
        box.slices.set(box.uuid, 0)
        assert box.gpu.timeslice == 0
    finally:
        box.session.close()


def test_a_gpu_without_time_slices(box):
    box.sim.set_fault(FUNCTION, error="NOT_SUPPORTED")
    assert code_of(box.slices.set, box.uuid, 1) == "DRA-TIME-SLICE-UNSUPPORTED"


def test_a_gpu_that_is_not_there_or_lost_and_a_driver_that_is_gone(box):
    assert code_of(box.slices.set, "GPU-00000000-0000-0000-0000-000000000000", 1) == "DRA-TIME-SLICE-GONE"
    box.sim.lose_gpu(0)
    assert code_of(box.slices.set, box.uuid, 1) == "DRA-TIME-SLICE-GONE"
    box.sim.recover_gpu(0)
    box.sim.unload_driver(force=True)
    assert code_of(box.slices.set, box.uuid, 1) == "DRA-TIME-SLICE-GONE"


def test_other_failures_are_tried_again(box):
    box.sim.set_fault(FUNCTION, error="UNKNOWN", times=1)
    assert code_of(box.slices.set, box.uuid, 1) == "DRA-TIME-SLICE-FAILED"
    box.slices.set(box.uuid, 1)
    assert box.gpu.timeslice == 1


def test_a_program_that_hangs_is_ended(box):
    box.sim.set_fault(FUNCTION, hang=True)
    slices = SmiTimeSlices(box.paths, seconds=0.5)
    with pytest.raises(DraError) as caught:
        slices.set(box.uuid, 1)
    assert caught.value.code == "DRA-TIME-SLICE-FAILED"
    assert caught.value.retryable
    assert "did not end within 0.5 s" in caught.value.message
    assert box.gpu.timeslice == 0


def test_a_driver_without_nvidia_smi(box):
    (box.machine.root / "usr/bin/nvidia-smi").unlink()
    assert code_of(box.slices.set, box.uuid, 1) == "DRA-TIME-SLICE-PROGRAM"


def test_compute_modes_are_read_and_set_by_name(box):
    assert box.modes.get(box.uuid) == "DEFAULT"
    for mode, number in (("EXCLUSIVE_PROCESS", 3), ("PROHIBITED", 2), ("DEFAULT", 0)):
        box.modes.set(box.uuid, mode)
        assert (box.gpu.compute_mode, box.modes.get(box.uuid)) == (number, mode)
    # One that no longer exists, as an old driver may still say it.
    box.sim.set_gpu(0, compute_mode=1)
    assert box.modes.get(box.uuid) == "DEFAULT"


def test_a_gpu_that_the_node_does_not_have(box):
    assert code_of(box.modes.get, "GPU-00000000-0000-0000-0000-000000000000") == "DRA-DEVICE-UNKNOWN"
    box.sim.set_fault("nvmlDeviceSetComputeMode", error="NOT_SUPPORTED")
    assert code_of(box.modes.set, box.uuid, "DEFAULT") == "DRA-NVML-NOT-SUPPORTED"
