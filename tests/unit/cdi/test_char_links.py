"""Links below /dev/char, so that a reload of systemd takes no GPU from running containers."""

from __future__ import annotations

import os

from dra.cdi.char_links import make_char_links
from dra.host.paths import HostPaths
from dra.sim.node import SimulatedNode


def links(root):
    folder = root / "dev/char"
    return {path.name: os.readlink(path) for path in folder.iterdir()} if folder.is_dir() else {}


def test_each_node_of_the_driver_gets_its_link_and_a_second_look_makes_none(tmp_path):
    paths = HostPaths(**SimulatedNode("t4-x1", tmp_path, real_nodes=False).paths_kwargs())
    assert make_char_links(paths)
    found = links(tmp_path)
    assert found["195:0"] == "../nvidia0" and found["195:255"] == "../nvidiactl"
    assert found["510:0"] == "../nvidia-uvm"
    assert any(target.startswith("../nvidia-caps/") for target in found.values())
    assert make_char_links(paths) == ()


def test_a_link_of_an_earlier_load_is_turned_and_what_is_no_link_stays(tmp_path):
    node = SimulatedNode("t4-x1", tmp_path, real_nodes=False)
    paths = HostPaths(**node.paths_kwargs())
    folder = tmp_path / "dev/char"
    folder.mkdir()
    (folder / "195:0").symlink_to("../gone")
    (folder / "195:255").write_text("somebody's")
    assert "195:0" in make_char_links(paths)
    assert links_of(folder) == "../nvidia0" and (folder / "195:255").read_text() == "somebody's"
    node.control.set_major("nvidia-uvm", 508)
    assert {"508:0", "508:1"} <= set(make_char_links(paths))


def links_of(folder):
    return os.readlink(folder / "195:0")


def test_nodes_in_a_driver_containers_root_are_linked_from_the_hosts_dev(tmp_path):
    paths = HostPaths(**SimulatedNode("t4-x1", tmp_path, layout="operator", real_nodes=False).paths_kwargs())
    make_char_links(paths)
    assert links(tmp_path)["195:0"] == "/run/nvidia/driver/dev/nvidia0"


def test_a_node_without_driver_gets_none(tmp_path):
    assert make_char_links(HostPaths(host_root=tmp_path)) == ()
    assert links(tmp_path) == {}
