"""What a node's file tree shows to somebody who reads it as the driver does."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import stat
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dra.sim.profiles import PROFILES
from dra.sim.tree import (
    LAYOUTS,
    NodeFacts,
    build_tree,
    can_make_nodes,
    default_majors,
    device_numbers,
    install_driver,
    ld_so_cache,
    make_device_node,
    make_socket,
    materialise_golden_tree,
    shared_object,
    sync_tree,
)

GOLDEN = Path(os.environ.get("DRA_GOLDEN", Path(__file__).parents[4] / "shared/golden")) / "cdi"


def facts_of(profile, **changes):
    base = NodeFacts(
        profile, profile.gpus, profile.driver_version, "b00t", majors=default_majors(profile.driver_version)
    )
    return replace(base, **changes)


def soname_of(path: Path) -> str | None:
    """Read DT_SONAME through the program headers, as a loader does."""
    data = path.read_bytes()
    assert data[:4] == b"\x7fELF"
    offset, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        struct.unpack_from("<H", data, 54)[0],
        struct.unpack_from("<H", data, 56)[0],
    )
    programs = [struct.unpack_from("<IIQQQQQQ", data, offset + i * size) for i in range(count)]
    loads = [p for p in programs if p[0] == 1]
    (dynamic,) = [p for p in programs if p[0] == 2]
    entries = dict(struct.iter_unpack("<qQ", data[dynamic[2] : dynamic[2] + dynamic[5]]))
    if 14 not in entries:
        return None
    (at,) = [p[2] + entries[5] - p[3] for p in loads if p[3] <= entries[5] < p[3] + p[5]]
    name = data[at + entries[14] :]
    return name[: name.index(b"\0")].decode()


def test_a_library_names_its_soname_where_the_load_address_is_not_the_file_offset(tmp_path):
    library = tmp_path / "libx.so.1.2"
    library.write_bytes(shared_object("libx.so.1"))
    assert soname_of(library) == "libx.so.1"
    library.write_bytes(shared_object(None))
    assert soname_of(library) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="loads an x86-64 library")
def test_the_real_loader_accepts_a_library(tmp_path):
    library = tmp_path / "libx.so.1"
    library.write_bytes(shared_object("libx.so.1"))
    assert ctypes.CDLL(str(library))._name == str(library)


def test_a_library_says_for_which_machine_it_was_made():
    assert struct.unpack_from("<H", shared_object("a", architecture="aarch64"), 18) == (0xB7,)


def test_ldconfig_reads_the_cache_we_write(tmp_path):
    cache = tmp_path / "ld.so.cache"
    cache.write_bytes(ld_so_cache([("liba.so.1", "/opt/x/liba.so.1"), ("libb.so.2", "/opt/x/libb.so.2")]))
    try:
        run = subprocess.run(
            ["/sbin/ldconfig", "-p", "-C", cache], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("no ldconfig on this machine")
    assert "2 libs found" in run.stdout
    assert "libb.so.2 (libc6,x86-64) => /opt/x/libb.so.2" in run.stdout


@pytest.mark.parametrize(
    "real",
    [False, pytest.param(True, marks=pytest.mark.skipif(not can_make_nodes(), reason="no right to mknod"))],
)
def test_a_node_reads_back_the_same_whether_it_is_real_or_a_stand_in(tmp_path, real):
    make_device_node(tmp_path / "dev/dri/card1", 226, 1, mode=0o660, gid=44, real=real)
    found = device_numbers(tmp_path / "dev/dri/card1")
    assert (found.kind, found.major, found.minor, found.mode, found.real) == ("c", 226, 1, 0o660, real)
    assert found.gid == 44


def test_an_ordinary_file_is_not_taken_for_a_node(tmp_path):
    (tmp_path / "file").write_text("hello")
    assert device_numbers(tmp_path / "file") is None
    assert device_numbers(tmp_path / "missing") is None


def test_a_socket_file_is_a_socket_even_deep_below(tmp_path):
    path = tmp_path.joinpath(*["a-rather-long-directory-name"] * 6) / "socket"
    make_socket(path)
    assert stat.S_ISSOCK(path.lstat().st_mode)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_libcuda_with_its_soname_below_its_driver_root(tmp_path, layout):
    profile = PROFILES["dgx-h100"]
    tree = build_tree(profile, tmp_path, layout=layout)
    (file,) = tree.driver_dir.rglob(f"libcuda.so.{profile.driver_version}")
    assert soname_of(file) == "libcuda.so.1"
    assert device_numbers(tree.dev_dir / "nvidia0").major == 195


def test_an_unknown_layout_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="floppy"):
        build_tree(PROFILES["t4-x1"], tmp_path, layout="floppy")


def test_the_driver_container_has_the_device_nodes_and_the_host_has_none(tmp_path):
    tree = build_tree(PROFILES["dgx-a100"], tmp_path, layout="operator")
    assert tree.driver_root == "/run/nvidia/driver"
    assert (tmp_path / "run/nvidia/driver/dev/nvidia7").exists()
    assert not (tmp_path / "dev/nvidia0").exists()


def test_debian_links_lead_through_alternatives_with_absolute_targets(tmp_path):
    tree = build_tree(PROFILES["dgx-a100"], tmp_path, layout="debian-current")
    link = tree.driver_dir / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    assert os.readlink(link).startswith("/etc/alternatives/")
    assert not link.exists()  # the target is absolute in the tree, not on this machine


def test_the_sysfs_link_of_a_gpu_tells_its_root_complex_and_numa_node(tmp_path):
    build_tree(PROFILES["dgx-a100"], tmp_path)
    for slot in PROFILES["dgx-a100"].gpus:
        device = tmp_path / "sys/bus/pci/devices" / str(slot.pci_address)
        parts = device.resolve().relative_to(tmp_path / "sys/devices").parts
        assert parts[0] == slot.root
        assert parts[-1] == str(slot.pci_address)
        assert int((device / "numa_node").read_text()) == slot.numa_node
        assert (device / "vendor").read_text() == "0x10de\n"


def test_a_cloud_gpu_has_no_numa_node(tmp_path):
    build_tree(PROFILES["t4-x1"], tmp_path)
    assert (tmp_path / "sys/bus/pci/devices/0000:00:1e.0/numa_node").read_text() == "-1\n"


def test_display_nodes_exist_only_on_machines_that_have_them(tmp_path):
    build_tree(PROFILES["l40s-x4"], tmp_path / "l40s")
    build_tree(PROFILES["dgx-a100"], tmp_path / "a100")
    device = tmp_path / "l40s/sys/bus/pci/devices/0000:4a:00.0/drm"
    assert sorted(p.name for p in device.iterdir()) == ["card1", "renderD128"]
    assert device_numbers(tmp_path / "l40s/dev/dri/renderD128").minor == 128
    assert os.readlink(tmp_path / "l40s/dev/dri/by-path/pci-0000:4a:00.0-card") == "../card1"
    assert not (tmp_path / "a100/dev/dri").exists()


def test_an_older_driver_calls_its_major_nvidia_frontend(tmp_path):
    build_tree(PROFILES["t4-x1"], tmp_path / "old")
    build_tree(PROFILES["dgx-h100"], tmp_path / "new")
    assert "195 nvidia-frontend" in (tmp_path / "old/proc/devices").read_text()
    assert "195 nvidia\n" in (tmp_path / "new/proc/devices").read_text()


def test_a_fresh_node_answers_in_proc_but_has_no_device_nodes(tmp_path):
    build_tree(PROFILES["dgx-h100"], tmp_path, fresh=True)
    assert (tmp_path / "proc/driver/nvidia/version").exists()
    assert not list((tmp_path / "dev").glob("nvidia*"))


def test_nvidia_modprobe_of_a_fresh_node_makes_the_missing_nodes(tmp_path):
    tree = build_tree(PROFILES["dgx-h100"], tmp_path, fresh=True)
    subprocess.run([tree.driver_dir / "usr/bin/nvidia-modprobe", "-u", "-c0"], check=True)
    found = device_numbers(tmp_path / "dev/nvidia-uvm")
    assert (found.major, found.minor) == (510, 0)
    assert device_numbers(tmp_path / "dev/nvidia7").minor == 7


def test_mig_instances_show_as_capabilities_with_the_numbers_of_the_recorded_driver(tmp_path):
    profile = PROFILES["dgx-a100"]
    tree = build_tree(profile, tmp_path)
    sync_tree(tree, facts_of(profile, mig=((0, 7, (0,)), (0, 8, (0,)), (0, 2, (0,)))))
    top = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"
    expected = {"gi7": 66, "gi7/ci0": 67, "gi8": 75, "gi8/ci0": 76, "gi2": 21, "gi2/ci0": 22}
    for name, minor in expected.items():
        text = (top / name / "access").read_text()
        assert text == f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        assert device_numbers(tmp_path / f"dev/nvidia-caps/nvidia-cap{minor}").mode == 0o444
    minors = dict(
        line.rsplit(" ", 1)
        for line in (tmp_path / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    assert minors["gpu0/gi7/ci0/access"] == "67"

    sync_tree(tree, facts_of(profile, mig=((0, 8, (0,)),)))
    assert not (top / "gi7").exists()
    assert not (tmp_path / "dev/nvidia-caps/nvidia-cap67").exists()
    assert (top / "gi8/ci0/access").exists()


def test_a_gpu_that_falls_off_the_bus_leaves_proc_sys_and_dev(tmp_path):
    profile = PROFILES["dgx-a100"]
    tree = build_tree(profile, tmp_path)
    sync_tree(tree, facts_of(profile, gpus=profile.gpus[1:]))
    assert not (tmp_path / "dev/nvidia0").exists()
    assert not (tmp_path / "sys/bus/pci/devices/0000:07:00.0").is_symlink()
    assert not (tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0").exists()
    assert (tmp_path / "dev/nvidia1").exists()
    sync_tree(tree, facts_of(profile))
    assert (tmp_path / "dev/nvidia0").exists()
    assert (tmp_path / "sys/bus/pci/devices/0000:07:00.0/vendor").exists()


def test_unloading_the_driver_takes_its_proc_files_majors_and_nodes(tmp_path):
    profile = PROFILES["dgx-h100"]
    tree = build_tree(profile, tmp_path)
    sync_tree(tree, facts_of(profile, driver_version=""))
    assert not (tmp_path / "proc/driver/nvidia").exists()
    assert "nvidia" not in (tmp_path / "proc/devices").read_text()
    assert not [path for path in (tmp_path / "dev").rglob("nvidia*") if not path.is_dir()]
    assert not (tmp_path / "sys/module/nvidia").exists()


def test_a_reloaded_module_may_get_another_uvm_major(tmp_path):
    profile = PROFILES["dgx-h100"]
    tree = build_tree(profile, tmp_path)
    majors = default_majors(profile.driver_version) | {"nvidia-uvm": 507}
    sync_tree(tree, facts_of(profile, majors=majors))
    assert device_numbers(tmp_path / "dev/nvidia-uvm").major == 507
    assert "507 nvidia-uvm" in (tmp_path / "proc/devices").read_text()


def test_a_driver_upgrade_replaces_the_versioned_files(tmp_path):
    profile = PROFILES["dgx-a100"]
    tree = build_tree(profile, tmp_path)
    install_driver(tree, facts_of(profile), "590.44.01", replaces=profile.driver_version)
    directory = tmp_path / "usr/lib/x86_64-linux-gnu"
    assert os.readlink(directory / "libcuda.so.1") == "libcuda.so.590.44.01"
    assert not list(directory.rglob("*580.95.05*"))
    assert not [p for p in directory.rglob("*") if p.is_symlink() and not p.exists()]


def golden(name):
    path = GOLDEN / f"{name}.tree.json"
    if not path.exists():
        pytest.skip(f"no golden data at {path}")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["a100-headless", "a100-mig", "h100", "ldcache"])
@pytest.mark.parametrize("driver_root", ["/", "/run/nvidia/driver"])
def test_a_recorded_tree_comes_out_as_recorded(tmp_path, name, driver_root):
    tree = golden(name)
    driver = materialise_golden_tree(tree, tmp_path, driver_root=driver_root)
    assert driver == tmp_path / driver_root.lstrip("/")
    for path, entry in tree["root"].items():
        where = driver / path.lstrip("/")
        if "link" in entry:
            assert os.readlink(where) == entry["link"]
        elif "char" in entry:
            found = device_numbers(where)
            assert [found.major, found.minor] == entry["char"]
            assert (found.mode, found.gid) == (int(entry["mode"], 8), entry["gid"])
        elif "socket" in entry:
            assert stat.S_ISSOCK(where.lstat().st_mode)
        elif "dir" in entry:
            assert where.is_dir()
        else:
            assert where.is_file()
            assert os.access(where, os.X_OK) or not entry.get("exec")
    for path, entry in tree["proc"].items():
        if "text" in entry:
            assert (tmp_path / "proc" / path.lstrip("/")).read_text() == entry["text"]


def test_the_sonames_of_a_recorded_tree_are_those_of_its_links(tmp_path):
    materialise_golden_tree(golden("h100"), tmp_path)
    directory = tmp_path / "usr/lib/x86_64-linux-gnu"
    version = "580.95.05"
    expected = {
        f"libcuda.so.{version}": "libcuda.so.1",
        f"libnvidia-nvvm.so.{version}": "libnvidia-nvvm.so.4",
        f"libEGL_nvidia.so.{version}": "libEGL_nvidia.so.0",
        f"libnvidia-gpucomp.so.{version}": f"libnvidia-gpucomp.so.{version}",
        f"libnvidia-vulkan-producer.so.{version}": "libnvidia-vulkan-producer.so",
        "libnvidia-egl-gbm.so.1.1.2": "libnvidia-egl-gbm.so.1",
        f"vdpau/libvdpau_nvidia.so.{version}": "libvdpau_nvidia.so.1",
    }
    assert {name: soname_of(directory / name) for name in expected} == expected


def test_the_recorded_table_of_mig_minors_has_the_recorded_size(tmp_path):
    tree = golden("a100-mig")
    materialise_golden_tree(tree, tmp_path)
    size = tree["proc"]["/driver/nvidia-caps/mig-minors"]["file"]
    assert (tmp_path / "proc/driver/nvidia-caps/mig-minors").stat().st_size == size


def test_recorded_display_devices_are_reachable_through_sysfs(tmp_path):
    materialise_golden_tree(golden("h100"), tmp_path)
    drm = tmp_path / "sys/bus/pci/devices/0000:1a:00.0/drm"
    assert sorted(p.name for p in drm.iterdir()) == ["card1", "renderD128"]


def test_a_recording_without_proc_still_gives_the_majors_of_its_nodes(tmp_path):
    materialise_golden_tree(golden("ldcache"), tmp_path)
    assert "510 nvidia-uvm\n" in (tmp_path / "proc/devices").read_text()
