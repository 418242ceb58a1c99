"""Keep a node's files in step with its state: `/proc`, `/sys`, `/dev` and the driver's files."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from dra.sim.nvml.state import NodeState, StateStore
from dra.sim.profiles import MachineProfile, machine_profile
from dra.sim.tree import NodeFacts, NodeTree, install_driver, remove_driver, sync_partitions, sync_tree

SIM_FOLDER = "sim"


def machine_of(state: NodeState) -> MachineProfile:
    """Give the hardware a state belongs to."""
    return machine_profile(state.profile, salt=state.salt)


def tree_of(root: Path, state: NodeState) -> NodeTree:
    """Give where the files of a node are."""
    return NodeTree(root, state.layout, state.real_nodes)


def facts_of(state: NodeState, machine: MachineProfile) -> NodeFacts:
    """Give what the files have to say."""
    present = {gpu.uuid: gpu for gpu in state.gpus if gpu.present}
    slots = tuple(slot for slot in machine.gpus if slot.uuid in present)
    mig = tuple(
        (slot.minor, instance.gi, tuple(compute.ci for compute in instance.computes))
        for slot in slots
        for instance in present[slot.uuid].instances
    )
    return NodeFacts(
        machine,
        slots,
        state.module_version,
        state.boot_id,
        mig,
        state.majors,
        pci_drivers={uuid: gpu.pci_driver for uuid, gpu in present.items() if not gpu.seen},
        overrides={uuid: gpu.driver_override for uuid, gpu in present.items() if gpu.driver_override},
        vfs={uuid: gpu.vfs for uuid, gpu in present.items() if gpu.vfs},
        vfio_drivers=tuple(state.vfio_drivers),
        iommu=state.iommu,
        iommufd=state.iommufd,
    )


def sync_files(root: Path, *, only_partitions: bool = False) -> None:
    """Make the files say what the state says now. Safe to call from several processes at once.

    Args:
        root: the node's `/`.
        only_partitions: write only what tells of MIG partitions, all that a change of them changes: a hundredth of
            the work, and nothing else blinks.
    """
    store = StateStore(root / SIM_FOLDER)
    descriptor = os.open(store.folder / "files.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        state = store.read()
        tree, facts = tree_of(root, state), facts_of(state, machine_of(state))
        if only_partitions:
            sync_partitions(tree, facts, nodes=not state.fresh)
        else:
            sync_tree(tree, facts, nodes=not state.fresh)
    finally:
        os.close(descriptor)


def replace_library(root: Path, state: NodeState, before: str) -> None:
    """Put the user-space files of the state's library version in the place of those of `before`."""
    tree, facts = tree_of(root, state), facts_of(state, machine_of(state))
    if before and before != state.library_version:
        remove_driver(tree, facts, before)
    if state.library_version:
        install_driver(tree, facts, state.library_version)


def clear_volatile(root: Path, state: NodeState) -> None:
    """Empty what lies in memory on a real node: `/run` (and with it the CDI specs) and the device nodes."""
    for directory in (root / "run", root / "dev"):
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    (root / "run/cdi").mkdir(parents=True, exist_ok=True)
    replace_library(root, state, "")
