"""What was found is kept while nothing changes, and never longer."""

import os
import stat

import pytest

from dra.errors import StackError
from dra.host.driver_catalog import DriverCatalog
from dra.host.driver_files import find_driver_files
from dra.host.paths import HostPaths
from tests.unit.cdi.node import LIB, VERSION, library, make_node, put, settle


@pytest.fixture
def settled(tmp_path):
    make_node(tmp_path)
    settle(tmp_path)
    return tmp_path


def test_what_was_found_is_kept_while_no_directory_changes(settled):
    catalog = DriverCatalog(HostPaths(host_root=settled))
    assert catalog.get(VERSION) is catalog.get(VERSION)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: library(root / LIB, "nvidia-opencl", "libnvidia-opencl.so.1"),
        lambda root: (root / LIB / "libnvidia-ngx.so").symlink_to(f"libnvidia-ngx.so.{VERSION}"),
        lambda root: library(root / LIB / "vdpau", "vdpau_nvidia", None),
        lambda root: put(root / "usr/sbin/nvidia-debugdump", "#!/bin/sh\n", mode=0o755),
        lambda root: put(root / "usr/share/vulkan/icd.d/nvidia_icd.json", "{}"),
        lambda root: (root / "run/nvidia-persistenced/socket").unlink(),
        lambda root: (root / f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin").unlink(),
        lambda root: os.mknod(root / "usr/bin/not-ours", stat.S_IFREG | 0o755),
    ],
)
def test_any_change_of_a_directory_is_seen(settled, change):
    catalog = DriverCatalog(HostPaths(host_root=settled))
    before = catalog.get(VERSION)
    change(settled)
    after = catalog.get(VERSION)
    assert after is not before
    assert after == find_driver_files(HostPaths(host_root=settled), VERSION)


def test_another_version_is_looked_for_anew(settled):
    catalog = DriverCatalog(HostPaths(host_root=settled))
    catalog.get(VERSION)
    with pytest.raises(StackError, match="DRA-DRIVER-VERSION-MISMATCH"):
        catalog.get("590.1.1")
    assert catalog.get(VERSION).version == VERSION


def test_a_directory_that_changed_within_the_last_second_may_change_again_unseen_so_nothing_is_kept(settled):
    mtime = (settled / LIB).stat().st_mtime
    now = [mtime + 0.5]
    catalog = DriverCatalog(HostPaths(host_root=settled), wall_clock=lambda: now[0])
    assert catalog.get(VERSION) is not catalog.get(VERSION)
    now[0] = mtime + 5
    assert catalog.get(VERSION) is catalog.get(VERSION)


def test_an_incomplete_driver_is_never_kept(settled):
    catalog = DriverCatalog(HostPaths(host_root=settled))
    cuda = settled / LIB / f"libcuda.so.{VERSION}"
    data = cuda.read_bytes()
    cuda.unlink()
    settle(settled)
    with pytest.raises(StackError):
        catalog.get(VERSION)
    cuda.write_bytes(data)
    settle(settled)
    assert "cuda" in {library.stem for library in catalog.get(VERSION).libraries}


def test_a_driver_root_that_now_is_another_directory_is_looked_through_again(tmp_path):
    for name in ("one", "two"):
        make_node(tmp_path / name)
        settle(tmp_path / name)
    library(tmp_path / "two" / LIB, "nvidia-opencl", None)
    settle(tmp_path / "two")
    (tmp_path / "current").symlink_to("one")
    catalog = DriverCatalog(HostPaths(host_root=tmp_path / "current"))
    assert len(catalog.get(VERSION).libraries) == 6
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("two")
    assert len(catalog.get(VERSION).libraries) == 7
