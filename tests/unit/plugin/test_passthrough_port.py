"""The node's side of passing GPUs through: who has one open, letting go of it ourselves, persistence mode."""

import os
import threading

import pynvml
import pytest

from dra.errors import DraError, StackError
from dra.host.open_files import Holder
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.plugin.passthrough_port import PassthroughPort
from dra.values import PciAddress
from tests.unit.host.pci_files import GPU, PlainBus
from tests.unit.nvml.nvml_fake import FakeNvml, gpus

ADDRESS = PciAddress.parse(GPU)


@pytest.fixture
def machine(tmp_path):
    """A bus with one GPU, `/dev/nvidia3` and the group's node."""
    bus = PlainBus(tmp_path)
    bus.device(GPU, group=12)
    bus.write(f"proc/driver/nvidia/gpus/{GPU}/information", "Device Minor: \t 3\n")
    bus.write("dev/nvidia3", "a node")
    bus.write("dev/vfio/12", "another")
    return bus


@pytest.fixture
def nvml():
    library = FakeNvml(gpus(1))
    session = NvmlSession(InjectedLibrary(lambda: library))
    yield library, session
    session.close()


def opens(bus, pid, comm, path):
    bus.write(f"proc/{pid}/comm", f"{comm}\n")
    bus.link(f"proc/{pid}/fd/7", bus.root / path)


def test_who_has_a_gpu_open_through_any_driver_is_told_but_for_ourselves(machine, nvml):
    port = PassthroughPort(machine.paths, nvml[1])
    assert port.holders(ADDRESS) == ()
    opens(machine, 41, "dcgm", "dev/nvidia3")
    opens(machine, os.getpid(), "python3", "dev/nvidia3")
    opens(machine, 77, "qemu", "dev/vfio/12")
    assert port.holders(ADDRESS) == (Holder(41, "dcgm"),)
    # Where the node's /proc counts processes otherwise than this process does, it says itself which one this is.
    machine.link("proc/self", machine.root / "proc/41")
    assert [each.pid for each in port.holders(ADDRESS)] == [os.getpid()]
    machine.drivers("vfio-pci")
    machine.link(f"sys/bus/pci/devices/{GPU}/driver", machine.root / "sys/bus/pci/drivers/vfio-pci")
    (machine.root / f"proc/driver/nvidia/gpus/{GPU}/information").unlink()
    assert port.holders(ADDRESS) == (Holder(77, "qemu"),)


def test_the_session_is_closed_while_the_driver_changes_and_serves_again_after_it(machine, nvml):
    library, session = nvml
    port = PassthroughPort(machine.paths, session)
    session.run(lambda api: api.call("nvmlDeviceGetCount"))
    assert library.open
    with port.let_go(ADDRESS):
        assert not library.open
    assert session.run(lambda api: api.call("nvmlDeviceGetCount")) == 1


def test_a_session_that_cannot_be_closed_is_an_error_and_nothing_is_changed(machine):
    library = FakeNvml(gpus(1))
    gate = library.hangs["nvmlDeviceGetName", 0x10] = threading.Event()
    session = NvmlSession(InjectedLibrary(lambda: library))
    address = PciAddress.parse("0000:10:00.0")
    with pytest.raises(DraError):
        session.run(
            lambda api: api.call("nvmlDeviceGetName", api.handle(address)),
            subject=str(address), deadline_seconds=0.05,
        )  # fmt: skip
    port = PassthroughPort(machine.paths, session, release_seconds=0.05)
    with pytest.raises(StackError) as caught, port.let_go(ADDRESS):
        raise AssertionError("the driver would be changed")
    assert (caught.value.code, caught.value.retryable) == ("DRA-VFIO-NVML-HANGS", True)
    assert GPU in caught.value.message
    gate.set()
    session.close()


SMI = """#!/bin/sh
echo "$@" >> {log}
exit {status}
"""


@pytest.mark.parametrize("status", [0, 3])
def test_persistence_mode_is_set_by_nvidia_smi_and_by_nvml_where_that_cannot(machine, nvml, status):
    """nvidia-smi reaches nvidia-persistenced, which has the GPU open."""
    log = machine.root / "log"
    machine.write("usr/bin/nvidia-smi", SMI.format(log=log, status=status))
    (machine.root / "usr/bin/nvidia-smi").chmod(0o755)
    library, session = nvml
    address = PciAddress.parse("0000:10:00.0")
    calls = []
    library.nvmlDeviceSetPersistenceMode = lambda _device, mode: calls.append(int(mode.value)) or 0
    PassthroughPort(machine.paths, session).set_persistence(address, on=True)
    PassthroughPort(machine.paths, session).set_persistence(address, on=False)
    assert log.read_text() == f"-i {address} -pm 1\n-i {address} -pm 0\n"
    assert calls == ([1, 0] if status else [])


def test_without_a_driver_persistence_mode_is_an_error_of_nvml(machine):
    library = FakeNvml(gpus(0))
    library.faults["nvmlInitWithFlags", None] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    session = NvmlSession(InjectedLibrary(lambda: library))
    with pytest.raises(StackError, match="DRA-NVML"):
        PassthroughPort(machine.paths, session).set_persistence(ADDRESS, on=True)
    session.close()
