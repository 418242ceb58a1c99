"""Keeps the node's GPUs as the GpuNodePolicies say, without ever touching one that a claim has.

For each GPU whose meaning is to change: taint it, so that nobody new gets it; wait until no allocation in the API and
no claim on the node names it; write down that the change has begun; change; publish; take the taint away. What may
change under a claim (attributes, a reservation, health rules) is published at once. While a policy that is for the
node, or may be, is invalid, everything stays as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dra.api.gpu_settings import GpuSettings, NodeSettings, block_name
from dra.api.policy import Policy, Resolution, UnreadablePolicy, read_policy, resolve
from dra.controller.policy_model import GpuReport, PolicyPorts, PolicyTimings, report_of, waiting_report
from dra.controller.policy_plan import GpuPlan, plan_gpu
from dra.controller.policy_state import AppliedFile, AppliedSettings
from dra.controller.policy_tell import PolicyTeller
from dra.errors import DraError
from dra.inventory.allocations import claims_on_gpus, sides_on_node
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import GpuName
from dra.kube.clock import Clock, SystemClock
from dra.prepare.holds import lock_name
from dra.prepare.layouts import LayoutRecord
from dra.slices.sharing import identity_of
from dra.slices.taints import Taint
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop

log = get_logger()

DRAINING = "gpu.nvidia.com/draining"
# So often a change is tried before the GPU goes back to what it was.
MAX_ATTEMPTS = 3
MAX_CLAIMS_NAMED = 16


@dataclass(slots=True)
class _Draining:
    """One GPU on its way."""

    wanted: GpuSettings
    since: float
    stored_at: float | None = None
    attempts: int = 0
    given_up_at: float | None = None
    error: DraError | None = None


@dataclass(frozen=True, slots=True)
class _World:
    """What the API says: None where it is not known yet."""

    policies: Mapping[str, Policy] | None = None
    unreadable: tuple[UnreadablePolicy, ...] = ()
    labels: Mapping[str, str] | None = None


class PolicyKeeper:
    """One for each node driver; its work is done in one thread.

    Args:
        base: what the flags say.
        driver, pool: whose allocations count.
        state: what holds now, over restarts.
        step: hears the name of each step that is done, for tests that end the process there.
    """

    def __init__(
        self,
        *,
        base: NodeSettings,
        driver: str,
        pool: str,
        state: AppliedFile,
        ports: PolicyPorts,
        timings: PolicyTimings | None = None,
        clock: Clock | None = None,
        step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._base, self._driver, self._pool = base, driver, pool
        self._file, self._ports, self._step = state, ports, step
        self._timings, self._clock = timings or PolicyTimings(), clock or SystemClock()
        self._applied = state.load()
        self._settings = self._applied.over(base)
        self._world = _World()
        self._lock = threading.Lock()
        self._loop = Loop(
            "policy", self.step, seconds=self._timings.idle, retry_seconds=self._timings.slow_poll
        )
        self._teller = PolicyTeller(ports.tell, ports.report)
        self._draining: dict[str, _Draining] = {}
        self._led = False

    # -- for the daemon ----------------------------------------------------------------------------

    @property
    def settings(self) -> NodeSettings:
        """What holds now; before the first step, what held when the last instance ended."""
        return self._settings

    @property
    def has_state(self) -> bool:
        """Whether something holds that the flags do not say."""
        return bool(self._applied.settings or self._applied.held_back)

    def recall(self) -> None:
        """Take what was written down last, before anything is published: a GPU that was held back stays so."""
        if not self._led:
            self._take(self._file.load())
            self._publish()
            self.hold_back(self._ports.inventory())

    def hold_back(self, inventory: Inventory) -> None:
        """Have the GPUs of an inventory that are held back tainted, before they are published."""
        self._taint(self._applied.held_back, inventory)

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        self._loop.start()

    def stop(self, *, timeout_seconds: float = 5.0) -> bool:
        """End after the step under way; whether the thread is gone."""
        return self._loop.stop(timeout_seconds=timeout_seconds)

    def policies_are(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Take all GpuNodePolicies that there are; none, where the definition is not installed."""
        read = [read_policy(body) for body in bodies]
        valid = {each.name: each for each in read if isinstance(each, Policy)}
        unreadable = sorted(
            (each for each in read if isinstance(each, UnreadablePolicy)), key=lambda each: each.name
        )
        with self._lock:
            self._see(replace(self._world, policies=valid, unreadable=tuple(unreadable)))

    def labels_are(self, labels: Mapping[str, str]) -> None:
        """Take the labels of the node."""
        with self._lock:
            self._see(replace(self._world, labels=dict(labels)))

    def look(self) -> None:
        """Look now: the hardware or the claims changed."""
        self._loop.wake()

    def _see(self, world: _World) -> None:
        if world != self._world:
            self._world = world
            self._loop.wake()

    # -- one step ----------------------------------------------------------------------------------

    def step(self) -> float:
        """Do what can be done now; give the seconds until the next look. Raises DraError."""
        with self._lock:
            world = self._world
        if not self._ports.leads():
            self._follow()
            return self._timings.slow_poll
        if not self._led:
            self._follow()
            self._led = True
        if world.policies is None or world.labels is None:
            # Nothing is known: what held goes on, and what had begun stays held back.
            self._taint(self._applied.held_back)
            return self._timings.idle
        in_the_way = [each for each in world.unreadable if each.may_choose(world.labels)]
        if in_the_way:
            self._stand_still(in_the_way)
            return self._timings.idle
        inventory = self._ports.inventory()
        found = resolve(
            world.policies.values(),
            labels=world.labels,
            gpus=[identity_of(gpu) for gpu in inventory.gpus],
            base=self._base,
        )
        plans = self._plans(inventory, found.settings)
        self._forget_gone(inventory)
        self._apply_now(plans)
        self._drop_finished(plans)
        self._hold_back_busy()
        self._publish()
        reports = [
            replace(self._advance(gpu, plan), policy=_whose(found, gpu, plan), blocks=plan.blocks)
            for gpu, plan in plans
        ]
        self._hold_back_busy()
        self._teller.tell_progress(found, world.policies, reports)
        if not self._draining:
            return self._timings.idle
        now = self._clock.now()
        young = any(now - each.since < 20 and each.given_up_at is None for each in self._draining.values())
        return self._timings.poll if young else self._timings.slow_poll

    def _follow(self) -> None:
        """Take what the instance that publishes has written down."""
        self._led, self._draining = False, {}
        self._teller.forget()
        self._take(self._file.load())
        self._publish()
        self._taint(self._applied.held_back)

    def _stand_still(self, unreadable: Sequence[UnreadablePolicy]) -> None:
        # What waits for a change that may not come is given out again; what has begun is not.
        self._draining = {}
        self._hold_back_busy()
        # What held goes on: partitions that a reboot took away are made again.
        reports = [
            self._advance(gpu, plan)
            if plan.step == "at-once" and gpu.uuid not in self._applied.changing
            else report_of(gpu)
            for gpu, plan in self._plans(self._ports.inventory(), self._settings)
        ]
        self._teller.tell_unreadable(unreadable, reports)

    def _plans(self, inventory: Inventory, wanted: NodeSettings) -> list[tuple[Gpu, GpuPlan]]:
        return [
            (
                gpu,
                plan_gpu(
                    gpu,
                    current=self._settings.of(identity_of(gpu)),
                    wanted=wanted.of(identity_of(gpu)),
                    record=self._record(gpu),
                ),
            )
            for gpu in inventory.gpus
            if gpu.uuid and not gpu.unusable
        ]

    def _record(self, gpu: Gpu) -> LayoutRecord | None:
        return None if self._ports.changer is None else self._ports.changer.record(gpu.uuid)

    def _apply_now(self, plans: Iterable[tuple[Gpu, GpuPlan]]) -> None:
        """Publish what may change under a claim."""
        applied = self._applied
        for gpu, plan in plans:
            current = applied.over(self._base).of(identity_of(gpu))
            if plan.now != current:
                applied = applied.with_gpu(gpu.uuid, plan.now, changing=gpu.uuid in applied.changing)
        self._save(applied)

    def _drop_finished(self, plans: Iterable[tuple[Gpu, GpuPlan]]) -> None:
        """Let GPUs go that need not change any more, and begin with those that must."""
        for gpu, plan in plans:
            way = self._draining.get(gpu.uuid)
            if plan.step != "when-idle":
                self._draining.pop(gpu.uuid, None)
                if plan.step == "none" and gpu.uuid in self._applied.changing:
                    # The process died after the change and before it was written down.
                    self._save(self._applied.with_gpu(gpu.uuid, plan.now))
            elif way is None or way.wanted != plan.wanted:
                self._draining[gpu.uuid] = _Draining(plan.wanted, self._clock.now())

    def _forget_gone(self, inventory: Inventory) -> None:
        there = {gpu.uuid for gpu in inventory.gpus}
        for uuid in [each for each in self._draining if each not in there]:
            del self._draining[uuid]

    def _busy_gpus(self) -> frozenset[str]:
        on_the_way = {uuid for uuid, way in self._draining.items() if way.given_up_at is None}
        return frozenset(on_the_way | self._applied.changing)

    def _hold_back_busy(self) -> None:
        """Taint what is on its way, and write it down for the next instance."""
        busy = self._busy_gpus()
        self._taint(busy)
        self._save(replace(self._applied, draining=busy))

    def _taint(self, uuids: Iterable[str], inventory: Inventory | None = None) -> None:
        wanted = set(uuids)
        taint = (Taint(DRAINING, "NoSchedule"),)
        gpus = (inventory or self._ports.inventory()).gpus
        self._ports.taint({str(GpuName(gpu.minor)): taint for gpu in gpus if gpu.uuid in wanted})

    # -- one GPU -----------------------------------------------------------------------------------

    def _advance(self, gpu: Gpu, plan: GpuPlan) -> GpuReport:
        if plan.step == "refused" and plan.refused is not None:
            return report_of(gpu, "Refused", plan.refused)
        if plan.step == "at-once":
            error = self._change(gpu, plan)
            return report_of(gpu) if error is None else report_of(gpu, "Changing", error)
        way = self._draining.get(gpu.uuid)
        if way is None:
            return report_of(gpu)
        if way.given_up_at is not None:
            if self._clock.now() - way.given_up_at >= self._timings.retry:
                self._draining[gpu.uuid] = _Draining(plan.wanted, self._clock.now())
            return report_of(gpu, "Refused", way.error)
        return self._drain(gpu, plan, way)

    def _drain(self, gpu: Gpu, plan: GpuPlan, way: _Draining) -> GpuReport:
        what = ", ".join(block_name(block) for block in plan.blocks)
        if way.stored_at is None:
            late = self._clock.now() - way.since >= self._timings.stored
            if not self._ports.stored() and not late:
                return waiting_report(gpu, f"to change {what}: the taint {DRAINING} is being published")
            way.stored_at = self._clock.now()
        if self._clock.now() - way.stored_at < self._timings.settle:
            return waiting_report(gpu, f"to change {what}: until no scheduler can be about to give it out")
        claims = self._claims_on(gpu)
        if claims:
            named = ", ".join(claims[:MAX_CLAIMS_NAMED])
            return waiting_report(
                gpu, f"to change {what} when these claims end: {named}", claims[:MAX_CLAIMS_NAMED]
            )
        self._save(self._applied.with_gpu(gpu.uuid, self._settings.of(identity_of(gpu)), changing=True))
        self._step("policy:begun")
        error = self._change(gpu, plan)
        if error is None:
            del self._draining[gpu.uuid]
            return report_of(gpu)
        return self._failed(gpu, way, error)

    def _claims_on(self, gpu: Gpu) -> tuple[str, ...]:
        mine = lock_name(str(GpuName(gpu.minor)))
        sides = sides_on_node(self._ports.inventory())
        held = {
            str(hold.ref)
            for hold in self._ports.holds()
            if lock_name(sides.get(hold.device, hold.device)) == mine
        }
        allocated = claims_on_gpus(self._ports.claims(), driver=self._driver, pool=self._pool, sides=sides)
        return tuple(sorted(held.union(allocated.get(gpu.minor, ()))))

    def _change(self, gpu: Gpu, plan: GpuPlan) -> DraError | None:
        """Make the change on the hardware and publish it; give what went wrong."""
        try:
            if plan.places is not None and self._ports.changer is not None:
                self._ports.changer.change(gpu, plan.places)
                self._ports.look_again()
            if "time_slice" in plan.blocks:
                self._ports.time_slice(gpu, plan.wanted.time_slice or "Default")
        except DraError as error:
            log.warning("policy_change_failed", gpu=gpu.uuid, **error_fields(error))
            return error
        # Published with the taint still on it; the taint goes with the next publication.
        self._save(self._applied.with_gpu(gpu.uuid, plan.wanted, changing=True))
        self._publish()
        self._step("policy:published")
        self._save(self._applied.with_gpu(gpu.uuid, plan.wanted))
        self._step("policy:done")
        return None

    def _failed(self, gpu: Gpu, way: _Draining, error: DraError) -> GpuReport:
        """Try again a few times; then go back to what was, and say why."""
        way.attempts, way.error = way.attempts + 1, error
        if way.attempts < MAX_ATTEMPTS:
            return report_of(gpu, "Changing", error)
        seen = self._ports.look_again()
        again = next((each for each in seen.gpus if each.uuid == gpu.uuid), gpu)
        current = self._settings.of(identity_of(gpu))
        back = plan_gpu(again, current=current, wanted=current, record=self._record(gpu))
        if back.places is not None and self._ports.changer is not None:
            try:
                self._ports.changer.change(again, back.places)
                self._ports.look_again()
            except DraError as worse:
                # Neither the new nor the old: it stays tainted, and is tried again.
                way.attempts, way.error = 0, worse
                return report_of(gpu, "Changing", worse)
        way.given_up_at = self._clock.now()
        self._save(self._applied.with_gpu(gpu.uuid, current))
        log.warning("policy_change_given_up", gpu=gpu.uuid, **error_fields(error))
        return report_of(gpu, "Refused", error)

    # -- what holds --------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._ports.publish(self._settings)

    def _save(self, applied: AppliedSettings) -> None:
        if applied != self._applied:
            self._file.save(applied)
            self._take(applied)

    def _take(self, applied: AppliedSettings) -> None:
        self._applied, self._settings = applied, applied.over(self._base)


def _whose(found: Resolution, gpu: Gpu, plan: GpuPlan) -> str:
    """Give the policy that wants a change; empty: the flags do."""
    sources = (found.settings.source_of(identity_of(gpu), block) for block in plan.blocks)
    return next((source for source in sources if source), "").removeprefix("GpuNodePolicy ")
