"""A ResourceClaim as a driver sees it: who it is, what was allocated, and which configuration applies.

Pure: takes the JSON of any served version of resource.k8s.io (the allocation has the same shape in v1, v1beta2
and v1beta1) and gives frozen values. Nothing is trusted to be there or to have its type: a claim is what users
and other components wrote. Source: resource.k8s.io/v1 ResourceClaim.status.allocation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, cast

from dra.errors import ClaimError, ConfigError, ValueFormatError
from dra.values import Quantity

# Source: k8s.io/api/resource/v1, the annotation of generated claims.
POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"

ClaimUid = NewType("ClaimUid", str)
ConfigSource = Literal["FromClass", "FromClaim"]


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """What the kubelet sends: enough to fetch a claim and to be sure that it is the same one."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """Give `namespace/name`, as users write it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One entry of `status.allocation.devices.results`.

    `request` is `name` or, for a `firstAvailable` request, `name/subrequest`.
    """

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = None
    admin_access: bool = False
    consumed_capacity: Mapping[str, Quantity] = field(default_factory=dict)

    @property
    def request_name(self) -> str:
        """The base name of the request, which the kubelet compares with a container's."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class OpaqueConfig:
    """One entry of `status.allocation.devices.config` with opaque parameters."""

    source: ConfigSource
    requests: tuple[str, ...]
    driver: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Consumer:
    """One entry of `status.reservedFor`: a pod, or another object that stands for pods."""

    resource: str
    name: str
    uid: str

    def __str__(self) -> str:
        """Give `pod NAME` or `RESOURCE NAME`."""
        return f"{'pod' if self.resource == 'pods' else self.resource} {self.name}"


@dataclass(frozen=True, slots=True)
class ClaimView:
    """A claim as one driver sees it.

    `results` and `configs` are this driver's only, in the order of the API (the scheduler lists the class's
    configs before the claim's). `node_selector` is `status.allocation.nodeSelector` as it stands, None if the
    allocation is usable everywhere. `deleting`: somebody asked to delete it; it may still be in use. `pod_claim_name`: of
    the entry in the pod from whose template it was made; empty for a claim that is used by its own name.
    """

    ref: ClaimRef
    allocated: bool = False
    results: tuple[AllocatedDevice, ...] = ()
    configs: tuple[OpaqueConfig, ...] = ()
    reserved_for: tuple[Consumer, ...] = ()
    node_selector: Mapping[str, Any] | None = None
    deleting: bool = False
    pod_claim_name: str = ""


def parse_claim(claim: Mapping[str, Any], *, driver: str) -> ClaimView:
    """Read a ResourceClaim; null and missing mean the same.

    Raises:
        ClaimError: DRA-CLAIM-MALFORMED where a field has another type than the API gives it.
        ConfigError: DRA-CONFIG-NOT-OPAQUE, DRA-CONFIG-SOURCE for a configuration that no driver could use.
    """
    root = _object(claim, "the claim")
    metadata = _object(root.get("metadata"), "metadata")
    ref = ClaimRef(*(_text(metadata, key, "metadata") for key in ("namespace", "name", "uid")))
    status = _object(root.get("status"), "status")
    allocation = status.get("allocation")
    devices = _object(_object(allocation, "status.allocation").get("devices"), "status.allocation.devices")
    results = _results(devices.get("results"), driver)
    selector = _object(allocation, "status.allocation").get("nodeSelector")
    return ClaimView(
        ref=ref,
        allocated=allocation is not None,
        results=results,
        configs=parse_configs(devices.get("config"), driver=driver),
        reserved_for=_consumers(status.get("reservedFor")),
        node_selector=None if selector is None else _object(selector, "status.allocation.nodeSelector"),
        deleting=metadata.get("deletionTimestamp") is not None,
        pod_claim_name=_pod_claim_name(metadata.get("annotations")),
    )


def _pod_claim_name(annotations: Any) -> str:
    """Give what the ResourceClaim controller notes on claims that it makes from templates."""
    found = annotations.get(POD_CLAIM_NAME) if isinstance(annotations, Mapping) else None
    return found if isinstance(found, str) else ""


def admit_claim(view: ClaimView, ref: ClaimRef, *, pool: str) -> None:
    """Check that a claim may be prepared here for whom the kubelet asked.

    Raises:
        ClaimError: DRA-CLAIM-UID-MISMATCH, DRA-CLAIM-NOT-ALLOCATED, DRA-CLAIM-NOT-RESERVED,
            DRA-CLAIM-POOL-FOREIGN.

    Source: kubelet contract of KEP-4381 (the driver compares UIDs); reservedFor: a retry of the kubelet may
    come after the pod was deleted and the claim unprepared.
    """
    if view.ref.uid != ref.uid:
        raise ClaimError(
            "DRA-CLAIM-UID-MISMATCH",
            f"claim {ref} was replaced: its UID is now {view.ref.uid or 'unknown'}, the kubelet asked for {ref.uid}",
            remedy="Delete the pod that uses the old claim; the new claim is prepared when a pod uses it.",
            claim_uid=ref.uid,
        )
    if not view.allocated:
        raise ClaimError(
            "DRA-CLAIM-NOT-ALLOCATED",
            f"claim {ref} is not allocated",
            remedy="Wait for the scheduler to allocate it, or delete the pod so that it is scheduled again.",
            retryable=True,
            claim_uid=ref.uid,
        )
    if not view.reserved_for:
        raise ClaimError(
            "DRA-CLAIM-NOT-RESERVED",
            f"claim {ref} is not reserved for any pod, so nothing may be prepared for it",
            remedy="Nothing to do if its pod was deleted; else delete the pod so that it is scheduled again.",
            retryable=True,
            claim_uid=ref.uid,
        )
    for result in view.results:
        if result.pool != pool:
            raise ClaimError(
                "DRA-CLAIM-POOL-FOREIGN",
                f"claim {ref} was allocated device {result.device} of pool {result.pool}, this node has pool {pool}",
                remedy="Delete the pod so that it is scheduled again, to the node that has the device.",
                claim_uid=ref.uid,
                device=result.device,
            )


def claim_not_found(ref: ClaimRef) -> ClaimError:
    """Give the error for a claim that the API no longer has."""
    return ClaimError(
        "DRA-CLAIM-NOT-FOUND",
        f"claim {ref} does not exist (UID {ref.uid})",
        remedy="Nothing to do if its pod was deleted; else delete the pod so that its claim is made again.",
        claim_uid=ref.uid,
    )


def parse_configs(value: object, *, driver: str) -> tuple[OpaqueConfig, ...]:
    """Read `allocation.devices.config`, leaving out other drivers' entries.

    Raises:
        ClaimError: DRA-CLAIM-MALFORMED.
        ConfigError: DRA-CONFIG-NOT-OPAQUE, DRA-CONFIG-SOURCE.
    """
    found = []
    for index, item in enumerate(_list(value, "status.allocation.devices.config")):
        path = f"status.allocation.devices.config[{index}]"
        entry = _object(item, path)
        if entry.get("opaque") is None:
            raise ConfigError(
                "DRA-CONFIG-NOT-OPAQUE",
                f"{path} has no opaque configuration",
                remedy="Only opaque configuration exists for device drivers; remove the entry.",
            )
        opaque = _object(entry.get("opaque"), f"{path}.opaque")
        if _text(opaque, "driver", f"{path}.opaque") != driver:
            continue
        source = entry.get("source")
        if source not in ("FromClass", "FromClaim"):
            raise ConfigError(
                "DRA-CONFIG-SOURCE",
                f"{path}.source is {source!r}, which is neither FromClass nor FromClaim",
                remedy="The scheduler writes this field; check which component allocated the claim.",
            )
        parameters = opaque.get("parameters")
        found.append(
            OpaqueConfig(
                source=cast("ConfigSource", source),
                requests=_texts(entry.get("requests"), f"{path}.requests"),
                driver=driver,
                parameters=_object(parameters, f"{path}.opaque.parameters"),
            )
        )
    return tuple(found)


def _results(value: object, driver: str) -> tuple[AllocatedDevice, ...]:
    found = []
    for index, item in enumerate(_list(value, "status.allocation.devices.results")):
        path = f"status.allocation.devices.results[{index}]"
        entry = _object(item, path)
        if _text(entry, "driver", path) != driver:
            continue
        share = _text(entry, "shareID", path)
        found.append(
            AllocatedDevice(
                request=_text(entry, "request", path),
                driver=driver,
                pool=_text(entry, "pool", path),
                device=_text(entry, "device", path),
                share_id=share or None,
                admin_access=_flag(entry, "adminAccess", path),
                consumed_capacity=_capacity(entry.get("consumedCapacity"), f"{path}.consumedCapacity"),
            )
        )
    return tuple(found)


def _capacity(value: object, path: str) -> dict[str, Quantity]:
    amounts = {}
    for name, amount in _object(value, path).items():
        # A quantity may stand as a bare number in JSON.
        text = amount if isinstance(amount, str) else str(amount)
        try:
            amounts[name] = Quantity.parse(text)
        except ValueFormatError as error:
            raise _malformed(f"{path}[{name}]", "a quantity", amount) from error
    return amounts


def _consumers(value: object) -> tuple[Consumer, ...]:
    found = []
    for index, item in enumerate(_list(value, "status.reservedFor")):
        path = f"status.reservedFor[{index}]"
        entry = _object(item, path)
        found.append(Consumer(*(_text(entry, key, path) for key in ("resource", "name", "uid"))))
    return tuple(found)


def _object(value: object, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _malformed(path, "an object", value)
    return value


def _list(value: object, path: str) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _malformed(path, "a list", value)
    return value


def _text(entry: Mapping[str, Any], key: str, path: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _malformed(f"{path}.{key}", "a string", value)
    return value


def _texts(value: object, path: str) -> tuple[str, ...]:
    items = _list(value, path)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise _malformed(f"{path}[{index}]", "a string", item)
    return tuple(str(item) for item in items)


def _flag(entry: Mapping[str, Any], key: str, path: str) -> bool:
    value = entry.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _malformed(f"{path}.{key}", "true or false", value)
    return value


def _malformed(path: str, expected: str, value: object) -> ClaimError:
    return ClaimError(
        "DRA-CLAIM-MALFORMED",
        f"{path} is not {expected} but {type(value).__name__}",
        remedy="Check which component wrote the claim's status; the API server's own validation refuses this.",
        field=path,
    )
