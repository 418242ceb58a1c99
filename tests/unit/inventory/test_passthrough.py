"""Which GPUs can be passed through, and what becomes of those that are."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dra.host.paths import HostPaths
from dra.host.pci_binding import PciBus
from dra.host.pci_names import UNKNOWN_DEVICE, addressable_bytes, board_name, find_name
from dra.inventory.diff import diff
from dra.inventory.keep import Kept, plan_inventory, with_siblings
from dra.inventory.model import Inventory, ScanProblem
from dra.inventory.names import VfioName, parse_device_name, parse_vfio_name
from dra.inventory.passthrough import scan_with_passthrough
from dra.inventory.scan import Scanner
from dra.nvml.event_watch import EventWatch, WatchedGpu
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.sim.node import SimulatedNode
from dra.values import PciAddress
from tests.unit.inventory.inventory_samples import gpu, inventory, problem, vfio


class Node:
    """A simulated node that is looked at with its PCI bus."""

    def __init__(self, root, profile="h100-nvl-x2"):
        self.machine = SimulatedNode(profile, root)
        self.pci, self.paths = self.machine.pci, HostPaths(**self.machine.paths_kwargs())
        self.bus = PciBus(self.paths, self.machine.kernel)
        self.session = NvmlSession(InjectedLibrary(self.machine.library))
        self.held = ()
        self.look = scan_with_passthrough(
            Scanner(self.session, self.paths).scan, self.bus, self.paths, in_use=lambda: self.held
        )
        self.kept = Kept(Inventory())

    def inventory(self, *in_use):
        """Look, and give what the live inventory makes of it."""
        on_bus = lambda address: self.bus.driver_of(address) == "nvidia"  # noqa: E731
        self.held = in_use
        self.kept = plan_inventory(self.kept, self.look(), in_use=in_use, on_bus=on_bus)
        return self.kept.inventory

    def bind(self, minor, driver):
        """Bind a GPU as prepare does."""
        with self.session.paused("a GPU changes its driver"):
            self.bus.load_module(driver)
            self.bus.bind(self.pci.address_of(minor), driver)


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.session.close()


def minors(found):
    return [each.minor for each in found.gpus]


def test_every_gpu_of_a_node_with_an_iommu_can_be_passed_through(node):
    found = node.inventory()
    first = found.vfio[0]
    assert (first.index, str(first.pci_address), first.driver, first.on_vfio) == (
        0,
        "0000:1b:00.0",
        "nvidia",
        False,
    )
    assert (first.vendor_id, first.device_id, first.product_name) == (0x10DE, 0x2321, "GH100 [H100L 94GB]")
    assert first.iommu_group == node.bus.function(first.pci_address).iommu_group
    # 94 GiB and 32 MiB of 64-bit regions need 256 GiB; the 16 MiB below 4 GiB do not count.
    assert first.addressable_bytes == 256 << 30
    assert (first.pcie_root, first.numa_node, first.iommufd) == ("pci0000:15", 0, True)
    assert [each.gpu_minor for each in found.vfio] == [0, 1]
    assert found.problems == ()


def test_without_an_iommu_there_is_one_word_about_it_and_the_gpus_stay(node):
    node.pci.set_iommu(False)
    found = node.inventory()
    assert minors(found) == [0, 1]
    assert found.vfio == ()
    (told,) = found.problems
    assert told.code == "DRA-VFIO-NO-IOMMU"
    assert "intel_iommu=on" in told.remedy
    node.pci.set_iommu(True)
    assert len(node.inventory().vfio) == 2


def test_a_gpu_with_virtual_functions_or_without_a_driver_is_not_offered_and_keeps_its_number(node):
    node.pci.bind(0, "")
    assert [each.index for each in node.inventory().vfio] == [1]
    node.pci.bind(0, "nvidia")
    node.pci.set_virtual_functions(0, 2)
    assert [each.index for each in node.inventory().vfio] == [1]
    node.pci.bind(0, "nouveau")
    node.pci.set_virtual_functions(0, 0)
    assert [each.index for each in node.inventory().vfio] == [1]


def test_what_a_claim_has_stays_while_it_has_no_driver(node):
    """Between two drivers, or because a bind failed half-way: the device is in use, and not gone."""
    node.pci.bind(0, "")
    assert [each.index for each in node.inventory("gpu-vfio-0").vfio] == [0, 1]
    assert [each.index for each in node.inventory("gpu-vfio-1").vfio] == [1]


def test_a_gpu_goes_and_comes_back_without_being_lost(node):
    before = node.inventory()
    node.bind(1, "vfio-pci")
    away = node.inventory("gpu-vfio-1")
    assert minors(away) == [0]
    assert away.problems == ()
    assert (away.vfio[1].driver, away.vfio[1].on_vfio, away.vfio[1].gpu_minor) == ("vfio-pci", True, None)
    assert away.vfio[1].vfio_device == "vfio1"
    assert diff(before, away).publishes
    node.bind(1, "nvidia")
    assert node.inventory() == before


def test_a_gpu_comes_back_while_the_events_of_the_others_are_waited_for(node):
    """NVML counts its GPUs when it is opened, and an event wait keeps it open."""

    def watched():
        return tuple(WatchedGpu(each.uuid, each.pci_address) for each in node.kept.inventory.gpus)

    def wait_registered(count):
        with heard:
            assert heard.wait_for(lambda: len(watch.state.registered) == count, 60)

    def changed(_state):
        with heard:
            heard.notify_all()

    heard = threading.Condition()
    before = node.inventory()
    watch = EventWatch(node.session, gpus=watched, told=lambda _events: None, changed=changed)
    watch.start()
    try:
        wait_registered(2)
        node.bind(1, "vfio-pci")
        assert minors(node.inventory()) == [0]
        wait_registered(1)
        node.pci.bind(1, "nvidia")  # by somebody who tells nobody
        assert node.inventory() == before
        wait_registered(2)
    finally:
        assert watch.stop(timeout_seconds=60)


def test_the_only_gpu_of_a_node_goes_and_comes_back(tmp_path):
    node = Node(tmp_path, "t4-x1")
    node.inventory()
    node.bind(0, "vfio-pci")
    away = node.inventory()
    assert (away.gpus, away.problems) == ((), ())
    assert [each.index for each in away.vfio] == [0]
    node.bind(0, "nvidia")
    assert minors(node.inventory()) == [0]
    node.session.close()


def test_a_gpu_that_was_given_away_before_is_a_function_alone(node):
    node.pci.bind(0, "vfio-pci")
    found = node.inventory()
    assert minors(found) == [1]
    assert [(each.index, each.on_vfio) for each in found.vfio] == [(0, True), (1, False)]


def test_a_node_without_nvidias_driver_can_pass_through_what_vfio_has(node):
    node.pci.bind(0, "vfio-pci")
    node.machine.control.unload_driver()
    found = node.inventory()
    assert [each.index for each in found.vfio] == [0]
    assert [each.code for each in found.problems] == ["DRA-NVML-DRIVER-NOT-LOADED"]


# -- what becomes of GPUs that a scan does not show

ONE = with_siblings(inventory(gpu(0), gpu(1), vfio=[vfio(0), vfio(1)]))


def plan(before, scanned, *in_use, on_bus=True):
    return plan_inventory(Kept(before), scanned, in_use=in_use, on_bus=lambda _: on_bus).inventory


def test_a_gpu_on_its_way_to_a_claim_is_not_gone():
    """NVML does not list it any more, and sysfs still shows NVIDIA's driver."""
    scanned = replace(ONE, gpus=ONE.gpus[1:])
    assert minors(plan(ONE, scanned, "gpu-vfio-4")) == [1]
    assert plan(ONE, scanned, "gpu-vfio-4").problems == ()
    # Without such a claim it is lost.
    lost = plan(ONE, scanned)
    assert [(each.minor, each.unusable) for each in lost.gpus] == [(0, "DRA-GPU-GONE"), (1, "")]
    assert [each.gpu_minor for each in lost.vfio] == [0, 1]


def test_a_gpu_that_an_old_session_still_lists_as_lost_is_passed_through():
    ill = replace(ONE.gpus[0], unusable="DRA-NVML-GPU-LOST")
    told = ScanProblem(str(ill.pci_address), "DRA-NVML-GPU-LOST", "lost")
    scanned = inventory(
        ill, gpu(1), problems=[told, problem("DRA-X", "node-2")], vfio=[vfio(0, driver="vfio-pci"), vfio(1)]
    )
    found = plan(ONE, scanned, on_bus=False)
    assert minors(found) == [1]
    assert [each.code for each in found.problems] == ["DRA-X"]
    assert [each.gpu_minor for each in found.vfio] == [None, 1]


def test_a_gpu_that_was_taken_from_a_claim_by_hand_stays_listed_as_gone():
    scanned = inventory(gpu(1), vfio=[vfio(0, driver="vfio-pci"), vfio(1)])
    found = plan(ONE, scanned, "gpu-0", on_bus=False)
    assert [(each.minor, each.unusable) for each in found.gpus] == [(0, "DRA-GPU-GONE"), (1, "")]


def test_while_nvml_is_let_go_of_the_bus_is_still_looked_at():
    blind = Inventory(problems=(problem("DRA-NVML-RELEASED"),), vfio=(vfio(0, driver="vfio-pci"), vfio(1)))
    found = plan(ONE, blind, "gpu-vfio-4")
    assert [(each.minor, each.unusable) for each in found.gpus] == [(1, "")]
    assert [each.gpu_minor for each in found.vfio] == [None, 1]


def test_a_changed_driver_is_a_difference():
    other = replace(ONE, vfio=(replace(ONE.vfio[0], driver="vfio-pci"), ONE.vfio[1]))
    assert diff(ONE, other).publishes
    assert not diff(ONE, ONE)


# -- names


def test_names_of_devices_that_are_passed_through():
    assert str(VfioName(12)) == "gpu-vfio-12"
    assert parse_vfio_name("gpu-vfio-12") == VfioName(12)
    for other in ("gpu-1", "gpu-vfio-", "gpu-vfio-x", "gpu-vfio-1-mig-1g5gb-19-0", "gpu-0-mig-vfio-1-1"):
        assert parse_vfio_name(other) is None
    assert parse_device_name("gpu-vfio-12") is None


IDS = """# a comment
10dd  Somebody else
\t20b0  not ours
10de  NVIDIA Corporation
\t0020  NV4 [Riva TNT]
\t\t1043 0200  a subsystem
\tabcd  Some [Board of the future]
10df  Another
\tabce  not ours either
"""


def test_a_board_is_called_as_in_the_database_of_pci_ids(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    assert board_name(paths, 0x20B0) == "GA100 [A100 SXM4 40GB]"
    assert board_name(paths, 0xABCD) == UNKNOWN_DEVICE
    (tmp_path / "usr/share/misc").mkdir(parents=True)
    (tmp_path / "usr/share/misc/pci.ids").write_text(IDS)
    assert board_name(paths, 0xABCD) == "Some [Board of the future]"
    assert board_name(paths, 0xABCE) == UNKNOWN_DEVICE
    assert find_name(IDS.splitlines(keepends=True), 0x0200) == ""


def test_only_the_64_bit_regions_of_the_function_itself_count(tmp_path):
    paths, address = HostPaths(host_root=tmp_path), PciAddress.parse("0000:01:00.0")
    assert addressable_bytes(paths, address) == 0
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    rows = [
        "0x00000000fb000000 0x00000000fbffffff 0x0000000000040200",  # 16 MiB, 32 bits
        "0x0000001000000000 0x00000017ffffffff 0x000000000014220c",  # 32 GiB
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x0000001800000000 0x0000001801ffffff 0x000000000014220c",  # 32 MiB
        "nonsense",
        "0x0000000000003000 0x000000000000307f 0x0000000000040101",  # ports
        "0x0000100000000000 0x00001fffffffffff 0x000000000014220c",  # of virtual functions
    ]
    (device / "resource").write_text("\n".join(rows) + "\n")
    assert addressable_bytes(paths, address) == 64 << 30
    (device / "resource").write_text(rows[1] + "\n")
    assert addressable_bytes(paths, address) == 32 << 30
