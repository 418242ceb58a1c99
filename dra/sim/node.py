"""A simulated GPU node: its files, its NVML, its switches.

`dra plugin --simulate dgx-h100 --host-root DIR` makes one, or finds the one that is there. Everything about the
node lies in its root: MIG devices, compute modes and faults outlive the process, and `control` works from any
other process.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dra.sim.kernel import SimulatedKernel
from dra.sim.nvml.control import SimControl
from dra.sim.nvml.files import SIM_FOLDER, machine_of, sync_files, tree_of
from dra.sim.nvml.functions import FUNCTIONS
from dra.sim.nvml.library import SimulatedNvml
from dra.sim.nvml.state import StateStore, first_state
from dra.sim.pci_control import PciControl
from dra.sim.profiles import MachineProfile, machine_profile
from dra.sim.tree import NodeTree, build_tree


class SimulatedNode:
    """One node under `root`, which is its `/`. Thread-safe.

    Args:
        profile_name: the machine; see `dra.sim.profiles.PROFILES`.
        root: made if missing. A node that is there keeps its state, and must be of the same profile.
        layout: how the driver is installed; only when the node is made.
        salt: tells nodes of one profile apart (their UUIDs); only when the node is made.
        fresh: without device nodes, as after boot on a headless machine; only when the node is made.
        real_nodes: see `dra.sim.tree.build_tree`.

    Raises:
        KeyError: no such profile.
        ValueError: another machine lives under this root.
    """

    def __init__(
        self,
        profile_name: str,
        root: Path,
        *,
        layout: str = "host",
        salt: str = "",
        fresh: bool = False,
        real_nodes: bool | None = None,
    ) -> None:
        self.root = root
        self._store = StateStore(root / SIM_FOLDER)
        self._lock = threading.Lock()
        self._library: SimulatedNvml | None = None
        self._library_key: tuple[str, int] | None = None
        profile = machine_profile(profile_name, salt=salt)
        if not self._store.exists():
            self._make(profile, layout=layout, salt=salt, fresh=fresh, real_nodes=real_nodes)
        state = self._store.read()
        if state.profile != profile_name:
            raise ValueError(f"{root} is a {state.profile}, not a {profile_name}")
        self.profile: MachineProfile = machine_of(state)
        self.tree: NodeTree = tree_of(root, state)
        self.control = SimControl(root)
        self.pci = PciControl(root)
        self.kernel = SimulatedKernel(root)

    @staticmethod
    def lives_in(root: Path) -> bool:
        """Tell whether a node has been made below `root`; makes nothing."""
        return StateStore(root / SIM_FOLDER).exists()

    def _make(
        self, profile: MachineProfile, *, layout: str, salt: str, fresh: bool, real_nodes: bool | None
    ) -> None:
        """Build the files, then write the state: a node that was half made is made again."""
        # First of all: what a half made node leaves is known as one by this folder.
        (self.root / SIM_FOLDER).mkdir(parents=True, exist_ok=True)
        state = first_state(profile, salt=salt, layout=layout, fresh=fresh)
        tree = build_tree(
            profile, self.root, layout=layout, real_nodes=real_nodes, fresh=fresh, boot_id=state.boot_id
        )
        state.real_nodes = tree.real_nodes
        self._store.create(state)

    def library(self) -> SimulatedNvml:
        """Give the NVML library as `dlopen` would: the same object until another version is installed.

        Raises:
            OSError: the driver's files are not there.
        """
        with self._lock:
            state = self._store.read()
            if not state.library_version:
                raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
            key = (state.library_version, state.boots)
            if self._library is None or self._library_key != key:
                self._library = SimulatedNvml(
                    self._store,
                    self.profile,
                    FUNCTIONS,
                    on_change=lambda: sync_files(self.root, only_partitions=True),
                )
                self._library_key = key
            return self._library

    def paths_kwargs(self) -> dict[str, Any]:
        """Give the arguments with which `HostPaths` finds this node's files."""
        return {
            "host_root": self.root,
            "driver_root_host": self.tree.driver_root,
            "dev_root_host": self.tree.dev_root,
            "stand_in_nodes": not self.tree.real_nodes,
        }
