"""Inventories of simulated machines with MIG, read through NVML, and their pools as the scheduler sees them."""

from __future__ import annotations

import functools
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dra.allocator.allocate import Allocator, allocated_state
from dra.cel import compile_selector
from dra.host.paths import HostPaths
from dra.inventory.scan import scan
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.sim.node import SimulatedNode
from dra.sim.profiles import PROFILES
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.validate import validate_slices

WITH_MIG = tuple(
    name for name, machine in PROFILES.items() if any(slot.model.mig_table for slot in machine.gpus)
)
NEW = ServerFeatures.of_version(1, 36)
OLD = replace(ServerFeatures.of_version(1, 34), partitionable=True)
GATE_OFF = replace(NEW, partitionable=False)
NODE = {"metadata": {"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}}}
CLASSES = [
    {
        "metadata": {"name": f"{kind}.nvidia.com"},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": "device.driver == 'gpu.nvidia.com' && "
                        f"device.attributes['gpu.nvidia.com'].type == '{kind}'"
                    }
                }
            ]
        },
    }
    for kind in ("gpu", "mig", "vfio")
]


@contextmanager
def simulated(profile):
    """Give (node, session) of a fresh simulated machine."""
    with tempfile.TemporaryDirectory(prefix="dra-mig-") as root:
        node = SimulatedNode(profile, Path(root), real_nodes=False)
        session = NvmlSession(InjectedLibrary(node.library))
        try:
            yield node, session
        finally:
            session.close()


@functools.cache
def machine(profile, *, mig_mode_on=False):
    """Give the inventory of a machine with its MIG profiles; Ampere GPUs are in MIG mode if asked for."""
    with simulated(profile) as (node, session):
        if mig_mode_on:
            for slot in node.profile.gpus:
                if slot.model.mig_table:
                    node.control.set_mig_mode(slot.minor, enabled=True)
        return scan(session, HostPaths(**node.paths_kwargs()), profiles=True)


def partitioned(profile):
    """Give the inventory of a machine on which every GPU with MIG offers its placements."""
    whole = machine(profile)
    return whole if whole.gpus[0].compute_capability >= (9, 0) else machine(profile, mig_mode_on=True)


def pool_of(inventory, features=NEW, *, mig_mode="dynamic", **options):
    """Give the pool, which must be valid without a word."""
    made = build_pool(inventory, node_name="node-1", features=features, mig_mode=mig_mode, **options)
    assert made.problems == ()
    assert validate_slices(made.specs(generation=1), counters_apart=features.counters_apart) == []
    return made


def slices_of(pool):
    """Give the ResourceSlice objects of a pool."""
    return [
        {"metadata": {"name": f"{index:03d}-node-1"}, "spec": spec}
        for index, spec in enumerate(pool.specs(generation=1))
    ]


def claim_for(name, *, profile="", device="", kind="mig", **more):
    """Give a claim for one device: of a profile, by name, or any of a kind; `more` are fields of the request."""
    selectors = []
    if profile:
        selectors = [{"cel": {"expression": f"device.attributes['gpu.nvidia.com'].profile == '{profile}'"}}]
    exactly = {"deviceClassName": f"{kind}.nvidia.com", "selectors": selectors, **more}
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}},
    }


class Scheduler:
    """Claims that come and go on one node, decided by the allocator."""

    def __init__(self, slices):
        self._slices = slices
        self.held = {}
        self._number = 0

    def ask(self, **wanted):
        """Give (claim's name, device), None if it does not fit."""
        self._number += 1
        claim = claim_for(f"c{self._number}", **wanted)
        allocator = Allocator(
            slices=self._slices,
            classes=CLASSES,
            allocated=allocated_state(self.held.values()),
            compile_selector=compiled,
        )
        found = allocator.allocate(NODE, [claim])
        if found is None:
            return None
        name = claim["metadata"]["name"]
        self.held[name] = {**claim, "status": {"allocation": found[0]}}
        return name, found[0]["devices"]["results"][0]["device"]

    def free(self, name):
        del self.held[name]

    @property
    def devices(self):
        return [
            claim["status"]["allocation"]["devices"]["results"][0]["device"] for claim in self.held.values()
        ]


compiled = functools.cache(compile_selector)
