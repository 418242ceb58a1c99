"""Where /proc/devices names no NVIDIA driver although NVML answers, the nodes on disk are believed.

So it is on a node inside a container (kind) and with a stand-in library: the kernel's list is another machine's.
"""

from __future__ import annotations

import pytest

from dra.cdi.nodes import NodeSource
from dra.errors import StackError
from tests.unit.cdi.node import BDF, make_node, put

BARE = "Character devices:\n  1 mem\n 10 misc\n\nBlock devices:\n  8 sd\n"


def test_nodes_keep_the_numbers_that_they_have_on_disk(tmp_path):
    paths = make_node(tmp_path)
    put(tmp_path / "proc/devices", BARE)
    nodes = NodeSource(paths).get({1: BDF})
    assert (nodes.gpus[1].node.major, nodes.gpus[1].node.minor) == (195, 1)
    assert {node.path: (node.major, node.minor) for node in nodes.control}["/dev/nvidia-uvm"] == (510, 0)


def test_a_node_that_is_not_there_is_still_an_error(tmp_path):
    paths = make_node(tmp_path)
    put(tmp_path / "proc/devices", BARE)
    (tmp_path / "dev/nvidia-uvm").unlink()
    with pytest.raises(StackError, match="DRA-DEVICE-NODE-MISSING"):
        NodeSource(paths).get({0: BDF})
