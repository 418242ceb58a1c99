"""What a pod must look like, as far as claims, resources and the commonest mistakes go.

Source: pkg/apis/core/validation of Kubernetes 1.36.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from dra.api.rules import names
from dra.api.rules.cause import Cause
from dra.api.rules.decode import same_meaning
from dra.api.rules.dns import dns_subdomain_error
from dra.api.rules.fields import bad, duplicate, forbidden, required, unsupported
from dra.api.rules.meta import qualified_name_errors
from dra.values import Quantity

Json = dict[str, Any]

_STANDARD = {"cpu", "memory", "ephemeral-storage"}
_POLICIES = ["Always", "OnFailure", "Never"]
_UPDATE_TEXT = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)


def validate_spec(spec: Json, field: str) -> list[Cause]:
    """Find what is wrong with a pod's spec."""
    found = _claims(spec.get("resourceClaims") or [], f"{field}.resourceClaims")
    claim_names = [claim.get("name") or "" for claim in spec.get("resourceClaims") or []]
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    seen: set[str] = set()
    if not spec.get("containers"):
        found.append(required(f"{field}.containers"))
    for key in ("containers", "initContainers"):
        for i, container in enumerate(spec.get(key) or []):
            at = f"{field}.{key}[{i}]"
            found += _container(container, at, claim_names, volumes)
            name = container.get("name") or ""
            if name in seen:
                found.append(duplicate(f"{at}.name", name))
            seen.add(name)
    policy = spec.get("restartPolicy")
    if policy not in _POLICIES:
        found.append(unsupported(f"{field}.restartPolicy", policy or "", _POLICIES))
    if spec.get("resources") is not None:
        found += _pod_resources(spec["resources"], f"{field}.resources")
    return found


def _claims(claims: list[Json], field: str) -> list[Cause]:
    found: list[Cause] = []
    seen: set[str] = set()
    for i, claim in enumerate(claims):
        at = f"{field}[{i}]"
        name = claim.get("name") or ""
        if not name:
            found.append(required(f"{at}.name"))
        elif name in seen:
            found.append(duplicate(f"{at}.name", name))
        else:
            found += names.label(name, f"{at}.name")
        seen.add(name)
        direct, template = claim.get("resourceClaimName"), claim.get("resourceClaimTemplateName")
        shown = {"Name": name, "ResourceClaimName": direct, "ResourceClaimTemplateName": template}
        if direct is not None and template is not None:
            why = "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"
            found.append(bad(at, shown, why))
        if direct is None and template is None:
            why = "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"
            found.append(bad(at, shown, why))
        for key, value in (("resourceClaimName", direct), ("resourceClaimTemplateName", template)):
            if value is not None and (error := dns_subdomain_error(value)):
                found.append(bad(f"{at}.{key}", value, error))
    return found


def _container(container: Json, field: str, claims: list[str], volumes: set[Any]) -> list[Cause]:
    name = container.get("name") or ""
    found = names.label(name, f"{field}.name") if name else [required(f"{field}.name")]
    if not container.get("image"):
        found.append(required(f"{field}.image"))
    for i, entry in enumerate(container.get("env") or []):
        if not entry.get("name"):
            found.append(required(f"{field}.env[{i}].name"))
    for i, mount in enumerate(container.get("volumeMounts") or []):
        at = f"{field}.volumeMounts[{i}]"
        if mount.get("name") not in volumes:
            found.append(Cause("FieldValueNotFound", f"{at}.name", f'Not found: "{mount.get("name") or ""}"'))
        if not mount.get("mountPath"):
            found.append(required(f"{at}.mountPath"))
    resources = container.get("resources") or {}
    found += _resources(resources, f"{field}.resources")
    return [*found, *_used_claims(resources.get("claims") or [], f"{field}.resources.claims", claims)]


def _used_claims(items: list[Json], field: str, known: list[str]) -> list[Cause]:
    found: list[Cause] = []
    seen: set[tuple[str, str]] = set()
    for i, item in enumerate(items):
        at = f"{field}[{i}]"
        name, request = item.get("name") or "", item.get("request") or ""
        if not name:
            found.append(required(f"{at}.name"))
            continue
        if request:
            found += names.label(request, f"{at}.request")
        if (name, request) in seen or (name, "") in seen:
            found.append(duplicate(at, f"{name}/{request}" if request and (name, "") not in seen else name))
        elif name not in known:
            listed = ": " + ", ".join(known) if known else " which is empty"
            detail = f'Not found: "{name}": must be one of the names in pod.spec.resourceClaims{listed}'
            found.append(Cause("FieldValueNotFound", at, detail))
        seen.add((name, request))
    return found


def is_extended(name: str) -> bool:
    """Whether a resource is an extended one: qualified, and not Kubernetes' own."""
    return "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")


def _resources(resources: Json, field: str) -> list[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    found = [cause for key in sorted(limits) for cause in _amount(key, limits[key], f"{field}.limits[{key}]")]
    for key in sorted(requests):
        found += _amount(key, requests[key], f"{field}.requests[{key}]")
        amount = Quantity.parse(str(requests[key]))
        limit = Quantity.parse(str(limits[key])) if key in limits else None
        overcommit = not is_extended(key) and not key.startswith("hugepages-")
        if limit is not None:
            if not overcommit and amount != limit:
                why = f"must be equal to {key} limit of {limit}"
                found.append(bad(f"{field}.requests", str(amount), why))
            elif overcommit and amount > limit:
                why = f"must be less than or equal to {key} limit of {limit}"
                found.append(bad(f"{field}.requests", str(amount), why))
        elif not overcommit:
            found.append(required(f"{field}.limits", "Limit must be set for non overcommitable resources"))
    return found


def _amount(name: str, value: Any, field: str) -> list[Cause]:
    found = [bad(field, name, why) for why in qualified_name_errors(name)]
    if not found and "/" not in name and name not in _STANDARD and not name.startswith("hugepages-"):
        found.append(bad(field, name, "must be a standard resource type or fully qualified"))
        found.append(bad(field, name, "must be a standard resource for containers"))
    elif found and is_extended(name):
        found.append(bad(field, name, "doesn't follow extended resource name standard"))
    amount = Quantity.parse(str(value))
    if amount.nano < 0:
        found.append(bad(field, str(amount), "must be greater than or equal to 0"))
    if is_extended(name) and not amount.is_integer:
        found.append(bad(field, str(amount), "must be an integer"))
    return found


def _pod_resources(resources: Json, field: str) -> list[Cause]:
    found: list[Cause] = []
    for kind in ("limits", "requests"):
        for key in sorted(resources.get(kind) or {}):
            if key not in {"cpu", "memory"} and not key.startswith("hugepages-"):
                at = f"{field}.{kind}[{key}]"
                found.append(unsupported(at, key, ["cpu", "hugepages-", "memory"]))
    return found


def _pairs(new: Json, old: Json) -> Iterator[tuple[Json, Json]]:
    for key in ("containers", "initContainers"):
        yield from zip(new.get(key) or [], old.get(key) or [], strict=False)


def validate_change(new: Json, old: Json) -> list[Cause]:
    """Find changes of a pod's spec that are not allowed."""
    kept = old.get("tolerations") or []
    given = new.get("tolerations") or []
    keyed = [{k: v for k, v in t.items() if k != "tolerationSeconds"} for t in given]
    if any({k: v for k, v in t.items() if k != "tolerationSeconds"} not in keyed for t in kept):
        why = "existing toleration can not be modified except its tolerationSeconds"
        return [forbidden("spec.tolerations", why)]
    if any(len(new.get(k) or []) != len(old.get(k) or []) for k in ("containers", "initContainers")):
        return [forbidden("spec", "pod updates may not add or remove containers")]
    gates = [gate["name"] for gate in old.get("schedulingGates") or []]
    for gate in new.get("schedulingGates") or []:
        if gate["name"] not in gates:
            why = f"only deletion is allowed, but found new scheduling gate '{gate['name']}'"
            return [forbidden("spec.schedulingGates", why)]
    masked = copy.deepcopy(new)
    for key in ("schedulingGates", "tolerations", "activeDeadlineSeconds", "terminationGracePeriodSeconds"):
        if key in old:
            masked[key] = old[key]
        else:
            masked.pop(key, None)
    for one, other in _pairs(masked, old):
        one["image"] = other.get("image")
    grace = new.get("terminationGracePeriodSeconds")
    if grace != old.get("terminationGracePeriodSeconds") and grace != 1:
        masked["terminationGracePeriodSeconds"] = grace
    return [] if same_meaning(masked, old) else [forbidden("spec", _UPDATE_TEXT)]


def validate_status(obj: Json) -> list[Cause]:
    """Find claim statuses that fit no claim of the spec."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    known = {claim.get("name") for claim in spec.get("resourceClaims") or []}
    found: list[Cause] = []
    seen: set[str] = set()
    for i, entry in enumerate(status.get("resourceClaimStatuses") or []):
        at = f"status.resourceClaimStatuses[{i}]"
        name = entry.get("name") or ""
        if name not in known:
            found.append(bad(f"{at}.name", name, "must match the name of an entry in `spec.resourceClaims`"))
        if name in seen:
            found.append(duplicate(at, name))
        seen.add(name)
        claim = entry.get("resourceClaimName")
        if claim is not None and (why := dns_subdomain_error(claim)):
            found.append(bad(f"{at}.resourceClaimName", claim, why))
    return [*found, *_extended(spec, status.get("extendedResourceClaimStatus"))]


def _extended(spec: Json, status: Json | None) -> list[Cause]:
    if status is None:
        return []
    field = "status.extendedResourceClaimStatus"
    found: list[Cause] = []
    name = status.get("resourceClaimName") or ""
    if why := dns_subdomain_error(name):
        found.append(bad(f"{field}.resourceClaimName", name, why))
    wanted = {
        key
        for kind in ("initContainers", "containers")
        for container in spec.get(kind) or []
        for key in (container.get("resources") or {}).get("requests") or {}
    }
    why = (
        "must match the extended resource name of an entry in spec.initContainers.resources.requests or "
        "spec.containers.resources.requests"
    )
    for i, mapping in enumerate(status.get("requestMappings") or []):
        resource = mapping.get("resourceName") or ""
        if resource not in wanted:
            found.append(bad(f"{field}.requestMappings[{i}].resourceName", resource, why))
    return found
