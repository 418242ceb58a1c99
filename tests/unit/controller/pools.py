"""Contents of pools, and how a scheduler would see what is stored."""

from __future__ import annotations

import copy
from dataclasses import dataclass

DRIVER = "gpu.nvidia.com"
NODE = "node-1"


@dataclass(frozen=True)
class Part:
    devices: list | None = None
    shared_counters: list | None = None


@dataclass(frozen=True)
class Pool:
    slices: tuple[Part, ...]


def gpu(name: str, **fields: object) -> dict:
    return {
        "name": name,
        "attributes": {"type": {"string": "gpu"}, "index": {"int": int(name.rpartition("-")[2])}},
        "capacity": {"memory": {"value": "81920Mi"}},
        **fields,
    }


def pool(*names: str) -> Pool:
    """One slice with these devices."""
    return Pool((Part([gpu(name) for name in names]),))


def pools(*parts: list | None) -> Pool:
    """One slice for each list of devices."""
    return Pool(tuple(Part(copy.deepcopy(devices)) for devices in parts))


def with_counters() -> Pool:
    counters = {"name": "gpu-0-counters", "counters": {"memory": {"value": "80Gi"}}}
    uses = [{"counterSet": "gpu-0-counters", "counters": {"memory": {"value": "80Gi"}}}]
    return Pool((Part(shared_counters=[counters]), Part([gpu("gpu-0", consumesCounters=uses)])))


def visible(stored: list[dict]) -> tuple[int, list[str]] | None:
    """What a scheduler takes of one pool: generation and device names; None while it is incomplete."""
    if not stored:
        return None
    top = max(obj["spec"]["pool"]["generation"] for obj in stored)
    newest = [obj for obj in stored if obj["spec"]["pool"]["generation"] == top]
    if any(obj["spec"]["pool"]["resourceSliceCount"] != len(newest) for obj in newest):
        return None
    newest.sort(key=lambda obj: obj["metadata"]["name"])
    return top, [device["name"] for obj in newest for device in obj["spec"].get("devices") or []]
