"""What each kind of claim costs: requests, syncs, files, bytes, calls into the driver; alone, and eight in a call.

Counts that hold on any machine, on a node with two GPUs and on one with eight.
"""

from __future__ import annotations

from collections import Counter

import pytest
from prepare_fakes import opaque
from sharing_node import SharingNode, interval, share
from test_prepare_costs import Disk


def whole(node, number, minor):
    return node.claim(number, f"gpu-{minor}")


def partition(node, number, minor):
    offered = next(each for each in node.inventory.gpus if each.minor == minor).mig_profiles
    profile = next(each.name for each in offered if each.name.startswith("1g"))
    return node.claim(number, node.name(minor, profile, 0))


def time_sliced(node, number, minor):
    return node.claim(number, f"gpu-{minor}", configs=[opaque(interval("Long"))])


def shared(node, number, minor):
    return node.claim(number, share(f"gpu-{minor}", "abcdefgh"[number % 8]))


KINDS = {"whole": whole, "partition": partition, "time-sliced": time_sliced, "shared": shared}


# Of a prepare at most: files written (the record before and after what it changes, marks of partitions, the CDI spec),
# and calls into the driver. Each write of a file is a new one that takes the place of the old. One sync each, and one
# request for the claim.
MOST = {"whole": (2, 0), "partition": (5, 9), "time-sliced": (3, 2), "shared": (2, 0)}
MOST_OF_UNPREPARE = {"whole": (0, 0), "partition": (3, 20), "time-sliced": (3, 1), "shared": (0, 0)}
MOST_RECORD_BYTES = 2 << 10
MOST_SPEC_BYTES = 40 << 10


class Costs:
    """What has been done since the last look."""

    def __init__(self, node, monkeypatch):
        self._node, self._disk = node, Disk(monkeypatch)
        self.taken()

    def taken(self):
        """Give files written, syncs, requests, and calls into the driver by name."""
        counts = self._disk.taken()
        # The simulated driver writes its state by `replace`, and each of that is a new file too.
        files = counts.get("rename", 0)
        found = (
            files,
            counts.get("fsync", 0),
            self._node.api.gets.total(),
            Counter(self._node.sim.count_calls()),
        )
        self._node.api.gets.clear()
        self._node.sim.reset_calls()
        return found


def made(root, profile, kind, monkeypatch):
    """Give a node on which directories are made and the driver was asked what cannot change, and its costs."""
    node = SharingNode(root / profile, profile=profile, dynamic=True)
    first = KINDS[kind](node, 1, 0)
    node.prepared(first)
    assert node.unprepare(first) is None
    return node, Costs(node, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_costs_one_request_one_sync_and_few_files_and_calls_on_any_node(tmp_path, kind, monkeypatch):
    calls = []
    for profile in ("h100-nvl-x2", "dgx-h100"):
        node, costs = made(tmp_path, profile, kind, monkeypatch)
        try:
            ref = KINDS[kind](node, 2, 0)
            node.prepared(ref)
            files, syncs, requests, prepared = costs.taken()
            assert (syncs, requests) == (1, 1)
            assert (files <= MOST[kind][0], prepared.total() <= MOST[kind][1]) == (True, True), (
                files,
                prepared,
            )
            assert node.record_file(ref).stat().st_size <= MOST_RECORD_BYTES
            assert node.cdi_file(ref).stat().st_size <= MOST_SPEC_BYTES
            node.prepared(ref)
            files, syncs, requests, again = costs.taken()
            assert (files, syncs, requests) == (0, 0, 1)
            assert again.total() <= MOST[kind][1]
            assert node.unprepare(ref) is None
            files, syncs, requests, unprepared = costs.taken()
            assert (syncs, requests) == (0, 0)
            most = MOST_OF_UNPREPARE[kind]
            assert (files <= most[0], unprepared.total() <= most[1]) == (True, True), (files, unprepared)
            calls.append((prepared, again, unprepared))
        finally:
            node.close()
            monkeypatch.undo()
    # Two GPUs or eight: the same calls.
    assert calls[0] == calls[1]


@pytest.mark.parametrize("kind", KINDS)
def test_eight_in_a_call_cost_what_eight_cost(tmp_path, kind, monkeypatch):
    node, costs = made(tmp_path, "dgx-h100", kind, monkeypatch)
    try:
        refs = [KINDS[kind](node, number, number - 2) for number in range(2, 10)]
        if kind == "partition":
            # What a GPU is asked once and for all.
            for ref in refs:
                node.prepared(ref)
                assert node.unprepare(ref) is None
            costs.taken()
        assert [type(each) for each in node.the_engine.prepare(refs).values()] == [tuple] * 8
        files, syncs, requests, prepared = costs.taken()
        assert (syncs, requests) == (8, 8)
        most = 8 * MOST[kind][0], 8 * MOST[kind][1]
        assert (files <= most[0], prepared.total() <= most[1]) == (True, True), (files, prepared)
        assert set(node.the_engine.unprepare(refs).values()) == {None}
        files, syncs, requests, unprepared = costs.taken()
        assert (syncs, requests) == (0, 0)
        most = 8 * MOST_OF_UNPREPARE[kind][0], 8 * MOST_OF_UNPREPARE[kind][1]
        assert (files <= most[0], unprepared.total() <= most[1]) == (True, True), (files, unprepared)
    finally:
        node.close()
