"""However processes are stopped between any two things that they do, at no time do two replicas lead."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.errors import KubeError
from dra.fleet.election import ElectionTimes, Elector, Lead

TIMES = ElectionTimes(lease=15.0, renew=10.0, retry=2.0)
# Mostly none; long enough to be late with a renewal, to lose the lease, to lose it and get it again.
PAUSES = [0.0] * 30 + [0.5, 9.0, 9.5, 12.0]


@dataclass
class World:
    """One time for all, one lease, and what happens between the steps of whoever is at work."""

    chance: random.Random
    now: float = 1000.0
    version: int = 0
    lease: dict | None = None
    replicas: list[Replica] = field(default_factory=list)
    at_work: list[Replica] = field(default_factory=list)

    def pause(self):
        """Let time pass, and perhaps another replica have its round meanwhile."""
        for _ in range(2):
            idle = [each for each in self.replicas if each not in self.at_work]
            if idle and self.chance.random() < 0.2:
                self.round(self.chance.choice(idle))
            self.now += self.chance.choice(PAUSES)
            self.check()

    def lost(self):
        return self.chance.random() < 0.05

    def round(self, replica):
        self.at_work.append(replica)
        replica.elector._round()
        self.at_work.remove(replica)
        self.check()

    def check(self):
        leading = [each.name for each in self.replicas if each.lead is not None and each.lead.holds]
        assert len(leading) <= 1, leading


class Leases:
    """The API server as one replica sees it: each call can be cut by a pause before and after what it does."""

    def __init__(self, world):
        self.world = world

    def get(self, *_args, **_options):
        found = self._call(lambda: copy.deepcopy(self.world.lease))
        if found is None:
            raise KubeError("DRA-API-NOT-FOUND", "no lease", status=404)
        return found

    def create(self, _resource, body, *_args, **_options):
        return self._call(lambda: self._store(body, None))

    def replace(self, _resource, _name, body, *_args, **_options):
        return self._call(lambda: self._store(body, body["metadata"]["resourceVersion"]))

    def _store(self, body, version):
        there = self.world.lease and self.world.lease["metadata"]["resourceVersion"]
        if version != there:
            raise KubeError("DRA-API-CONFLICT", "changed meanwhile", status=409)
        self.world.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.world.version)}
        self.world.lease = {**copy.deepcopy(body), "metadata": metadata}
        return copy.deepcopy(self.world.lease)

    def _call(self, act):
        self.world.pause()
        if self.world.lost():
            raise KubeError("DRA-API-TIMEOUT", "the request was lost", status=0)
        done = act()
        self.world.pause()
        if self.world.lost():
            raise KubeError("DRA-API-TIMEOUT", "the answer was lost", status=0)
        return done


class Replica:
    """One replica, with a clock that began at some other time than the others'."""

    def __init__(self, world, name, offset):
        self.world, self.name, self.offset, self.lead = world, name, offset, None
        self.elector = Elector(
            Leases(world), namespace="n", name="l", identity=name, on_lead=self.take, on_lost=self.lose,
            times=TIMES, clock=self,
        )  # fmt: skip

    def take(self, lead: Lead):
        self.lead = lead

    def lose(self):
        self.lead = None

    def now(self):
        return self.world.now + self.offset

    def wall(self):
        return 1.8e9 + 3600.0 * self.offset


@pytest.mark.fault("F44")
@given(seed=st.integers(0, 2**32))
def test_at_no_time_do_two_replicas_lead(seed):
    world = World(random.Random(seed))
    world.replicas = [
        Replica(world, name, offset) for name, offset in (("a", 0.0), ("b", -900.0), ("c", 77.0))
    ]
    for _ in range(60):
        world.round(world.chance.choice(world.replicas))
        world.now += world.chance.choice([0.5, 2.0, 3.0])
        world.check()


def test_one_that_is_alone_leads_at_once_and_for_as_long_as_it_is_heard():
    world = World(random.Random(1))
    world.pause, world.lost = lambda: None, lambda: False
    alone = Replica(world, "a", 5.0)
    world.replicas = [alone]
    for _ in range(20):
        world.round(alone)
        world.now += TIMES.retry
        assert alone.lead is not None
        assert alone.lead.holds
        alone.elector.check()
    world.now += TIMES.renew
    with pytest.raises(KubeError, match="DRA-FLEET-NOT-LEADING") as caught:
        alone.elector.check()
    assert caught.value.retryable
