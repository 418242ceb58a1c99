"""Device nodes: their numbers of this moment, and making them on a fresh node."""

import os
import stat

import pytest

from dra.cdi.model import DeviceNode
from dra.cdi.node_making import (
    link_by_number,
    missing_char_links,
    modprobe_command,
    node_parameters,
    run_program,
)
from dra.cdi.nodes import NodeSource, read_node
from dra.errors import HostError, StackError
from dra.host.chroot import chroot_command
from dra.host.paths import HostPaths
from dra.sim.tree.nodes import can_make_nodes
from tests.unit.cdi.node import BDF, DEVICES, make_node, put, stand_in

needs_mknod = pytest.mark.skipif(not can_make_nodes(), reason="this process may not make device nodes")


class Modprobe:
    """Stands for running the driver's nvidia-modprobe: `does` changes the node as the program would."""

    def __init__(self, does=lambda: None, *, status=0):
        self.calls = []
        self.does = does
        self.status = status

    def __call__(self, arguments, environment, seconds):
        self.calls.append((list(arguments), dict(environment)))
        assert seconds < 45, "the kubelet waits no longer"
        self.does()
        return self.status


def numbers(nodes):
    return {node.path: (node.major, node.minor) for node in nodes}


def test_a_claim_gets_the_control_nodes_and_its_gpu(tmp_path):
    paths = make_node(tmp_path)
    found = NodeSource(paths).get({1: BDF})
    assert numbers(found.control) == {
        "/dev/nvidia-modeset": (195, 254), "/dev/nvidia-uvm": (510, 0),
        "/dev/nvidia-uvm-tools": (510, 1), "/dev/nvidiactl": (195, 255),
    }  # fmt: skip
    assert found.gpus[1].node == DeviceNode("/dev/nvidia1", 195, 1)
    assert found.gpus[1].drm == found.gpus[1].links == ()


def test_majors_are_those_of_this_moment_whatever_the_node_on_disk_says(tmp_path):
    paths = make_node(tmp_path)
    source = NodeSource(paths)
    assert numbers(source.get({0: BDF}).control)["/dev/nvidia-uvm"] == (510, 0)
    put(tmp_path / "proc/devices", DEVICES.replace("510", "235"))
    assert numbers(source.get({0: BDF}).control)["/dev/nvidia-uvm"] == (235, 0)


def test_an_older_driver_s_frontend_is_known(tmp_path):
    paths = make_node(tmp_path)
    put(tmp_path / "proc/devices", "Character devices:\n195 nvidia-frontend\n510 nvidia-uvm\n")
    assert NodeSource(paths).get({0: BDF}).gpus[0].node.major == 195


def test_optional_nodes_may_be_missing(tmp_path):
    paths = make_node(tmp_path)
    (tmp_path / "dev/nvidia-modeset").unlink()
    (tmp_path / "dev/nvidia-uvm-tools").unlink()
    control = NodeSource(paths).get({0: BDF}).control
    assert [node.path for node in control] == ["/dev/nvidia-uvm", "/dev/nvidiactl"]


def test_render_nodes_come_from_sysfs_with_their_group_and_links_by_path(tmp_path):
    paths = make_node(tmp_path)
    drm = tmp_path / "sys/bus/pci/devices/0000:1a:00.0/drm"
    for name in ("card1", "renderD128", "renderD129"):
        (drm / name).mkdir(parents=True)
    stand_in(tmp_path / "dev/dri/card1", 226, 1, gid=44, mode=0o660)
    stand_in(tmp_path / "dev/dri/renderD128", 226, 128, gid=109, mode=0o660)
    gpu = NodeSource(paths).get({0: BDF}).gpus[0]
    assert gpu.drm == (
        DeviceNode("/dev/dri/card1", 226, 1, mode=0o660, gid=44),
        DeviceNode("/dev/dri/renderD128", 226, 128, mode=0o660, gid=109),
    )
    assert gpu.links == (
        ("../card1", "/dev/dri/by-path/pci-0000:1a:00.0-card"),
        ("../renderD128", "/dev/dri/by-path/pci-0000:1a:00.0-render"),
    )


def test_nodes_of_a_driver_container_keep_their_path_in_the_container(tmp_path):
    paths = make_node(tmp_path, driver_root="/run/nvidia/driver")
    for node in (tmp_path / "dev").iterdir():
        target = paths.driver_root / "dev" / node.name
        target.parent.mkdir(exist_ok=True)
        node.rename(target)
    found = NodeSource(paths).get({0: BDF})
    assert found.gpus[0].node.path == "/dev/nvidia0"
    assert found.gpus[0].node.host_path == "/run/nvidia/driver/dev/nvidia0"


def test_a_driver_root_without_dev_takes_the_host_s_nodes(tmp_path):
    paths = make_node(tmp_path, driver_root="/home/kubernetes/bin/nvidia")
    assert NodeSource(paths).get({0: BDF}).gpus[0].node.host_path == ""


@needs_mknod
def test_a_regular_file_is_no_device_node_on_a_real_node(tmp_path):
    make_node(tmp_path)
    assert read_node(tmp_path, "/dev/nvidia0", stand_ins=False) is None
    (tmp_path / "dev/nvidia0").unlink()
    os.mknod(tmp_path / "dev/nvidia0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
    os.chown(tmp_path / "dev/nvidia0", -1, 44)
    (tmp_path / "dev/nvidia0").chmod(0o640)
    found = read_node(tmp_path, "/dev/nvidia0", stand_ins=False)
    assert found == DeviceNode("/dev/nvidia0", 195, 0, mode=0o640, gid=44)


# -- fresh headless nodes ----------------------------------------------------------------------------------------


def fresh(tmp_path, **options):
    """Make a node where the kernel modules are loaded but nothing has made device nodes."""
    make_node(tmp_path, dev=False)
    return HostPaths(host_root=tmp_path, **options)


@needs_mknod
def test_nodes_that_are_missing_are_made_with_the_numbers_and_rights_the_driver_wants(tmp_path):
    paths = fresh(tmp_path)
    put(tmp_path / "proc/driver/nvidia/params",
        "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n")  # fmt: skip
    found = NodeSource(paths, runner=Modprobe()).get({1: BDF})
    assert found.gpus[1].node == DeviceNode("/dev/nvidia1", 195, 1, mode=0o660, gid=44)
    made = {
        path.name: path.lstat() for path in (tmp_path / "dev").iterdir() if path.name.startswith("nvidia")
    }
    assert set(made) == {"nvidia1", "nvidiactl", "nvidia-uvm"}
    assert made["nvidia-uvm"].st_rdev == os.makedev(510, 0)
    assert all(stat.S_ISCHR(entry.st_mode) and entry.st_mode & 0o777 == 0o660 for entry in made.values())
    # systemd finds a node's name by its number at daemon-reload.
    assert (tmp_path / "dev/char/510:0").readlink().as_posix() == "../nvidia-uvm"


def test_the_driver_s_own_program_is_run_first_and_what_it_makes_is_used(tmp_path):
    make_node(tmp_path, dev=False)
    put(tmp_path / "proc/devices", DEVICES.replace("510 nvidia-uvm\n", ""))
    put(tmp_path / "usr/bin/nvidia-modprobe", "#!/bin/sh\n", mode=0o755)
    paths = HostPaths(host_root=tmp_path)

    def load_and_make():
        put(tmp_path / "proc/devices", DEVICES)
        for name, major, minor in (("nvidiactl", 195, 255), ("nvidia3", 195, 3), ("nvidia-uvm", 510, 0)):
            os.mknod(tmp_path / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    if not can_make_nodes():
        pytest.skip("this process may not make device nodes")
    modprobe = Modprobe(load_and_make)
    found = NodeSource(paths, runner=modprobe).get({3: BDF})
    assert numbers(found.control)["/dev/nvidia-uvm"] == (510, 0)
    ((arguments, _),) = modprobe.calls
    assert arguments == chroot_command(str(tmp_path), ["/usr/bin/nvidia-modprobe", "-u", "-c0", "-c3"])
    NodeSource(paths, runner=modprobe).get({3: BDF})
    assert len(modprobe.calls) == 1


@pytest.mark.parametrize("status", [0, 1, 127])
def test_a_module_that_is_not_loaded_makes_prepare_fail_and_says_what_to_do(tmp_path, status):
    make_node(tmp_path)
    (tmp_path / "dev/nvidia-uvm").unlink()
    put(tmp_path / "proc/devices", DEVICES.replace("510 nvidia-uvm\n", ""))
    put(tmp_path / "usr/bin/nvidia-modprobe", "#!/bin/sh\n", mode=0o755)
    paths = HostPaths(host_root=tmp_path, stand_in_nodes=True)
    source = NodeSource(paths, runner=Modprobe(status=status))
    with pytest.raises(StackError) as caught:
        source.get({0: BDF})
    error = caught.value
    assert error.code == "DRA-DEVICE-NODE-MISSING"
    assert error.retryable
    assert "/dev/nvidia-uvm is missing and the kernel module of nvidia-uvm is not loaded" in error.message
    assert "modprobe nvidia-uvm" in error.remedy
    put(tmp_path / "proc/devices", DEVICES)
    assert source.get({0: BDF}).gpus[0].node.major == 195


def test_a_node_left_over_from_an_unloaded_module_does_not_count(tmp_path):
    paths = make_node(tmp_path)
    put(tmp_path / "proc/devices", DEVICES.replace("510 nvidia-uvm\n", ""))
    with pytest.raises(StackError, match=r"/dev/nvidia-uvm is missing and the kernel module"):
        NodeSource(paths).get({0: BDF})


def test_a_driver_told_to_leave_nodes_alone_is_obeyed(tmp_path):
    paths = fresh(tmp_path, stand_in_nodes=True)
    put(tmp_path / "proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n")
    modprobe = Modprobe()
    with pytest.raises(StackError, match="ModifyDeviceFiles"):
        NodeSource(paths, runner=modprobe).get({0: BDF})
    assert modprobe.calls == []
    assert list((tmp_path / "dev").iterdir()) == []


def test_a_dev_that_cannot_be_written_is_an_error_that_names_all_nodes(tmp_path):
    paths = fresh(tmp_path)
    (tmp_path / "dev").rmdir()
    put(tmp_path / "dev", "in the way")
    with pytest.raises(StackError) as caught:
        NodeSource(paths, runner=Modprobe()).get({0: BDF})
    for name in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"):
        assert name in caught.value.message
    assert "privileged" in caught.value.remedy


def test_a_simulated_node_gets_stand_ins(tmp_path):
    paths = fresh(tmp_path, stand_in_nodes=True)
    found = NodeSource(paths).get({0: BDF})
    assert found.gpus[0].node == DeviceNode("/dev/nvidia0", 195, 0)
    assert (tmp_path / "dev/nvidia0").read_text() == "simulated-device c 195 0 gid 0\n"


def test_without_proc_the_error_says_so(tmp_path):
    with pytest.raises(HostError, match="DRA-HOST-PROC-DEVICES"):
        NodeSource(HostPaths(host_root=tmp_path)).get({0: BDF})


# -- how the program is called -----------------------------------------------------------------------------------


def test_a_driver_without_the_program_has_no_call(tmp_path):
    assert modprobe_command(make_node(tmp_path), [0]) is None


def test_a_driver_root_without_dev_is_not_entered_but_lends_its_libraries(tmp_path):
    paths = make_node(tmp_path, driver_root="/home/kubernetes/bin/nvidia")
    put(paths.driver_root / "bin/nvidia-modprobe", "#!/bin/sh\n", mode=0o755)
    arguments, environment = modprobe_command(paths, [0, 2, 2])
    assert arguments == [f"{paths.driver_root}/bin/nvidia-modprobe", "-u", "-c0", "-c2"]
    assert f"{paths.driver_root}/usr/lib/x86_64-linux-gnu" in environment["LD_LIBRARY_PATH"].split(":")
    assert "LD_PRELOAD" not in environment


def test_a_program_is_really_run_without_a_shell_and_never_for_long(tmp_path):
    script = put(tmp_path / "program", '#!/bin/sh\necho "$1|$MARK" > "$0.out"\nexit 3\n', mode=0o755)
    assert run_program([str(script), "$(id) *"], {"MARK": "x", "PATH": "/bin"}, 10) == 3
    assert (tmp_path / "program.out").read_text() == "$(id) *|x\n"
    assert run_program([str(tmp_path / "absent")], {}, 10) == 127
    assert run_program(["/bin/sleep", "30"], {}, 0.05) == 127


def test_what_the_driver_does_not_say_about_nodes_has_its_defaults(tmp_path):
    assert node_parameters(HostPaths(host_root=tmp_path)) == (0o666, 0, 0)


def test_links_by_number_that_systemd_needs_are_listed_while_missing(tmp_path):
    paths = make_node(tmp_path)
    nodes = NodeSource(paths).get({0: BDF}).control
    assert "/dev/char/510:0" in missing_char_links(paths, nodes)
    for node in nodes:
        link_by_number(tmp_path, node.path, node.major, minor=node.minor)
    assert missing_char_links(paths, nodes) == ()
