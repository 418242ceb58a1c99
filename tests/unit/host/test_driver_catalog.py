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


class Time:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def logged(monkeypatch):
    events = []

    class Log:
        def __getattr__(self, level):
            return lambda event, **fields: events.append((level, event, fields))

    monkeypatch.setattr("dra.host.driver_catalog._log", Log())
    return events


def lose(root, stem="cuda"):
    """Take a library away; what it held."""
    file = root / LIB / f"lib{stem}.so.{VERSION}"
    data = file.read_bytes()
    file.unlink()
    settle(root)
    return data


def test_a_node_that_never_had_libcuda_is_used_as_it_is_with_one_warning(settled, logged):
    lose(settled)
    clock = Time()
    catalog = DriverCatalog(HostPaths(host_root=settled), clock=clock)
    for _ in range(5):
        assert catalog.get(VERSION).missing == (f"libcuda.so.{VERSION}",)
        clock.now += 10
    (warning,) = logged
    assert warning[:2] == ("warning", "driver_libraries_missing")
    assert warning[2]["missing"] == [f"libcuda.so.{VERSION}"]
    assert f"/{LIB}/lib*.so.{VERSION}" in warning[2]["searched"]
    assert not any("nvidia-smi" in place for place in warning[2]["searched"])
    assert "--nvidia-driver-root" in warning[2]["remedy"]


def test_the_library_that_came_is_told_and_given_and_its_loss_is_told_again(settled, logged):
    data = lose(settled)
    clock = Time()
    catalog = DriverCatalog(HostPaths(host_root=settled), clock=clock)
    catalog.get(VERSION)
    put(settled / LIB / f"libcuda.so.{VERSION}", data)
    settle(settled)
    clock.now += 4
    assert catalog.get(VERSION).missing == ()
    lose(settled)
    os.utime(settled / LIB, (1_700_000_001, 1_700_000_001))
    with pytest.raises(StackError):
        catalog.get(VERSION)
    clock.now += 6
    catalog.get(VERSION)
    assert [event for _, event, _ in logged] == [
        "driver_libraries_missing", "driver_libraries_complete", "driver_libraries_missing"
    ]  # fmt: skip


def test_an_incomplete_driver_is_kept_for_some_seconds_only(settled):
    data = lose(settled)
    clock = Time()
    catalog = DriverCatalog(HostPaths(host_root=settled), clock=clock)
    before = catalog.get(VERSION)
    assert catalog.get(VERSION) is before
    # No time of a directory tells of it.
    put(settled / LIB / f"libcuda.so.{VERSION}", data)
    settle(settled)
    clock.now += 3.5
    assert catalog.get(VERSION).missing == ()


def test_a_driver_that_was_whole_and_is_not_is_waited_for(settled):
    """It is being replaced: a pod that starts now would run without CUDA for all its life."""
    clock = Time()
    catalog = DriverCatalog(HostPaths(host_root=settled), clock=clock)
    catalog.get(VERSION)
    lose(settled)
    catalog.forget()
    for _ in range(3):
        with pytest.raises(StackError, match=rf"no libcuda.so.{VERSION}") as caught:
            catalog.get(VERSION)
        assert caught.value.retryable
        assert "being installed" in caught.value.remedy
        clock.now += 1.5
    clock.now += 1
    assert catalog.get(VERSION).missing == (f"libcuda.so.{VERSION}",)


def test_a_driver_whose_module_is_loaded_and_whose_libraries_just_changed_is_waited_for(settled):
    lose(settled)
    changed = (settled / LIB).stat().st_mtime
    put(
        settled / "proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  x\n",
    )
    paths = HostPaths(host_root=settled)
    with pytest.raises(StackError, match="DRA-DRIVER-LIBRARIES-MISSING"):
        DriverCatalog(paths, wall_clock=lambda: changed + 2).get(VERSION)
    assert DriverCatalog(paths, wall_clock=lambda: changed + 20).get(VERSION).missing
    # A rig has no module, and has what it has from the first moment.
    (settled / "proc/driver/nvidia/version").unlink()
    assert DriverCatalog(paths, wall_clock=lambda: changed + 2).get(VERSION).missing


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
