"""The publisher: a thread that keeps a node's pool in the API equal to what the node has.

It publishes when the wanted content changes, when the watch shows that somebody else changed or deleted a
slice, and now and then to be sure. Everything is decided in one thread; the watch and the callers only leave
notes for it. It never deletes the pool when it stops: a driver that restarts keeps its devices.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dra.controller.dropped import DroppedFields, describe
from dra.controller.lock import PublisherLock
from dra.controller.reconcile import Outcome, PoolReconciler, pool_selector
from dra.controller.refusal import Refusal
from dra.controller.restores import SETTLE_SECONDS, Restores
from dra.controller.shape import Json, PoolContent, PoolIdentity, contents_of, normal_form
from dra.errors import BugError, DraError, HostError, KubeError
from dra.kube.client import KubeClient, ObjectList
from dra.kube.clock import Backoff, Clock, SystemClock
from dra.kube.reflector import Change, Reflector, ReflectorOptions, metadata_of
from dra.kube.resources import RESOURCE_SLICES
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

State = Literal["stopped", "waiting", "publishing"]
# Two changes of the content in a row are published together: at most two writes a second.
GAP_SECONDS = 0.5
# Read the pool again after this long although nobody said that it changed: with a good watch, without one.
VERIFY_SECONDS = 600.0
VERIFY_BLIND_SECONDS = 45.0
# A node that is not registered yet may be there any moment.
NODE_RETRY_SECONDS = 5.0
# After an outage, fields that were dropped longer ago than this are sent again once.
FORGIVE_SECONDS = 600.0
# How often the waiting instance tries the lock.
LOCK_SECONDS = 0.1
# A failure that goes on is logged again after this long.
REPEAT_LOG_SECONDS = 300.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """What the probe, the metrics and `doctor` show. Times are seconds since 1970.

    Args:
        state: `waiting` means that another instance publishes for this node.
        ready: the pool in the API equals the wanted one. While waiting it is never true.
        writes: objects written or deleted since the start.
        restores: how often somebody else's change was undone.
    """

    state: State = "stopped"
    ready: bool = False
    ready_since: float | None = None
    generation: int = 0
    slices: int = 0
    devices: int = 0
    writes: int = 0
    restores: int = 0
    failures: int = 0
    last_success: float | None = None
    last_error: DraError | None = None
    watch_error: DraError | None = None
    contested_by: str | None = None
    dropped: DroppedFields = describe(set())  # noqa: RUF009  an immutable value
    refused: tuple[Refusal, ...] = ()


class Publisher:
    """Publishes one pool of one node.

    Args:
        pool_name: the node's name, if not given.
        lock_path: `publisher.lock` in the state directory; None means that nobody else can be there.
        start_jitter_seconds: a random part of it passes before the first publication: a whole fleet that
            is rolled out at once does not write at once.
        on_server_version: told (major, minor) before the first publication, when it changes, and when fields that
            were dropped are worth another try; may call `set_desired`, so that the pool has the shape of
            that server.
        on_dropped: told all fields that this server leaves out, whenever there are new ones; may call
            `set_desired` with a pool that does without.
        on_lead: called when this instance is the one that publishes, before it does.

    The callbacks run in the publisher's thread.
    """

    def __init__(
        self,
        client: KubeClient,
        node_name: str,
        driver: str,
        *,
        pool_name: str | None = None,
        lock_path: Path | None = None,
        start_jitter_seconds: float = 0.0,
        on_server_version: Callable[[tuple[int, int]], None] | None = None,
        on_dropped: Callable[[DroppedFields], None] | None = None,
        on_lead: Callable[[], None] = lambda: None,
        watch_options: ReflectorOptions | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        identity = PoolIdentity(driver, node_name, pool_name or node_name)
        self._log = log.bind(node=node_name, pool=identity.pool_name)
        self._lock_file = PublisherLock(lock_path) if lock_path else None
        self._jitter = start_jitter_seconds
        self._on_server_version = on_server_version or (lambda _version: None)
        self._on_dropped = on_dropped or (lambda _dropped: None)
        self._on_lead = on_lead
        self._reconciler = PoolReconciler(client, identity, clock=self._clock, on_write=self._note_own)
        self._reflector = self._watch(identity, watch_options or ReflectorOptions())
        self._restores = Restores()
        self._backoff = Backoff(rng=self._rng)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Guards what callers and the thread share.
        self._mutex = threading.Lock()
        self._desired: tuple[Json, ...] | None = None
        self._desired_form: list[Json] | None = None
        self._status = PublisherStatus()
        self._news: deque[tuple[str, str, str] | dict[str, str]] = deque()
        # Below: the thread's own.
        self._own: deque[tuple[str, str]] = deque(maxlen=256)
        self._versions: dict[str, str] | None = None
        self._due: float | None = None
        self._not_before = 0.0
        self._passed_at = float("-inf")
        self._verify_seconds = VERIFY_SECONDS * (0.9 + self._rng.random() / 10)
        self._disturbed = False
        self._server: tuple[int, int] | None = None
        self._server_is_known = False
        self._unreachable = False
        self._published_form: list[Json] | None = None
        self._told: set[str] = set()
        self._told_at = 0.0
        self._logged: tuple[str, float] = ("", 0.0)

    def _watch(self, identity: PoolIdentity, options: ReflectorOptions) -> Reflector:
        return Reflector(
            self._client,
            RESOURCE_SLICES,
            on_change=self._see_change,
            on_list=self._see_list,
            options=replace(options, field_selector=pool_selector(identity)),
            clock=self._clock,
            rng=self._rng,
            # What the slices say is read at each pass; with partitions a copy of it would be megabytes.
            keep=metadata_of,
        )

    # -- for the owner -----------------------------------------------------------------------------

    def set_desired(self, pool: PoolContent) -> None:
        """Say what the pool shall hold; returns at once. The same content again changes nothing."""
        contents = contents_of(pool)
        form = [normal_form(content) for content in contents]
        with self._mutex:
            if form == self._desired_form:
                return
            self._desired, self._desired_form = contents, form
            self._status = replace(self._status, ready=False, ready_since=None)
        self._news.append(("desired", "", ""))
        self._wake.set()

    def start(self) -> None:
        """Start the thread."""
        self._update(state="waiting")
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        start_thread(self._thread)

    def stop(self, *, timeout_seconds: float = 5.0) -> bool:
        """Stop publishing and let another instance take over; the slices stay. Whether the thread is gone."""
        self._stop.set()
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """Let another instance publish although this one's thread still hangs; for a process that ends."""
        if self._lock_file is not None:
            self._lock_file.release()

    def status(self) -> PublisherStatus:
        """Give a snapshot."""
        with self._mutex:
            return replace(self._status, watch_error=self._reflector.error)

    @property
    def ready(self) -> bool:
        """Whether the pool in the API equals the wanted one, written by this instance."""
        with self._mutex:
            return self._status.ready

    # -- notes from other threads ------------------------------------------------------------------

    def _see_change(self, change: Change) -> None:
        metadata = change.object["metadata"]
        mark = metadata["uid"] if change.type == "deleted" else metadata["resourceVersion"]
        self._news.append((change.type, metadata["name"], str(mark)))
        self._wake.set()

    def _see_list(self, listed: ObjectList) -> None:
        self._news.append(
            {obj["metadata"]["name"]: str(obj["metadata"]["resourceVersion"]) for obj in listed.items}
        )
        self._wake.set()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._wait_for_lock():
                return
            self._tell_of_the_lead()
            self._update(state="publishing")
            if self._jitter > 0:
                self._clock.wait(self._stop, self._rng.random() * self._jitter)
            self._start_watch()
            while not self._stop.is_set():
                self._step()
        finally:
            self._reflector.stop()
            if self._lock_file is not None:
                self._lock_file.release()
            self._update(state="stopped", ready=False, ready_since=None)

    def _tell_of_the_lead(self) -> None:
        try:
            self._on_lead()
        except (
            Exception
        ) as error:  # marked border: a node without slices is worse than what the listener missed
            self._log.exception("lead_not_told", **error_fields(error))

    def _start_watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._reflector.start()
            except HostError as error:
                self._log.warning("publisher_watch_not_started", **error_fields(error))
                self._update(last_error=error)
                self._clock.wait(self._stop, LOCK_SECONDS)
            else:
                return

    def _wait_for_lock(self) -> bool:
        """Wait until no other instance publishes; whether to go on."""
        waited = False
        while self._lock_file is not None and not self._stop.is_set():
            try:
                if self._lock_file.try_acquire():
                    break
            except DraError as error:
                # A node with a full disk has GPUs all the same.
                self._log.error("publisher_lock_failed", **error_fields(error))
                self._update(last_error=error)
                break
            if not waited:
                self._log.info("publisher_waiting", path=str(self._lock_file.path))
                waited = True
            self._clock.wait(self._stop, LOCK_SECONDS)
        return not self._stop.is_set()

    def _confirm_lead(self) -> bool:
        """Make sure that still nobody else publishes, or wait until that is so; whether to go on."""
        lock = self._lock_file
        if lock is None or not lock.held or lock.confirm():
            return True
        self._log.warning("publisher_lock_replaced", path=str(lock.path))
        self._update(state="waiting", ready=False, ready_since=None)
        if not self._wait_for_lock():
            return False
        self._tell_of_the_lead()
        self._update(state="publishing")
        return True

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        now = self._clock.now()
        due = self._verify_due() if self._due is None else min(self._due, self._verify_due())
        until = max(due, self._not_before)
        if until > now:
            # The watch can go blind without waking us.
            self._clock.wait(self._wake, min(until - now, VERIFY_BLIND_SECONDS))
        self._wake.clear()
        if self._stop.is_set():
            return
        self._read_news()
        now = self._clock.now()
        if now < self._not_before:
            return
        if (self._due is not None and now >= self._due) or now >= self._verify_due():
            self._pass()

    def _verify_due(self) -> float:
        return self._passed_at + (VERIFY_BLIND_SECONDS if self._reflector.error else self._verify_seconds)

    def _read_news(self) -> None:
        """Turn what callers and the watch left into a time for the next pass."""
        now = self._clock.now()
        while self._news:
            news = self._news.popleft()
            if isinstance(news, dict):
                # A complete list: a server that could not be reached answers again.
                if self._unreachable:
                    self._not_before = min(self._not_before, now)
                if self._versions is not None and news != self._versions:
                    self._schedule_restore(now)
                continue
            kind, name, mark = news
            if kind == "desired":
                self._due = now if self._due is None else min(self._due, now)
            elif (name, mark) not in self._own and (self._versions or {}).get(name) != mark:
                self._schedule_restore(now)

    def _schedule_restore(self, now: float) -> None:
        delay = self._restores.delay_seconds(now)
        if delay > SETTLE_SECONDS:
            self._update(ready=False, ready_since=None)
        at = now + delay
        self._due = at if self._due is None else min(self._due, at)
        self._disturbed = True

    def _pass(self) -> None:
        """One attempt to bring the pool in order."""
        self._due = None
        if not self._confirm_lead():
            return
        try:
            self._ask_server_version()
            with self._mutex:
                desired, form = self._desired, self._desired_form
            if desired is None:
                self._passed_at = self._clock.now()
                return
            outcome = self._reconciler.run(desired, forms=form or ())
        except DraError as error:
            self._failed(error)
        except Exception as error:  # marked border: a bug here must not end the publishing
            self._log.exception("publisher_crashed")
            self._failed(BugError("DRA-BUG", f"publishing failed: {type(error).__name__}: {error}"))
        else:
            self._succeeded(outcome, form)

    def _ask_server_version(self) -> None:
        if self._server_is_known:
            return
        version = self._client.server_version(refresh=True)
        self._server_is_known = True
        # After an outage the same version may have other gates: what it dropped is worth another try.
        again = bool(self._told) and self._clock.now() - self._told_at > FORGIVE_SECONDS
        if version != self._server or again:
            if self._server is not None:
                self._reconciler.forget_server()
            self._told.clear()
            self._server = version
            self._on_server_version(version)

    def _succeeded(self, outcome: Outcome, form: list[Json] | None) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        failed_before = self._backoff.failures > 0
        self._backoff.reset()
        self._unreachable = False
        if self._disturbed and outcome.writes and form == self._published_form:
            self._note_restore(outcome, now)
        self._disturbed = False
        self._published_form = form
        self._versions = dict(outcome.versions)
        self._passed_at = now
        self._not_before = now + GAP_SECONDS if outcome.writes else now
        refused = self._reconciler.refusals
        new_fields = set(self._reconciler.dropped.fields) - self._told
        self._told |= new_fields
        dropped = describe(self._told)
        with self._mutex:
            before = self._status
            ready = form == self._desired_form
            self._status = replace(
                before,
                ready=ready,
                ready_since=(before.ready_since if before.ready else wall) if ready else None,
                generation=outcome.generation,
                slices=outcome.slices,
                devices=outcome.devices,
                writes=before.writes + outcome.writes,
                failures=0,
                last_success=wall,
                last_error=self._standing_error(outcome, now),
                contested_by=(outcome.last_writer or before.contested_by or "an unknown writer")
                if self._restores.is_contested(now)
                else None,
                dropped=dropped,
                refused=refused,
            )
        standing = self._status.last_error
        if standing is not None and standing.code == "DRA-SLICE-ALTERED" and outcome.writes:
            self._log.error("pool_altered", **error_fields(standing))
        if outcome.writes or failed_before:
            self._log.info(
                "pool_published",
                generation=outcome.generation,
                slices=outcome.slices,
                devices=outcome.devices,
                writes=outcome.writes,
            )
        self._logged = ("", 0.0)
        for refusal in refused:
            if refusal not in before.refused:
                self._log.error("device_refused", **error_fields(refusal.error))
        if failed_before:
            self._reflector.hurry()
        if new_fields:
            self._told_at = now
            self._log.warning("fields_dropped", **error_fields(dropped.error))
            self._on_dropped(dropped)

    def _note_restore(self, outcome: Outcome, now: float) -> None:
        self._restores.record(now)
        self._update(restores=self._status.restores + 1)
        writer = outcome.last_writer or "unknown"
        if self._restores.is_contested(now):
            self._log.error("pool_contested", **error_fields(_contested(self._reconciler.identity, writer)))
        else:
            self._log.warning(
                "pool_restored", wiped=outcome.only_creates, writer=writer, writes=outcome.writes
            )

    def _standing_error(self, outcome: Outcome, now: float) -> DraError | None:
        """Give what is wrong although the pool is published."""
        if self._restores.is_contested(now):
            return _contested(self._reconciler.identity, outcome.last_writer or "unknown")
        if self._reconciler.altered:
            return KubeError(
                "DRA-SLICE-ALTERED",
                f"the API server stores other values in pool {self._reconciler.identity.pool_name} than were sent",
                remedy="Find the mutating admission webhook or policy that changes ResourceSlices, and exempt them.",
                retryable=False,
            )
        refusals = self._reconciler.refusals
        return refusals[0].error if refusals else None

    def _failed(self, error: DraError) -> None:
        now = self._clock.now()
        delay = self._backoff.next_seconds(error)
        if error.code == "DRA-NODE-NOT-FOUND":
            delay = min(delay, NODE_RETRY_SECONDS)
        self._unreachable = isinstance(error, KubeError) and error.status == 0
        if self._unreachable:
            # Whoever answers next may be an upgraded server.
            self._server_is_known = False
        self._due, self._not_before = now, now + delay
        self._update(failures=self._backoff.failures, last_error=error)
        if self._disturbed:
            # Somebody changed the pool, and it could not be put right.
            self._update(ready=False, ready_since=None)
        code, at = self._logged
        if code != error.code or now - at > REPEAT_LOG_SECONDS:
            self._logged = (error.code, now)
            self._log.warning("pool_publish_failed", attempt=self._backoff.failures, **error_fields(error))

    def _note_own(self, name: str, mark: str) -> None:
        self._own.append((name, mark))

    def _update(self, **changes: object) -> None:
        with self._mutex:
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]


def _contested(identity: PoolIdentity, writer: str) -> DraError:
    return KubeError(
        "DRA-POOL-CONTESTED",
        f"{writer} keeps changing the ResourceSlices of pool {identity.pool_name} of driver {identity.driver}",
        remedy="Only one program may publish a pool: stop the other one, or give one of them another driver name.",
        writer=writer,
    )
