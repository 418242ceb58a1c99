"""Where /proc/devices names no NVIDIA driver although NVML answers, the nodes on disk are believed.

So it is on a node inside a container (kind) and with a stand-in library: the kernel's list is another machine's.
"""

from __future__ import annotations

import pytest

from dra.cdi.nodes import NodeSource
from dra.errors import StackError
from dra.host.paths import HostPaths
from tests.unit.cdi.node import BDF, make_node, put

BARE = "Character devices:\n  1 mem\n 10 misc\n\nBlock devices:\n  8 sd\n"


def test_nodes_keep_the_numbers_that_they_have_on_disk(tmp_path):
    paths = make_node(tmp_path)
    put(tmp_path / "proc/devices", BARE)
    nodes = NodeSource(paths).get({1: BDF})
    assert (nodes.gpus[1].node.major, nodes.gpus[1].node.minor) == (195, 1)
    assert {node.path: (node.major, node.minor) for node in nodes.control}["/dev/nvidia-uvm"] == (510, 0)


def bare_node(root, *missing):
    paths = make_node(root)
    put(root / "proc/devices", BARE)
    for name in missing:
        (root / "dev" / name).unlink()
    return paths


def test_a_node_that_is_not_there_is_still_an_error_that_says_how_to_make_it(tmp_path):
    paths = bare_node(tmp_path, "nvidia-uvm", "nvidia1")
    with pytest.raises(StackError) as caught:
        NodeSource(paths).get({1: BDF})
    error = caught.value
    assert error.code == "DRA-DEVICE-NODE-MISSING"
    assert error.retryable
    assert "/dev/nvidia-uvm, /dev/nvidia1 are missing" in error.message
    assert "lists no NVIDIA driver" in error.message
    for command in (
        "modprobe -a nvidia nvidia-uvm",
        "mknod -m 666 /dev/nvidia-uvm c 510 0",
        "mknod -m 666 /dev/nvidia1 c 195 1",
    ):
        assert command in error.remedy


def test_the_commands_name_the_nodes_of_the_driver_root_that_has_some(tmp_path):
    root = tmp_path / "host"
    paths = make_node(root, driver_root="/run/driver", dev=False)
    put(root / "proc/devices", BARE)
    (root / "run/driver/dev").mkdir()
    with pytest.raises(StackError) as caught:
        NodeSource(paths).get({0: BDF})
    assert "mknod -m 666 /run/driver/dev/nvidiactl c 195 255" in caught.value.remedy


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_device_does_not_stand_for_one_and_is_named(tmp_path, kind):
    simulated = bare_node(tmp_path, "nvidia-uvm")
    place = tmp_path / "dev/nvidia-uvm"
    place.mkdir() if kind == "directory" else place.write_bytes(b"")
    with pytest.raises(StackError) as caught:
        NodeSource(HostPaths(host_root=simulated.host_root)).get({0: BDF})
    # The stand-ins of a simulated node are none either where the node is a real one.
    _, _, named = caught.value.message.partition("; what is at ")
    assert named == "/dev/nvidia-uvm, /dev/nvidiactl, /dev/nvidia0 is no character device"
    assert caught.value.remedy.startswith("Remove /dev/nvidia-uvm ")
