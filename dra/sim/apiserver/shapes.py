"""The type of a resource's objects, built in or from the schema of a custom resource definition."""

from __future__ import annotations

from typing import Any

from dra.api.rules.schema import Field, Struct, Type
from dra.sim.apiserver.registry import Resource

Json = dict[str, Any]

# Maps and lists whose shape nobody declared: maps by field, lists as a whole.
DEDUCED = Type("deduced")


def shape_of(resource: Resource, version: str) -> Type:
    """Give the type of a resource's objects in a version."""
    ref = resource.versions.get(version, "")
    if ref:
        return Type("struct", ref=ref)
    schema = getattr(resource.custom, "schemas", {}).get(version) or {}
    shape = from_openapi({"type": "object", **schema}, name=resource.kind)
    struct = shape.inline or Struct(resource.kind, atomic=False)
    meta = Field(
        "metadata", Type("struct", ref="meta_v1.ObjectMeta"), always=False, required=False, keeps_zero=False
    )
    plain = {
        name: Field(name, Type("string"), always=False, required=False, keeps_zero=False)
        for name in ("apiVersion", "kind")
    }
    fields = {**struct.fields, **plain, "metadata": meta}
    return Type("struct", inline=Struct(struct.name, struct.atomic, fields))


def from_openapi(schema: Json, *, name: str = "") -> Type:
    """Give the type that a structural schema describes."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return Type("intstr")
    if kind == "array":
        elem = from_openapi(schema.get("items") or {})
        return Type(
            "list",
            elem=elem,
            list_type=schema.get("x-kubernetes-list-type", "atomic"),
            keys=tuple(schema.get("x-kubernetes-list-map-keys") or ()),
        )
    if kind == "object":
        atomic = schema.get("x-kubernetes-map-type") == "atomic"
        if schema.get("properties"):
            fields = {
                key: Field(key, from_openapi(value), always=False, required=False, keeps_zero=True)
                for key, value in schema["properties"].items()
            }
            return Type("struct", inline=Struct(name, atomic, fields))
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            return Type("map", elem=from_openapi(extra), atomic=atomic)
        return Type("any") if atomic else DEDUCED
    return {
        "string": Type("string"),
        "integer": Type("int64"),
        "number": Type("float"),
        "boolean": Type("bool"),
    }.get(str(kind), Type("any"))
