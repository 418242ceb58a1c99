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
    """A container sees only the driver root of the host; /bin/sh is its own."""
    operator = HostPaths(driver_root_host="/run/nvidia/driver", driver_root=tmp_path)
    assert Path("/bin/sh").exists()
    assert find_hook(operator, "/bin/sh") == ""
    whole_host = HostPaths(driver_root_host="/", driver_root=tmp_path)
    assert find_hook(whole_host, "/bin/sh") == ""
    put(tmp_path / "bin/sh", PROGRAM, mode=0o755)
    assert find_hook(whole_host, "/bin/sh") == "/bin/sh"
    assert find_hook(operator, "/bin/sh") == ""


def test_a_container_with_the_host_mounted_sees_the_host_s_programs(tmp_path):
    host = tmp_path / "host-root"
    paths = HostPaths(host_root=host, driver_root_host="/run/nvidia/driver", driver_root=tmp_path / "driver")
    put(host / "usr/bin/nvidia-cdi-hook", PROGRAM, mode=0o755)
    assert find_hook(paths) == "/usr/bin/nvidia-cdi-hook"


def test_a_program_in_the_plugin_s_directory_is_seen_since_that_is_mounted_at_its_place(tmp_path):
    plugins = tmp_path / "plugins"
    paths = HostPaths(
        driver_root_host="/run/nvidia/driver", driver_root=tmp_path / "driver", kubelet_plugins_dir=plugins
    )
    place = put(plugins / "gpu.nvidia.com/nvidia-cdi-hook", PROGRAM, mode=0o755)
    assert find_hook(paths, str(place)) == str(place)


def test_a_file_in_the_driver_root_is_seen_through_it(tmp_path):
    driver = tmp_path / "driver"
    file = put(driver / "usr/bin/x", PROGRAM, mode=0o755)
    paths = HostPaths(host_root=Path("/nowhere"), driver_root_host="/run/nvidia/driver", driver_root=driver)
    assert host_file(paths, "/run/nvidia/driver/usr/bin/x") == file
