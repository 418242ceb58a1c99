"""How the daemon publishes shared GPUs: by the settings, by what the server keeps, by whether there is MPS."""

from __future__ import annotations

from dra.api.gpu_settings import parse_sharing
from dra.errors import HostError
from dra.health.feed import HealthFeed
from dra.inventory.diff import diff
from dra.inventory.model import Inventory
from dra.plugin.keeper_presence import AWAY_SECONDS, KeeperPresence
from dra.plugin.pool_source import PoolSource
from dra.plugin.ports import NodeEvents
from tests.unit.inventory.inventory_samples import gpu, inventory


class Events:
    def __init__(self):
        self.written = []

    def emit(self, about, type_, reason, message):
        self.written.append((about.kind, about.name, type_, reason, message))


def source(sharing, **options):
    pools, events = [], Events()
    made = PoolSource(
        "gpu.nvidia.com", "node-a", feed=HealthFeed(), settings=parse_sharing(sharing), **options,
        on_problem=NodeEvents(events, "node-a").problem,
    )  # fmt: skip
    made.publish_to(pools.append)
    made.inventory_changed(inventory(gpu(0), gpu(1)), diff(Inventory(), inventory(gpu(0), gpu(1))))
    return made, pools, events


def enforcement(pool):
    return {device["attributes"]["gpudra.dev/enforcement"]["string"] for device in pool.devices}


def test_enforcement_is_published_when_mps_comes_and_goes():
    made, pools, _ = source("4")
    assert enforcement(pools[-1]) == {"none"}
    made.mps_is(True)
    assert enforcement(pools[-1]) == {"per-process"}
    made.mps_is(True)
    assert len(pools) == 2
    made.mps_is(False)
    assert enforcement(pools[-1]) == {"none"}


def test_other_settings_are_another_pool_at_once_and_the_same_are_none():
    made, pools, _ = source("exclusive")
    made.settings_changed(parse_sharing("GPU-00000000-0000-0000-0000-000000000001=4"))
    assert [each.get("allowMultipleAllocations", False) for each in pools[-1].devices] == [False, True]
    before = len(pools)
    made.settings_changed(parse_sharing("GPU-00000000-0000-0000-0000-000000000001=4"))
    assert len(pools) == before


def test_a_server_without_shares_gets_exclusive_gpus_and_the_node_has_an_event_that_says_so():
    made, pools, events = source("4")
    assert events.written == []
    made.server_dropped({"DRAConsumableCapacity"})
    assert not any(
        "allowMultipleAllocations" in each or "requestPolicy" in str(each) for each in pools[-1].devices
    )
    kinds = {(kind, name, type_, reason) for kind, name, type_, reason, _ in events.written}
    assert kinds == {("Node", "node-a", "Warning", "GpuSharingNotPublished")}
    assert all(
        "DRA-SLICE-NOT-SHARED" in text and "DRAConsumableCapacity" in text for *_, text in events.written
    )
    told = len(events.written)
    made.mps_is(True)
    assert len(events.written) == told


def test_a_server_is_asked_once_whether_it_keeps_shares_and_only_where_something_is_shared():
    asked = []

    def keeps(version):
        asked.append(version)
        return True

    made, pools, _ = source("exclusive", keeps_shares=keeps)
    made.server_is((1, 34))
    assert asked == []
    made.settings_changed(parse_sharing("4"))
    assert asked == [(1, 34)]
    assert all(each["allowMultipleAllocations"] for each in pools[-1].devices)
    made.settings_changed(parse_sharing("5"))
    made.settings_changed(parse_sharing("exclusive"))
    assert asked == [(1, 34)]
    made.server_is((1, 35))
    made.settings_changed(parse_sharing("4"))
    assert asked == [(1, 34), (1, 35)]


def test_a_server_that_says_no_never_sees_a_share_and_one_that_says_nothing_is_taken_by_its_version():
    made, pools, events = source("4", keeps_shares=lambda _version: False)
    made.server_is((1, 36))
    assert not any("allowMultipleAllocations" in each for each in pools[-1].devices)
    assert events.written
    made, pools, _ = source("4", keeps_shares=lambda _version: None)
    made.server_is((1, 36))
    assert all(each["allowMultipleAllocations"] for each in pools[-1].devices)


class Keeper:
    def __init__(self):
        self.there = False

    def hello(self):
        if not self.there:
            raise HostError("DRA-MPS-KEEPER-ABSENT", "nobody")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_keeper_is_missed_only_when_it_stays_away(tmp_path):
    keeper, told, clock = Keeper(), [], Clock()
    presence = KeeperPresence(keeper, told.append, folder=tmp_path / "mps", monotonic=clock)
    presence.look()
    assert told == []
    keeper.there = True
    presence.look()
    presence.look()
    assert told == [True]
    keeper.there = False
    for _ in range(3):
        presence.look()
        clock.now += AWAY_SECONDS / 3 - 1
    presence.look()
    assert told == [True]
    keeper.there = True
    presence.look()
    keeper.there = False
    presence.look()
    clock.now += AWAY_SECONDS - 1
    presence.look()
    assert told == [True]
    clock.now += 1
    presence.look()
    assert told == [True, False]
    assert presence.present() is False


def test_what_was_published_of_a_keeper_is_known_to_the_next_process(tmp_path):
    keeper, told, clock = Keeper(), [], Clock()

    def started():
        return KeeperPresence(keeper, told.append, folder=tmp_path / "mps", monotonic=clock)

    assert started().present() is False
    keeper.there = True
    started().look()
    keeper.there = False
    second = started()
    assert second.present() is True
    second.look()
    clock.now += AWAY_SECONDS
    second.look()
    assert told == [True, False]
    assert started().present() is False


def test_a_disk_that_refuses_keeps_nobody_from_seeing_the_keeper(tmp_path):
    (tmp_path / "mps").write_text("a file in the way")
    keeper, told, clock = Keeper(), [], Clock()
    keeper.there = True
    presence = KeeperPresence(keeper, told.append, folder=tmp_path / "mps", monotonic=clock)
    presence.look()
    keeper.there = False
    presence.look()
    clock.now += AWAY_SECONDS
    presence.look()
    assert told == [True, False]


def test_the_first_pool_says_what_was_published_before():
    _, pools, _ = source("4", mps=True)
    assert enforcement(pools[0]) == {"per-process"}


def test_the_keeper_is_looked_at_only_where_something_is_shared():
    begun = []
    made, _, _ = source("exclusive", on_shared=lambda: begun.append(1))
    assert begun == []
    made.settings_changed(parse_sharing("4"))
    assert begun
