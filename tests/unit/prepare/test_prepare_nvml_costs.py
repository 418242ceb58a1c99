"""What a prepare asks NVML and writes to the disk. Counts, not times: these hold on any machine."""

from __future__ import annotations

import contextlib
import os

from mig_node import MigNode
from test_prepare_costs import Disk


@contextlib.contextmanager
def opened(root, profile: str):
    """One node at a time: a process has one NVML session."""
    node = MigNode(root / profile, profile=profile)
    try:
        yield node
    finally:
        node.close()


def calls_of(node: MigNode, device: str, number: int) -> tuple[dict[str, int], dict[str, int]]:
    """Give the NVML calls of a prepare and of its unprepare."""
    ref = node.claim(number, device)
    node.sim.reset_calls()
    node.prepared(ref)
    prepared = node.sim.count_calls()
    node.sim.reset_calls()
    node.unprepare(ref)
    return prepared, node.sim.count_calls()


def test_a_whole_gpu_costs_no_nvml_call_on_any_node(tmp_path):
    for profile in ("t4-x1", "a2-megagpu-16g"):
        with opened(tmp_path, profile) as node:
            assert calls_of(node, "gpu-0", 1) == ({}, {})


def test_a_partition_costs_the_same_calls_on_two_gpus_and_on_eight(tmp_path):
    costs = []
    for profile in ("h100-nvl-x2", "dgx-h100"):
        with opened(tmp_path, profile) as node:
            offered = next(each for each in node.inventory.gpus if each.minor == 0).mig_profiles
            device = node.name(0, next(each.name for each in offered if each.name.startswith("1g")), 0)
            calls_of(node, device, 1)
            costs.append(calls_of(node, device, 2))
    assert costs[0] == costs[1]
    # Each of them is a round trip into the driver; the real ones take milliseconds.
    assert sum(costs[0][0].values()) <= 25
    assert sum(costs[0][1].values()) <= 20


def test_a_partition_costs_one_sync_and_five_files(tmp_path, monkeypatch):
    """A power failure ends what is made, so that only a process that dies must find it: in the page cache."""
    with opened(tmp_path, "dgx-h100") as node:
        device = node.name(0, "1g.10gb", 0)
        calls_of(node, device, 1)  # makes directories
        ref = node.claim(2, device)
        disk = Disk(monkeypatch)
        node.prepared(ref)
        # The record before and after, two marks, the spec; the simulated driver replaces its own files another way.
        prepared = disk.taken()
        assert {kind: prepared[kind] for kind in ("new", "rename", "fsync")} == {
            "new": 5,
            "rename": 5,
            "fsync": 1,
        }
        assert "directory" not in prepared
        node.unprepare(ref)
        gone = disk.taken()
        # That it ends, and that the partition is gone: one made by hand may look the same.
        assert (gone["new"], gone["rename"]) == (2, 2)
        assert "fsync" not in gone


def test_a_prepare_writes_each_byte_of_its_two_files_once(tmp_path, monkeypatch):
    written = []
    real = os.write

    def counted(descriptor: int, data: bytes) -> int:
        done = real(descriptor, data)
        written.append(done)
        return done

    with opened(tmp_path, "dgx-h100") as node:
        ref = node.claim(1, "gpu-0")
        monkeypatch.setattr(os, "write", counted)
        node.prepared(ref)
        sizes = [path.stat().st_size for path in (node.cdi_file(ref), node.record_file(ref))]
        assert sum(written) == sum(sizes)
        assert sum(sizes) < 48 << 10
        written.clear()
        node.prepared(ref)
        node.unprepare(ref)
        assert written == []
