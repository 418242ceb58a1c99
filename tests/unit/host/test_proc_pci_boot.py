"""What /proc and /sys say."""

import pytest

from dra.errors import HostError
from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.host.pci import drm_nodes, numa_node, pcie_root
from dra.host.proc import device_majors, frontend_major, kernel_driver_version, parse_device_majors
from dra.values import PciAddress

BDF = PciAddress.parse("00000000:1A:00.0")

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidia-modeset
195 nvidiactl
226 drm
510 nvidia-uvm

Block devices:
  7 loop
259 nvidia-not-really
"""


def test_majors_are_the_character_devices_only():
    assert parse_device_majors(DEVICES) == {
        "mem": 1, "nvidia": 195, "nvidia-modeset": 195, "nvidiactl": 195, "drm": 226, "nvidia-uvm": 510
    }  # fmt: skip


def test_older_drivers_call_their_frontend_otherwise():
    assert frontend_major({"nvidia-frontend": 195}) == 195
    assert frontend_major({"nvidia": 195, "nvidia-frontend": 1}) == 195
    assert frontend_major({"drm": 226}) is None


def test_majors_are_read_each_time(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    paths.proc.mkdir()
    (paths.proc / "devices").write_text(DEVICES)
    assert device_majors(paths)["nvidia-uvm"] == 510
    (paths.proc / "devices").write_text(DEVICES.replace("510", "235"))
    assert device_majors(paths)["nvidia-uvm"] == 235


def test_without_proc_the_error_names_the_file_and_what_to_mount(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    with pytest.raises(HostError, match=r"DRA-HOST-PROC-DEVICES.*proc/devices.*Mount"):
        device_majors(paths)
    with pytest.raises(HostError, match=r"DRA-HOST-BOOT-ID.*boot_id.*Mount"):
        boot_id(paths)


def test_the_boot_id_is_the_kernels_and_never_empty(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    file = tmp_path / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True)
    file.write_text("6f2a7a1e-0000-4000-8000-000000000001\n")
    assert boot_id(paths) == "6f2a7a1e-0000-4000-8000-000000000001"
    file.write_text("\n")
    with pytest.raises(HostError, match="is empty"):
        boot_id(paths)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:  gcc 11.4\n",
            "535.104.05",
        ),
        ("nonsense", ""),
    ],
)
def test_the_loaded_kernel_module_tells_its_version(tmp_path, text, version):
    paths = HostPaths(host_root=tmp_path)
    assert kernel_driver_version(paths) == ""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert kernel_driver_version(paths) == version


def plug_in(root, real, bdf="0000:1a:00.0"):
    device = root / "sys/devices" / real / bdf
    device.mkdir(parents=True)
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / bdf).symlink_to(device)
    return device


def test_the_root_complex_is_the_first_component_of_the_real_path(tmp_path):
    plug_in(tmp_path, "pci0000:16/0000:16:01.0/0000:17:00.0")
    assert pcie_root(HostPaths(host_root=tmp_path), BDF) == "pci0000:16"


def test_a_root_complex_behind_another_bus_is_found(tmp_path):
    plug_in(tmp_path, "LNXSYSTM:00/LNXSYBUS:00/pci1234:00")
    assert pcie_root(HostPaths(host_root=tmp_path), BDF) == "pci1234:00"


def test_a_device_without_a_root_complex_has_none(tmp_path):
    plug_in(tmp_path, "platform/soc")
    paths = HostPaths(host_root=tmp_path)
    assert pcie_root(paths, BDF) is None
    assert pcie_root(paths, PciAddress.parse("0000:ff:00.0")) is None


def test_long_domains_keep_their_digits(tmp_path):
    plug_in(tmp_path, "pci10000:e0", bdf="10000:e1:00.0")
    paths = HostPaths(host_root=tmp_path)
    assert pcie_root(paths, PciAddress.parse("00010000:E1:00.0")) == "pci10000:e0"


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)])
def test_the_numa_node_is_none_where_the_kernel_knows_none(tmp_path, text, node):
    (plug_in(tmp_path, "pci0000:16") / "numa_node").write_text(text)
    assert numa_node(HostPaths(host_root=tmp_path), BDF) == node


def test_drm_nodes_are_cards_and_render_nodes_in_order_and_nothing_else(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    assert drm_nodes(paths, BDF) == ()
    drm = plug_in(tmp_path, "pci0000:16") / "drm"
    for name in ("renderD128", "card10", "card2", "controlD64", "version"):
        (drm / name).mkdir(parents=True)
    assert drm_nodes(paths, BDF) == ("card2", "card10", "renderD128")
