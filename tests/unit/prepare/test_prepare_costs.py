"""What a call costs in requests, files and syncs. Counts, not times: these hold on any machine."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from dra.prepare.engine import Engine


class Disk:
    """Counts what is done to the disk, by kind."""

    def __init__(self, monkeypatch) -> None:
        self.counts: Counter[str] = Counter()
        for name in ("fsync", "rename", "replace", "unlink"):
            self._count(monkeypatch, name)
        real_open = os.open

        def counted_open(path, flags, *args, **options):
            if flags & os.O_EXCL:
                self.counts["new"] += 1
            elif flags & os.O_ACCMODE != os.O_RDONLY:
                self.counts["lock"] += 1
            elif flags & os.O_DIRECTORY:
                self.counts["directory"] += 1
            return real_open(path, flags, *args, **options)

        monkeypatch.setattr(os, "open", counted_open)

    def _count(self, monkeypatch, name: str) -> None:
        real = getattr(os, name)

        def counted(*args, **options):
            self.counts[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(os, name, counted)

    def taken(self) -> dict[str, int]:
        """Give the counts since the last call."""
        found, self.counts = dict(self.counts), Counter()
        return found


@pytest.fixture
def disk(node, monkeypatch):
    node.cdi_root.mkdir()
    return Disk(monkeypatch)


def test_a_prepare_writes_a_record_and_a_spec_with_one_sync_and_asks_the_api_once(node, disk):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    # Locks: NVIDIA's, the claim's, the GPU's. The spec and the names in directories need no sync.
    assert disk.taken() == {"new": 2, "rename": 2, "fsync": 1, "lock": 3}
    assert node.api.gets.total() == 1


def test_a_repeated_prepare_writes_nothing(node, disk):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    disk.taken()
    node.prepared(ref)
    assert disk.taken() == {"lock": 3}
    assert node.api.gets.total() == 2


def test_an_unprepare_removes_two_files_and_neither_writes_nor_syncs_nor_asks_the_api(node, disk):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    disk.taken()
    node.api.gets.clear()
    node.unprepare(ref)
    assert disk.taken() == {"unlink": 2, "lock": 3}
    assert node.api.gets.total() == 0


def test_the_cost_of_a_claim_does_not_grow_with_the_claims_on_the_node(node, disk):
    for number in range(1, 8):
        node.prepared(node.claim(number, f"gpu-{number}"))
    disk.taken()
    node.api.gets.clear()
    node.prepared(node.claim(8, "gpu-0"))
    assert disk.taken() == {"new": 2, "rename": 2, "fsync": 1, "lock": 3}
    assert node.api.gets.total() == 1


def test_the_claims_of_a_call_are_fetched_side_by_side(node):
    """Eight round trips in the time of one: all eight requests are out before any is answered."""
    from threading import Thread

    from prepare_fakes import wait_until

    refs = [node.claim(number, f"gpu-{number}") for number in range(8)]
    node.api.hang()
    answers = {}
    call = Thread(target=lambda: answers.update(node.the_engine.prepare(refs)))
    call.start()
    wait_until(lambda: node.api.waiting == 8)
    node.api.release()
    call.join(10)
    assert {uid: type(answer) for uid, answer in answers.items()} == {ref.uid: tuple for ref in refs}


def test_the_hardware_is_looked_at_again_only_for_an_unknown_device(node):
    looks = Counter()

    def inventory():
        looks["kept"] += 1
        return node.inventory

    def fresh():
        looks["fresh"] += 1
        return node.inventory

    node.ports = {"inventory": inventory, "fresh_inventory": fresh}
    engine: Engine = node.restart()
    ref = node.claim(1, "gpu-0")
    engine.prepare([ref])
    engine.unprepare([ref])
    assert looks == {"kept": 1}
    engine.prepare([node.claim(2, "gpu-77")])
    assert looks == {"kept": 2, "fresh": 1}
