"""One wait for events lasts for several of NVML's, and whoever wants the session is let in between two of them."""

from __future__ import annotations

import time

import pytest

from dra.host.paths import HostPaths
from dra.inventory.scan import Scanner
from dra.nvml import event_watch
from dra.nvml.event_watch import EVENTS, EventWatch, WatchedGpu
from dra.nvml.node import session_of
from dra.sim.node import SimulatedNode

FOR_EVER = 10**9


class Events:
    """A watch on a simulated machine, and how often the session was asked to wait."""

    def __init__(self, root):
        self.node = SimulatedNode("l40s-x4", root, real_nodes=False)
        self.session = session_of(HostPaths(**self.node.paths_kwargs()), library=self.node.library)
        found = Scanner(self.session, HostPaths(**self.node.paths_kwargs())).scan()
        self.wanted = tuple(WatchedGpu(each.uuid, each.pci_address) for each in found.gpus)
        self.told, self.runs = [], 0
        run = self.session.run

        def counted(call, **options):
            self.runs += options.get("subject") == EVENTS
            return run(call, **options)

        self.session.run = counted
        self.watch = EventWatch(
            self.session, gpus=lambda: self.wanted, told=self.told.extend, wait_milliseconds=20
        )
        self.watch.start()
        self.until(lambda: len(self.watch.state.registered) == 4)

    def waits(self):
        return self.node.control.count_calls().get("nvmlEventSetWait_v2", 0)

    def until(self, holds):
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end, self.watch.state
            time.sleep(0.005)

    def until_it_waits(self):
        before = self.waits()
        self.until(lambda: self.waits() > before + 1)

    def close(self):
        assert self.watch.stop(timeout_seconds=60)
        self.session.close()


@pytest.fixture
def events(tmp_path):
    made = Events(tmp_path)
    yield made
    made.close()


@pytest.fixture
def for_ever(monkeypatch):
    monkeypatch.setattr(event_watch, "WAITS", FOR_EVER)
    # Its deadline would be as long.
    monkeypatch.setattr(event_watch, "LATE_SECONDS", 60.0 - FOR_EVER * 0.02)


def test_while_nothing_happens_the_session_is_asked_once_for_several_waits(events):
    waits, runs = events.waits(), events.runs
    events.until(lambda: events.waits() >= waits + 50)
    assert events.runs - runs <= (events.waits() - waits) / event_watch.WAITS + 2


def test_an_event_is_told_although_the_wait_goes_on_for_ever(for_ever, events):
    events.until_it_waits()
    events.node.control.push_xid(1, 79)
    events.node.control.push_xid(2, 31)
    events.until(lambda: {(each.gpu_uuid, each.xid) for each in events.told} >= {
        (events.wanted[1].uuid, 79), (events.wanted[2].uuid, 31)
    })  # fmt: skip


def test_a_change_of_the_gpus_ends_the_wait(for_ever, events):
    events.until_it_waits()
    events.wanted = events.wanted[:2]
    events.until(lambda: len(events.watch.state.registered) == 2)


def test_who_lets_go_of_the_driver_is_not_kept_waiting(for_ever, events):
    events.until_it_waits()
    assert events.session.release("a driver upgrade", timeout_seconds=60)
    events.until(lambda: not events.watch.state.registered)
    events.session.resume()
    events.watch.wake()
    events.until(lambda: len(events.watch.state.registered) == 4)


def test_who_needs_a_pause_of_the_session_has_it(for_ever, events):
    events.until_it_waits()
    with events.session.paused("a GPU changes its driver", timeout_seconds=60) as clean:
        assert clean
    events.until_it_waits()
    events.node.control.push_xid(3, 31)
    events.until(lambda: events.told and events.told[-1].gpu_uuid == events.wanted[3].uuid)


def test_what_other_gpus_tell_when_one_is_lost_is_heard(monkeypatch, events):
    """One that falls off the bus often takes others along; what they tell while there is no set, nobody hears."""
    monkeypatch.setattr(event_watch, "RETRY_SECONDS", (3600.0, 3600.0))
    events.until_it_waits()
    events.node.control.lose_gpu(0)
    events.until(lambda: events.wanted[0].uuid in events.watch.state.refused)
    events.node.control.push_xid(2, 74, sources=("nvml",))
    events.until(lambda: (events.wanted[2].uuid, 74) in {(each.gpu_uuid, each.xid) for each in events.told})
