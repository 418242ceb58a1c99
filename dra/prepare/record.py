"""A claim's record: everything needed to unprepare it without API server and without NVML. Pure.

The file is a JSON object. Two rules keep rollback and rolling updates safe: a reader keeps every field that it
does not know and writes it back, and `readable_from` says which reader a writer still serves, so that a newer
version only has to raise it when an older one could do harm. The checksum is taken over the JSON as it was
read, never over our own classes, so that a field more or less is no corruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, cast

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer, OpaqueConfig
from dra.errors import RecordError
from dra.prepare.model import PreparedDevice
from dra.values import Quantity

VERSION = 1
# The oldest reader that understands what this version writes.
READABLE_FROM = 1

State = Literal["preparing", "prepared", "unpreparing"]
EntryState = Literal["pending", "applied"]


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One effect: what undoes it (`kind`, `args`) and whether it is known to be done.

    `pending` means that it may or may not have happened; a CDI spec's entry always stays so, since the file is
    looked at each time. `outcome` is what came of it where that is not known before (the UUID of a partition);
    empty until then.
    """

    kind: str
    args: Mapping[str, Any]
    state: EntryState = "pending"
    outcome: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two entries the same effect."""
        return f"{self.kind} {json.dumps(self.args, sort_keys=True)}"


@dataclass(frozen=True, slots=True)
class Record:
    """What this node did, or began to do, for one claim.

    `results` and `configs` are the allocation's as of the last prepare, `consumers` its reservations: the record
    serves in place of the API when that does not answer. `extra` are fields of other versions.
    """

    ref: ClaimRef
    state: State
    boot_id: str
    results: tuple[AllocatedDevice, ...] = ()
    configs: tuple[OpaqueConfig, ...] = ()
    consumers: tuple[Consumer, ...] = ()
    journal: tuple[JournalEntry, ...] = ()
    devices: tuple[PreparedDevice, ...] = ()
    cdi_file: str = ""
    cdi_sha256: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def is_complete(self, boot_id: str) -> bool:
        """Whether everything was prepared, in this boot of the machine."""
        return self.state == "prepared" and self.boot_id == boot_id

    def holds(self, boot_id: str) -> bool:
        """Whether its devices are taken: what was prepared before a reboot is gone from the hardware."""
        return self.boot_id == boot_id

    def with_entry(self, entry: JournalEntry) -> Record:
        """Give the record with the entry of the same key replaced."""
        return replace(self, journal=tuple(entry if old.key == entry.key else old for old in self.journal))

    def without_entry(self, entry: JournalEntry) -> Record:
        """Give the record with the entry struck."""
        return replace(self, journal=tuple(old for old in self.journal if old.key != entry.key))


def encode_record(record: Record) -> bytes:
    """Give the file's bytes."""
    content = _with_unknown(_content(record), record.extra)
    content["checksum"] = checksum(content)
    return json.dumps(content, separators=(",", ":")).encode()


def decode_record(data: bytes, *, uid: str) -> Record:
    """Read a record that must be of the claim `uid`.

    Fields that an older version did not write get their defaults.

    Raises:
        RecordError: DRA-RECORD-CORRUPT; DRA-RECORD-NEWER if only a newer version of the driver may touch it.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        _corrupt(uid, f"it is not JSON ({len(data)} bytes)", error)
    if not isinstance(content, dict):
        _corrupt(uid, "it is not a JSON object")
    _check_version(content, uid)
    if "checksum" in content and content["checksum"] != checksum(content):
        _corrupt(uid, "its checksum does not match")
    try:
        record = _decode(content)
        rest = {key: value for key, value in content.items() if key != "checksum"}
        record = replace(record, extra=_unknown(rest, _content(record)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _corrupt(uid, f"a field is missing or malformed ({error!r})", error)
    if record.ref.uid != uid:
        _corrupt(uid, f"it is of claim {record.ref.uid}")
    return record


def checksum(content: Mapping[str, Any]) -> str:
    """Give the checksum of a record's JSON object, its own field left out."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _check_version(content: Mapping[str, Any], uid: str) -> None:
    version, readable_from = content.get("version"), content.get("readable_from", content.get("version"))
    if not isinstance(version, int) or not isinstance(readable_from, int):
        _corrupt(uid, "it has no version")
    if readable_from > VERSION:
        raise RecordError(
            "DRA-RECORD-NEWER",
            f"the record of claim {uid} was written by a newer version of the driver (format {version})",
            remedy="Upgrade the driver on this node again, or delete the claim's pod there before a downgrade.",
            retryable=True,
            claim_uid=uid,
        )


def _content(record: Record) -> dict[str, Any]:
    return {
        "version": VERSION,
        "readable_from": READABLE_FROM,
        "claim": {"namespace": record.ref.namespace, "name": record.ref.name, "uid": record.ref.uid},
        "state": record.state,
        "boot_id": record.boot_id,
        "results": [_result(item) for item in record.results],
        "configs": [
            {"source": item.source, "requests": list(item.requests), "driver": item.driver,
             "parameters": dict(item.parameters)}
            for item in record.configs
        ],
        "consumers": [{"resource": c.resource, "name": c.name, "uid": c.uid} for c in record.consumers],
        "effects": [_effect(entry) for entry in record.journal],
        "devices": [
            {"request_names": list(d.request_names), "pool": d.pool, "device": d.device,
             "cdi_ids": list(d.cdi_ids), "share_id": d.share_id}
            for d in record.devices
        ],
        "cdi": {"file": record.cdi_file, "sha256": record.cdi_sha256},
    }  # fmt: skip


def _unknown(raw: Any, known: Any) -> Any:
    """Give what `raw` has beside `known`, in the same shape; items of lists are told apart by their place."""
    if isinstance(raw, dict) and isinstance(known, dict):
        rest = {key: _unknown(raw[key], known[key]) if key in known else raw[key] for key in raw}
        return {key: part for key, part in rest.items() if key not in known or part}
    if isinstance(raw, list) and isinstance(known, list) and len(raw) == len(known):
        parts = [_unknown(one, other) for one, other in zip(raw, known, strict=True)]
        return parts if any(parts) else []
    return {}


def _with_unknown(content: Any, unknown: Any) -> Any:
    """Put back what `_unknown` found, as far as the place for it is still there."""
    if isinstance(content, dict) and isinstance(unknown, Mapping):
        added = {
            key: _with_unknown(content[key], part) if key in content else part
            for key, part in unknown.items()
        }
        return {**content, **added}
    if isinstance(content, list) and isinstance(unknown, list) and len(content) == len(unknown):
        return [_with_unknown(one, part) for one, part in zip(content, unknown, strict=True)]
    return content


def _decode(content: Mapping[str, Any]) -> Record:
    claim, cdi = content["claim"], content.get("cdi") or {}
    state = content["state"]
    if state not in ("preparing", "prepared", "unpreparing"):
        raise ValueError(f"state {state!r}")
    return Record(
        ref=ClaimRef(_str(claim["namespace"]), _str(claim["name"]), _str(claim["uid"])),
        state=state,
        boot_id=_str(content.get("boot_id", "")),
        results=tuple(
            AllocatedDevice(
                request=_str(item["request"]),
                driver=_str(item["driver"]),
                pool=_str(item["pool"]),
                device=_str(item["device"]),
                share_id=item.get("share_id"),
                admin_access=bool(item.get("admin_access")),
                consumed_capacity={
                    name: Quantity.parse(text) for name, text in (item.get("consumed_capacity") or {}).items()
                },
            )
            for item in content.get("results", ())
        ),
        configs=tuple(
            OpaqueConfig(
                item["source"], tuple(item["requests"]), _str(item["driver"]), dict(item["parameters"])
            )
            for item in content.get("configs", ())
        ),
        consumers=tuple(
            Consumer(_str(c["resource"]), _str(c["name"]), _str(c["uid"]))
            for c in content.get("consumers", ())
        ),
        journal=tuple(_entry(item) for item in content.get("effects", ())),
        devices=tuple(
            PreparedDevice(
                tuple(d["request_names"]),
                _str(d["pool"]),
                _str(d["device"]),
                tuple(d["cdi_ids"]),
                d["share_id"],
            )
            for d in content.get("devices", ())
        ),
        cdi_file=_str(cdi.get("file", "")),
        cdi_sha256=_str(cdi.get("sha256", "")),
    )


def _entry(item: Mapping[str, Any]) -> JournalEntry:
    # An unknown state of a newer version is read as the one from which everything is checked.
    state = cast("EntryState", item["state"] if item["state"] == "applied" else "pending")
    return JournalEntry(_str(item["kind"]), dict(item["args"]), state, dict(item.get("outcome") or {}))


def _effect(entry: JournalEntry) -> dict[str, Any]:
    written = {"kind": entry.kind, "args": dict(entry.args), "state": entry.state}
    return {**written, "outcome": dict(entry.outcome)} if entry.outcome else written


def _result(item: AllocatedDevice) -> dict[str, Any]:
    return {
        "request": item.request, "driver": item.driver, "pool": item.pool, "device": item.device,
        "share_id": item.share_id, "admin_access": item.admin_access,
        "consumed_capacity": {name: str(amount) for name, amount in item.consumed_capacity.items()},
    }  # fmt: skip


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def corrupt_record(uid: str, reason: str) -> RecordError:
    """Give the error of a record that is there and says nothing."""
    return RecordError(
        "DRA-RECORD-CORRUPT",
        f"the record of claim {uid} cannot be used: {reason}",
        remedy="Nothing to do: it was set aside and is rebuilt from the claim; check the disk if it happens again.",
        retryable=True,
        claim_uid=uid,
    )


def _corrupt(uid: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise corrupt_record(uid, reason) from cause
