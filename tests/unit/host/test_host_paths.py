"""Where `/` is, in the three ways a node plugin can stand to its host."""

from pathlib import Path

from dra.host.paths import HostPaths, join_root, strip_root


def test_on_the_host_itself_everything_is_where_it_says():
    paths = HostPaths()
    assert (paths.proc, paths.sys, paths.dev) == (Path("/proc"), Path("/sys"), Path("/dev"))
    assert paths.driver_root == Path("/")
    assert paths.cdi_root == Path("/var/run/cdi")
    assert paths.state_dir("gpu.nvidia.com") == Path("/var/lib/kubelet/plugins/gpu.nvidia.com")
    assert paths.sees_whole_host


def test_a_simulated_node_has_everything_below_its_root(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    assert paths.proc == tmp_path / "proc"
    assert paths.driver_root == tmp_path
    assert paths.cdi_root == tmp_path / "var/run/cdi"
    assert paths.view_of("/usr/bin/nvidia-cdi-hook") == tmp_path / "usr/bin/nvidia-cdi-hook"


def test_a_given_path_wins_over_the_derived_one(tmp_path):
    paths = HostPaths(host_root=tmp_path, proc=Path("/proc"), cdi_root=Path("/etc/cdi"))
    assert paths.proc == Path("/proc")
    assert paths.cdi_root == Path("/etc/cdi")
    assert paths.sys == tmp_path / "sys"


def test_a_container_with_the_driver_container_mounted_sees_only_that_of_the_host():
    paths = HostPaths(driver_root_host="/run/nvidia/driver/", driver_root=Path("/driver-root"))
    assert paths.driver_root_host == "/run/nvidia/driver"
    assert not paths.sees_whole_host
    assert paths.view_of("/run/nvidia/driver/usr/bin/x") == Path("/driver-root/usr/bin/x")
    assert paths.view_of("/run/nvidia/driverless/x") is None
    assert paths.view_of("/usr/bin/nvidia-cdi-hook") is None
    plugin_file = "/var/lib/kubelet/plugins/gpu.nvidia.com/nvidia-cdi-hook"
    assert paths.view_of(plugin_file) == Path(plugin_file)
    assert paths.driver_file_at_host("/usr/bin/x") == "/run/nvidia/driver/usr/bin/x"


def test_a_container_with_the_host_root_as_driver_root_sees_the_whole_host_through_it():
    paths = HostPaths(driver_root_host="/", driver_root=Path("/driver-root"))
    assert paths.view_of("/usr/bin/nvidia-cdi-hook") == Path("/driver-root/usr/bin/nvidia-cdi-hook")


def test_the_dev_root_is_the_driver_root_only_if_that_has_dev(tmp_path):
    host, driver = tmp_path / "host", tmp_path / "driver"
    for directory in (host / "dev", driver / "usr"):
        directory.mkdir(parents=True)
    paths = HostPaths(host_root=host, driver_root_host="/run/nvidia/driver", driver_root=driver)
    assert paths.dev_root() == (host, "/")
    (driver / "dev").mkdir()
    assert paths.dev_root() == (driver, "/run/nvidia/driver")


def test_a_dev_root_that_was_asked_for_is_taken(tmp_path):
    (tmp_path / "run/nvidia/driver/dev").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    paths = HostPaths(host_root=tmp_path, driver_root_host="/run/nvidia/driver", dev_root_host="/")
    assert paths.dev_root() == (tmp_path, "/")
    paths = HostPaths(host_root=tmp_path, dev_root_host="/run/nvidia/driver")
    assert paths.dev_root() == (tmp_path / "run/nvidia/driver", "/run/nvidia/driver")


def test_roots_are_cut_at_component_boundaries():
    assert strip_root("/driver-root/usr", "/driver-root") == "/usr"
    assert strip_root("/driver-rooted/usr", "/driver-root") is None
    assert strip_root("/driver-root", "/driver-root/") == "/"
    assert strip_root("/usr", "/") == "/usr"
    assert join_root("/", "/usr") == "/usr"
    assert join_root("/run/nvidia/driver/", "usr") == "/run/nvidia/driver/usr"
