"""The health monitor: brings events, checks and the book together, on a thread of its own.

    NVML's events, kernel log -> hearing -> book <- checks <- NVML
                                             book -> verdict -> taints, health stream, Events; health.json

Nothing slow happens on the thread: a check runs beside it and reports when it is done, so that a GPU that hangs does
not delay the news of another.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dra.errors import HostError
from dra.health.book import HealthBook
from dra.health.checks import DEADLINE_SECONDS, Answer, Checks
from dra.health.ears import Ears
from dra.health.model import Change, Condition, Reading, XidEvent
from dra.health.outcome import Verdict, plan_verdict
from dra.health.policy import LOST, HealthPolicy
from dra.health.state_file import HealthState, load_state, save_state
from dra.host.kernel_log import seconds_since_boot
from dra.inventory.diff import InventoryDiff
from dra.inventory.model import NODE, Gpu, Inventory
from dra.nvml.event_watch import WatchedGpu, WatchState
from dra.nvml.session import NvmlSession
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# Between two checks of all GPUs while all are well, and while one is not.
CHECK_SECONDS = 10.0
FAST_SECONDS = 2.0
# How long an XID waits for what its GPU says about it.
JUDGE_SECONDS = 1.0
# XIDs are judged at most this often: a storm is a few batches.
GAP_SECONDS = 0.25
# How often a GPU that is lost or gone is looked for.
RESCAN_SECONDS = 3.0
# For so long nobody may listen before that is said: a driver is being replaced.
UNHEARD_SECONDS = 30.0
_GONE = "DRA-GPU-GONE"
# What changes of a GPU that is cut into partitions, and back.
_PARTITIONS = frozenset({"mig_enabled", "mig_devices", "mig_profiles", "mig_mode_ours"})
_NOT_LOADED = "DRA-NVML-DRIVER-NOT-LOADED"


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """What `doctor` and the metrics show. `xids` counts by (GPU UUID, XID) since the start."""

    conditions: tuple[Condition, ...]
    xids: dict[tuple[str, int], int]
    watch: WatchState
    kernel_log: str


@dataclass(frozen=True, slots=True)
class HealthPorts:
    """What the monitor sees of the rest of the driver; all of it answers at once.

    Args:
        inventory: what the node has.
        held: names of the devices that claims hold.
        rescan: have the hardware looked at again.
        told: hears the verdict and what changed since the last one, on the monitor's thread.
        away: whether a GPU (by UUID) is passed through to a virtual machine: then it does not answer, and is not ill.
    """

    inventory: Callable[[], Inventory]
    held: Callable[[], Collection[str]]
    rescan: Callable[[str], None]
    told: Callable[[Verdict, tuple[Change, ...]], None]
    away: Callable[[str], bool] = lambda _uuid: False


class HealthMonitor:
    """See the module's text.

    Args:
        session: NVML.
        ports: the rest of the driver.
        policy: what the administrator set.
        state_path: `health.json`.
        kernel_log_path: `/dev/kmsg` of the node.
        boot_id: which boot of the machine this is.
    """

    def __init__(
        self,
        session: NvmlSession,
        ports: HealthPorts,
        *,
        policy: HealthPolicy,
        state_path: Path,
        kernel_log_path: Path,
        boot_id: str,
        check_seconds: float = CHECK_SECONDS,
        fast_seconds: float = FAST_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
        unheard_seconds: float = UNHEARD_SECONDS,
        rescan_seconds: float = RESCAN_SECONDS,
    ) -> None:
        self._ports, self._policy = ports, policy
        self._state_path, self._boot_id = state_path, boot_id
        self._check_seconds, self._fast_seconds = check_seconds, fast_seconds
        self._unheard_seconds, self._rescan_seconds = unheard_seconds, rescan_seconds
        self._book = HealthBook(policy, wall=time.time, clock=seconds_since_boot)
        self._ears = Ears(
            session,
            kernel_log_path=kernel_log_path,
            inventory=ports.inventory,
            watched=self._watched,
            heard=self._heard,
        )
        self._checks = Checks(session, self._answered, deadline_seconds=deadline_seconds)
        self._thread: threading.Thread | None = None
        self._stopping = False
        # Guards what other threads leave here.
        self._news = threading.Condition()
        self._readings: list[Answer] = []
        self._look = True
        # GPUs to look at, where it is not all.
        self._look_at: set[str] = set()
        self._inventory_is_new = True
        # When a GPU was last seen passed through, by its UUID (monotonic).
        self._last_away: dict[str, float] = {}
        # One verdict at a time; taken before `_news`.
        self._telling = threading.Lock()
        self._said: Verdict | None = None
        # Below: the thread's own.
        self._waiting: list[tuple[XidEvent, int, float]] = []
        self._next_check = 0.0
        self._next_batch = 0.0
        self._next_rescan = 0.0
        self._unheard_since: float | None = None
        self._epoch = 0
        self._saved: tuple[Condition, ...] = ()
        self._save_failed = ""

    # -- for the owner -----------------------------------------------------------------------------

    def start(self) -> None:
        """Read what an earlier process left, say it, and start watching. Raises HostError."""
        state = load_state(self._state_path)
        same_boot = state.boot_id == self._boot_id
        self._book.restore(state.conditions, same_boot=same_boot)
        self._saved = self._book.conditions
        if self._saved:
            log.info("health_restored", conditions=len(self._saved), same_boot=same_boot)
        thread = threading.Thread(target=self._run, name="health", daemon=True)
        start_thread(thread)
        self._thread = thread
        self._ears.start(after=_heard_until(state, same_boot=same_boot))

    def stop(self, *, timeout_seconds: float = 2.0) -> None:
        """Stop watching; what is held against the GPUs stays written down."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._ears.stop(timeout_seconds=timeout_seconds)
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def inventory_changed(self, inventory: Inventory, difference: InventoryDiff) -> None:
        """Take that the inventory is another one (a subscriber of the live inventory).

        What is held against its devices is told before this returns: a pool that is built from the inventory
        afterwards is never published without its taints.
        """
        self._tell(inventory, ())
        self._ears.place(inventory)
        cut = _cut_anew(difference)
        for gpu in difference.removed:
            self._note_away(gpu.uuid)
        with self._news:
            self._inventory_is_new = True
            self._look = self._look or not cut
            self._look_at |= cut
            self._news.notify_all()

    def resume(self) -> None:
        """Watch again at once: NVML may be used again."""
        self._ears.wake()
        self._heard(True)

    def snapshot(self) -> HealthSnapshot:
        """Give what is known now. From any thread."""
        with self._news:
            return HealthSnapshot(
                self._book.conditions,
                dict(self._book.xid_counts),
                self._ears.watch,
                self._ears.deaf_to_log,
            )

    # -- notes from other threads ------------------------------------------------------------------

    def _heard(self, look: bool) -> None:
        with self._news:
            self._look = self._look or look
            self._news.notify_all()

    def _answered(self, answers: list[Answer]) -> None:
        with self._news:
            self._readings += answers
            self._news.notify_all()

    def _watched(self) -> tuple[WatchedGpu, ...]:
        return tuple(
            WatchedGpu(
                gpu.uuid,
                gpu.pci_address,
                (gpu.mig_enabled, tuple(each.uuid for each in gpu.mig_devices), self._epoch),
            )
            for gpu in self._awake(self._ports.inventory())
            if gpu.unusable != _GONE
        )

    def _awake(self, inventory: Inventory) -> list[Gpu]:
        """Give the GPUs that may be asked without waking them."""
        if all(gpu.persistence for gpu in inventory.gpus):
            return list(inventory.gpus)
        held = {name.split("-")[1] for name in self._ports.held() if name.startswith("gpu-")}
        return [gpu for gpu in inventory.gpus if gpu.persistence or str(gpu.minor) in held]

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(self._has_work, self._seconds_left())
                if self._stopping:
                    break
            try:
                self._step()
            except Exception:  # marked border: the watching must not end
                log.exception("health_bug")
                with self._news:
                    self._news.wait(FAST_SECONDS)
        with contextlib.suppress(Exception):
            self._save(force=True)

    def _has_work(self) -> bool:
        now = time.monotonic()
        return (
            self._stopping
            or bool(self._readings)
            or self._inventory_is_new
            or ((self._look or bool(self._look_at)) and not self._checks.all_asked)
            or (self._ears.waiting and now >= self._next_batch)
        )

    def _seconds_left(self) -> float:
        now = time.monotonic()
        times = [self._next_check, *(until for _, _, until in self._waiting)]
        if self._ears.waiting:
            times.append(self._next_batch)
        if self._wants_rescan():
            times.append(self._next_rescan)
        return max(0.0, min(times) - now)

    def _step(self) -> None:
        now = time.monotonic()
        with self._news:
            heard = self._ears.take() if now >= self._next_batch else []
            readings, self._readings = self._readings, []
            new_inventory, self._inventory_is_new = self._inventory_is_new, False
            free = not self._checks.all_asked
            look, look_at = free and (self._look or now >= self._next_check), self._look_at
            if free:
                self._look, self._look_at = False, set()
        inventory = self._ports.inventory()
        if new_inventory:
            self._take_inventory(inventory)
        if heard:
            self._next_batch = now + GAP_SECONDS
            self._judge_later(heard, inventory, now)
        for gpu, reading, began in readings:
            self._take_reading(gpu, reading, began, inventory)
        for event, count, until in self._waiting[:]:
            if now >= until:
                self._waiting.remove((event, count, until))
                self._judge(event, count, None)
        if look:
            self._check_all(inventory)
        elif free and look_at:
            self._check_some(inventory, look_at)
        self._note_unmonitored(inventory, now)
        self._look_for_lost(now)
        self._publish()

    # -- XIDs --------------------------------------------------------------------------------------

    def _judge_later(self, heard: list[tuple[XidEvent, int]], inventory: Inventory, now: float) -> None:
        """Have the GPUs asked what to make of their XIDs; if they do not answer soon, the list decides."""
        known = {gpu.uuid: gpu for gpu in inventory.gpus}
        for event, count in heard:
            self._waiting.append((event, count, now + JUDGE_SECONDS))
        asked = [known[uuid] for uuid in dict.fromkeys(each.scope.gpu for each, _ in heard) if uuid in known]
        if not asked or not self._checks.start(asked):
            for entry in self._waiting:
                self._judge(entry[0], entry[1], None)
            self._waiting.clear()

    def _judge(self, event: XidEvent, count: int, reading: Reading | None) -> None:
        with self._news:
            self._book.take_xid(event, reading, count=count)
        log.warning(
            "xid_received", gpu_uuid=event.scope.gpu, xid=event.xid, gi=event.scope.gi, ci=event.scope.ci,
            count=count, source=event.source, recovery_action=None if reading is None else reading.recovery_action,
        )  # fmt: skip

    # -- checks ------------------------------------------------------------------------------------

    def _check_some(self, inventory: Inventory, uuids: set[str]) -> None:
        gpus = [gpu for gpu in self._asked(inventory) if gpu.uuid in uuids and gpu.unusable != _GONE]
        if gpus and not self._checks.start(gpus):
            self._next_check = min(self._next_check, time.monotonic() + self._fast_seconds)

    def _check_all(self, inventory: Inventory) -> None:
        gpus = []
        for gpu in self._asked(inventory):
            if gpu.unusable == _GONE:
                gone = Reading(error=_GONE, message="the driver does not report the GPU any more")
                self._take_reading(gpu.uuid, gone, time.monotonic(), inventory)
            else:
                gpus.append(gpu)
        if gpus and not self._checks.start(gpus, all_gpus=True):
            self._next_check = time.monotonic() + self._fast_seconds
            return
        unsettled = self._book.unsettled
        self._next_check = time.monotonic() + (self._fast_seconds if unsettled else self._check_seconds)

    def _asked(self, inventory: Inventory) -> list[Gpu]:
        """Give the GPUs that may be asked now. Nobody opens one that is on its way to a virtual machine."""
        return [gpu for gpu in self._awake(inventory) if not self._ports.away(gpu.uuid)]

    def _take_reading(self, gpu: str, reading: Reading, began: float, inventory: Inventory) -> None:
        for entry in self._waiting[:]:
            event, count, until = entry
            # Only what was asked after the XID came says anything about it.
            if event.scope.gpu == gpu and began >= until - JUDGE_SECONDS:
                self._waiting.remove(entry)
                self._judge(event, count, reading)
        if reading.error and self._was_away(gpu, began):
            return
        was_lost = self._is_lost(gpu)
        with self._news:
            self._book.take_reading(gpu, reading)
        if self._book.unsettled:
            self._next_check = min(self._next_check, time.monotonic() + self._fast_seconds)
        lost = self._is_lost(gpu)
        if lost != was_lost:
            if was_lost:
                # Registered for events anew.
                self._epoch += 1
            self._next_rescan = 0.0
        if not reading.error and any(each.uuid == gpu and each.unusable for each in inventory.gpus):
            # The scan has not seen yet that it is well again.
            self._next_rescan = min(self._next_rescan, time.monotonic())

    def _note_away(self, gpu: str) -> None:
        if self._ports.away(gpu):
            self._last_away[gpu] = time.monotonic()

    def _was_away(self, gpu: str, began: float) -> bool:
        """Whether a GPU is passed through, or was after it was asked: it may be back when its answer is."""
        self._note_away(gpu)
        return self._last_away.get(gpu, -math.inf) >= began

    def _is_lost(self, gpu: str) -> bool:
        return any(each.key == LOST for each in self._book.of(gpu))

    # -- the rest ----------------------------------------------------------------------------------

    def _take_inventory(self, inventory: Inventory) -> None:
        with self._news:
            for gpu in inventory.gpus:
                if not gpu.unusable:
                    self._book.take_instances(
                        gpu.uuid,
                        [(each.gpu_instance_id, each.compute_instance_id) for each in gpu.mig_devices],
                    )
            if any(each.subject == NODE and each.code == _NOT_LOADED for each in inventory.problems):
                self._book.take_driver_gone(gpu.uuid for gpu in inventory.gpus)
            if inventory.gpus:
                self._book.forget_absent(gpu.uuid for gpu in inventory.gpus)

    def _note_unmonitored(self, inventory: Inventory, now: float) -> None:
        """Say which GPUs nobody listens to: no event set, and no kernel log either."""
        deaf, state = bool(self._ears.deaf_to_log), self._ears.watch
        if not deaf or not inventory.gpus or len(state.registered) >= len(inventory.gpus):
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = now
        late = self._unheard_since is not None and now - self._unheard_since >= self._unheard_seconds
        with self._news:
            for gpu in inventory.gpus:
                heard = not deaf or gpu.uuid in state.registered
                if heard or late:
                    why = "" if heard else state.refused.get(gpu.uuid) or state.why or "it is asleep"
                    self._book.take_unmonitored(gpu.uuid, why)

    def _wants_rescan(self) -> bool:
        inventory = self._ports.inventory()
        return any(gpu.unusable for gpu in inventory.gpus) or any(
            each.key == LOST for each in self._book.conditions
        )

    def _look_for_lost(self, now: float) -> None:
        """Have the hardware looked at soon while a GPU is lost: it may be back."""
        if self._wants_rescan() and now >= self._next_rescan:
            self._next_rescan = now + self._rescan_seconds
            self._ports.rescan("a GPU is lost or may be back")

    def _publish(self) -> None:
        with self._news:
            changes = self._book.take_changes()
        for change in changes:
            _report(change)
        # Written first: what was said is not forgotten.
        self._save()
        self._tell(self._ports.inventory(), changes)

    def _tell(self, inventory: Inventory, changes: tuple[Change, ...]) -> None:
        with self._telling:
            with self._news:
                conditions = self._book.conditions
            verdict = plan_verdict(conditions, inventory, self._policy)
            if changes or verdict != self._said:
                self._said = verdict
                self._ports.told(verdict, changes)

    def _save(self, *, force: bool = False) -> None:
        conditions = self._book.conditions
        if conditions == self._saved and not force:
            return
        try:
            heard = (time.time(), seconds_since_boot())
            save_state(self._state_path, HealthState(self._boot_id, conditions, *heard))
        except HostError as error:
            if error.code != self._save_failed:
                log.warning("health_state_not_written", **error_fields(error))
            self._save_failed = error.code
            return
        self._saved, self._save_failed = conditions, ""


def _cut_anew(difference: InventoryDiff) -> set[str]:
    """Give the GPUs on which partitions were made or destroyed, if nothing else has changed. Pure.

    It happens with every claim for a partition, and says nothing about the other GPUs.
    """
    if replace(difference, changed=()):
        return set()
    if any(set(each.changed) - _PARTITIONS for each in difference.changed):
        return set()
    return {each.after.uuid for each in difference.changed}


def _heard_until(state: HealthState, *, same_boot: bool) -> float | None:
    """Give the time since boot until which an earlier process has listened; None: nobody did in this boot."""
    if not same_boot or not state.heard_at:
        return None
    if state.heard_up is not None:
        return state.heard_up
    # A version wrote it that kept the time of day alone.
    ago = time.time() - state.heard_at
    return seconds_since_boot() - ago if ago > 0 else None


def _report(change: Change) -> None:
    condition = change.condition
    fields = {
        "gpu_uuid": condition.scope.gpu, "gi": condition.scope.gi, "ci": condition.scope.ci, "key": condition.key,
        "value": condition.value, "grade": condition.grade.name.lower(), "text": condition.message,
    }  # fmt: skip
    if change.after is None:
        seconds = 0.0 if condition.since_up is None else seconds_since_boot() - condition.since_up
        log.info("health_condition_cleared", seconds=round(seconds), **fields)
    elif condition.is_ill:
        log.warning("health_condition_set", remedy=condition.remedy, **fields)
    else:
        log.info("health_condition_set", **fields)
