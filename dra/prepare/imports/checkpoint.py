"""NVIDIA's checkpoint as it lies on disk: read in every form since v25.3, and written for the way back. Pure.

The file is one JSON object: `v1` (all releases) and `v2` (from v25.8), each with a checksum. Theirs is computed over what
the release's own structs marshal to, so that a field more or less is "corruption" to the next release; here it is taken
over the bytes that are there, which is the same thing for the file's own writer.

Source: the driver's released checkpoints; Kubernetes' checkpoint manager (FNV-1a over a dump of the bytes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.errors import RecordError

_FNV_OFFSET, _FNV_PRIME = 0x811C9DC5, 0x01000193
_CHECKSUM = re.compile(r'"checksum":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class CheckpointDevice:
    """A prepared device: what the kubelet was told, and the hardware behind it.

    `kind` is gpu, mig or vfio. `instances` are the ids of GPU and compute instance of a MIG device, None before v25.12,
    which did not keep them.
    """

    kind: str
    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    uuid: str = ""
    parent_uuid: str = ""
    instances: tuple[int, int] | None = None
    share_id: str | None = None
    parent_minor: int | None = None
    pci_bus_id: str = ""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that share one configuration. `mps_daemon` is empty without MPS, `time_slice_applied` None where not kept."""

    devices: tuple[CheckpointDevice, ...]
    mps_daemon: str = ""
    time_slice_applied: bool | None = None


@dataclass(frozen=True, slots=True)
class CheckpointClaim:
    """One claim. `name` and `namespace` are mostly empty: releases keep them for half-prepared claims only."""

    uid: str
    completed: bool
    groups: tuple[DeviceGroup, ...]
    status: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole file. `boot_id` is empty before v0.4. `version` says which part was read."""

    claims: tuple[CheckpointClaim, ...]
    boot_id: str = ""
    version: int = 2


# -- reading -----------------------------------------------------------------------------------------------


def parse_checkpoint(data: bytes) -> Checkpoint:
    """Read a checkpoint: its `v2` if that is whole, else its `v1`.

    Raises:
        RecordError: DRA-CHECKPOINT-CORRUPT: neither part can be trusted.
    """
    try:
        text = data.decode("utf-8")
        spans = _members(text)
        top = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"it is not JSON ({len(data)} bytes)") from error
    if not isinstance(top, dict):
        raise _corrupt("it is not a JSON object")
    second, first = top.get("v2"), top.get("v1")
    reasons = []
    if isinstance(second, dict):
        if second.get("checksum") == checksum(_CHECKSUM.sub('"checksum":0', spans["v2"], count=1)):
            return _decode(second, boot_id=str(second.get("nodeBootID") or ""), version=2)
        reasons.append("the checksum of v2 does not match")
    if isinstance(first, dict) or second is None:
        inner = f'{{"checksum":0,"v1":{spans["v1"]}}}' if "v1" in spans else '{"checksum":0}'
        if top.get("checksum") == checksum(inner):
            boot_id = str(second.get("nodeBootID") or "") if isinstance(second, dict) else ""
            return _decode(first or {}, boot_id=boot_id, version=1)
        reasons.append("the checksum of v1 does not match")
    raise _corrupt("; ".join(reasons) or "it has neither v1 nor v2")


def checksum(text: str) -> int:
    """Give the checksum of a JSON text as Kubernetes' checkpoint manager computes it.

    FNV-1a of 32 bits over the bytes' dump, `([]uint8)[123 34 ...]`.
    """
    value = _FNV_OFFSET
    for byte in ("([]uint8)[" + " ".join(map(str, text.encode())) + "]").encode():
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFF
    return value


def _members(text: str) -> dict[str, str]:
    """Give the raw text of each member of the outermost object."""
    decoder = json.JSONDecoder()
    found: dict[str, str] = {}
    place = _skip(text, 0)
    if text[place : place + 1] != "{":
        return found
    place = _skip(text, place + 1)
    while place < len(text) and text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        place = _skip(text, place)
        if text[place : place + 1] != ":":
            raise ValueError("no colon")
        start = _skip(text, place + 1)
        _, place = decoder.raw_decode(text, start)
        found[str(key)] = text[start:place]
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
    return found


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _decode(part: Mapping[str, Any], *, boot_id: str, version: int) -> Checkpoint:
    claims = part.get("preparedClaims")
    if claims is not None and not isinstance(claims, dict):
        raise _corrupt("preparedClaims is no object")
    try:
        return Checkpoint(
            tuple(_claim(uid, entry, version) for uid, entry in sorted((claims or {}).items())),
            boot_id=boot_id,
            version=version,
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _corrupt(f"a claim in it is malformed ({error!r})") from error


def _claim(uid: str, entry: Mapping[str, Any], version: int) -> CheckpointClaim:
    # v1 has completed claims only.
    state = entry.get("checkpointState") if version > 1 else "PrepareCompleted"
    return CheckpointClaim(
        uid=uid,
        completed=state == "PrepareCompleted",
        groups=tuple(_group(group) for group in entry.get("preparedDevices") or () if group),
        status=dict(entry.get("status") or {}),
        name=str(entry.get("name") or ""),
        namespace=str(entry.get("namespace") or ""),
    )


def _group(group: Mapping[str, Any]) -> DeviceGroup:
    state = group.get("configState") or {}
    applied = state.get("timeSliceApplied")
    return DeviceGroup(
        tuple(_device(each) for each in group.get("devices") or ()),
        mps_daemon=str(state.get("mpsControlDaemonID") or ""),
        time_slice_applied=None if applied is None else bool(applied),
    )


def _device(entry: Mapping[str, Any]) -> CheckpointDevice:
    kind = next(kind for kind in ("gpu", "mig", "vfio") if entry.get(kind))
    inner = entry[kind]
    info = inner.get("concrete") or inner.get("info") or {}
    told = inner["device"]
    instances = (int(info["giId"]), int(info["ciId"])) if "giId" in info and "ciId" in info else None
    return CheckpointDevice(
        kind=kind,
        requests=tuple(_either(told, "Requests", "request_names") or ()),
        pool=str(_either(told, "PoolName", "pool_name") or ""),
        device=str(_either(told, "DeviceName", "device_name") or ""),
        cdi_ids=tuple(_either(told, "CDIDeviceIDs", "cdi_device_ids") or ()),
        uuid=str(info.get("migUUID") or info.get("uuid") or ""),
        parent_uuid=str(info.get("parentUUID") or ""),
        instances=instances,
        share_id=told.get("ShareID") or None,
        parent_minor=info.get("parentMinor"),
        pci_bus_id=str(info.get("parentPCIBusID") or info.get("pciBusID") or ""),
    )


def _either(told: Mapping[str, Any], name: str, older: str) -> Any:
    return told.get(name, told.get(older))


def _corrupt(reason: str) -> RecordError:
    return RecordError(
        "DRA-CHECKPOINT-CORRUPT",
        f"the checkpoint of NVIDIA's driver cannot be used: {reason}",
        remedy="It is set aside; its claims are rebuilt from their CDI files and from the API.",
        retryable=True,
    )


# -- writing -----------------------------------------------------------------------------------------------

# Release lines whose forms differ, oldest first.
RELEASES = ("v25.3", "v25.8", "v25.12", "v0.4", "v0.5")


def knows_vfio(release: str) -> bool:
    """Whether a release has GPUs that are passed through. Raises ValueError: no such release."""
    return RELEASES.index(release) >= RELEASES.index("v25.12")


def encode_checkpoint(checkpoint: Checkpoint, *, release: str) -> bytes:
    """Give the bytes that this release of NVIDIA's driver reads without complaint.

    It compares its checksums with what its own structs marshal to: the order of the fields is theirs.

    Raises:
        ValueError: no such release.
    """
    step = RELEASES.index(release)
    dump = _Dump(step)
    first = {uid: dump.claim(claim, v1=True) for uid, claim in _ordered(checkpoint.claims) if claim.completed}
    inner = _text({"preparedClaims": first} if first else {})
    sum_1 = checksum(f'{{"checksum":0,"v1":{inner}}}')
    if step == 0:
        return f'{{"checksum":{sum_1},"v1":{inner}}}'.encode()
    second = {uid: dump.claim(claim, v1=False) for uid, claim in _ordered(checkpoint.claims)}
    rest: dict[str, Any] = {"preparedClaims": second} if second else {}
    if step >= RELEASES.index("v0.4") and checkpoint.boot_id:
        rest["nodeBootID"] = checkpoint.boot_id
    sum_2 = checksum(_text({"checksum": 0, **rest}))
    return f'{{"checksum":{sum_1},"v1":{inner},"v2":{_text({"checksum": sum_2, **rest})}}}'.encode()


def _ordered(claims: Iterable[CheckpointClaim]) -> list[tuple[str, CheckpointClaim]]:
    return sorted((claim.uid, claim) for claim in claims)


def _text(value: Any) -> str:
    """Write JSON as Go does: no spaces, and `<`, `>`, `&` and two line separators escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


class _Dump:
    """The forms of one release."""

    def __init__(self, step: int) -> None:
        self._since: Callable[[str], bool] = lambda release: step >= RELEASES.index(release)

    def claim(self, claim: CheckpointClaim, *, v1: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not v1:
            found["checkpointState"] = "PrepareCompleted" if claim.completed else "PrepareStarted"
        found["status"] = status_in_order(claim.status)
        groups = [self._group(group) for group in claim.groups]
        if groups:
            found["preparedDevices"] = groups
        if not v1 and self._since("v25.12"):
            found |= {"name": claim.name} if claim.name else {}
            found |= {"namespace": claim.namespace} if claim.namespace else {}
        return found

    def _group(self, group: DeviceGroup) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if group.mps_daemon or not self._since("v0.5"):
            state["mpsControlDaemonID"] = group.mps_daemon
        if group.time_slice_applied is not None and self._since("v0.4"):
            state["timeSliceApplied"] = group.time_slice_applied
        return {"devices": [self._device(device) for device in group.devices] or None, "configState": state}

    def _device(self, device: CheckpointDevice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "Requests": list(device.requests),
            "PoolName": device.pool,
            "DeviceName": device.device,
            "CDIDeviceIDs": list(device.cdi_ids),
        }
        if device.share_id and self._since("v0.4"):
            told["ShareID"] = device.share_id
        if device.kind == "gpu":
            return {"gpu": {"info": {"uuid": device.uuid}, "device": told}, "mig": None}
        if device.kind == "vfio":
            place = {"pciBusID": device.pci_bus_id} if device.pci_bus_id and self._since("v0.4") else {}
            return {
                "gpu": None,
                "mig": None,
                "vfio": {"info": {"uuid": device.uuid, **place}, "device": told},
            }
        if not self._since("v25.12"):
            return {"gpu": None, "mig": {"info": {"uuid": device.uuid}, "device": told}}
        instances = device.instances or (0, 0)
        concrete: dict[str, Any] = {
            "parentMinor": device.parent_minor or 0,
            "giId": instances[0],
            "ciId": instances[1],
            "migUUID": device.uuid,
            "parentUUID": device.parent_uuid,
        }
        if device.pci_bus_id and self._since("v0.4"):
            concrete["parentPCIBusID"] = device.pci_bus_id
        return {"gpu": None, "mig": {"concrete": concrete, "device": told}}


# The order of the fields in Go's structs. Source: k8s.io/api/resource/v1.
_RESULT = ("request", "driver", "pool", "device", "adminAccess", "shareID", "consumedCapacity")
_CONSUMER = ("apiGroup", "resource", "name", "uid")


def status_in_order(status: Mapping[str, Any]) -> dict[str, Any]:
    """Give the parts of a claim's status that matter, with the fields in the API's own order."""
    found: dict[str, Any] = {}
    devices = ((status.get("allocation") or {}).get("devices")) or {}
    if status.get("allocation") is not None:
        inner: dict[str, Any] = {}
        if devices.get("results"):
            inner["results"] = [_pick(result, _RESULT) for result in devices["results"]]
        if devices.get("config"):
            inner["config"] = [_config(entry) for entry in devices["config"]]
        found["allocation"] = {"devices": inner}
    if status.get("reservedFor"):
        found["reservedFor"] = [_pick(entry, _CONSUMER) for entry in status["reservedFor"]]
    return found


def _config(entry: Mapping[str, Any]) -> dict[str, Any]:
    opaque = entry.get("opaque") or {}
    found: dict[str, Any] = {"source": entry.get("source", "")}
    if entry.get("requests"):
        found["requests"] = list(entry["requests"])
    found["opaque"] = {"driver": opaque.get("driver", ""), "parameters": opaque.get("parameters")}
    return found


def _pick(entry: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    found = {key: entry[key] for key in keys if entry.get(key) not in (None, "", {})}
    if "consumedCapacity" in found:
        found["consumedCapacity"] = dict(sorted(found["consumedCapacity"].items()))
    return found
