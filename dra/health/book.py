"""The book of what is held against each GPU: events and readings go in, conditions come out. Pure, apart from memory.

A condition comes at once (a temperature at the second look) and goes when several checks in a row find the GPU well,
over a time that doubles each time the same condition comes back: a GPU that flaps stays tainted. Nothing is forgotten
because the driver restarts; what a reset or a reboot heals is seen in NVML, not assumed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dra.health.findings import HUNG, findings, speaks_of_gpu
from dra.health.model import Change, Condition, Finding, Reading, Scope, XidEvent
from dra.health.policy import (
    APPLICATION_XIDS,
    LOST,
    NO_ACTION,
    PCIE,
    REPORT_XIDS,
    RESET_REMEDY,
    THERMAL,
    UNMONITORED,
    XID,
    Grade,
    HealthPolicy,
    action_remedy,
    action_word,
    describe_xid,
)

# Checks in a row that must find a GPU well, and how long they must span.
CLEAR_CHECKS = 3
CLEAR_SECONDS = 4.0
# A condition that comes back this soon after it was cleared has to stay away twice as long, up to the longest.
FLAP_SECONDS = 600.0
LONGEST_CLEAR_SECONDS = 600.0
# How long an XID that keeps nobody away is shown.
NOTE_SECONDS = 600.0
# A recovery action that shows up so long after an XID is put down to it.
BLAME_SECONDS = 120.0
# Checks in a row that must find these before they count: they come and go by themselves.
_ACTION = "recovery-action"
_CONFIRM = {THERMAL: 2, PCIE: 2, _ACTION: 2}
# After these nothing on the GPU can go on: NODE_REBOOT, BUS_RESET, SYSTEM_REBOOT.
_WHOLE_GPU_ACTIONS = frozenset({2, 6, 7})
# A board that has not been there for a week is another machine's by now.
ABSENT_SECONDS = 7 * 86_400.0
# XIDs whose counts are kept; there are fewer than two hundred numbers.
_COUNTED = 4096
_CLEARED = 1024

Key = tuple[Scope, str]


@dataclass(slots=True)
class _Streak:
    """Good checks in a row: how many, and when the first was (monotonic)."""

    checks: int = 0
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class _Last:
    event: XidEvent
    at: float


class HealthBook:
    """Holds the conditions of a node. One thread uses it.

    Args:
        policy: what the administrator set.
        wall: seconds since 1970, for what people see.
        clock: seconds since boot, for what is measured: the time of day can be set.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        *,
        wall: Callable[[], float],
        clock: Callable[[], float],
        clear_checks: int = CLEAR_CHECKS,
        clear_seconds: float = CLEAR_SECONDS,
        note_seconds: float = NOTE_SECONDS,
        flap_seconds: float = FLAP_SECONDS,
    ) -> None:
        self._policy = policy
        self._wall, self._clock = wall, clock
        self._clear_checks, self._clear_seconds = clear_checks, clear_seconds
        self._note_seconds, self._flap_seconds = note_seconds, flap_seconds
        self._conditions: dict[Key, Condition] = {}
        self._streaks: dict[Key, _Streak] = {}
        self._suspected: Counter[Key] = Counter()
        self._cleared: OrderedDict[Key, tuple[float, int]] = OrderedDict()
        self._last_xid: dict[str, _Last] = {}
        self._changes: list[Change] = []
        # GPUs whose driver was seen unloaded since the condition began: without a recovery action this heals.
        self._reloaded: set[str] = set()
        self.xid_counts: Counter[tuple[str, int]] = Counter()

    # -- looking -----------------------------------------------------------------------------------

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Everything that is held against anything now, in order."""
        return tuple(self._conditions[key] for key in sorted(self._conditions, key=_order))

    def of(self, gpu: str) -> tuple[Condition, ...]:
        """What is held against a GPU and its MIG devices."""
        return tuple(each for each in self.conditions if each.scope.gpu == gpu)

    @property
    def unsettled(self) -> bool:
        """Whether the next look should come soon: somebody is ill, or is suspected to be."""
        return bool(self._suspected) or any(each.is_ill for each in self._conditions.values())

    def take_changes(self) -> tuple[Change, ...]:
        """Give what has changed since this was asked last."""
        changes, self._changes = tuple(self._changes), []
        return changes

    # -- taking in ---------------------------------------------------------------------------------

    def restore(self, conditions: Iterable[Condition], *, same_boot: bool) -> None:
        """Take what an earlier process had written down; after a reboot, what was only worth a note is over."""
        for each in conditions:
            if each.grade is Grade.NOTE and not same_boot:
                continue
            # Not known to be unmonitored before anybody tried.
            if each.key == UNMONITORED:
                continue
            self._conditions[each.scope, each.key] = replace(
                each,
                since_up=self._up(each.since_up if same_boot else None, each.since),
                seen_up=self._up(each.seen_up if same_boot else None, each.seen),
            )
            if not same_boot:
                self._reloaded.add(each.scope.gpu)

    def _up(self, up: float | None, at: float) -> float:
        """Give when something was in seconds since boot: as it was noted, or by the time of day where it was not."""
        now = self._clock()
        return up if up is not None and up <= now else now - max(0.0, self._wall() - at)

    def take_xid(self, event: XidEvent, reading: Reading | None, *, count: int = 1) -> None:
        """Take an XID that came so many times, with what the GPU said when it was asked right after it.

        None: it could not be asked.
        """
        gpu = event.scope.gpu
        if len(self.xid_counts) < _COUNTED or (gpu, event.xid) in self.xid_counts:
            self.xid_counts[gpu, event.xid] += count
        self._last_xid[gpu] = _Last(event, self._clock())
        action = None if reading is None or reading.error else reading.recovery_action
        grade = self._policy.grade_xid(event.xid, action=action, gpu=gpu)
        self._set_xid(event, grade, action if grade > Grade.NOTE else None, reading)

    def take_reading(self, gpu: str, reading: Reading) -> None:
        """Take what a check of a GPU read."""
        if reading.error and not speaks_of_gpu(reading.error):
            # Nothing is known about this GPU: what there is stays.
            return
        hot = (Scope(gpu), THERMAL) in self._conditions
        limit = self._policy.of_gpu(gpu).temperature_celsius
        if limit is not None:
            reading = replace(reading, slowdown_temperature=limit)
        found = {each.key: each for each in findings(reading, hot=hot)}
        self._take_findings(gpu, found, reading)
        if not reading.error:
            lost = self._conditions.get((Scope(gpu), LOST))
            if lost is not None and lost.value != HUNG:
                # It answers again: nothing but a reset or a reboot brings back a GPU that was lost.
                self._reloaded.add(gpu)
            self._take_action(gpu, reading)
            self._clear_xids(gpu, reading)
        self._expire(gpu)

    def take_instances(self, gpu: str, instances: Iterable[tuple[int, int]]) -> None:
        """Take which MIG devices (GPU instance, compute instance) a GPU has that was read completely.

        What was held against one that is gone is void.
        """
        there = set(instances)
        gis = {gi for gi, _ in there}
        for scope, key in list(self._conditions):
            if scope.gpu != gpu or scope.gi is None:
                continue
            if scope.gi not in gis or (scope.ci is not None and (scope.gi, scope.ci) not in there):
                self._drop((scope, key))

    def forget_absent(self, present: Iterable[str]) -> None:
        """Drop what is held against GPUs that have been away for long: they were replaced."""
        there = set(present)
        for scope, key in list(self._conditions):
            if scope.gpu not in there and self._ago(self._conditions[scope, key].seen_up) > ABSENT_SECONDS:
                self._drop((scope, key))

    def take_unmonitored(self, gpu: str, why: str) -> None:
        """Take that nobody would hear an XID of this GPU, and why; empty: somebody would."""
        key = (Scope(gpu), UNMONITORED)
        if not why:
            if key in self._conditions:
                self._drop(key)
            return
        self._set(key, Finding(UNMONITORED, Grade.NOTE, "", f"XIDs of the GPU cannot be heard: {why}"))

    def take_driver_gone(self, gpus: Iterable[str]) -> None:
        """Take that the driver of these GPUs is not loaded: when it is again, they were reset."""
        self._reloaded |= set(gpus)

    # -- findings ----------------------------------------------------------------------------------

    def _take_findings(self, gpu: str, found: Mapping[str, Finding], reading: Reading) -> None:
        scope = Scope(gpu)
        for name, finding in found.items():
            key = (scope, name)
            self._streaks.pop(key, None)
            self._suspected[key] += 1
            if self._suspected[key] >= _CONFIRM.get(name, 1) or key in self._conditions:
                del self._suspected[key]
                self._set(key, finding, energy_mj=reading.energy_mj)
        for suspect in list(self._suspected):
            if suspect[0] == scope and suspect[1] not in (*found, _ACTION):
                del self._suspected[suspect]
        if reading.error:
            # A GPU that does not answer says nothing about its memory or its temperature.
            return
        for held in list(self._conditions):
            if held[0] == scope and held[1] not in (XID, UNMONITORED) and held[1] not in found:
                self._good(held)

    def _take_action(self, gpu: str, reading: Reading) -> None:
        """Put a recovery action down to the XID that it came with, or to the GPU."""
        action = reading.recovery_action
        guess = (Scope(gpu), _ACTION)
        if not action:
            self._suspected.pop(guess, None)
            return
        blamed = [each for each in self.of(gpu) if each.key == XID and each.is_ill]
        if action in _WHOLE_GPU_ACTIONS:
            blamed = [each for each in blamed if each.scope.whole]
        for each in blamed:
            self._streaks.pop((each.scope, XID), None)
            if each.action != action:
                remedy = action_remedy(action)
                self._conditions[each.scope, XID] = replace(each, action=action, remedy=remedy)
        if blamed:
            self._suspected.pop(guess, None)
            return
        last = self._last_xid.get(gpu)
        if last is not None and self._clock() - last.at <= BLAME_SECONDS:
            event = last.event
            if action in _WHOLE_GPU_ACTIONS and not event.scope.whole:
                event = replace(event, scope=Scope(gpu))
            if not self._policy.ignores(event.xid, gpu):
                self._set_xid(event, Grade.ILL, action, reading)
                return
        # The XID that goes with it may be on its way, and tell which MIG device it is about.
        self._suspected[guess] += 1
        if self._suspected[guess] < _CONFIRM[_ACTION]:
            return
        del self._suspected[guess]
        finding = Finding(
            XID, Grade.ILL, action_word(action), f"NVML asks for: {action_word(action).replace('-', ' ')}",
            action_remedy(action),
        )  # fmt: skip
        self._set((Scope(gpu), XID), finding, energy_mj=reading.energy_mj, action=action)

    def _set_xid(self, event: XidEvent, grade: Grade, action: int | None, reading: Reading | None) -> None:
        key = (event.scope, XID)
        old = self._conditions.get(key)
        message = describe_xid(event.xid)
        if action:
            message += f"; NVML asks for: {action_word(action).replace('-', ' ')}"
        elif self._policy.insists(event.xid, event.scope.gpu):
            message += "; a GpuNodePolicy holds it back until it is reset"
        if old is not None and old.is_ill and grade <= old.grade and not self._explains(event, grade, old):
            # The first one is the cause: it stays, and so does the time at which the taint was added.
            if grade >= Grade.ILL:
                # A reset that was seen before it is none of this one.
                self._streaks.pop(key, None)
                self._reloaded.discard(event.scope.gpu)
                energy = old.energy_mj if reading is None or reading.energy_mj is None else reading.energy_mj
                self._conditions[key] = replace(
                    old,
                    seen=self._wall(),
                    seen_up=self._clock(),
                    action=action or old.action,
                    energy_mj=energy,
                )
            return
        self._drop_guess(event, grade, action)
        remedy = "" if grade is Grade.NOTE else action_remedy(action) if action else RESET_REMEDY
        finding = Finding(XID, grade, str(event.xid), message, remedy)
        energy = None if reading is None else reading.energy_mj
        self._set(key, finding, energy_mj=energy, action=action)

    def _drop_guess(self, event: XidEvent, grade: Grade, action: int | None) -> None:
        """Take back what was held against the whole GPU until an XID told which MIG device it is about."""
        key = (Scope(event.scope.gpu), XID)
        guess = self._conditions.get(key)
        if event.scope.whole or guess is None or not self._is_guess(guess) or grade < Grade.ILL:
            return
        if action not in _WHOLE_GPU_ACTIONS and self._ago(guess.since_up) <= BLAME_SECONDS:
            self._drop(key)

    def _explains(self, event: XidEvent, grade: Grade, old: Condition) -> bool:
        """Whether an XID that came a moment later is the cause of an illness that was put down to something else.

        A check may see the recovery action before the XID is told.
        """
        return (
            self._is_guess(old)
            and grade >= Grade.ILL
            and self._policy.grade_xid(event.xid, action=None, gpu=event.scope.gpu) >= Grade.ILL
            and self._ago(old.since_up) <= BLAME_SECONDS
        )

    def _is_guess(self, held: Condition) -> bool:
        """Whether an illness was put down to no XID, or to one that makes nobody ill by itself."""
        if not held.value.isdecimal():
            return True
        xid = int(held.value)
        return xid in APPLICATION_XIDS | REPORT_XIDS and not self._policy.insists(xid, held.scope.gpu)

    def _set(
        self, key: Key, finding: Finding, *, energy_mj: int | None = None, action: int | None = None
    ) -> None:
        now, up = self._wall(), self._clock()
        old = self._conditions.get(key)
        self._streaks.pop(key, None)
        times = old.times if old is not None else self._times_before(key)
        new = Condition(
            key[0], finding.key, finding.grade, finding.value, finding.message, finding.remedy,
            since=now, seen=now, times=times, energy_mj=energy_mj, action=action, since_up=up, seen_up=up,
        )  # fmt: skip
        if old is not None and (old.grade, old.value) == (new.grade, new.value):
            new = replace(new, since=old.since, since_up=old.since_up, energy_mj=old.energy_mj, data=old.data)
            self._conditions[key] = new
            return
        if old is None or new.is_ill != old.is_ill:
            self._reloaded.discard(key[0].gpu)
        self._conditions[key] = new
        self._changes.append(Change(old, new))

    def _times_before(self, key: Key) -> int:
        cleared = self._cleared.get(key)
        if cleared is None or self._clock() - cleared[0] > self._flap_seconds:
            return 0
        return cleared[1] + 1

    # -- clearing ----------------------------------------------------------------------------------

    def _clear_xids(self, gpu: str, reading: Reading) -> None:
        for each in self.of(gpu):
            if each.key != XID or not each.is_ill:
                continue
            if _was_reset(each, reading):
                # Once seen it holds: the counter grows again.
                self._reloaded.add(gpu)
            if self._is_over(each, reading):
                self._good((each.scope, XID))
            else:
                self._streaks.pop((each.scope, XID), None)

    def _is_over(self, held: Condition, reading: Reading) -> bool:
        """Whether a look finds nothing any more of what an XID, or a recovery action, was held to mean."""
        gpu, action = held.scope.gpu, reading.recovery_action
        if action:
            return False
        reset = gpu in self._reloaded
        if not held.action and held.value.isdecimal():
            xid = int(held.value)
            if self._policy.insists(xid, gpu):
                # NVML never asked for anything, so that its silence says nothing: the policy's word counts until a reset.
                return reset
            if self._policy.grade_xid(xid, action=held.action, gpu=gpu) is Grade.NOTE:
                return True  # the rule that made it an illness is gone
        return reset if action is None else action == NO_ACTION

    def _good(self, key: Key) -> None:
        now = self._clock()
        streak = self._streaks.setdefault(key, _Streak(0, now))
        streak.checks += 1
        wait = min(self._clear_seconds * 2 ** min(self._conditions[key].times, 20), LONGEST_CLEAR_SECONDS)
        if streak.checks >= self._clear_checks and now - streak.began >= wait:
            self._drop(key)

    def _expire(self, gpu: str) -> None:
        for each in self.of(gpu):
            if each.key == XID and not each.is_ill and self._ago(each.seen_up) > self._note_seconds:
                self._drop((each.scope, XID))

    def _ago(self, up: float | None) -> float:
        return 0.0 if up is None else self._clock() - up

    def _drop(self, key: Key) -> None:
        old = self._conditions.pop(key)
        self._streaks.pop(key, None)
        if old.is_ill:
            self._cleared[key] = (self._clock(), old.times)
            self._cleared.move_to_end(key)
            if len(self._cleared) > _CLEARED:
                self._cleared.popitem(last=False)
        self._changes.append(Change(old, None))


def _was_reset(condition: Condition, reading: Reading) -> bool:
    """Whether the energy counter, which starts anew with the GPU, is lower than when the condition began."""
    before, now = condition.energy_mj, reading.energy_mj
    return before is not None and now is not None and now < before


def _order(key: Key) -> tuple[str, int, int, str]:
    scope, name = key
    return scope.gpu, -1 if scope.gi is None else scope.gi, -1 if scope.ci is None else scope.ci, name
