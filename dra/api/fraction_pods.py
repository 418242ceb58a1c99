"""Pods that ask for a part of a GPU the short way, rewritten to ask for it with claims. Pure.

    limits: {nvidia.com/gpu: 0.2}   ->   claims: [{name: gpudra-main}], and the pod's claim gpudra-main from the template
                                         gpu-share-20of100-…, which `dra fleet` makes in the pod's namespace

Whole numbers stay what they are: extended resources. The API server refuses a fraction of one, but only after
mutation, so it must go, in pods and in the pod templates of workloads. Nothing is changed twice: what has no fraction
has nothing to change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dra.api.fractions import (
    ANNOTATION,
    CLAIM_PREFIX,
    GROUP,
    LABEL,
    Ask,
    FractionRules,
    memory_mib,
    quantity_of,
)
from dra.errors import ClaimError
from dra.values import Quantity

Json = dict[str, Any]

# Where the pod lies in an object of each kind.
POD_PATHS: Mapping[str, tuple[str, ...]] = {
    "Pod": (),
    "Deployment": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
# Who has this label, or lies in a namespace that has it, is rewritten.
OPT_IN_LABEL, OPT_IN = f"{GROUP}/fractions", "enabled"
_MAX_LABEL = 63
# What the admission plugin ExtendedResourceToleration adds for whole GPUs, which it cannot see here.
_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}


@dataclass(frozen=True, slots=True)
class Place:
    """A container: the list it stands in, its index, itself."""

    listed: str
    index: int
    container: Json

    @property
    def path(self) -> str:
        """Its path in the pod's spec."""
        return f"{self.listed}[{self.index}]"


def rewrite(obj: Mapping[str, Any], rules: FractionRules) -> list[Json]:
    """Give the JSON patch that turns fractions into claims; empty where there is none.

    Raises:
        ClaimError: DRA-FRACTION-…: what cannot be meant; names the field.
    """
    path = POD_PATHS.get(str(obj.get("kind")))
    if path is None:
        return []
    pod: Any = obj
    for part in path:
        pod = pod.get(part) if isinstance(pod, Mapping) else None
    if not isinstance(pod, Mapping) or not isinstance(pod.get("spec"), Mapping):
        return []
    made = rewrite_pod(pod, rules, where=".".join((*path, "spec")))
    return [] if made is None else _patch(pod, made, "".join(f"/{part}" for part in path))


def is_opted_in(obj: Mapping[str, Any], namespace: Mapping[str, Any] | None) -> bool:
    """Whether fractions in an object are rewritten: it, or its namespace, has the label. Kinds without pods: no."""
    labelled = any(
        _object(_object(one.get("metadata")).get("labels")).get(OPT_IN_LABEL) == OPT_IN
        for one in (obj, namespace or {})
    )
    return labelled and str(obj.get("kind")) in POD_PATHS


def rewritten(obj: Mapping[str, Any], rules: FractionRules) -> Json:
    """Give the object as it is after `rewrite`.

    Raises:
        ClaimError: as `rewrite`.
    """
    made: Json = json.loads(json.dumps(obj))
    path = POD_PATHS.get(str(obj.get("kind")), ())
    place: Any = made
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict) or not isinstance(place.get("spec"), dict):
        return made
    changed = rewrite_pod(place, rules, where=".".join((*path, "spec")))
    place.update(changed or {})
    return made


def rewrite_pod(pod: Mapping[str, Any], rules: FractionRules, *, where: str = "spec") -> Json | None:
    """Give a pod (or pod template) with claims in place of fractions; None if nothing changes.

    Raises:
        ClaimError: as `rewrite`.
    """
    made: Json = json.loads(json.dumps(pod))
    spec = made["spec"]
    asks: dict[str, Ask] = {}
    of_main: dict[Ask, str] = {}
    changed = False
    for place in _containers(spec):
        ask, whole = _take(place, rules, where)
        name = _claim_name(place.container)
        if ask is not None:
            changed = True
            if place.listed == "containers":
                of_main.setdefault(ask, name)
            elif place.container.get("restartPolicy") != "Always":
                # It has ended before the others begin: a claim of the same amount serves both.
                name = of_main.get(ask, name)
            asks[name] = ask
            _use(place.container, name)
        elif whole and _drop(place.container):
            changed = True
    if not changed:
        return None
    _set_claims(spec, asks)
    _set_metadata(made, asks)
    if asks and not any(_tolerates(each) for each in _list(spec.get("tolerations"))):
        spec["tolerations"] = [*_list(spec.get("tolerations")), dict(_TOLERATION)]
    return made


def _containers(spec: Mapping[str, Any]) -> Iterator[Place]:
    # Init containers come last: what they can share is known by then.
    for listed in ("containers", "initContainers"):
        for index, container in enumerate(_list(spec.get(listed))):
            if isinstance(container, dict):
                yield Place(listed, index, container)


def _take(place: Place, rules: FractionRules, where: str) -> tuple[Ask | None, bool]:
    """Take what a container asks for the short way out of its resources.

    Gives the amount, None if there is none, and whether it asks for whole GPUs (or expressly for none).
    """
    resources = place.container.get("resources")
    if not isinstance(resources, dict):
        return None, False
    at = f"{where}.{place.path}.resources"
    # Of whole GPUs the API server is the judge.
    gpu = _amount(resources, rules.gpu, at, lenient=True)
    memory = _amount(resources, rules.memory, at)
    fraction = gpu is not None and not gpu[1].is_integer
    if not fraction and (memory is None or memory[1].nano == 0):
        return None, gpu is not None
    shares, mib = 0, 0
    if gpu is not None:
        _check_gpu(gpu, at, alone=memory is None)
        shares = rules.shares_of(gpu[1]) if fraction else 0
        _remove(resources, gpu[0])
    if memory is not None:
        mib = _mib(memory, at)
        _remove(resources, memory[0])
    return Ask(shares, rules.shares_per_card if shares else 0, mib), False


def _check_gpu(gpu: tuple[str, Quantity], at: str, *, alone: bool) -> None:
    name, amount = gpu
    if amount.nano < 0 or (amount.nano > 10**9 and not (amount.is_integer and alone)):
        raise ClaimError(
            "DRA-FRACTION-RANGE",
            f"{at}.limits[{name}] is {amount}: a container gets whole GPUs, or a part of one",
            remedy="Write a whole number, or a fraction below 1; with an amount of memory, 1 or a fraction.",
            field=f"{at}.limits[{name}]",
        )


def _mib(memory: tuple[str, Quantity], at: str) -> int:
    name, amount = memory
    mib = memory_mib(amount)
    if not 0 < mib < 1 << 24:
        raise ClaimError(
            "DRA-FRACTION-MEMORY",
            f"{at}.limits[{name}] is {amount}, which is no amount of GPU memory",
            remedy="Write MiB as a whole number, or an amount with its suffix, such as 4Gi.",
            field=f"{at}.limits[{name}]",
        )
    return mib


def _amount(
    resources: Json, names: frozenset[str], at: str, *, lenient: bool = False
) -> tuple[str, Quantity] | None:
    """Give (name, amount) of the one resource among `names` that is asked for; limits and requests must agree.

    Source: the API server's rules for extended resources: requests need limits, and equal them.
    """
    limits, requests = resources.get("limits"), resources.get("requests")
    limits = limits if isinstance(limits, dict) else {}
    requests = requests if isinstance(requests, dict) else {}
    found = sorted(name for name in names if name in limits or name in requests)
    if not found:
        return None
    if len(found) > 1:
        raise ClaimError(
            "DRA-FRACTION-TWICE",
            f"{at} asks for {' and '.join(found)}, which are the same thing",
            remedy="Keep one of them.",
            field=at,
        )
    name = found[0]
    limit, request = quantity_of(limits.get(name)), quantity_of(requests.get(name))
    written = limit if limit is not None else request
    if written is None:
        return None  # The API server says what is wrong with it.
    wrong = limit is None or (name in requests and request != limit)
    if wrong and not (lenient and written.is_integer):
        raise ClaimError(
            "DRA-FRACTION-LIMITS",
            f"{at}: {name} must stand in limits, and in requests with the same value or not at all",
            remedy=f"Write limits: {{{name}: {written}}} alone.",
            field=f"{at}.limits[{name}]",
        )
    return name, written


def _remove(resources: Json, name: str) -> None:
    for part in ("limits", "requests"):
        listed = resources.get(part)
        if isinstance(listed, dict) and name in listed:
            del listed[name]
            if not listed:
                del resources[part]


def _claim_name(container: Mapping[str, Any]) -> str:
    """Give the name of a container's claim in its pod."""
    own = str(container.get("name") or "")
    name = f"{CLAIM_PREFIX}{own}"
    if len(name) <= _MAX_LABEL:
        return name
    return f"{name[:50].rstrip('-')}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"


def _use(container: Json, name: str) -> None:
    resources = container["resources"]
    others = [each for each in _list(resources.get("claims")) if not _is_ours(each)]
    resources["claims"] = [*others, {"name": name}]


def _drop(container: Json) -> bool:
    """Take a claim of ours from a container that asks for whole GPUs now; whether it had one."""
    resources = container["resources"]
    listed = _list(resources.get("claims"))
    left = [each for each in listed if not _is_ours(each)]
    if len(left) == len(listed):
        return False
    if left:
        resources["claims"] = left
    else:
        del resources["claims"]
    return True


def _is_ours(entry: object) -> bool:
    return isinstance(entry, Mapping) and str(entry.get("name") or "").startswith(CLAIM_PREFIX)


def _set_claims(spec: Json, asks: Mapping[str, Ask]) -> None:
    used = {
        str(each.get("name"))
        for place in _containers(spec)
        for each in _list(_object(place.container.get("resources")).get("claims"))
        if isinstance(each, Mapping)
    }
    listed = []
    for entry in _list(spec.get("resourceClaims")):
        name = str(entry.get("name")) if isinstance(entry, Mapping) else ""
        if name not in asks and not (_is_ours(entry) and name not in used):
            listed.append(entry)
    listed += [
        {"name": name, "resourceClaimTemplateName": ask.template_name} for name, ask in sorted(asks.items())
    ]
    if listed:
        spec["resourceClaims"] = listed
    else:
        spec.pop("resourceClaims", None)


def _set_metadata(pod: Json, asks: Mapping[str, Ask]) -> None:
    """Say in the pod what its templates hold; claims from before that are still used keep their word."""
    metadata = dict(_object(pod.get("metadata")))
    labels, notes = dict(_object(metadata.get("labels"))), dict(_object(metadata.get("annotations")))
    named = {
        str(entry.get("resourceClaimTemplateName"))
        for entry in _list(pod["spec"].get("resourceClaims"))
        if _is_ours(entry)
    }
    contents: Json = {}
    try:
        before = json.loads(notes.get(ANNOTATION) or "{}")
        contents = {name: each for name, each in before.items() if name in named}
    except (ValueError, TypeError, AttributeError):
        contents = {}
    contents |= {ask.template_name: ask.content() for ask in asks.values()}
    if contents:
        labels[LABEL] = "true"
        notes[ANNOTATION] = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    else:
        labels.pop(LABEL, None)
        notes.pop(ANNOTATION, None)
    for name, value in (("labels", labels), ("annotations", notes)):
        if value:
            metadata[name] = value
        else:
            metadata.pop(name, None)
    pod["metadata"] = metadata


def _tolerates(toleration: object) -> bool:
    if not isinstance(toleration, Mapping):
        return False
    key = toleration.get("key") or ""
    everything = toleration.get("operator") == "Exists" and not toleration.get("effect")
    return everything and key in ("", _TOLERATION["key"])


def _patch(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> list[Json]:
    """Give the JSON patch (RFC 6902) of the parts that are ever changed."""
    operations: list[Json] = []
    if before.get("metadata") != after.get("metadata"):
        operations += _patch_metadata(before.get("metadata"), after["metadata"], prefix)
    old, new = before["spec"], after["spec"]
    for listed in ("containers", "initContainers"):
        for index, container in enumerate(_list(new.get(listed))):
            if container != old[listed][index]:
                path = f"{prefix}/spec/{listed}/{index}/resources"
                operations.append({"op": "replace", "path": path, "value": container["resources"]})
    for field in ("resourceClaims", "tolerations"):
        if new.get(field) == old.get(field):
            continue
        if field in new:
            operations.append({"op": "add", "path": f"{prefix}/spec/{field}", "value": new[field]})
        else:
            operations.append({"op": "remove", "path": f"{prefix}/spec/{field}"})
    return operations


def _patch_metadata(before: object, after: Json, prefix: str) -> list[Json]:
    if not isinstance(before, Mapping):
        return [{"op": "add", "path": f"{prefix}/metadata", "value": after}]
    operations: list[Json] = []
    for part in ("labels", "annotations"):
        if before.get(part) == after.get(part):
            continue
        path = f"{prefix}/metadata/{part}"
        if part in after:
            operations.append({"op": "add", "path": path, "value": after[part]})
        else:
            operations.append({"op": "remove", "path": path})
    return operations


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
