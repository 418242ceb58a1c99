"""What a ResourceClaim's spec must look like (and a template's, and a class's).

Source: pkg/apis/resource/validation of Kubernetes 1.36 (ValidateResourceClaim, ValidateDeviceClass …).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.api.rules import names
from dra.api.rules.cause import Cause, Rules
from dra.api.rules.fields import bad, duplicate, forbidden, required, unsupported
from dra.api.rules.meta import validate_annotations, validate_labels
from dra.api.rules.parts import (
    MAX_CONFIGS,
    limited,
    node_selector,
    opaque_config,
    selectors,
    taint,
    toleration,
)

Json = dict[str, Any]

MAX_REQUESTS = 32
MAX_CONSTRAINTS = 32
MAX_ALTERNATIVES = 8
_SERVER_META = (
    "name", "generateName", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
    "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields",
)  # fmt: skip
ADMIN_LABEL = "resource.kubernetes.io/admin-access"
ADMIN_TEXT = "admin access to devices requires the `resource.kubernetes.io/admin-access: true` label on the containing namespace"
UNKNOWN_REQUEST = (
    "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"
)


def validate_claim_spec(spec: Json, field: str, rules: Rules) -> list[Cause]:
    """Find what is wrong with a claim's spec."""
    devices = spec.get("devices") or {}
    at = f"{field}.devices"
    requests = devices.get("requests") or []
    found = limited(requests, f"{at}.requests", MAX_REQUESTS)
    seen: set[str] = set()
    for i, request in enumerate(requests if not found else []):
        where = f"{at}.requests[{i}]"
        found += _request(request, where, rules)
        if request.get("name") in seen:
            found.append(duplicate(where, request.get("name")))
        seen.add(request.get("name") or "")
    known = request_names(spec)
    found += _constraints(devices.get("constraints") or [], f"{at}.constraints", known)
    configs = devices.get("config") or []
    found += limited(configs, f"{at}.config", MAX_CONFIGS)
    for i, config in enumerate(configs if len(configs) <= MAX_CONFIGS else []):
        where = f"{at}.config[{i}]"
        found += request_references(config.get("requests") or [], f"{where}.requests", known)
        found += opaque_config(config, where)
    return found


def request_names(spec: Json) -> set[str]:
    """Give the names that results, constraints and configurations may refer to."""
    known: set[str] = set()
    for request in (spec.get("devices") or {}).get("requests") or []:
        known.add(request.get("name") or "")
        for sub in request.get("firstAvailable") or []:
            known.add(f"{request.get('name')}/{sub.get('name')}")
    return known


def request_references(items: list[str], field: str, known: set[str]) -> list[Cause]:
    """Find references to requests that are not there, or twice."""
    found = limited(items, field, MAX_REQUESTS)
    for i, item in enumerate(items):
        if item not in known:
            found.append(bad(f"{field}[{i}]", item, UNKNOWN_REQUEST))
        if item in items[:i]:
            found.append(duplicate(f"{field}[{i}]", item))
    return found


def _request(request: Json, field: str, rules: Rules) -> list[Cause]:
    found = names.label(request.get("name") or "", f"{field}.name")
    exactly, alternatives = request.get("exactly"), request.get("firstAvailable") or []
    if exactly is None and not alternatives:
        found.append(required(field, "exactly one of `exactly` or `firstAvailable` is required"))
    elif exactly is not None and alternatives:
        why = "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set"
        found.append(bad(field, None, why))
    elif exactly is not None:
        found += _exact(exactly, f"{field}.exactly", rules)
    else:
        at = f"{field}.firstAvailable"
        found += limited(alternatives, at, MAX_ALTERNATIVES)
        for i, sub in enumerate(alternatives if len(alternatives) <= MAX_ALTERNATIVES else []):
            found += names.label(sub.get("name") or "", f"{at}[{i}].name")
            found += _exact(sub, f"{at}[{i}]", rules)
            if sub.get("name") in [other.get("name") for other in alternatives[:i]]:
                found.append(duplicate(f"{at}[{i}]", sub.get("name")))
    return found


def _exact(request: Json, field: str, rules: Rules) -> list[Cause]:
    name = request.get("deviceClassName") or ""
    at = f"{field}.deviceClassName"
    found = names.subdomain(name, at) if name else [required(at)]
    found += selectors(request.get("selectors") or [], f"{field}.selectors", rules.cel_check)
    mode, count = request.get("allocationMode") or "", request.get("count") or 0
    if mode == "All":
        if count:
            found.append(bad(f"{field}.count", count, "must not be specified when allocationMode is 'All'"))
    elif mode == "ExactCount":
        if count <= 0:
            found.append(bad(f"{field}.count", count, "must be greater than zero"))
    else:
        found.append(unsupported(f"{field}.allocationMode", mode, ["All", "ExactCount"]))
    for i, item in enumerate(request.get("tolerations") or []):
        found += toleration(item, f"{field}.tolerations[{i}]", rules.minor)
    return found


def _constraints(items: list[Json], field: str, known: set[str]) -> list[Cause]:
    found = limited(items, field, MAX_CONSTRAINTS)
    for i, item in enumerate(items if not found else []):
        at = f"{field}[{i}]"
        found += request_references(item.get("requests") or [], f"{at}.requests", known)
        matched, distinct = item.get("matchAttribute"), item.get("distinctAttribute")
        if matched is not None:
            found += names.fully_qualified(matched, f"{at}.matchAttribute")
        elif distinct is not None:
            found += names.fully_qualified(distinct, f"{at}.distinctAttribute")
        else:
            why = 'exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set'
            found.append(required(at, why))
    return found


def admin_requests(spec: Json) -> Iterator[int]:
    """Give the positions of requests that ask for admin access."""
    for i, request in enumerate((spec.get("devices") or {}).get("requests") or []):
        if (request.get("exactly") or {}).get("adminAccess"):
            yield i


def validate_admin(spec: Json, namespace: Json | None) -> list[Cause]:
    """Find admin access outside a namespace that allows it."""
    labels = ((namespace or {}).get("metadata") or {}).get("labels") or {}
    if labels.get(ADMIN_LABEL) == "true":
        return []
    return [forbidden(f"spec.devices.requests[{i}].adminAccess", ADMIN_TEXT) for i in admin_requests(spec)]


def validate_template(obj: Json, rules: Rules) -> list[Cause]:
    """Find what is wrong with a claim template."""
    spec = obj.get("spec") or {}
    meta = spec.get("metadata") or {}
    found = [forbidden(f"spec.metadata.{key}", "cannot be set") for key in _SERVER_META if meta.get(key)]
    found += [
        forbidden(f"spec.metadata.{key}", "cannot be set")
        for key in ("ownerReferences", "finalizers")
        if meta.get(key) is not None
    ]
    found += validate_labels(meta.get("labels"), "spec.metadata.labels")
    found += validate_annotations(meta.get("annotations"), "spec.metadata.annotations")
    return [*found, *validate_claim_spec(spec.get("spec") or {}, "spec.spec", rules)]


def validate_class(obj: Json, rules: Rules) -> list[Cause]:
    """Find what is wrong with a device class."""
    spec = obj.get("spec") or {}
    found = selectors(spec.get("selectors") or [], "spec.selectors", rules.cel_check)
    configs = spec.get("config") or []
    found += limited(configs, "spec.config", MAX_CONFIGS)
    for i, config in enumerate(configs if len(configs) <= MAX_CONFIGS else []):
        found += opaque_config(config, f"spec.config[{i}]")
    extended = spec.get("extendedResourceName")
    if extended is not None and not is_extended_name(extended):
        found.append(bad("spec.extendedResourceName", extended, "must be a valid extended resource name"))
    return found


def is_extended_name(name: str) -> bool:
    """Whether a resource name is that of an extended resource. Source: helper.IsExtendedResourceName."""
    from dra.api.rules.meta import qualified_name_errors

    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    return not qualified_name_errors(f"requests.{name}")


def validate_taint_rule(obj: Json, rules: Rules) -> list[Cause]:
    """Find what is wrong with a device taint rule."""
    spec = obj.get("spec") or {}
    selector = spec.get("deviceSelector") or {}
    found: list[Cause] = []
    if selector.get("driver") is not None:
        found += names.driver(selector["driver"], "spec.deviceSelector.driver")
    if selector.get("pool") is not None:
        found += names.pool(selector["pool"], "spec.deviceSelector.pool")
    if selector.get("device") is not None:
        found += names.label(selector["device"], "spec.deviceSelector.device")
    return [*found, *taint(spec.get("taint") or {}, "spec.taint", rules.minor)]


__all__ = ["node_selector", "validate_claim_spec", "validate_class", "validate_template"]
