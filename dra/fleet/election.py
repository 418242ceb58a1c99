"""Leader election by a Lease: of several replicas one works.

The clocks of the replicas are never compared: a lease is old when its record has not changed for its duration on our own
clock, which goes on while the machine sleeps. Who cannot renew in time stops working before another may begin, and who
could not even notice (its process was stopped) finds its `Lead` at an end before it sends the next thing.
Source: coordination.k8s.io/v1; the behaviour of client-go's leader election.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dra.errors import KubeError
from dra.kube.client import KubeClient
from dra.kube.clock import Clock, SleeplessClock
from dra.kube.resources import LEASES
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """How long a lease is good, how long a leader tries to renew it, and how often everybody looks; in seconds."""

    lease: float = 15.0
    renew: float = 10.0
    retry: float = 2.0


class Lead:
    """One time as leader: it holds until so many seconds after the last renewal, or until it is ended. Thread-safe.

    Whatever is done in its name asks `check` right before it is done: between two rounds of the election a process can
    be stopped for longer than its lease is good. What was sent just before that is for the API server to refuse: each
    write also names the version of the object that it was decided by.
    """

    def __init__(self, lease: str, *, seconds: float, clock: Clock) -> None:
        self._lease, self._seconds, self._clock = lease, seconds, clock
        self._until = float("-inf")
        self._over = False

    def renew(self, at: float) -> None:
        """Take that the lease was ours at this moment of the clock, or later."""
        self._until = at + self._seconds

    def end(self) -> None:
        """End it for good."""
        self._over = True

    @property
    def holds(self) -> bool:
        """Whether we lead now."""
        return not self._over and self._clock.now() < self._until

    def check(self) -> None:
        """Raise KubeError (DRA-FLEET-NOT-LEADING) if it does not hold."""
        if not self.holds:
            raise _not_leading(self._lease)


def _not_leading(lease: str) -> KubeError:
    return KubeError(
        "DRA-FLEET-NOT-LEADING",
        f"not sent: this replica does not hold the lease {lease}, or not for sure",
        remedy="Nothing is to do: the replica that holds the lease does this work. If none does, look at the lease and "
        "at what the replicas log of it.",
    )


class Elector:
    """Takes part in an election, in a thread of its own.

    Args:
        identity: who we are; differs between replicas.
        on_lead: called with the new lead when we lead; must return soon.
        on_lost: called when we do not any more, and when we stop while leading; when it returns nothing of ours works.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        on_lead: Callable[[Lead], None],
        on_lost: Callable[[], None],
        times: ElectionTimes | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._namespace, self._name, self._identity = client, namespace, name, identity
        self._on_lead, self._on_lost = on_lead, on_lost
        self._times, self._clock = times or ElectionTimes(), clock or SleeplessClock()
        self._seen: tuple[str, Json] = ("", {})
        self._seen_at = 0.0
        self._lead: Lead | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = ""

    @property
    def leading(self) -> bool:
        """Whether the lease was ours when we looked last; what may be done now the `Lead` says."""
        return self._lead is not None

    def check(self) -> None:
        """Raise KubeError (DRA-FLEET-NOT-LEADING) if we do not lead now."""
        lead = self._lead
        if lead is None:
            raise _not_leading(self._name)
        lead.check()

    @property
    def trouble(self) -> str:
        """What keeps us from the lease; empty while the API server answers."""
        return self._failing

    def start(self) -> None:
        """Take part. Raises HostError: DRA-HOST-NO-THREADS."""
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        start_thread(self._thread)

    def stop(self, *, timeout_seconds: float = 10.0) -> None:
        """Give the lease up, so that another need not wait, and end."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._round()
                self._clock.wait(self._ending, self._times.retry)
        finally:
            if self.leading:
                self._lose("we are stopping")
                self._release()

    def _round(self) -> None:
        began = self._clock.now()
        try:
            ours = self._try()
            self._failing = ""
        except KubeError as error:
            if error.code != self._failing:
                log.warning("lease_failed", lease=self._name, **error_fields(error))
            self._failing = error.code
            if self._lead is not None and not self._lead.holds:
                self._lose(str(error))
            return
        if self._lead is not None and not self._lead.holds:
            # Also where the lease is ours again: others may have led meanwhile.
            self._lose("the lease was not renewed in time")
        if not ours:
            if self._lead is not None:
                self._lose("another replica has the lease")
            return
        # The clock of the lease began before the answer came, which may be long ago.
        if self._clock.now() - began >= self._times.renew:
            return
        if self._lead is not None:
            self._lead.renew(began)
            return
        log.info("leading", lease=self._name, identity=self._identity)
        self._lead = Lead(self._name, seconds=self._times.renew, clock=self._clock)
        self._lead.renew(began)
        self._on_lead(self._lead)

    def _lose(self, reason: str) -> None:
        log.warning("not_leading", lease=self._name, reason=reason)
        if self._lead is not None:
            self._lead.end()
        self._lead = None
        self._on_lost()

    def _try(self) -> bool:
        """Take or renew the lease; whether it is ours. Raises KubeError."""
        seconds = self._times.retry + 3
        try:
            lease = self._client.get(LEASES, self._name, self._namespace, timeout_seconds=seconds)
        except KubeError as error:
            if error.code != "DRA-API-NOT-FOUND":
                raise
            body = {
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace}, "spec": self._spec({}),
            }  # fmt: skip
            return self._write(
                lambda: self._client.create(LEASES, body, self._namespace, timeout_seconds=seconds)
            )
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        version = str(lease["metadata"].get("resourceVersion") or "")
        if version != self._seen[0]:
            self._seen, self._seen_at = (version, spec), self._clock.now()
        duration = float(spec.get("leaseDurationSeconds") or self._times.lease)
        if holder not in ("", self._identity) and self._clock.now() - self._seen_at < duration:
            return False
        lease["spec"] = self._spec(spec)
        return self._write(
            lambda: self._client.replace(LEASES, self._name, lease, self._namespace, timeout_seconds=seconds)
        )

    def _write(self, write: Callable[[], Json]) -> bool:
        try:
            write()
        except KubeError as error:
            # Somebody was faster.
            if error.status == 409:
                return False
            raise
        return True

    def _spec(self, before: Json) -> Json:
        now = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        renewing = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._times.lease)),
            "acquireTime": before.get("acquireTime") or now if renewing else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0)
            + (0 if renewing or not before else 1),
        }

    def _release(self) -> None:
        try:
            lease = self._client.get(LEASES, self._name, self._namespace, timeout_seconds=3.0)
            if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._client.replace(LEASES, self._name, lease, self._namespace, timeout_seconds=3.0)
        except KubeError as error:
            log.info("lease_not_released", **error_fields(error))
