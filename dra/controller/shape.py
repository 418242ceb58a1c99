"""How a pool's content looks as ResourceSlice objects, and when two of them say the same. Pure.

A *content* is what one slice holds besides its identity: `devices` and `sharedCounters` in the shape of v1. A
*normal form* is a content (or a stored spec) in which everything that may differ without meaning is gone:
how a quantity is written, empty fields, the time at which a taint was added.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dra.errors import DraError
from dra.values import Quantity

Json = dict[str, Any]
TaintTimes = dict[tuple[str, str, str, str], str]

# Object names are limited to 253 characters; the index comes first so that it survives every cut and orders
# the slices: the allocator takes them by object name. Source: kube-scheduler 1.36.
MAX_NAME = 253
_INDEX = re.compile(r"([0-9a-f]{5,8})-", re.ASCII)


class SliceContent(Protocol):
    """What one slice of a pool holds; made by `dra.slices.pool`."""

    @property
    def devices(self) -> Sequence[Mapping[str, Any]] | None:
        """Devices in the shape of v1."""

    @property
    def shared_counters(self) -> Sequence[Mapping[str, Any]] | None:
        """Counter sets in the shape of v1."""


class PoolContent(Protocol):
    """All slices of a pool, in the order in which the allocator shall see them."""

    @property
    def slices(self) -> Sequence[SliceContent]:
        """The slices."""


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """Whose pool it is. `node_uid` changes when a node is made again under its name."""

    driver: str
    node_name: str
    pool_name: str
    node_uid: str = ""

    @property
    def owner(self) -> Json:
        """The owner reference: the API server removes the slices when this very node is gone."""
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self.node_name,
            "uid": self.node_uid,
            "controller": True,
        }


def contents_of(pool: PoolContent) -> tuple[Json, ...]:
    """Give the contents of a pool; a pool without slices becomes one empty slice.

    The empty slice says "the driver is here, it has nothing", and takes the place of older ones.
    """
    contents = []
    for part in pool.slices:
        content: Json = {}
        # A key with an empty list beside the other key is refused: leave it out.
        if part.devices:
            content["devices"] = [dict(device) for device in part.devices]
        if part.shared_counters:
            content["sharedCounters"] = [dict(counters) for counters in part.shared_counters]
        contents.append(content)
    return tuple(contents) or ({},)


def slice_name(identity: PoolIdentity, index: int, *, salt: str = "") -> str:
    """Give the name of a pool's slice: `<index>-<driver>-<node>`, cut with a hash where it is too long.

    `salt` gives another name, for when somebody else's object has the first.
    """
    base = f"{identity.driver}-{identity.node_name}"
    name = f"{index:05x}-{base}"
    if not salt and identity.pool_name == identity.node_name and len(name) <= MAX_NAME:
        return name
    text = f"{identity.driver}\n{identity.node_name}\n{identity.pool_name}\n{salt}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    head = f"{index:05x}-{base}"[: MAX_NAME - len(digest) - 1].rstrip(".-")
    return f"{head}-{digest}"


def index_of(name: str) -> int | None:
    """Give the position that a slice's name says; None for a name of another form."""
    match = _INDEX.match(name)
    return int(match[1], 16) if match else None


def slice_spec(identity: PoolIdentity, content: Json, *, generation: int, count: int) -> Json:
    """Give the spec of a ResourceSlice."""
    return {
        "driver": identity.driver,
        "nodeName": identity.node_name,
        "pool": {"name": identity.pool_name, "generation": generation, "resourceSliceCount": count},
        **content,
    }


def slice_body(identity: PoolIdentity, name: str, spec: Json) -> Json:
    """Give a new ResourceSlice object."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name, "ownerReferences": [identity.owner]},
        "spec": spec,
    }


# -- normal forms ------------------------------------------------------------------------------------------


def content_in(spec: Mapping[str, Any]) -> Json:
    """Give what a spec holds beside pool, driver and node."""
    return {key: value for key, value in spec.items() if key not in ("driver", "nodeName", "pool")}


def normal_form(spec: Mapping[str, Any]) -> Json:
    """Give the meaning of a content or of a stored spec; pool, driver and node are left out."""
    rest = content_in(spec)
    devices, counters = rest.pop("devices", None) or [], rest.pop("sharedCounters", None) or []
    form = {**_pruned(rest)}
    if devices:
        form["devices"] = [_normal_device(device) for device in devices]
    if counters:
        form["sharedCounters"] = [_normal_counters(entry) for entry in counters]
    return form


def _normal_device(device: Mapping[str, Any]) -> Json:
    form: Json = _pruned(device)
    if "capacity" in form:
        form["capacity"] = {name: _normal_capacity(value) for name, value in form["capacity"].items()}
    if "consumesCounters" in form:
        form["consumesCounters"] = [_normal_counters(entry) for entry in form["consumesCounters"]]
    if "taints" in form:
        form["taints"] = [
            {key: value for key, value in taint.items() if key != "timeAdded" and value != ""}
            for taint in form["taints"]
        ]
    return form


def _normal_counters(entry: Mapping[str, Any]) -> Json:
    form: Json = _pruned(entry)
    if "counters" in form:
        form["counters"] = {name: _normal_capacity(value) for name, value in form["counters"].items()}
    return form


def _normal_capacity(capacity: Any) -> Any:
    if not isinstance(capacity, (dict, Mapping)):
        return capacity
    if len(capacity) == 1 and "value" in capacity:
        return _form_of_value(str(capacity["value"]))
    form = dict(capacity)
    if "value" in form:
        form["value"] = _normal_quantity(form["value"])
    policy = form.get("requestPolicy")
    if isinstance(policy, Mapping):
        form["requestPolicy"] = {
            key: (
                {bound: _normal_quantity(amount) for bound, amount in value.items()}
                if isinstance(value, Mapping)
                else [_normal_quantity(amount) for amount in value]
                if isinstance(value, list)
                else _normal_quantity(value)
            )
            for key, value in policy.items()
        }
    return form


@functools.lru_cache(maxsize=1024)
def _form_of_value(text: str) -> Json:
    """Give the form of an amount and nothing else: the same object each time, which nobody changes.

    A pool of partitions has thousands of these, of few amounts, and two forms of it are kept.
    """
    return _form_of_amount(_normal_quantity(text))


@functools.lru_cache(maxsize=1024)
def _form_of_amount(amount: Any) -> Json:
    return {"value": amount}


def _normal_quantity(value: Any) -> Any:
    try:
        return Quantity.parse(str(value)).nano
    except DraError:
        return value


def _pruned(value: Any) -> Any:
    """Copy without what the server leaves out when it stores: nulls, empty lists and maps."""
    # The types of JSON are told apart by themselves: a pool of partitions has a hundred thousand values.
    if type(value) in _SCALARS:
        return value
    if isinstance(value, (dict, Mapping)):
        found: Json = {}
        for key, inner in value.items():
            if inner is None:
                continue
            kept = inner if type(inner) in _SCALARS else _pruned(inner)
            if kept or not isinstance(kept, (dict, list)):
                found[key] = kept
        return found
    if isinstance(value, (list, tuple)):
        return [_pruned(inner) for inner in value]
    return value


_SCALARS = frozenset({str, int, bool, float})


# -- taints ------------------------------------------------------------------------------------------------


def taint_times(stored: Sequence[Mapping[str, Any]]) -> TaintTimes:
    """Give when each taint of the stored slices was added, by device, key, value and effect."""
    times: TaintTimes = {}
    for obj in stored:
        for device in (obj.get("spec") or {}).get("devices") or []:
            for taint in device.get("taints") or []:
                if taint.get("timeAdded"):
                    times[_taint_key(device, taint)] = str(taint["timeAdded"])
    return times


def taint_keys(contents: Sequence[Json]) -> frozenset[tuple[str, str, str, str]]:
    """Give the taints of some contents: device, key, value, effect."""
    return frozenset(
        _taint_key(device, taint)
        for content in contents
        for device in content.get("devices") or []
        for taint in device.get("taints") or []
    )


def with_taint_times(content: Json, times: TaintTimes) -> Json:
    """Give the content with the known times in its taints.

    A taint that is sent without its time gets the present one, and the eviction timer of the pods that
    tolerate it for a while starts again. Source: resource.k8s.io/v1 DeviceTaint.timeAdded.
    """
    if not times or not any(device.get("taints") for device in content.get("devices") or []):
        return content

    def device_with_times(device: Json) -> Json:
        if not device.get("taints"):
            return device
        taints = []
        for taint in device["taints"]:
            known = times.get(_taint_key(device, taint))
            taints.append({**taint, "timeAdded": known} if known else taint)
        return {**device, "taints": taints}

    return {**content, "devices": [device_with_times(device) for device in content["devices"]]}


def without_taints(form: Json) -> Json:
    """Give a normal form without the taints of its devices."""
    if "devices" not in form:
        return form
    devices = [{key: value for key, value in device.items() if key != "taints"} for device in form["devices"]]
    return {**form, "devices": devices}


def _taint_key(device: Mapping[str, Any], taint: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return (
        str(device.get("name")),
        str(taint.get("key")),
        str(taint.get("value") or ""),
        str(taint.get("effect")),
    )
