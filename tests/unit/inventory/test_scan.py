import pytest

from dra.host.paths import HostPaths
from dra.inventory.names import profile_slug
from dra.inventory.scan import Scanner, scan
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.values import PciAddress
from tests.unit.nvml.nvml_fake import FakeGpu, FakeNvml, gpus


@pytest.fixture
def session():
    made = []

    def make(give):
        made.append(NvmlSession(InjectedLibrary(give if callable(give) else lambda: give)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def sysfs(root, address, *, pcie_root, numa):
    real = root / f"sys/devices/{pcie_root}/0000:00:01.0/{address}"
    real.mkdir(parents=True)
    (real / "numa_node").write_text(f"{numa}\n")
    link = root / "sys/bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(real)


def test_a_scan_joins_nvml_and_sysfs(tmp_path, session):
    sysfs(tmp_path, "0000:10:00.0", pcie_root="pci0000:0f", numa=1)
    sysfs(tmp_path, "0000:11:00.0", pcie_root="pci0000:10", numa=-1)
    found = scan(session(FakeNvml(gpus(2))), HostPaths(host_root=tmp_path))
    assert [(gpu.pcie_root, gpu.numa_node) for gpu in found.gpus] == [("pci0000:0f", 1), ("pci0000:10", None)]
    assert (found.driver_version, found.cuda_version) == ("580.95.05", (13, 0))
    assert found.gpus[0].pci_address == PciAddress.parse("0000:10:00.0")
    assert found.problems == ()


def test_two_scans_of_an_unchanged_node_are_equal(tmp_path, session):
    scanner = Scanner(session(FakeNvml(gpus(3))), HostPaths(host_root=tmp_path))
    assert scanner.scan() == scanner.scan()


def test_no_driver_is_an_empty_inventory_that_says_why(tmp_path, session):
    def give():
        raise OSError("libnvidia-ml.so.1: no such file")

    found = scan(session(give), HostPaths(host_root=tmp_path))
    assert found.gpus == ()
    assert [(each.subject, each.code) for each in found.problems] == [("node", "DRA-NVML-LIBRARY-NOT-FOUND")]
    assert found.problems[0].remedy


def test_an_ill_gpu_carries_the_code_of_its_illness(tmp_path, session):
    library = FakeNvml(gpus(2))
    library.faults["nvmlDeviceGetName", 0x11] = 15
    found = scan(session(library), HostPaths(host_root=tmp_path))
    assert [gpu.unusable for gpu in found.gpus] == ["", "DRA-NVML-GPU-LOST"]
    assert found.problems[0].subject == "0000:11:00.0"


def test_mig_devices_are_part_of_the_inventory(tmp_path, session):
    library = FakeNvml([FakeGpu(0x10, 0, "GPU-a", mig=1, mig_devices=[(8, 0, "MIG-b", 19, 3, 1)])])
    gpu = scan(session(library), HostPaths(host_root=tmp_path)).gpus[0]
    assert gpu.mig_enabled
    assert [(each.uuid, each.profile.name, each.start) for each in gpu.mig_devices] == [
        ("MIG-b", "1g.10gb", 3)
    ]
    assert profile_slug(gpu.mig_devices[0].profile.name) == "1g10gb"
