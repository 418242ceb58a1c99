"""Build the file tree of a node from a machine profile, and keep it true afterwards."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from dra.sim.profiles import MachineProfile
from dra.sim.tree.dev import KERNEL_LOG, sync_dev
from dra.sim.tree.driver_files import (
    installation,
    remove_driver_files,
    write_driver_files,
    write_sockets,
)
from dra.sim.tree.facts import LAYOUTS, NodeFacts, default_majors, dev_root_of, driver_root_of
from dra.sim.tree.nodes import can_make_nodes, make_link, under
from dra.sim.tree.proc import sync_capabilities, sync_proc
from dra.sim.tree.sysfs import sync_sys
from dra.sim.tree.vfio import sync_vfio, write_module_aliases


@dataclass(frozen=True, slots=True)
class NodeTree:
    """A tree on disk.

    `root` is the node's `/`. `driver_root` and `dev_root` are paths as the host sees them; `driver_dir` and
    `dev_dir` are where this process finds them. `real_nodes` is false where the device nodes are stand-in
    files (see `dra.sim.tree.nodes`).
    """

    root: Path
    layout: str
    real_nodes: bool

    @property
    def driver_root(self) -> str:
        """Give the driver root as the host sees it."""
        return driver_root_of(self.layout)

    @property
    def dev_root(self) -> str:
        """Give the root of `dev` as the host sees it."""
        return dev_root_of(self.layout)

    @property
    def driver_dir(self) -> Path:
        """Give the driver root as this process sees it."""
        return under(self.root, self.driver_root)

    @property
    def dev_dir(self) -> Path:
        """Give the `dev` directory as this process sees it."""
        return under(self.root, self.dev_root) / "dev"


def build_tree(
    profile: MachineProfile,
    root: Path,
    *,
    layout: str = "host",
    real_nodes: bool | None = None,
    fresh: bool = False,
    boot_id: str = "",
) -> NodeTree:
    """Write the tree of a node that has just booted, without MIG devices.

    Args:
        profile: the machine.
        root: the node's `/`; made if missing. Files of an earlier tree are overwritten.
        layout: how the driver is installed: `host` (packages), `operator` (driver container under
            `/run/nvidia/driver`, which also has the device nodes), `cos` (Container-Optimized OS),
            `debian-current` (alternatives below `nvidia/current`), `ldcache` (found through ld.so.cache only).
        real_nodes: true or false to force device nodes or stand-ins, by default what the kernel lets us do.
        fresh: leave all NVIDIA device nodes out, as on a headless node that nobody has used since boot.
        boot_id: of `/proc/sys/kernel/random/boot_id`; by default derived from the root's path.

    Raises:
        ValueError: the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"no tree layout {layout!r}; there are {', '.join(LAYOUTS)}")
    facts = NodeFacts(
        machine=profile,
        gpus=profile.gpus,
        driver_version=profile.driver_version,
        boot_id=boot_id or str(uuid.uuid5(uuid.NAMESPACE_URL, f"boot:{root}")),
        majors=default_majors(profile.driver_version),
    )
    tree = NodeTree(root, layout, can_make_nodes() if real_nodes is None else real_nodes)
    for directory in ("proc", "sys", "dev", "etc", "run/cdi", "var/lib/kubelet/plugins_registry"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    if not (root / "var/run").exists():
        make_link(root / "var/run", "../run")
    install_driver(tree, facts, profile.driver_version)
    write_module_aliases(root)
    sync_tree(tree, facts, nodes=not fresh)
    return tree


def sync_tree(tree: NodeTree, facts: NodeFacts, *, nodes: bool = True) -> None:
    """Make proc, sys and dev of an existing tree agree with the facts."""
    sync_proc(tree.root, facts)
    sync_sys(tree.root, facts)
    sync_vfio(tree.root, facts, real=tree.real_nodes)
    (tree.root / KERNEL_LOG).parent.mkdir(parents=True, exist_ok=True)
    (tree.root / KERNEL_LOG).touch()
    if nodes:
        sync_dev(tree.dev_dir, facts, real=tree.real_nodes)


def sync_partitions(tree: NodeTree, facts: NodeFacts, *, nodes: bool = True) -> None:
    """Make what tells of MIG partitions agree with the facts."""
    if facts.loaded:
        sync_capabilities(tree.root / "proc/driver/nvidia/capabilities", facts)
    if nodes:
        sync_dev(tree.dev_dir, facts, real=tree.real_nodes)


def install_driver(tree: NodeTree, facts: NodeFacts, version: str, *, replaces: str = "") -> None:
    """Put the user-space files of a driver version in place, taking those of another away first."""
    machine = facts.machine
    if replaces and replaces != version:
        remove_driver(tree, facts, replaces)
    what = installation(
        tree.layout, version=version, architecture=machine.architecture, graphics=machine.graphics
    )
    write_driver_files(tree.driver_dir, what)
    run_root = tree.driver_dir if tree.layout == "operator" else tree.root
    write_sockets(run_root, fabric_manager=machine.nvswitches > 0)


def remove_driver(tree: NodeTree, facts: NodeFacts, version: str) -> None:
    """Take the user-space files of a driver version away."""
    machine = facts.machine
    remove_driver_files(
        tree.driver_dir,
        installation(
            tree.layout, version=version, architecture=machine.architecture, graphics=machine.graphics
        ),
    )
