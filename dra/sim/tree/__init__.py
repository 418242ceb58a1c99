"""File trees that look like GPU nodes: `/proc`, `/sys`, `/dev` and a driver installation.

`build_tree` makes one from a machine profile, `materialise_golden_tree` from a recording. Where the process may
not `mknod`, device nodes are stand-in files; `device_numbers` reads both.
"""

from dra.sim.tree.build import NodeTree, build_tree, install_driver, remove_driver, sync_partitions, sync_tree
from dra.sim.tree.elf import shared_object
from dra.sim.tree.facts import LAYOUTS, NodeFacts, default_majors, dev_root_of, driver_root_of
from dra.sim.tree.golden import materialise_golden_tree
from dra.sim.tree.ldcache import ld_so_cache
from dra.sim.tree.nodes import (
    DeviceNumbers,
    can_make_nodes,
    device_numbers,
    make_device_node,
    make_socket,
)

__all__ = [
    "LAYOUTS",
    "DeviceNumbers",
    "NodeFacts",
    "NodeTree",
    "build_tree",
    "can_make_nodes",
    "default_majors",
    "dev_root_of",
    "device_numbers",
    "driver_root_of",
    "install_driver",
    "ld_so_cache",
    "make_device_node",
    "make_socket",
    "materialise_golden_tree",
    "remove_driver",
    "shared_object",
    "sync_partitions",
    "sync_tree",
]
