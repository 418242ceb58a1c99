"""One object: its shape, and the API server's own rules for it, with remedies for the commonest mistakes.

Source: strict decoding and validation of Kubernetes 1.36, in `dra.api.rules`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules import claims, pods
from dra.api.rules.cause import Cause
from dra.api.rules.decode import DecodeError, Findings, decode
from dra.api.rules.defaults import default_claim
from dra.api.rules.dns import dns_subdomain_error
from dra.api.rules.meta import validate_meta
from dra.api.rules.pod_defaults import default_spec
from dra.api.rules.schema import Type
from dra.api.rules.workloads import default_workload, validate_cron_job, validate_workload
from dra.api.versions import to_v1
from dra.diagnose.validate_model import Finding, Json, Severity, guess
from dra.diagnose.validate_source import Manifest
from dra.diagnose.validate_types import type_error

DRA_GROUP = "resource.k8s.io"
DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")
DRA_KINDS = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
# Kinds of the group that are not written by hand.
_OTHER_DRA_KINDS = ("ResourceSlice", "DeviceTaintRule", "ResourcePoolStatusRequest")
SHAPES: dict[tuple[str, str], str] = {
    ("v1", "Pod"): "core_v1.Pod",
    **{
        ("apps/v1", kind): f"apps_v1.{kind}"
        for kind in ("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet")
    },
    **{("batch/v1", kind): f"batch_v1.{kind}" for kind in ("Job", "CronJob")},
    **{(f"{DRA_GROUP}/{v}", kind): f"resource_{v}.{kind}" for v in DRA_VERSIONS for kind in DRA_KINDS},
}
_HANDLED = {kind: version for version, kind in reversed(SHAPES)}


@dataclass(slots=True)
class Subject:
    """An object that was read. `obj` has the shape of v1 with the server's defaults filled in.

    `sound`: every value has its type, so that what lies in it can be looked at.
    """

    manifest: Manifest
    kind: str
    version: str
    obj: Json
    sound: bool = True
    findings: list[Finding] = field(default_factory=list)
    # What has an unknown field: a field that is missing there was only misspelt.
    misspelt: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Give the name (or the beginning of the generated one)."""
        meta = _object(self.obj.get("metadata"))
        return str(meta.get("name") or meta.get("generateName") or "?")

    @property
    def namespace(self) -> str:
        """Give the namespace; `default` where none is written."""
        return str(_object(self.obj.get("metadata")).get("namespace") or "default")

    @property
    def title(self) -> str:
        """Give `Kind namespace/name` as findings show it."""
        written = _object(self.obj.get("metadata")).get("namespace")
        return f"{self.kind} {written}/{self.name}" if written else f"{self.kind} {self.name}"

    def report(
        self,
        severity: Severity,
        code: str,
        path: str,
        message: str,
        *,
        remedy: str = "",
        line: int = 0,
        excerpt: tuple[str, ...] = (),
    ) -> None:
        """Add a finding about a field; the line is that of the field, or of what should hold it."""
        spot, _ = self.manifest.spot.find(path)
        shown = path
        if self.version == "v1beta1" and not code.startswith("DRA-SCHEMA"):
            shown = path.replace(".exactly", "")
        self.findings.append(
            Finding(
                self.manifest.file,
                line or spot.line,
                severity,
                code,
                message,
                self.title,
                shown,
                remedy,
                excerpt,
            )
        )

    def written(self, path: str) -> bool:
        """Tell whether the object has this field as it was given."""
        return self.manifest.spot.find(path)[1]

    def claim_spec(self) -> tuple[str, Json] | None:
        """Give the path and content of a claim's (or template's) spec; None for other kinds."""
        spec = _object(self.obj.get("spec"))
        if self.kind == "ResourceClaim":
            return "spec", spec
        return ("spec.spec", _object(spec.get("spec"))) if self.kind == "ResourceClaimTemplate" else None

    def pod_spec(self) -> tuple[str, Json] | None:
        """Give the path and content of the pod's spec in a pod or workload; None for other kinds."""
        path = {"Pod": "spec", "CronJob": "spec.jobTemplate.spec.template.spec"}.get(self.kind)
        if path is None:
            path = None if self.kind in DRA_KINDS else "spec.template.spec"
        if path is None:
            return None
        value: Any = self.obj
        for part in path.split("."):
            value = _object(value.get(part))
        return path, value


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def read_object(manifest: Manifest) -> Subject | Finding | None:
    """Give the object, or what is wrong with its kind; None for a kind that is not looked at."""
    version, kind = manifest.value.get("apiVersion"), manifest.value.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str) or not version or not kind:
        missing = "kind" if isinstance(version, str) and version else "apiVersion"
        return Finding(
            manifest.file, manifest.spot.line, "error", "DRA-MANIFEST-KIND", f"an object has no {missing}",
            remedy="Write apiVersion and kind, such as resource.k8s.io/v1 and ResourceClaim.",
        )  # fmt: skip
    ref = SHAPES.get((version, kind))
    if ref is None:
        return _unknown_kind(manifest, version, kind)
    subject = Subject(manifest, kind, version.rpartition("/")[2], manifest.value)
    notes = _Notes(subject)
    subject.obj = decode(manifest.value, ref, notes)
    subject.sound = not notes.broken
    if version.startswith(DRA_GROUP):
        subject.obj = to_v1(subject.obj, kind=kind, version=subject.version)
    if subject.sound:
        _default(subject)
    return subject


def _unknown_kind(manifest: Manifest, version: str, kind: str) -> Finding | None:
    group, _, number = version.rpartition("/")
    line = manifest.spot.find("apiVersion")[0].line
    if group == DRA_GROUP and kind not in _OTHER_DRA_KINDS:
        if kind in DRA_KINDS:
            return Finding(
                manifest.file, line, "error", "DRA-MANIFEST-VERSION", f"{kind} does not exist in {version}",
                remedy=f"Write apiVersion: {DRA_GROUP}/v1 (Kubernetes 1.34 and later), v1beta2 or v1beta1.",
            )  # fmt: skip
        return Finding(
            manifest.file, manifest.spot.find("kind")[0].line, "error", "DRA-MANIFEST-KIND",
            f"{group} has no kind {kind}.{guess(kind, DRA_KINDS)}",
            remedy=f"Kinds of {DRA_GROUP}/{number} are {', '.join(DRA_KINDS)}.",
        )  # fmt: skip
    if kind in _HANDLED and kind not in DRA_KINDS and group in {"", "apps", "batch", "extensions"}:
        return Finding(
            manifest.file, line, "error", "DRA-MANIFEST-VERSION", f"{kind} does not exist in {version}",
            remedy=f"Write apiVersion: {_HANDLED[kind]}.",
        )  # fmt: skip
    return None


class _Notes(Findings):
    """Collects what strict decoding objects to, all of it."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self.broken = False

    def unknown(self, path: str, known: Collection[str] = ()) -> None:
        name = re.split(r"[.\]]", path)[-1] or path
        self.subject.misspelt.add(path[: -len(name)].rstrip("."))
        self.subject.report(
            "error", "DRA-SCHEMA-UNKNOWN-FIELD", path, f"Kubernetes 1.36 has no such field.{guess(name, list(known))}",
            remedy=self._remedy(path, name, known),
        )  # fmt: skip

    def duplicate(self, path: str) -> None:
        self.subject.report(
            "error", "DRA-SCHEMA-DUPLICATE", path, "the field stands twice", remedy="Remove one of them."
        )

    def mismatch(self, path: str, value: Any, shape: Type, error: DecodeError) -> Any:
        self.broken = True
        remedy = "" if str(error).startswith("json:") else f"The API server says: {error}."
        if shape.kind == "string" and isinstance(value, bool):
            remedy = "Write it in quotes: YAML takes y, n, yes, no, on and off for true and false."
        self.subject.report(
            "error", "DRA-SCHEMA-TYPE", path.rstrip("."), type_error(value, shape), remedy=remedy
        )
        return None

    def _remedy(self, path: str, name: str, known: Collection[str]) -> str:
        version = self.subject.version
        if re.fullmatch(r".*devices\.requests\[\d+\]\.[A-Za-z]+", path):
            if version == "v1beta1" and name == "exactly":
                return "v1beta1 has no `exactly`: write its fields beside the name, or apiVersion: resource.k8s.io/v1."
            if version != "v1beta1" and name in _EXACT_FIELDS:
                return f"In {version} it stands below `exactly`; only v1beta1 has it beside the name."
        if known:
            shown = sorted(set(known) - {"apiVersion", "kind", "status"})
            return f"Fields here: {', '.join(shown[:12])}{', …' if len(shown) > 12 else ''}."
        return ""


_EXACT_FIELDS = frozenset(
    {"deviceClassName", "selectors", "allocationMode", "count", "adminAccess", "tolerations", "capacity"}
)


def _default(subject: Subject) -> None:
    """Fill in what the server fills in."""
    if claim := subject.claim_spec():
        default_claim(claim[1])
    elif subject.kind == "Pod":
        default_spec(_object(subject.obj.get("spec")))
    elif subject.kind == "CronJob":
        default_workload(subject.obj["spec"], "CronJob")
        default_workload(subject.obj["spec"]["jobTemplate"]["spec"], "Job")
    elif subject.pod_spec():
        default_workload(subject.obj["spec"], subject.kind)


@dataclass(frozen=True, slots=True)
class _Rules:
    """Kubernetes 1.36; expressions are checked apart, with their places."""

    cel_check: None = None
    minor: int = 36


def check_object(subject: Subject) -> None:
    """Apply the API server's rules."""
    obj = copy.deepcopy(subject.obj)
    obj.setdefault("metadata", {})
    for cause in _causes(subject, obj):
        _report_cause(subject, cause)


def _causes(subject: Subject, obj: Json) -> Iterator[Cause]:
    yield from validate_meta(
        obj,
        namespaced=subject.kind != "DeviceClass",
        check_name=dns_subdomain_error,
        check_prefix=_prefix_error,
    )
    match subject.kind:
        case "ResourceClaim":
            yield from claims.validate_claim_spec(_object(obj.get("spec")), "spec", _Rules())
        case "ResourceClaimTemplate":
            yield from claims.validate_template(obj, _Rules())
        case "DeviceClass":
            yield from claims.validate_class(obj, _Rules())
        case "Pod":
            yield from pods.validate_spec(_object(obj.get("spec")), "spec")
        case "CronJob":
            yield from validate_cron_job(obj)
        case _:
            yield from validate_workload(obj, subject.kind)


def _prefix_error(text: str) -> str | None:
    return dns_subdomain_error(text[:-1] + "a" if text.endswith("-") else text)


# Source: apimachinery's field.ErrorType.
_CODE_OF = {
    "FieldValueDuplicate": "DRA-API-DUPLICATE",
    "FieldValueForbidden": "DRA-API-FORBIDDEN",
    "FieldValueInvalid": "DRA-API-INVALID",
    "FieldValueNotFound": "DRA-API-NOT-FOUND",
    "FieldValueNotSupported": "DRA-API-NOT-SUPPORTED",
    "FieldValueRequired": "DRA-API-REQUIRED",
    "FieldValueTooLong": "DRA-API-TOO-LONG",
    "FieldValueTooMany": "DRA-API-TOO-MANY",
    "FieldValueTypeInvalid": "DRA-API-TYPE-INVALID",
}


def _report_cause(subject: Subject, cause: Cause) -> None:
    path, detail = cause.field, cause.detail
    if ".resources.requests[" in path and not subject.written(path):
        return  # the server copied it from the limit, of which it says the same
    if cause.reason == "FieldValueRequired" and any(_within(path, one) for one in subject.misspelt):
        return
    code = _CODE_OF.get(cause.reason, "DRA-API-INVALID")
    remedy = ""
    if claims.UNKNOWN_REQUEST in detail:
        found = subject.claim_spec()
        known = sorted(claims.request_names(found[1])) if found else []
        code, remedy = (
            "DRA-CLAIM-REQUEST-UNKNOWN",
            f"Name one of the requests: {', '.join(known) or 'there are none'}.",
        )
    elif "must be one of the names in pod.spec.resourceClaims" in detail:
        code = "DRA-POD-CLAIM-UNKNOWN"
        remedy = "Add it to the pod's spec.resourceClaims, or name one that is there."
    elif detail.endswith("must be an integer"):
        code, path, detail, remedy = _fraction(subject, path)
    elif ".resources." in path and ("must be equal to" in detail or "non overcommitable" in detail):
        code = "DRA-POD-REQUEST-LIMIT"
        remedy = "An extended resource has one number: write limits only, or the same in requests and limits."
    subject.report("error", code, path, detail, remedy=remedy)


def _within(path: str, parent: str) -> bool:
    return path == parent or (path.startswith(f"{parent}.") if parent else "." not in path)


def _fraction(subject: Subject, path: str) -> tuple[str, str, str, str]:
    resource = path.rpartition("[")[2].rstrip("]")
    given = _written_value(subject.manifest.value, path)
    message = f"{given} of {resource} cannot be had: an extended resource is counted in whole numbers"
    return "DRA-POD-GPU-FRACTION", path, message, _FRACTION_REMEDY


_FRACTION_REMEDY = (
    "Where the driver's webhook runs, give the namespace (or this object) the label gpudra.dev/fractions: enabled. Or ask for "
    "a part of a GPU with a ResourceClaim: capacity.requests.shares where the driver publishes shares, a MIG device "
    "(deviceClassName: mig.nvidia.com), or one GPU that several containers share."
)


def _written_value(value: Any, path: str) -> Any:
    """Give what stands at a path whose last key is in brackets."""
    head, _, key = path.rpartition("[")
    for part in re.findall(r"[^.\[\]]+", head):
        value = value[int(part)] if isinstance(value, list) else _object(value).get(part)
    return _object(value).get(key.rstrip("]"), "a part")


__all__ = ["DRA_KINDS", "Subject", "check_object", "read_object"]
