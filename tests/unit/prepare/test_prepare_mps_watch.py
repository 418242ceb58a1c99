"""What the plugin hears of the keeper reaches the owners of claims, and daemons of nobody are ended."""

from __future__ import annotations

import pytest
from prepare_fakes import wait_until
from sharing_node import SharingNode, mps, opaque

from dra.errors import HostError
from dra.plugin.mps_watch import MpsWatch
from dra.prepare.sharing.keeper_client import ABSENT, KeeperEvent
from dra.prepare.sharing.mps_model import DaemonSpec


class News:
    """A keeper in memory with things to tell. `asked`: the numbers that the watch gave."""

    def __init__(self, keeper) -> None:
        self.keeper, self.events_, self.asked, self.absent = keeper, [], [], False

    def list(self):
        self._here()
        return [self.keeper.status(each) for each in list(self.keeper.daemons)]

    def stop(self, daemon_id):
        self.keeper.stop(daemon_id)

    def events(self, after, *, wait_seconds):
        self.asked.append(after)
        self._here()
        start = after or 0
        return [e for e in self.events_ if e.number > start], len(self.events_)

    def happen(self, daemon_id, reason="MpsDaemonRestarted"):
        self.events_.append(KeeperEvent(len(self.events_) + 1, daemon_id, reason, f"{daemon_id} has ended"))

    def _here(self):
        if self.absent:
            raise HostError(ABSENT, "no keeper", remedy="Deploy it.")


@pytest.fixture
def shared(tmp_path):
    made = SharingNode(tmp_path)
    yield made
    made.close()


@pytest.fixture
def news(shared):
    return News(shared.keeper)


def watch_of(shared, news, **more):
    settings = {"retry_seconds": 0.0, "monotonic": lambda: shared.now, **more}
    return MpsWatch(news, shared.the_engine, shared.notices.append, **settings)


def prepared(shared, number, device):
    ref = shared.claim(number, device, configs=[opaque(mps())])
    shared.prepared(ref)
    (entry,) = [e for e in shared.record(ref)["effects"] if e["kind"] == "mps-daemon"]
    return ref, entry["args"]["id"]


def told(shared):
    return [(notice.ref, notice.reason) for notice in shared.notices]


def test_what_happened_to_a_daemon_is_told_once_to_the_claim_that_has_it(shared, news):
    one, daemon = prepared(shared, 1, "gpu-0")
    prepared(shared, 2, "gpu-1")
    news.happen(daemon)
    watch = watch_of(shared, news)
    watch.hear()
    watch.hear()
    assert told(shared) == [(one, "MpsDaemonRestarted")]
    assert shared.notices[0].message == f"{daemon} has ended"
    assert shared.notices[0].warning
    # The first question goes on where the instance before ended; the next ones say what was heard.
    assert news.asked == [None, 1]


def test_news_of_a_daemon_whose_claim_has_ended_are_for_nobody(shared, news):
    news.happen("gone-12345")
    watch_of(shared, news).hear()
    assert told(shared) == []


def test_a_keeper_that_is_gone_for_long_is_told_once_to_each_claim(shared, news):
    one, _ = prepared(shared, 1, "gpu-0")
    two, _ = prepared(shared, 2, "gpu-1")
    watch = watch_of(shared, news)
    watch.hear()
    news.absent = True
    watch.hear()
    shared.now += 5
    watch.hear()
    assert told(shared) == []
    shared.now += 6
    watch.hear()
    watch.hear()
    assert sorted(told(shared), key=str) == [(one, "MpsKeeperGone"), (two, "MpsKeeperGone")]
    # Back, and gone again: that is news.
    news.absent = False
    watch.hear()
    news.absent = True
    watch.hear()
    shared.now += 11
    watch.hear()
    assert len(told(shared)) == 4


def test_daemons_of_nobody_are_ended_and_others_are_not(shared, news):
    _, daemon = prepared(shared, 1, "gpu-0")
    shared.keeper.ensure(DaemonSpec("00000000-dead-4000-8000-000000000000-abcde", ("GPU-x",)))
    shared.keeper.ensure(DaemonSpec("card-0123456789ab", ("GPU-x",)))
    watch_of(shared, news).sweep()
    assert list(shared.keeper.daemons) == [daemon]


def test_a_record_that_cannot_be_read_may_have_a_daemon(shared, news):
    ref, daemon = prepared(shared, 1, "gpu-0")
    shared.keeper.ensure(DaemonSpec("card-0123456789ab", ("GPU-x",)))
    shared.record_file(ref).write_text("{")
    shared.restart()
    watch_of(shared, news).sweep()
    assert set(shared.keeper.daemons) == {daemon, "card-0123456789ab"}


def test_a_keeper_that_has_forgotten_a_daemon_is_told_again_what_it_should_be(shared, news):
    ref, daemon = prepared(shared, 1, "gpu-0")
    spec = shared.daemon()
    shared.keeper.daemons.clear()
    watch_of(shared, news).sweep()
    assert shared.keeper.daemons == {daemon: spec}
    assert told(shared) == []
    shared.unprepare(ref)
    shared.clean()


def test_it_begins_with_the_first_claim_that_has_a_daemon_and_ends_when_told(shared, news):
    watch = watch_of(shared, news, poll_seconds=0.0, retry_seconds=0.01)
    watch.begin_if_needed()
    assert news.asked == []
    prepared(shared, 1, "gpu-0")
    watch.begin_if_needed()
    watch.begin()
    wait_until(lambda: len(news.asked) > 2)
    assert watch.stop(timeout_seconds=60)
    asked = len(news.asked)
    watch.begin()
    assert watch.stop(timeout_seconds=60)
    assert len(news.asked) == asked
