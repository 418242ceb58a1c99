"""How objects go out: plain, as a Table with the server's columns, or only their metadata."""

from __future__ import annotations

from typing import Any

from dra.api.rules.decode import Findings, decode, prune
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.columns import Column
from dra.sim.apiserver.convert import from_storage
from dra.sim.apiserver.custom import DEFINITIONS
from dra.sim.apiserver.encoding import encode
from dra.sim.apiserver.exchange import Response
from dra.sim.apiserver.printers import columns_of
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import bad_request

Json = dict[str, Any]


def partial(obj: Json, version: str) -> Json:
    """Give only the metadata of an object."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": f"meta.k8s.io/{version}",
        "metadata": obj["metadata"],
    }


def plain(call: Call, obj: Json) -> Json:
    """Give a stored object in the version of the call, kind first."""
    shown = from_storage(call.resource, call.version, obj)
    return {"kind": shown["kind"], "apiVersion": shown["apiVersion"], **shown}


def item(call: Call, obj: Json) -> Json:
    """Give an object as it stands in a list: without kind, unless it is a custom resource."""
    shown = from_storage(call.resource, call.version, obj)
    if call.resource.custom is not None:
        return shown
    return {k: v for k, v in shown.items() if k not in {"kind", "apiVersion"}}


def one(api: ServerState, call: Call, obj: Json) -> Json:
    """Give one object as the client wants it."""
    wanted = call.wanted
    if wanted.shape == "Table":
        return table(api, call, [obj], {"resourceVersion": obj["metadata"].get("resourceVersion", "")})
    if wanted.shape in {"PartialObjectMetadata", "PartialObjectMetadataList"}:
        return partial(obj, wanted.version)
    return plain(call, obj)


def reply(api: ServerState, call: Call, obj: Json, status: int = 200) -> Response:
    """Answer with one stored object."""
    return encode(call.wanted, status, one(api, call, obj))


def many(api: ServerState, call: Call, objects: list[Json], meta: Json) -> Json:
    """Give a list as the client wants it."""
    wanted = call.wanted
    if wanted.shape == "Table":
        return table(api, call, objects, meta)
    if wanted.shape in {"PartialObjectMetadata", "PartialObjectMetadataList"}:
        return {
            "kind": "PartialObjectMetadataList",
            "apiVersion": f"meta.k8s.io/{wanted.version}",
            "metadata": meta,
            "items": [partial(obj, wanted.version) for obj in objects] or None,
        }
    return {
        "kind": call.resource.kind_of_list,
        "apiVersion": call.group_version,
        "metadata": {"continue": "", **meta} if call.resource.custom is not None else meta,
        "items": [item(call, obj) for obj in objects],
    }


def table(api: ServerState, call: Call, objects: list[Json], meta: Json, *, header: bool = True) -> Json:
    """Give a Table.

    Raises:
        ApiFailure: 400 for an unknown includeObject.
    """
    include = call.query.get("includeObject", "") or "Metadata"
    if include not in {"Metadata", "Object", "None"}:
        raise bad_request(
            "Unable to convert to Table as requested: includeObject: Invalid value: "
            f"\"{include}\": must be 'Metadata', 'Object', 'None', or empty"
        )
    columns = columns_of(call.resource, call.version)
    result: Json = {
        "kind": "Table",
        "apiVersion": f"meta.k8s.io/{call.wanted.version}",
        "metadata": meta,
        "columnDefinitions": [_definition(column) for column in columns] if header else None,
        "rows": [],
    }
    for obj in objects:
        row: Json = {"cells": [column.cell(obj, api.clock()) for column in columns]}
        if include == "Metadata":
            row["object"] = partial(obj, call.wanted.version)
        elif include == "Object":
            row["object"] = plain(call, obj)
        else:
            row["object"] = None
        result["rows"].append(row)
    if not objects and call.resource.key == DEFINITIONS:
        # The extension server writes an empty list as null.
        result["rows"] = None
    return result


def _definition(column: Column) -> Json:
    return {
        "name": column.name,
        "type": column.type,
        "format": column.format,
        "description": column.description,
        "priority": column.priority,
    }


class EventEncoder:
    """Gives the objects of watch events; a Table's first event alone carries the columns."""

    def __init__(self, api: ServerState, call: Call) -> None:
        self._api = api
        self._call = call
        self._header = True

    def event(self, obj: Json) -> Json:
        """Give the object of an event."""
        if self._call.wanted.shape == "Table":
            meta = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
            result = table(self._api, self._call, [obj], meta, header=self._header)
            self._header = False
            return result
        return one(self._api, self._call, obj)

    def bookmark(self, revision: int) -> Json:
        """Give the object of a bookmark: an empty object of the kind with a version."""
        call = self._call
        ref = call.resource.versions[call.version]
        empty = prune(decode({}, ref, Findings()), ref) if ref else {}
        meta: Json = {"resourceVersion": str(revision)}
        kind = {"kind": call.resource.kind, "apiVersion": call.group_version}
        return {**kind, "metadata": meta, **{k: v for k, v in empty.items() if k != "metadata"}}

    def bookmark_event(self, revision: int, annotations: Json | None = None) -> Json:
        """Give a bookmark as the client wants objects."""
        obj = self.bookmark(revision)
        if annotations:
            obj["metadata"]["annotations"] = annotations
        if self._call.wanted.shape == "Table":
            return table(self._api, self._call, [obj], {"resourceVersion": str(revision)}, header=False)
        if self._call.wanted.shape:
            return partial(obj, self._call.wanted.version)
        return obj
