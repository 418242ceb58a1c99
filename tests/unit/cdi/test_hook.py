"""The hook program counts only where the engine will find it: on the host."""

from pathlib import Path

import pytest

from dra.cdi.hook import find_hook, host_file
from dra.host.paths import HostPaths
from tests.unit.cdi.node import put

PROGRAM = "#!/bin/sh\n"


@pytest.mark.parametrize("place", ["/usr/bin/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-cdi-hook"])
def test_the_program_is_found_in_its_usual_places(tmp_path, place):
    paths = HostPaths(host_root=tmp_path)
    assert find_hook(paths) == ""
    put(tmp_path / place.lstrip("/"), PROGRAM, mode=0o755)
    assert find_hook(paths) == place


def test_what_was_named_is_the_only_place_that_counts(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    put(tmp_path / "usr/bin/nvidia-cdi-hook", PROGRAM, mode=0o755)
    put(tmp_path / "opt/hook", PROGRAM, mode=0o755)
    assert find_hook(paths, "/opt/hook") == "/opt/hook"
    assert find_hook(paths, "/opt/absent") == ""
    assert find_hook(paths, "opt/hook") == ""


def test_something_that_cannot_be_run_is_no_program(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    put(tmp_path / "usr/bin/nvidia-cdi-hook", PROGRAM, mode=0o644)
    (tmp_path / "usr/local/nvidia/toolkit/nvidia-cdi-hook").mkdir(parents=True)
    assert find_hook(paths) == ""


@pytest.mark.parametrize("driver_root", ["/", "/run/nvidia/driver"])
def test_links_are_followed_as_on_the_host(tmp_path, driver_root):
    paths = HostPaths(host_root=tmp_path / "host", driver_root_host=driver_root)
    put(tmp_path / "host/opt/real", PROGRAM, mode=0o755)
    (tmp_path / "host/usr/bin").mkdir(parents=True)
    link = tmp_path / "host/usr/bin/nvidia-cdi-hook"
    link.symlink_to("/opt/real")
    assert find_hook(paths) == "/usr/bin/nvidia-cdi-hook"
    link.unlink()
    put(tmp_path / "outside", PROGRAM, mode=0o755)
    link.symlink_to("../../../outside")
    assert find_hook(paths) == ""


def test_a_program_of_the_plugin_s_own_image_does_not_count(tmp_path):
    """A container sees only the driver root of the host; /usr/bin is its own."""
    image, driver = tmp_path / "image", tmp_path / "driver-root"
    put(image / "usr/bin/nvidia-cdi-hook", PROGRAM, mode=0o755)
    driver.mkdir()
    operator = HostPaths(host_root=image, driver_root_host="/run/nvidia/driver", driver_root=driver)
    assert find_hook(operator) == ""
    assert find_hook(operator, "/usr/bin/nvidia-cdi-hook") == ""
    whole_host = HostPaths(host_root=image, driver_root_host="/", driver_root=driver)
    assert find_hook(whole_host) == ""
    put(driver / "usr/bin/nvidia-cdi-hook", PROGRAM, mode=0o755)
    assert find_hook(whole_host) == "/usr/bin/nvidia-cdi-hook"
    assert find_hook(operator) == ""


def test_a_program_in_the_plugin_s_directory_is_seen_since_that_is_mounted_at_its_place(tmp_path):
    image = tmp_path / "image"
    paths = HostPaths(host_root=image, driver_root_host="/run/nvidia/driver", driver_root=tmp_path / "driver")
    place = "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook"
    put(image / place.lstrip("/"), PROGRAM, mode=0o755)
    assert find_hook(paths, place) == place


def test_a_file_in_the_driver_root_is_seen_through_it(tmp_path):
    driver = tmp_path / "driver"
    file = put(driver / "usr/bin/x", PROGRAM, mode=0o755)
    paths = HostPaths(host_root=Path("/nowhere"), driver_root_host="/run/nvidia/driver", driver_root=driver)
    assert host_file(paths, "/run/nvidia/driver/usr/bin/x") == file
