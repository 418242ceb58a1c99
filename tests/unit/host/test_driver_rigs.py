"""Rigs: a node whose NVML is a stand-in, with few of a driver's files, and how it differs from a broken driver."""

import pytest

from dra.errors import StackError
from dra.host.driver_files import find_driver_files
from dra.host.driver_required import OnDisk, plan_stand_ins
from dra.host.paths import HostPaths
from dra.sim.tree.elf import shared_object
from tests.unit.cdi.node import LIB, VERSION, install_driver, library, put

OTHER = "550.1.1"


def plain(root, stem, name=""):
    """A regular file under the name that programs ask for, without a version."""
    return put(root / LIB / (name or f"lib{stem}.so.1"), shared_object(f"lib{stem}.so.1"))


def load_module(root, version=VERSION):
    put(
        root / "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  x\n"
    )


def find(root, version=VERSION, **options):
    return find_driver_files(HostPaths(host_root=root), version, **options)


def names_of(files):
    return {one.path: one.names for one in files.libraries}


def test_an_nvml_without_libcuda_is_a_rig(tmp_path):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1")
    files = find(tmp_path)
    assert names_of(files) == {f"/{LIB}/libnvidia-ml.so.{VERSION}": ("libnvidia-ml.so.1",)}
    assert files.missing == (f"libcuda.so.{VERSION}",)
    assert files.assumed == ()


def test_one_file_without_any_version_is_a_rig(tmp_path):
    plain(tmp_path, "nvidia-ml")
    files = find(tmp_path)
    assert names_of(files) == {f"/{LIB}/libnvidia-ml.so.1": ()}
    assert files.library_dirs == (f"/{LIB}",)
    assert files.version == VERSION
    assert files.missing == (f"libcuda.so.{VERSION}",)
    assert files.assumed == (f"/{LIB}/libnvidia-ml.so.1",)


def test_a_rig_whose_nvml_says_no_version_is_taken_too(tmp_path):
    plain(tmp_path, "nvidia-ml")
    files = find(tmp_path, "")
    assert files.version == ""
    assert files.firmware == ()
    assert files.missing == ("libcuda.so.1",)


def test_libcuda_without_a_version_is_given_too(tmp_path):
    plain(tmp_path, "nvidia-ml")
    plain(tmp_path, "cuda")
    files = find(tmp_path)
    assert files.missing == ()
    # Programs open libcuda.so, whether the rig has such a link or not.
    assert names_of(files)[f"/{LIB}/libcuda.so.1"] == ("libcuda.so",)


def test_a_library_of_another_name_behind_the_link_is_found_by_the_link(tmp_path):
    put(tmp_path / "opt/mock/libmock.so", shared_object("libmock.so"))
    (tmp_path / LIB).mkdir(parents=True)
    (tmp_path / LIB / "libnvidia-ml.so.1").symlink_to("/opt/mock/libmock.so")
    files = find(tmp_path)
    assert names_of(files) == {"/opt/mock/libmock.so": ("libnvidia-ml.so.1",)}


def test_an_nvml_of_another_version_without_a_kernel_module_is_a_stand_in(tmp_path):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1", version="1.0.0")
    files = find(tmp_path)
    assert files.assumed == (f"/{LIB}/libnvidia-ml.so.1.0.0",)
    assert names_of(files) == {f"/{LIB}/libnvidia-ml.so.1.0.0": ("libnvidia-ml.so.1",)}


def test_an_nvml_of_another_version_beside_libcuda_of_the_right_one_is_a_stand_in(tmp_path):
    library(tmp_path / LIB, "cuda", "libcuda.so.1")
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1", version=OTHER)
    files = find(tmp_path)
    assert set(names_of(files)) == {f"/{LIB}/libcuda.so.{VERSION}", f"/{LIB}/libnvidia-ml.so.{OTHER}"}
    load_module(tmp_path)
    with pytest.raises(StackError, match="DRA-DRIVER-VERSION-MISMATCH"):
        find(tmp_path)


def test_the_same_under_a_loaded_module_of_that_version_is_a_driver_that_was_replaced(tmp_path):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1", version=OTHER)
    load_module(tmp_path)
    with pytest.raises(StackError) as caught:
        find(tmp_path)
    assert caught.value.code == "DRA-DRIVER-VERSION-MISMATCH"
    assert "reboot" in caught.value.remedy
    # Another module on the machine, as where a rig runs on a machine with a GPU, is not this NVML's.
    load_module(tmp_path, "595.1.1")
    assert find(tmp_path).assumed


def test_libcuda_of_another_version_is_never_given(tmp_path):
    install_driver(tmp_path, version=OTHER)
    with pytest.raises(StackError) as caught:
        find(tmp_path)
    assert caught.value.code == "DRA-DRIVER-VERSION-MISMATCH"
    assert "NVML reports" in caught.value.message
    assert "no module is loaded" in caught.value.message
    assert f"libcuda.so.{VERSION}" in caught.value.remedy


def test_a_driver_that_is_half_replaced_is_a_mismatch(tmp_path):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1")
    library(tmp_path / LIB, "cuda", "libcuda.so.1", version=OTHER)
    with pytest.raises(StackError, match=OTHER):
        find(tmp_path)
    # Who wants no CUDA is not told of it.
    assert find(tmp_path, capabilities=frozenset({"utility"})).missing == ()


def test_a_plain_file_is_taken_even_under_a_loaded_module(tmp_path):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1")
    plain(tmp_path, "cuda")
    load_module(tmp_path)
    assert find(tmp_path).assumed == (f"/{LIB}/libcuda.so.1",)


def test_a_link_that_leads_nowhere_and_a_32_bit_file_are_no_driver(tmp_path):
    (tmp_path / LIB).mkdir(parents=True)
    (tmp_path / LIB / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.1.0.0")
    narrow = bytearray(shared_object("libcuda.so.1"))
    narrow[4] = 1
    put(tmp_path / LIB / "libcuda.so.1", bytes(narrow))
    with pytest.raises(StackError, match="DRA-DRIVER-LIBRARIES-MISSING"):
        find(tmp_path)


def test_without_any_version_the_places_searched_are_still_named(tmp_path):
    with pytest.raises(StackError) as caught:
        find(tmp_path, "")
    assert f"/{LIB}/lib*.so.*" in caught.value.message
    assert "/usr/lib/lib*.so.*" in caught.value.message


def test_of_two_files_that_may_stand_for_nvml_the_one_without_a_version_is_taken():
    disk = [OnDisk("nvidia-ml", "/a", "/", OTHER), OnDisk("nvidia-ml", "/b", "/", "")]
    plan = plan_stand_ins(VERSION, "", lacking=["nvidia-ml"], refused=["nvidia-ml"], on_disk=disk)
    assert [one.path for one in plan.taken] == ["/b"]
    assert plan.others == ()
