"""PCI functions and their drivers, on plain files."""

from __future__ import annotations

import os
import re
import stat

import pytest

from dra.errors import HostError
from dra.host.kernel import RealKernel
from dra.host.module_aliases import best_vfio_module
from dra.host.open_files import holders_of
from dra.host.paths import HostPaths
from dra.host.pci_binding import GroupMember, Holder, PciBus, PciFunction, is_vfio_driver
from dra.sim.tree import can_make_nodes
from dra.values import PciAddress
from tests.unit.host.pci_files import AUDIO, BRIDGE, GPU, OTHER, PlainBus, PlainKernel

ADDRESS = PciAddress.parse(GPU)


@pytest.fixture
def node(tmp_path):
    """A node with one GPU on group 7."""
    node = PlainBus(tmp_path)
    node.device(GPU, group=7)
    return node


@pytest.fixture
def kernel(node):
    """Its kernel."""
    return PlainKernel(node)


@pytest.fixture
def bus(node, kernel):
    """Its bus."""
    return PciBus(node.paths, kernel)


# -- looking


def test_a_function_says_what_sysfs_says(node, bus):
    node.device(AUDIO, driver="snd_hda_intel", group=7, pci_class=0x040300)
    node.device(BRIDGE, driver="pcieport", group=7, pci_class=0x060400)
    node.device(OTHER, driver="nvidia-nvswitch", group=7, pci_class=0x068000)
    (node.root / f"sys/bus/pci/devices/{GPU}/virtfn0").mkdir()
    audio = GroupMember(PciAddress.parse(AUDIO), "snd_hda_intel")
    nvswitch = GroupMember(PciAddress.parse(OTHER), "nvidia-nvswitch")
    assert nvswitch.in_the_way
    assert bus.function(ADDRESS) == PciFunction(
        ADDRESS,
        driver="nvidia",
        iommu_group=7,
        group_members=(audio, nvswitch),
        sriov_vfs=1,
        vendor_id=0x10DE,
        device_id=0x2330,
    )


def test_a_function_that_is_not_there_has_nothing(bus):
    absent = PciAddress.parse(OTHER)
    assert bus.function(absent) == PciFunction(absent)


@pytest.mark.parametrize(
    ("driver", "blocks"),
    [("snd_hda_intel", True), ("nvidia", True), ("vfio-pci", False), ("", False), ("pci-stub", False)],
)
def test_what_keeps_a_group_from_a_virtual_machine(driver, blocks):
    assert GroupMember(ADDRESS, driver).in_the_way is blocks


@pytest.mark.parametrize(
    ("driver", "vfio"),
    [("vfio-pci", True), ("nvgrace_gpu_vfio_pci", True), ("mlx5_vfio_pci", True), ("nvidia", False),
     ("nvidia-vgpu-vfio", False), ("vfio", False), ("", False), ("pci-stub", False)],
)  # fmt: skip
def test_which_drivers_are_of_the_vfio_family(driver, vfio):
    assert is_vfio_driver(driver) is vfio


def test_a_device_of_iommufd_needs_a_number(node, bus):
    node.device(GPU, driver="vfio-pci", group=7)
    place = f"sys/bus/pci/devices/{GPU}/vfio-dev/vfio3"
    node.write(f"{place}/power/control", "on\n")
    assert bus.function(ADDRESS).vfio_device == ""
    node.write(f"{place}/dev", "511:3\n")
    assert bus.function(ADDRESS).vfio_device == "vfio3"
    assert not bus.has_iommufd()
    node.write("dev/iommu", "")
    assert bus.has_iommufd()


def test_a_group_that_the_kernel_only_pretends_is_none(node, bus):
    node.write("sys/kernel/iommu_groups/7/name", "vfio-noiommu\n")
    assert bus.function(ADDRESS).iommu_group is None


def test_whether_there_is_an_iommu(node, bus, tmp_path):
    assert bus.has_iommu()
    bare = PlainBus(tmp_path / "bare")
    assert not PciBus(bare.paths, PlainKernel(bare)).has_iommu()
    (bare.root / "sys/kernel/iommu_groups").mkdir(parents=True)
    assert not PciBus(bare.paths, PlainKernel(bare)).has_iommu()


def test_the_gpus_are_nvidias_display_functions_by_address_whatever_their_driver(node, bus):
    node.device(OTHER, driver="vfio-pci", group=9, pci_class=0x030000)
    node.device("0000:01:00.0", driver="", pci_class=0x030200)
    node.device(AUDIO, driver="snd_hda_intel", pci_class=0x040300)  # of the card
    node.device("0000:02:00.0", pci_class=0x030200, vendor=0x1002)  # another maker's
    node.device("0000:03:00.0", pci_class=0x068000)  # an NVSwitch
    virtual = node.device("0000:41:00.4", driver="")
    node.link(f"{virtual}/physfn", node.root / f"sys/bus/pci/devices/{GPU}")
    assert [str(each.address) for each in bus.functions()] == ["0000:01:00.0", GPU, OTHER]


# -- the driver for a device

ALIASES = """# Aliases extracted from modules themselves.
alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia
alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci
alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci
alias vfio_pci:v000010DEd*sv*sd*bc*sc*i* some_vfio_pci
alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
"""


@pytest.mark.parametrize(
    ("modalias", "module"),
    [
        ("pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00\n", "nvgrace_gpu_vfio_pci"),
        ("pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00", "some_vfio_pci"),
        ("pci:v00001002d000074A0sv00001002sd00000000bc03sc80i00", "vfio_pci"),
    ],
)
def test_the_closest_alias_decides(modalias, module):
    assert best_vfio_module(ALIASES.splitlines(), modalias) == module
    assert best_vfio_module(reversed(ALIASES.splitlines()), modalias) == module
    assert best_vfio_module((), modalias) == "vfio_pci"


def test_a_grace_gpu_gets_its_own_driver(node, bus):
    assert bus.vfio_driver_for(ADDRESS) == "vfio-pci"  # without a table
    node.aliases(ALIASES.replace("alias vfio_pci:v000010DEd*", "alias vfio_pci:v000010DEd0000AAAA"))
    assert bus.vfio_driver_for(ADDRESS) == "vfio-pci"
    node.device(GPU, device=0x2342)
    assert bus.vfio_driver_for(ADDRESS) == "nvgrace_gpu_vfio_pci"


def test_a_module_is_loaded_where_its_driver_is_missing(node, bus, kernel):
    bus.load_module("vfio-pci")
    assert kernel.loaded == []
    kernel.modules["nvgrace_gpu_vfio_pci"] = "nvgrace-gpu-vfio-pci"
    bus.load_module("nvgrace_gpu_vfio_pci")
    bus.bind(ADDRESS, "nvgrace_gpu_vfio_pci")
    assert bus.function(ADDRESS).driver == "nvgrace-gpu-vfio-pci"
    with pytest.raises(HostError, match=r"DRA-VFIO-MODULE.*mlx5_vfio_pci.*not found.*modprobe mlx5"):
        bus.load_module("mlx5_vfio_pci")
    kernel.modules["mlx5_vfio_pci"] = "something"
    with pytest.raises(HostError, match="no driver of that name"):
        bus.load_module("mlx5_vfio_pci")


# -- binding


def override(node) -> str:
    """Give what the kernel is told to choose for the GPU."""
    return (node.root / f"sys/bus/pci/devices/{GPU}/driver_override").read_text().strip()


def test_a_gpu_goes_to_vfio_and_comes_back(node, bus, kernel):
    bus.bind(ADDRESS, "vfio-pci")
    assert bus.function(ADDRESS).on_vfio
    assert override(node) == "vfio-pci"
    # The choice comes first: nothing else may take it in between.
    assert [name for name, _ in kernel.writes] == ["driver_override", "unbind", "drivers_probe"]
    bus.bind(ADDRESS, "vfio-pci")
    assert len(kernel.writes) == 3
    bus.bind(ADDRESS, "nvidia")
    assert bus.function(ADDRESS).driver == "nvidia"
    assert override(node) == "(null)"


def test_a_choice_that_a_crash_left_is_taken_back(node, bus):
    node.write(f"sys/bus/pci/devices/{GPU}/driver_override", "vfio-pci\n")
    bus.bind(ADDRESS, "nvidia")
    assert override(node) == "(null)"


def test_a_function_may_be_left_without_a_driver(node, bus, kernel):
    bus.bind(ADDRESS, "vfio-pci")
    bus.unbind(ADDRESS)
    assert bus.function(ADDRESS).driver == ""
    assert override(node) == "(null)"
    bus.unbind(ADDRESS)
    assert [name for name, _ in kernel.writes].count("unbind") == 2
    bus.bind(ADDRESS, "nvidia")
    assert bus.function(ADDRESS).driver == "nvidia"


def test_a_driver_that_is_not_loaded_costs_nothing(node, bus, kernel):
    (node.root / "sys/bus/pci/drivers/vfio-pci").rmdir()
    with pytest.raises(HostError, match=r"DRA-VFIO-NO-DRIVER.*0000:41:00\.0.*vfio-pci.*modprobe"):
        bus.bind(ADDRESS, "vfio-pci")
    assert kernel.writes == []
    assert bus.function(ADDRESS).driver == "nvidia"


@pytest.mark.parametrize("attribute", ["driver_override", "unbind", "drivers_probe"])
def test_what_the_kernel_refuses_is_told_with_the_file(bus, kernel, attribute):
    kernel.refuse[attribute] = "Device or resource busy"
    with pytest.raises(
        HostError, match=rf"DRA-VFIO-BIND.*{GPU}.*resource busy.*{attribute}.*dmesg"
    ) as caught:
        bus.bind(ADDRESS, "vfio-pci")
    assert caught.value.retryable


def test_a_driver_that_does_not_take_the_device_is_named(node, bus, kernel, monkeypatch):
    monkeypatch.setattr("dra.host.pci_binding._SETTLE_SECONDS", 0.05)
    kernel.write = lambda path, text: "" if path.name == "drivers_probe" else PlainKernel.write(kernel, path, text)  # fmt: skip
    with pytest.raises(HostError, match=r"DRA-VFIO-BIND.*vfio-pci did not take it.*bound to no driver"):
        bus.bind(ADDRESS, "vfio-pci")


# -- who has it open


def test_who_holds_a_gpu_is_told_by_pid_and_name(node, bus):
    node.write(f"proc/driver/nvidia/gpus/{GPU}/information", "Model: \t\t H100\nDevice Minor: \t 3\n")
    node.write("dev/nvidia3", "stands for 195:3")
    node.write("dev/nvidia4", "stands for 195:4")
    node.write("dev/dri/renderD131", "stands for 226:131")
    node.write(f"sys/bus/pci/devices/{GPU}/drm/renderD131/dev", "226:131\n")
    assert bus.holders(ADDRESS) == ()
    for pid, comm, file in (
        (71, "python3", "nvidia3"),
        (9, "Xorg", "dri/renderD131"),
        (8, "other", "nvidia4"),
    ):
        node.write(f"proc/{pid}/comm", comm + "\n")
        node.link(f"proc/{pid}/fd/5", node.root / "dev" / file)
    node.link("proc/8/fd/6", node.root / "gone")
    assert bus.holders(ADDRESS) == (Holder(9, "Xorg"), Holder(71, "python3"))
    assert bus.holders(PciAddress.parse(OTHER)) == ()
    assert bus.holders() == ()


@pytest.mark.skipif(not can_make_nodes(), reason="device nodes cannot be made here")
def test_a_real_device_is_known_by_its_numbers_under_any_path(tmp_path):
    """As a container's node is: another file than the one of the machine's own /dev that is open here."""
    other = tmp_path / "another name"
    os.mknod(other, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    with open("/dev/full", "rb"):
        assert os.getpid() in [holder.pid for holder in holders_of(HostPaths().proc, [other])]
    assert os.getpid() not in [holder.pid for holder in holders_of(HostPaths().proc, [other])]


# -- the kernel of the machine


def test_an_attribute_is_written_in_one_piece_and_never_made(tmp_path):
    kernel = RealKernel(HostPaths(host_root=tmp_path))
    attribute = tmp_path / "driver_override"
    assert "No such file" in kernel.write(attribute, "vfio-pci\n")
    assert not attribute.exists()
    attribute.write_text("")
    assert kernel.write(attribute, "vfio-pci\n") == ""
    assert attribute.read_text() == "vfio-pci\n"


def test_a_write_that_the_kernel_keeps_is_left_behind(tmp_path):
    """A pipe that nobody reads: opening it waits for as long as an unbind of a device in use does."""
    os.mkfifo(tmp_path / "unbind")
    kernel = RealKernel(HostPaths(host_root=tmp_path), write_seconds=0.3)
    assert kernel.write(tmp_path / "unbind", GPU) == "the kernel did not answer within 0.3 s"


def test_a_write_that_hangs_in_the_kernel_is_not_begun_again_beside_itself(tmp_path, monkeypatch):
    """Nothing ends a process that waits inside the kernel, as the one here that is not killed."""
    monkeypatch.setattr("dra.host.programs.os.killpg", lambda *_: None)
    monkeypatch.setattr("dra.host.programs._REAP_SECONDS", 0.0)
    unbind = tmp_path / "unbind"
    os.mkfifo(unbind)
    kernel = RealKernel(HostPaths(host_root=tmp_path), write_seconds=0.3)
    # What is asked of another function is not kept waiting by it.
    for function in (GPU, OTHER):
        assert "within 0.3 s" in kernel.write(unbind, function)
    hanging = []
    for function in (GPU, OTHER):
        said = kernel.write(unbind, function)
        assert "has not answered an earlier request" in said
        hanging.append(int(re.search(r"\(process (\d+)\)", said)[1]))
    # The devices are let go of: both come to their end, and the next is asked for as ever.
    device = os.open(unbind, os.O_RDWR)
    for process in hanging:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert "earlier" not in kernel.write(unbind, GPU)
    os.close(device)


def test_a_node_without_modprobe_says_so(tmp_path):
    kernel = RealKernel(HostPaths(host_root=tmp_path))
    assert kernel.load_module("vfio-pci") == f"there is no modprobe below {tmp_path}"
