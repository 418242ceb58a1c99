"""`status.devices` of prepared claims: which hardware a claim got, and whether it is well.

Written by server-side apply in the background, some time after the prepare call: nothing waits for it and nothing fails
because of it. What the API has already is read once for each claim, so that a restart changes nothing.

Source: KEP-4817; resource.k8s.io/v1 AllocatedDeviceStatus. From Kubernetes 1.36 the API server asks for the verb
`associated-node:patch` on `resourceclaims/driver` too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.errors import KubeError
from dra.health.feed import DeviceCondition, HealthFeed
from dra.health.outcome import mig_name
from dra.inventory.model import Inventory
from dra.inventory.names import MigName, parse_device_name
from dra.prepare.partitions import DEVICE_KIND
from dra.prepare.passthrough.model import function_of
from dra.prepare.record import Record
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop
from dra.telemetry.told import Told

if TYPE_CHECKING:
    from dra.inventory.live import LiveInventory
    from dra.kube.client import KubeClient
    from dra.prepare.store import RecordStore

log = get_logger()
Json = dict[str, Any]
# (driver, pool, device, share id): the key of the list. Source: resource.k8s.io/v1, listMapKey.
Key = tuple[str, str, str, str]

# From a change to the look whether there is something to write; a claim is written when it was seen twice.
SETTLE_SECONDS = 1.0
# How often it is looked where nothing was told.
FALLBACK_SECONDS = 10.0
# A fleet that restarts writes no faster than this from each node.
QPS, BURST = 2.0, 10
REQUEST_SECONDS = 10.0
# How long the entries of a claim that was unprepared stay: usually the claim is gone by then, or not allocated any more.
LINGER_SECONDS = 10.0
# Claims whose entries wait to be taken back; more are left to the API server, which drops them with the allocation.
MOST_LINGERING = 200
# After a refusal for want of rights, and where the server keeps no device status.
FORBIDDEN_SECONDS = (60.0, 3600.0)
UNSUPPORTED_SECONDS = 3600.0
# While the API does not answer.
RETRY_SECONDS = (2.0, 60.0)
_PASSING = frozenset({401, 403, 408, 429})
# Source: resource.k8s.io/v1; messages of conditions are limited by metav1.Condition.
MAX_MESSAGE = 32768


@dataclass(slots=True)
class _Claim:
    """What this process knows of a claim's entries in the API.

    `entries` None: not read yet, or a write failed, which may have arrived all the same. `sent`: there was a write.
    """

    ref: ClaimRef
    entries: dict[Key, Json] | None = None
    sent: bool = False
    gone_at: float | None = None
    failed: tuple[Any, ...] = ()
    seen: int = 0


@dataclass(slots=True)
class _Pause:
    """Until when nothing is sent, and how often in a row it failed."""

    until: float = 0.0
    failures: int = 0


class ClaimStatusWriter:
    """A thread that keeps the entries of this node's claims true.

    Args:
        client: the API server, with a limit of its own.
        driver, boot_id: of this instance.
        records: what is prepared on this node.
        conditions: the health of the published devices.
        inventory: what the node has.
        wall, clock: seconds since 1970; monotonic seconds.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        driver: str,
        boot_id: str,
        records: Callable[[], Iterable[Record]],
        conditions: Callable[[], Iterable[DeviceCondition]],
        inventory: Callable[[], Inventory],
        settle_seconds: float = SETTLE_SECONDS,
        fallback_seconds: float = FALLBACK_SECONDS,
        linger_seconds: float = LINGER_SECONDS,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._driver, self._boot_id = client, driver, boot_id
        self._records, self._conditions, self._inventory = records, conditions, inventory
        self._settle_seconds, self._linger_seconds = settle_seconds, linger_seconds
        self._wall, self._clock = wall, clock
        self._claims: dict[str, _Claim] = {}
        self._pause = _Pause()
        # By the code of the error.
        self._told: Told[str] = Told()
        self._loop = Loop(
            "claim-status",
            self.step,
            seconds=fallback_seconds,
            first_seconds=settle_seconds,
            settle_seconds=settle_seconds,
        )

    def start(self) -> None:
        """Start the thread. Raises HostError."""
        self._loop.start()

    def follow(self, *, inventory: LiveInventory, feed: HealthFeed, store: RecordStore) -> None:
        """Look soon after one of these is another one."""
        inventory.subscribe(lambda _inventory, _difference: self._loop.wake())
        feed.subscribe(self._loop.wake)
        store.subscribe(self._loop.wake)

    def stop(self, *, timeout_seconds: float = 1.0) -> None:
        """End the thread; what was not written is written by the next instance."""
        self._loop.stop(timeout_seconds=timeout_seconds)

    def step(self) -> float | None:
        """Look once, and write what differs; give the seconds until the next look is due, None if nothing is waited for."""
        if self._clock() >= self._pause.until:
            self._look()
        return self._seconds_left()

    def _look(self) -> None:
        records = {each.ref.uid: each for each in self._records() if each.is_complete(self._boot_id)}
        self._note_gone(records)
        if not self._claims and not records:
            return
        health = {each.device: each for each in self._conditions()}
        inventory = self._inventory()
        for uid, record in records.items():
            claim = self._claims.get(uid)
            if claim is None:
                claim = self._claims[uid] = _Claim(record.ref)
            claim.gone_at = None
            claim.seen += 1
            # The moment after a prepare belongs to the calls that are on their way.
            if claim.seen > 1 and not self._bring(claim, plan_entries(record, health, inventory)):
                return
        for uid, claim in list(self._claims.items()):
            if claim.gone_at is not None and self._clock() - claim.gone_at >= self._linger_seconds:
                if claim.entries != {} and not self._bring(claim, {}):
                    return
                del self._claims[uid]

    def _seconds_left(self) -> float | None:
        now = self._clock()
        if now < self._pause.until:
            return self._pause.until - now
        waits = [
            self._settle_seconds if claim.gone_at is None else claim.gone_at + self._linger_seconds - now
            for claim in self._claims.values()
            if claim.gone_at is not None or claim.seen == 1
        ]
        return max(0.0, min(waits)) if waits else None

    def _note_gone(self, records: Mapping[str, Record]) -> None:
        lingering = 0
        for uid, claim in list(self._claims.items()):
            if uid in records:
                continue
            lingering += 1
            if (claim.entries is None and not claim.sent) or lingering > MOST_LINGERING:
                del self._claims[uid]
            elif claim.gone_at is None:
                claim.gone_at = self._clock()

    def _bring(self, claim: _Claim, wanted: Mapping[Key, Json]) -> bool:
        """Make the API say what is wanted; False if nothing more should be sent for now."""
        shown = tuple(sorted(wanted.items()))
        if claim.failed == shown and shown:
            return True  # refused before; the same is not sent again
        try:
            if claim.entries is None:
                claim.entries = self._read(claim.ref)
            entries = with_times(wanted, claim.entries, now=self._wall())
            if entries != claim.entries:
                self._write(claim, entries)
        except KubeError as error:
            return self._failed(claim, error, shown)
        self._pause.failures = 0
        return self._clock() >= self._pause.until

    def _read(self, ref: ClaimRef) -> dict[Key, Json]:
        from dra.kube.resources import RESOURCE_CLAIMS

        found = self._client.get(RESOURCE_CLAIMS, ref.name, ref.namespace, timeout_seconds=REQUEST_SECONDS)
        if (found.get("metadata") or {}).get("uid") != ref.uid:
            raise KubeError("DRA-API-NOT-FOUND", f"claim {ref} was replaced", status=404)
        listed = (found.get("status") or {}).get("devices") or []
        return {key_of(entry): dict(entry) for entry in listed if entry.get("driver") == self._driver}

    def _write(self, claim: _Claim, entries: dict[Key, Json]) -> None:
        from dra.kube.resources import RESOURCE_CLAIMS

        ref = claim.ref
        body = {
            # With the UID a claim that was replaced meanwhile is a conflict.
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
            "status": {"devices": [entries[key] for key in sorted(entries)]},
        }
        claim.entries, claim.sent = None, True
        stored = self._client.apply(
            RESOURCE_CLAIMS,
            ref.name,
            body,
            ref.namespace,
            subresource="status",
            timeout_seconds=REQUEST_SECONDS,
        )
        claim.entries, claim.failed = entries, ()
        kept = {key_of(entry) for entry in (stored.get("status") or {}).get("devices") or []}
        if not entries.keys() <= kept:
            self._pause.until = self._clock() + UNSUPPORTED_SECONDS
            claim.entries = None
            self._say("DRA-CLAIM-STATUS-DROPPED", "claim_status_not_kept", claim=str(ref))
            return
        if not any(each.failed for each in self._claims.values()):
            self._told.only(())
        log.debug("claim_status_written", claim=str(ref), claim_uid=ref.uid, devices=len(entries))

    def _failed(self, claim: _Claim, error: KubeError, wanted: tuple[Any, ...]) -> bool:
        """Take a failure; whether other claims should be tried."""
        if 400 <= error.status < 500 and error.status not in _PASSING:
            # Gone, replaced, or nothing that this server takes: not tried again until something changes.
            claim.failed = wanted
            if error.status not in (404, 409):
                self._say(error.code, "claim_status_refused", **error_fields(error))
            return True
        first, longest = FORBIDDEN_SECONDS if error.status in (401, 403) else RETRY_SECONDS
        self._pause.until = self._clock() + min(longest, first * 2 ** min(self._pause.failures, 16))
        self._pause.failures += 1
        if error.status == 403:
            self._say(error.code, "claim_status_forbidden", **error_fields(error))
        else:
            log.debug("claim_status_not_written", **error_fields(error))
        return False

    def _say(self, code: str, event: str, **fields: Any) -> None:
        """Warn once, until everything can be written again."""
        if self._told.is_news(code):
            log.warning(event, **fields)


def plan_entries(
    record: Record, health: Mapping[str, DeviceCondition], inventory: Inventory
) -> dict[Key, Json]:
    """Give the entries of a prepared claim, without times."""
    return {
        (each.driver, each.pool, each.device, each.share_id or ""): {
            "driver": each.driver,
            "pool": each.pool,
            "device": each.device,
            **({"shareID": each.share_id} if each.share_id else {}),
            "data": describe_device(each, record, inventory),
            "conditions": [
                _condition("Ready", status="True", reason="Prepared", message=""),
                _health(health.get(each.device)),
            ],
        }
        for each in record.results
    }


def describe_device(result: AllocatedDevice, record: Record, inventory: Inventory) -> Json:
    """Say which hardware a device is: UUID of the GPU, of the MIG device, PCI address, IOMMU group of what is passed on."""
    function = function_of(result.device, inventory)
    if function is not None:
        return {"pciBusID": str(function.pci_address), "iommuGroup": function.iommu_group}
    name = parse_device_name(result.device)
    gpu = next((each for each in inventory.gpus if name is not None and each.minor == name.minor), None)
    data: Json = {} if gpu is None else {"uuid": gpu.uuid, "pciBusID": str(gpu.pci_address)}
    if isinstance(name, MigName):
        made = next(
            (
                str(entry.outcome["uuid"])
                for entry in record.journal
                if entry.kind == DEVICE_KIND
                and entry.args.get("device") == result.device
                and entry.outcome.get("uuid")
            ),
            "",
        )
        there = gpu.mig_devices if gpu is not None else ()
        found = made or next(
            (each.uuid for each in there if gpu and mig_name(gpu, each) == result.device), ""
        )
        if found:
            data["migUUID"] = found
    return data


def _health(condition: DeviceCondition | None) -> Json:
    if condition is None or condition.state == "Unknown":
        message = "" if condition is None else condition.message
        return _condition("Healthy", status="Unknown", reason="Unknown", message=message)
    if condition.state == "Healthy":
        return _condition("Healthy", status="True", reason="Healthy", message="")
    return _condition(
        "Healthy", status="False", reason=reason_of(condition.message), message=condition.message
    )


def reason_of(message: str) -> str:
    """Give one word for a message of the health stream: `Xid79`, or `Unhealthy`."""
    word, _, rest = message.partition(" ")
    number = rest.partition(" ")[0].rstrip(".,;")
    return f"Xid{number}" if word == "XID" and number.isdecimal() else "Unhealthy"


def _condition(type_: str, *, status: str, reason: str, message: str) -> Json:
    return {"type": type_, "status": status, "reason": reason, "message": message[:MAX_MESSAGE]}


def with_times(wanted: Mapping[Key, Json], known: Mapping[Key, Json], *, now: float) -> dict[Key, Json]:
    """Give the entries with `lastTransitionTime`: that of a known condition of the same status, else now."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    result = {}
    for key, entry in wanted.items():
        before = {each.get("type"): each for each in (known.get(key) or {}).get("conditions") or ()}
        conditions = []
        for condition in entry["conditions"]:
            old = before.get(condition["type"]) or {}
            same = old.get("status") == condition["status"] and old.get("lastTransitionTime")
            conditions.append({**condition, "lastTransitionTime": same or stamp})
        result[key] = {**entry, "conditions": conditions}
    return result


def key_of(entry: Mapping[str, Any]) -> Key:
    """Give the key of an entry."""
    return (
        str(entry.get("driver")),
        str(entry.get("pool")),
        str(entry.get("device")),
        str(entry.get("shareID") or ""),
    )


def claim_status_writer(client: KubeClient, **ports: Any) -> ClaimStatusWriter:
    """Give a writer whose requests do not take those of the publisher."""
    return ClaimStatusWriter(client.with_limit(qps=QPS, burst=BURST), **ports)
