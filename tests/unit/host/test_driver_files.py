"""What counts as the driver's, where it is looked for, and what is said when it is not there."""

import os

import pytest

from dra.errors import StackError
from dra.host.driver_files import find_driver_files
from dra.host.driver_lists import CAPABILITIES
from dra.host.paths import HostPaths
from dra.sim.tree.elf import shared_object
from dra.sim.tree.ldcache import ld_so_cache
from tests.unit.cdi.node import LIB, VERSION, install_driver, library, make_node, put


def found_in(root, **options):
    return find_driver_files(HostPaths(host_root=root, **options), VERSION)


def by_stem(files):
    return {library.stem: library for library in files.libraries}


@pytest.fixture
def root(tmp_path):
    make_node(tmp_path)
    return tmp_path


def test_libraries_are_known_by_the_version_behind_their_name(root):
    library(root / LIB, "nvidia-ml", "libnvidia-ml.so.1", version="570.1.1")
    put(root / LIB / "libc.so.6", shared_object("libc.so.6"))
    files = found_in(root)
    assert files.library_dirs == (f"/{LIB}",)
    assert set(by_stem(files)) == {
        "cuda",
        "nvidia-ml",
        "nvidia-gpucomp",
        "nvidia-encode",
        "EGL_nvidia",
        "nvidia-ngx",
    }
    assert all(found.path.endswith(f".so.{VERSION}") for found in files.libraries)
    assert files.machine == "x86_64"


def test_a_library_is_found_by_its_soname_and_the_links_beside_it(root):
    (root / LIB / "libnvidia-encode.so").symlink_to("libnvidia-encode.so.1")
    (root / LIB / "libnvidia-encode.so.1").symlink_to(f"libnvidia-encode.so.{VERSION}")
    found = by_stem(found_in(root))
    assert found["nvidia-encode"].names == ("libnvidia-encode.so.1", "libnvidia-encode.so")
    assert found["nvidia-gpucomp"].names == ()
    # Programs open libcuda.so; ldconfig makes only the SONAME's link.
    assert found["cuda"].names == ("libcuda.so.1", "libcuda.so")


def test_links_name_a_library_that_does_not_tell_its_soname(root):
    (root / LIB / f"libnvidia-ml.so.{VERSION}").write_bytes(b"not an ELF file")
    (root / LIB / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    assert by_stem(found_in(root))["nvidia-ml"].names == ("libnvidia-ml.so.1",)


def test_a_library_with_a_version_of_its_own_is_found(root):
    put(root / LIB / "libnvidia-egl-wayland2.so.1.0.1", shared_object("libnvidia-egl-wayland2.so.1"))
    put(root / LIB / "libnvidia-egl-stray.so", shared_object("libnvidia-egl-stray.so"))
    found = by_stem(found_in(root))
    assert found["nvidia-egl-wayland2"].names == ("libnvidia-egl-wayland2.so.1",)
    assert found["nvidia-egl-wayland2"].capabilities == {"graphics"}
    assert "nvidia-egl-stray" not in found


def test_vdpau_and_x_server_modules_stand_in_their_own_directories(root):
    library(root / LIB / "vdpau", "vdpau_nvidia", "libvdpau_nvidia.so.1")
    library(root / LIB / "nvidia/xorg", "glxserver_nvidia", None)
    put(root / "usr/lib/xorg/modules/drivers/nvidia_drv.so", shared_object("nvidia_drv.so"))
    found = by_stem(found_in(root))
    assert found["vdpau_nvidia"].subdir == "vdpau"
    assert found["glxserver_nvidia"].capabilities == {"display"}
    assert found["nvidia_drv"].capabilities == {"display"}


def test_a_library_nobody_knows_yet_is_for_everybody(root):
    library(root / LIB, "nvidia-brandnew", None)
    assert by_stem(found_in(root))["nvidia-brandnew"].capabilities == CAPABILITIES


def test_the_same_file_behind_two_directories_counts_once(root):
    (root / "usr/lib64").symlink_to("lib/x86_64-linux-gnu")
    (root / "lib64").symlink_to("usr/lib64")
    files = found_in(root)
    assert files.library_dirs == (f"/{LIB}",)
    assert len(files.libraries) == 6


def test_debian_alternatives_lead_to_the_real_file(tmp_path):
    make_node(tmp_path, driver=False)
    real = tmp_path / LIB / "nvidia/current"
    install_driver(tmp_path, lib=f"{LIB}/nvidia/current")
    put(real / "nvidia-smi", "#!/bin/sh\n", mode=0o755)
    (tmp_path / "usr/bin/nvidia-smi").unlink()
    (tmp_path / "etc/alternatives").mkdir()
    (tmp_path / "etc/alternatives/nvidia--nvidia-smi").symlink_to(f"/{LIB}/nvidia/current/nvidia-smi")
    (tmp_path / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/nvidia--nvidia-smi")
    for name in (f"libcuda.so.{VERSION}", "libnvidia-ml.so.1"):
        (tmp_path / LIB / name).symlink_to(f"/{LIB}/nvidia/current/{name}")
    files = found_in(tmp_path)
    assert files.library_dirs == (f"/{LIB}/nvidia/current",)
    (smi,) = [file for file in files.binaries if file.container_path == "/usr/bin/nvidia-smi"]
    assert smi.path == f"/{LIB}/nvidia/current/nvidia-smi"


def test_google_s_layout_is_a_driver_root_of_its_own(tmp_path):
    driver = tmp_path / "home/kubernetes/bin/nvidia"
    for stem, soname in (("cuda", "libcuda.so.1"), ("nvidia-ml", "libnvidia-ml.so.1")):
        library(driver / "lib64", stem, soname)
    put(driver / "bin/nvidia-smi", "#!/bin/sh\n", mode=0o755)
    put(driver / "vulkan/icd.d/nvidia_icd.json", "{}")
    put(driver / f"firmware/nvidia/{VERSION}/gsp_tu10x.bin")
    files = found_in(tmp_path, driver_root_host="/home/kubernetes/bin/nvidia")
    assert files.library_dirs == ("/lib64",)
    assert [file.container_path for file in files.binaries] == ["/bin/nvidia-smi"]
    assert [file.container_path for file in files.configuration] == ["/etc/vulkan/icd.d/nvidia_icd.json"]
    assert [file.container_path for file in files.firmware] == [
        f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"
    ]


def test_a_distribution_with_plain_lib_only_is_found_and_32_bit_libraries_are_not(tmp_path):
    install_driver(tmp_path, lib="usr/lib")
    assert found_in(tmp_path).library_dirs == ("/usr/lib",)
    wide = (tmp_path / "usr/lib" / f"libcuda.so.{VERSION}").read_bytes()
    (tmp_path / "usr/lib" / f"libcuda.so.{VERSION}").write_bytes(wide[:4] + b"\x01" + wide[5:])
    files = found_in(tmp_path)
    assert files.missing == (f"libcuda.so.{VERSION}",)
    assert "cuda" not in by_stem(files)


def test_the_loader_s_cache_leads_where_no_usual_directory_does(tmp_path):
    install_driver(tmp_path, lib="opt/nvidia/lib64")
    with pytest.raises(StackError):
        found_in(tmp_path)
    cache = ld_so_cache([("libcuda.so.1", "/opt/nvidia/lib64/libcuda.so.1")], architecture=os.uname().machine)
    put(tmp_path / "etc/ld.so.cache", cache)
    assert found_in(tmp_path).library_dirs == ("/opt/nvidia/lib64",)
    put(tmp_path / "etc/ld.so.cache", cache[:60])
    with pytest.raises(StackError, match=r"etc/ld.so.cache \(the loader's cache cannot be read"):
        found_in(tmp_path)


def test_of_two_machines_in_the_loader_s_cache_ours_counts_and_another_s_only_alone(tmp_path):
    ours, other = sorted(("x86_64", "aarch64"), key=lambda name: name != os.uname().machine)
    for machine in (ours, other):
        for stem, soname in (("cuda", "libcuda.so.1"), ("nvidia-ml", "libnvidia-ml.so.1")):
            library(tmp_path / f"opt/{machine}", stem, soname, machine=machine)

    def cache(machine):
        path = f"/opt/{machine}/libcuda.so.{VERSION}"
        return ld_so_cache([("libcuda.so.1", path)], architecture=machine)

    put(tmp_path / "etc/ld.so.cache", cache(other))
    assert found_in(tmp_path).library_dirs == (f"/opt/{other}",)
    both = bytearray(ld_so_cache([("libcuda.so.1", f"/opt/{name}/libcuda.so.{VERSION}") for name in (ours, other)],
                                 architecture=ours))  # fmt: skip
    at = both.index(f"/opt/{other}".encode()) - both.index(b"glibc")
    entry = next(place for place in (48, 72) if int.from_bytes(both[place + 8 : place + 12], "little") == at)
    both[entry : entry + 4] = cache(other)[48:52]
    put(tmp_path / "etc/ld.so.cache", bytes(both))
    assert found_in(tmp_path).library_dirs == (f"/opt/{ours}",)


def test_an_arm_driver_says_so_whatever_the_machine_we_run_on(tmp_path):
    for stem, soname in (("cuda", "libcuda.so.1"), ("nvidia-ml", "libnvidia-ml.so.1")):
        library(tmp_path / "usr/lib/aarch64-linux-gnu", stem, soname, machine="aarch64")
    assert found_in(tmp_path).machine == "aarch64"


def test_firmware_is_taken_from_where_the_kernel_is_told_to_look(root):
    place = root / "opt/firmware/nvidia" / VERSION
    put(place / "gsp_ga10x.bin")
    put(root / "sys/module/firmware_class/parameters/path", "/opt/firmware\n")
    (file,) = found_in(root).firmware
    assert file.container_path == f"/opt/firmware/nvidia/{VERSION}/gsp_ga10x.bin"


def test_a_driver_container_s_firmware_path_is_read_in_the_host_s_spelling(tmp_path):
    make_node(tmp_path, driver_root="/run/nvidia/driver")
    put(tmp_path / f"run/nvidia/driver/opt/firmware/nvidia/{VERSION}/gsp_ga10x.bin")
    put(tmp_path / "sys/module/firmware_class/parameters/path", "/run/nvidia/driver/opt/firmware\n")
    (file,) = found_in(tmp_path, driver_root_host="/run/nvidia/driver").firmware
    assert file.container_path == f"/opt/firmware/nvidia/{VERSION}/gsp_ga10x.bin"


def test_firmware_of_the_running_kernel_comes_before_the_common_one(root):
    release = os.uname().release
    put(root / f"lib/firmware/{release}/nvidia/{VERSION}/gsp_ga10x.bin")
    (file,) = found_in(root).firmware
    assert file.container_path == f"/lib/firmware/{release}/nvidia/{VERSION}/gsp_ga10x.bin"


def test_only_real_sockets_are_sockets(root):
    assert [file.container_path for file in found_in(root).sockets] == [
        "/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"
    ]  # fmt: skip
    (root / "run/nvidia-fabricmanager/socket").unlink()
    (root / "run/nvidia-fabricmanager/socket").mkdir()
    assert [file.path for file in found_in(root).sockets] == ["/run/nvidia-persistenced/socket"]


def test_a_program_that_is_not_executable_is_none(root):
    put(root / "usr/bin/nvidia-debugdump", "x", mode=0o644)
    put(root / "usr/local/bin/nvidia-smi", "#!/bin/sh\n", mode=0o755)
    assert [file.path for file in found_in(root).binaries] == ["/usr/local/bin/nvidia-smi"]


def test_nothing_is_found_by_a_link_out_of_the_root(tmp_path):
    outside = library(tmp_path / "outside", "nvidia-encode", None)
    root = tmp_path / "root"
    make_node(root)
    (root / LIB / f"libnvidia-encode.so.{VERSION}").unlink()
    (root / LIB / f"libnvidia-encode.so.{VERSION}").symlink_to(outside)
    (root / LIB / f"libnvidia-nvvm.so.{VERSION}").symlink_to(f"../../../../outside/{outside.name}")
    assert set(by_stem(found_in(root))) == {"cuda", "nvidia-ml", "nvidia-gpucomp", "EGL_nvidia", "nvidia-ngx"}


def test_no_driver_is_an_error_that_lists_everything_searched_and_what_to_do(tmp_path):
    with pytest.raises(StackError) as caught:
        found_in(tmp_path, driver_root_host="/run/nvidia/driver")
    error = caught.value
    assert error.code == "DRA-DRIVER-LIBRARIES-MISSING"
    assert error.retryable
    for place in ("/run/nvidia/driver", f"/usr/lib64/lib*.so.{VERSION}", f"/{LIB}/", "/etc/ld.so.cache"):
        assert place in error.message
    assert "--nvidia-driver-root" in error.remedy


def test_a_driver_replaced_without_a_reload_names_both_versions(tmp_path):
    make_node(tmp_path, driver=False)
    install_driver(tmp_path, version="590.10.01")
    with pytest.raises(StackError) as caught:
        found_in(tmp_path)
    assert caught.value.code == "DRA-DRIVER-VERSION-MISMATCH"
    assert VERSION in caught.value.message
    assert "590.10.01" in caught.value.message
    assert "reboot" in caught.value.remedy


def test_without_nvml_the_loaded_module_tells_the_version_and_without_that_the_library(root):
    paths = HostPaths(host_root=root)
    assert find_driver_files(paths, "").version == VERSION
    put(root / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.1.1  x\n")
    with pytest.raises(StackError, match="DRA-DRIVER-VERSION-MISMATCH"):
        find_driver_files(paths, "")


def test_a_library_that_a_capability_needs_is_missed_only_with_it(root):
    (root / LIB / f"libcuda.so.{VERSION}").unlink()
    files = found_in(root)
    assert files.missing == (f"libcuda.so.{VERSION}",)
    assert "nvidia-ml" in by_stem(files)
    paths = HostPaths(host_root=root)
    assert find_driver_files(paths, VERSION, capabilities=frozenset({"utility"})).missing == ()
