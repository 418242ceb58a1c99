"""Which devices conditions concern, and XIDs that two sources tell."""

from __future__ import annotations

from dra.health.hearing import MOST_WAITING, TOGETHER_SECONDS, Hearing
from dra.health.model import Scope, XidEvent
from dra.health.outcome import devices_of, plan_verdict
from dra.health.policy import HealthPolicy
from tests.unit.health.health_world import World, gpu, inventory, mig

NODE = inventory(gpu(0), gpu(1, mig_enabled=True, mig_devices=(mig(0, gi=3), mig(1, gi=4))))


def test_a_scope_is_a_gpu_or_its_mig_devices_of_these_instances():
    assert devices_of(Scope("GPU-0"), NODE) == ("gpu-0",)
    assert devices_of(Scope("GPU-1", 4, 0), NODE) == ("gpu-1-mig-1g10gb-19-1",)
    assert devices_of(Scope("GPU-1", 4), NODE) == ("gpu-1-mig-1g10gb-19-1",)
    assert devices_of(Scope("GPU-1", 4, 1), NODE) == ()
    assert devices_of(Scope("GPU-9"), NODE) == ()


def test_a_verdict_has_marks_with_times_and_sentences_with_what_to_do():
    world = World()
    world.now = 1_767_225_600.7
    world.xid(95, action=1, gpu="GPU-1", gi=3, ci=0)
    world.xid(31, gpu="GPU-0")
    world.book.take_unmonitored("GPU-0", "the log cannot be opened")
    verdict = plan_verdict(world.book.conditions, NODE, HealthPolicy())
    (mark,) = verdict.marks["gpu-1-mig-1g10gb-19-0"]
    assert (mark.key, mark.effect, mark.value) == ("gpu.nvidia.com/xid", "NoSchedule", "95")
    assert mark.time_added == "2026-01-01T00:00:00Z"
    assert sorted((m.key, m.effect, m.value) for m in verdict.marks["gpu-0"]) == [
        ("gpu.nvidia.com/unmonitored", "None", ""), ("gpu.nvidia.com/xid", "None", "31"),
    ]  # fmt: skip
    assert list(verdict.unhealthy) == ["gpu-1-mig-1g10gb-19-0"]
    text = verdict.unhealthy["gpu-1-mig-1g10gb-19-0"]
    assert text.startswith("XID 95")
    assert "nvidia-smi --gpu-reset" in text
    assert list(verdict.unknown) == ["gpu-0"]


def test_nothing_held_is_nothing_said():
    verdict = plan_verdict((), NODE, HealthPolicy())
    assert (verdict.marks, verdict.unhealthy, verdict.unknown) == ({}, {}, {})


# Two sources


def event(xid=79, source="nvml", gpu="GPU-0", gi=None):
    return XidEvent(Scope(gpu, gi), xid, source)


def test_what_one_source_told_is_no_news_from_the_other():
    hearing = Hearing()
    assert hearing.hear(event(), now=1)
    assert not hearing.hear(event(source="kernel log"), now=1.5)
    assert hearing.hear(event(source="kernel log"), now=2)  # one more than NVML told
    assert not hearing.hear(event(), now=2.1)
    assert hearing.hear(event(xid=31), now=2)
    assert hearing.hear(event(gpu="GPU-1"), now=2)
    assert [(e.xid, e.scope.gpu, count) for e, count in hearing.take()] == [
        (79, "GPU-0", 2), (31, "GPU-0", 1), (79, "GPU-1", 1),
    ]  # fmt: skip
    assert not hearing.waiting
    assert hearing.hear(event(source="kernel log"), now=3 + TOGETHER_SECONDS)


def test_a_storm_takes_no_memory():
    hearing = Hearing()
    for number in range(5000):
        hearing.hear(event(xid=number % 3), now=number / 1000)
    assert [count for _, count in hearing.take()] == [1667, 1667, 1666]
    for number in range(5 * MOST_WAITING):
        hearing.hear(event(xid=number), now=100 + number)
    assert len(hearing.take()) == MOST_WAITING
    assert hearing.overflowed == 4 * MOST_WAITING
