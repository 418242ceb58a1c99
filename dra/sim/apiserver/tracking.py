"""Who owns which fields after a write other than an apply.

Source: k8s.io/apiserver/pkg/endpoints/handlers/fieldmanager.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dra.api.rules.decode import Findings, decode, prune
from dra.sim.apiserver import managers
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.convert import from_storage
from dra.sim.apiserver.fieldset import Difference, Path, ShapeError, compare
from dra.sim.apiserver.managers import ManagerId
from dra.sim.apiserver.shapes import shape_of
from dra.sim.apiserver.state import ServerState

Json = dict[str, Any]


def versioned(call: Call, obj: Json) -> Json:
    """Give an object in the version of the call, without its list of managers."""
    shown = from_storage(call.resource, call.version, obj)
    return {**shown, "metadata": {k: v for k, v in shown["metadata"].items() if k != "managedFields"}}


def empty(call: Call) -> Json:
    """Give what a new object of the kind holds before anybody sets a field."""
    ref = call.resource.versions[call.version]
    return _empty_of(ref) if ref else {"metadata": {}}


@cache
def _empty_of(ref: str) -> Json:
    return prune(decode({}, ref, Findings()), ref)


def own(call: Call, paths: set[Path]) -> frozenset[Path]:
    """Give those of the fields that somebody can own."""
    return managers.ownable(
        paths, subresource=call.subresource, has_status="status" in call.resource.subresources
    )


def _updater(call: Call) -> ManagerId:
    return ManagerId("Update", call.manager, call.group_version, call.subresource)


def difference(call: Call, old: Json, new: Json) -> Difference:
    """Give what a write changed."""
    try:
        return compare(old, new, shape_of(call.resource, call.version))
    except ShapeError:
        # A list that is not as its schema wants it was let in by validation: nobody owns more than the whole.
        return Difference()


def track_create(api: ServerState, call: Call, obj: Json) -> None:
    """Note who set the fields of a new object."""
    obj["metadata"].pop("managedFields", None)
    changes = difference(call, empty(call), versioned(call, obj))
    who = _updater(call)
    managers.write(obj, managers.after_update({}, who, changes, own(call, changes.changed), api.now()))


def track_update(api: ServerState, call: Call, new: Json, old: Json) -> None:
    """Note who changed which fields.

    An object whose list of managers was cleared is not tracked until somebody applies.
    """
    given = new["metadata"].get("managedFields")
    if given is not None and all(not entry for entry in given):
        new["metadata"].pop("managedFields", None)
        return
    # A write may set the list itself (kubectl does so when it turns to server-side apply).
    known = managers.read(new) if given and not call.subresource else managers.read(old)
    if not known:
        new["metadata"].pop("managedFields", None)
        return
    changes = difference(call, versioned(call, old), versioned(call, new))
    who = _updater(call)
    managers.write(new, managers.after_update(known, who, changes, own(call, changes.changed), api.now()))
