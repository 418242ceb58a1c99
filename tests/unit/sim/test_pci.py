"""The PCI side of a simulated node, through the same code that binds GPUs on a real one."""

from __future__ import annotations

import errno
import threading

import pytest

from dra.errors import HostError
from dra.host.paths import HostPaths
from dra.host.pci_binding import GroupMember, Holder, PciBus
from dra.inventory.scan import scan
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.sim.node import SimulatedNode
from dra.sim.tree import device_numbers
from dra.sim.tree.nodes import make_link, write_text
from dra.values import PciAddress


class Node:
    """A simulated node with its bus."""

    def __init__(self, root, profile="h100-nvl-x2"):
        self.machine = SimulatedNode(profile, root)
        self.paths = HostPaths(**self.machine.paths_kwargs())
        self.bus = PciBus(self.paths, self.machine.kernel)
        self.pci = self.machine.pci

    def minors(self):
        """Give the GPUs that NVML has."""
        session = NvmlSession(InjectedLibrary(self.machine.library))
        try:
            return [gpu.minor for gpu in scan(session, self.paths).gpus]
        finally:
            session.close()

    def to_vfio(self, minor):
        """Bind a GPU as the driver does; gives its address."""
        address = self.pci.address_of(minor)
        driver = self.bus.vfio_driver_for(address)
        self.bus.load_module(driver)
        self.bus.bind(address, driver)
        return address


@pytest.fixture
def node(tmp_path):
    """A node with 2 H100."""
    return Node(tmp_path)


def test_every_gpu_has_an_iommu_group_of_its_own(node):
    functions = node.bus.functions()
    assert [str(each.address) for each in functions][:2] == ["0000:1b:00.0", "0000:43:00.0"]
    assert {each.driver for each in functions} == {"nvidia"}
    assert len({each.iommu_group for each in functions}) == 2
    assert all(each.group_members == () and each.vfio_device == "" for each in functions)
    node.pci.set_iommu(False)
    assert not node.bus.has_iommu()
    assert {each.iommu_group for each in node.bus.functions()} == {None}
    node.pci.set_iommu(True)
    assert [each.iommu_group for each in node.bus.functions()] == [each.iommu_group for each in functions]


def test_a_gpu_that_goes_to_vfio_is_gone_for_nvml_and_has_nodes_there(tmp_path):
    node = Node(tmp_path, "l40s-x4")
    address = node.to_vfio(3)
    function = node.bus.function(address)
    assert function.driver == "vfio-pci"
    assert node.minors() == [0, 1, 2]
    dev = node.paths.dev
    group = device_numbers(dev / f"vfio/{function.iommu_group}")
    assert group is not None and group.mode == 0o600
    assert device_numbers(dev / "vfio/vfio") is not None
    assert device_numbers(dev / f"vfio/devices/{function.vfio_device}") is not None
    assert not (dev / "dri/renderD131").exists()
    assert (dev / "nvidia3").exists()  # made by a program, not by the kernel
    node.bus.bind(address, "nvidia")
    assert node.minors() == [0, 1, 2, 3]
    assert not (dev / f"vfio/{function.iommu_group}").exists()
    assert (dev / "dri/renderD131").exists()
    assert node.bus.function(address).vfio_device == ""


def test_a_kernel_without_iommufd_has_only_the_group(node):
    node.pci.set_iommufd(False)
    address = node.to_vfio(0)
    assert not node.bus.has_iommufd()
    assert node.bus.function(address).vfio_device == ""
    assert node.bus.function(address).on_vfio
    assert list(node.paths.dev.glob("vfio/devices/*")) == []


def test_a_grace_machine_gets_its_own_module(tmp_path):
    node = Node(tmp_path, "gb200")
    assert node.bus.function(node.to_vfio(1)).driver == "nvgrace_gpu_vfio_pci"


def test_an_open_nvml_session_keeps_a_gpu_bound(node):
    node.pci.set_kernel_patience(0.2)
    session = NvmlSession(InjectedLibrary(node.machine.library))
    scan(session, node.paths)
    with pytest.raises(HostError, match=r"DRA-VFIO-BIND.*did not answer"):
        node.to_vfio(1)
    assert node.pci.driver_of(1) == "nvidia"
    node.pci.set_kernel_patience(30)
    waiting = threading.Timer(0.2, session.close)
    waiting.start()
    node.to_vfio(1)
    waiting.join()
    assert node.pci.driver_of(1) == "vfio-pci"


def test_a_process_that_has_it_open_keeps_a_gpu_bound_and_is_named(node):
    node.pci.set_kernel_patience(0.1)
    node.pci.hold(1, 4711, "dcgm-exporter")
    address = node.pci.address_of(1)
    assert node.bus.holders(address) == (Holder(4711, "dcgm-exporter"),)
    assert node.bus.holders(node.pci.address_of(0)) == ()
    with pytest.raises(HostError, match="did not answer"):
        node.to_vfio(1)
    node.pci.let_go(4711)
    node.to_vfio(1)
    assert node.bus.holders(address) == ()


def test_another_function_of_the_card_is_bound_in_the_files(node):
    sys, address = node.paths.sys, node.pci.address_of(0)
    audio = PciAddress(address.domain, address.bus, address.device, 1)
    device = sys / "bus/pci/devices" / str(audio)
    write_text(device / "class", "0x040300\n")
    write_text(device / "driver_override", "(null)\n")
    (sys / "bus/pci/drivers/snd_hda_intel").mkdir()
    make_link(device / "driver", "../../drivers/snd_hda_intel")
    group = node.bus.function(address).iommu_group
    make_link(sys / f"kernel/iommu_groups/{group}/devices/{audio}", str(device))
    assert node.bus.function(address).group_members == (GroupMember(audio, "snd_hda_intel"),)
    node.to_vfio(0)
    node.bus.bind(audio, "vfio-pci")
    assert node.bus.function(address).group_members == (GroupMember(audio, "vfio-pci"),)
    node.bus.unbind(audio)
    assert node.bus.function(audio).driver == ""


def test_faults_of_the_kernel(node):
    node.pci.set_kernel_fault("drivers_probe", gpu=0, error=errno.EIO, times=1)
    with pytest.raises(HostError, match="Input/output error"):
        node.to_vfio(0)
    assert node.pci.driver_of(0) == ""
    node.to_vfio(0)
    node.to_vfio(1)
    node.pci.set_kernel_fault("load_module", error=errno.ENOENT)
    assert node.machine.kernel.load_module("vfio-pci") == "No such file or directory"
    node.machine.control.clear()
    node.pci.set_kernel_patience(0.1)
    node.pci.set_kernel_fault("unbind", hang=True)
    with pytest.raises(HostError, match="did not answer"):
        node.bus.bind(node.pci.address_of(1), "nvidia")
    assert "FATAL: Module snd" in node.machine.kernel.load_module("snd")


def test_nvml_faults_leave_the_kernel_alone(node):
    node.machine.control.set_fault("*", error="UNKNOWN")
    node.to_vfio(1)
    assert node.pci.driver_of(1) == "vfio-pci"


def test_a_reboot_gives_every_gpu_back_to_nvidia(node):
    node.to_vfio(1)
    node.machine.control.reboot()
    assert node.minors() == [0, 1]
    assert not (node.paths.dev / "vfio/vfio").exists()


def test_an_unloaded_nvidia_module_takes_nothing(node):
    address = node.to_vfio(1)
    node.machine.control.unload_driver()
    node.bus.unbind(address)
    assert node.bus.function(address).driver == ""
    node.machine.control.load_driver()
    assert node.minors() == [0, 1]


def test_virtual_functions_and_a_gpu_without_a_driver_are_seen(node):
    node.pci.set_virtual_functions(1, 4)
    assert node.bus.function(node.pci.address_of(1)).sriov_vfs == 4
    node.pci.bind(0, "")
    assert node.bus.function(node.pci.address_of(0)).driver == ""
    assert node.minors() == [1]


@pytest.mark.parametrize("gpu", [-1, 2])
def test_a_gpu_that_is_not_there_cannot_be_held(node, gpu):
    with pytest.raises(ValueError, match=f"no GPU {gpu}"):
        node.pci.hold(gpu, 77)
    assert node.pci.held_by(77) == []
