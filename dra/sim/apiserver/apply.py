"""Server-side apply and the bookkeeping of field managers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.sim.apiserver import bodies
from dra.sim.apiserver.call import Call

if TYPE_CHECKING:
    from dra.sim.apiserver.api import Api

Json = dict[str, Any]


def track_create(api: Api, call: Call, obj: Json) -> None:
    """Note who set the fields of a new object."""
    obj["metadata"].pop("managedFields", None)


def track_update(api: Api, call: Call, new: Json, old: Json) -> None:
    """Note who changed which fields."""
    new["metadata"].pop("managedFields", None)


def apply_patch(api: Api, call: Call) -> tuple[Json, bool]:
    """Apply a configuration."""
    from dra.sim.apiserver import write
    from dra.sim.apiserver.patch import merge_patch

    body = bodies.load_yaml(call.request.body.decode())
    if api.storage.get(call.resource.key, call.key) is None:
        return write.create(api, call, bodies.shape_body(call, body)), True
    return write.update(
        api, call, lambda old: write._reshape(call, merge_patch(old, body)), kind="PatchOptions"
    )[0], False
