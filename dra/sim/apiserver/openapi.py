"""OpenAPI v3 documents made from the shapes: enough for kubectl's validation and `kubectl explain`.

There are no field descriptions: the shapes have none.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dra.api.rules.schema import Struct, Type, load_struct
from dra.sim.apiserver.registry import Registry, Resource

Json = dict[str, Any]

_SCALARS: dict[str, Json] = {
    "string": {"type": "string"},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "float": {"type": "number", "format": "double"},
    "bool": {"type": "boolean"},
    "quantity": {"oneOf": [{"type": "string"}, {"type": "number"}]},
    "time": {"type": "string", "format": "date-time"},
    "microtime": {"type": "string", "format": "date-time"},
    "bytes": {"type": "string", "format": "byte"},
    "intstr": {"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string"},
    "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}


def _base(group: str, version: str) -> str:
    return f"apis/{group}/{version}" if group else f"api/{version}"


def index(registry: Registry) -> Json:
    """Give the list of documents with a hash each, so that clients may cache them."""
    paths: Json = {}
    for group, versions in registry.group_versions().items():
        for version in versions:
            base = _base(group, version)
            raw = json.dumps(document(registry, group, version), sort_keys=True)
            digest = hashlib.sha256(raw.encode()).hexdigest().upper()
            paths[base] = {"serverRelativeURL": f"/openapi/v3/{base}?hash={digest}"}
    return {"paths": paths}


def document(registry: Registry, group: str, version: str) -> Json:
    """Give the document of one group version."""
    schemas: Json = {}
    paths: Json = {}
    for resource in registry.in_version(group, version):
        ref = resource.versions[version]
        name = _model(ref) if ref else f"{'.'.join(reversed(group.split('.')))}.{version}.{resource.kind}"
        kind = {"group": group, "version": version, "kind": resource.kind}
        if ref:
            _collect(ref, schemas)
        else:
            schemas[name] = custom_schema(resource, version)
        schemas[name] = {**schemas[name], "x-kubernetes-group-version-kind": [kind]}
        if "list" in resource.verbs:
            schemas[f"{name}List"] = _list_schema(name, {**kind, "kind": resource.kind_of_list})
        paths.update(_paths(resource, _base(group, version), name, kind))
    _collect("meta_v1.ObjectMeta", schemas)
    return {
        "openapi": "3.0.0",
        "info": {"title": "Simulated Kubernetes", "version": "v1.36.2"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def custom_schema(resource: Resource, version: str) -> Json:
    """Give the schema of a custom resource as its definition has it."""
    schema = getattr(resource.custom, "schemas", {}).get(version) or {"type": "object"}
    properties = dict(schema.get("properties") or {})
    properties["apiVersion"] = {"type": "string"}
    properties["kind"] = {"type": "string"}
    properties["metadata"] = {"allOf": [{"$ref": f"#/components/schemas/{_model('meta_v1.ObjectMeta')}"}]}
    return {**schema, "properties": properties}


def _list_schema(name: str, kind: Json) -> Json:
    return {
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "items": {"type": "array", "items": {"allOf": [{"$ref": f"#/components/schemas/{name}"}]}},
        },
        "x-kubernetes-group-version-kind": [kind],
    }


def _model(ref: str) -> str:
    module, _, name = ref.partition(".")
    group, _, version = module.rpartition("_")
    if group == "meta":
        return f"io.k8s.apimachinery.pkg.apis.meta.{version}.{name}"
    if group == "apiextensions":
        return f"io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.{version}.{name}"
    return f"io.k8s.api.{group}.{version}.{name}"


def _collect(ref: str, schemas: Json) -> None:
    todo = [ref]
    while todo:
        current = todo.pop()
        name = _model(current)
        if name in schemas:
            continue
        struct = load_struct(current)
        schemas[name] = _struct_schema(struct, todo)


def _struct_schema(struct: Struct, todo: list[str]) -> Json:
    schema: Json = {"type": "object"}
    required = [f.name for f in struct.fields.values() if f.required]
    if required:
        schema["required"] = required
    if struct.fields:
        schema["properties"] = {f.name: _type_schema(f.type, todo) for f in struct.fields.values()}
    if struct.atomic:
        schema["x-kubernetes-map-type"] = "atomic"
    return schema


def _type_schema(shape: Type, todo: list[str]) -> Json:
    if shape.kind == "struct":
        todo.append(shape.ref)
        return {"allOf": [{"$ref": f"#/components/schemas/{_model(shape.ref)}"}]}
    if shape.kind == "list" and shape.elem is not None:
        schema: Json = {"type": "array", "items": _type_schema(shape.elem, todo)}
        schema["x-kubernetes-list-type"] = shape.list_type
        if shape.keys:
            schema["x-kubernetes-list-map-keys"] = list(shape.keys)
        if shape.merge_key:
            schema["x-kubernetes-patch-strategy"] = "merge"
        if shape.merge_key not in {"", "*"}:
            schema["x-kubernetes-patch-merge-key"] = shape.merge_key
        return schema
    if shape.kind == "map" and shape.elem is not None:
        schema = {"type": "object", "additionalProperties": _type_schema(shape.elem, todo)}
        return {**schema, "x-kubernetes-map-type": "atomic"} if shape.atomic else schema
    return dict(_SCALARS[shape.kind])


def _paths(resource: Resource, base: str, model: str, kind: Json) -> Json:
    prefix = f"/{base}/namespaces/{{namespace}}" if resource.namespaced else f"/{base}"
    collection = f"{prefix}/{resource.plural}"
    answers = {
        "200": {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}}}
    }

    def operation(action: str, *parameters: str) -> Json:
        return {
            "responses": answers,
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": kind,
            "parameters": [
                {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
                for name in parameters
            ],
        }

    writes = ("dryRun", "fieldManager", "fieldValidation")
    one: Json = {}
    many: Json = {}
    if "get" in resource.verbs:
        one["get"] = operation("get")
    if "update" in resource.verbs:
        one["put"] = operation("put", *writes)
    if "patch" in resource.verbs:
        # kubectl looks here whether the kind knows strategic merge patches, and reads the old document otherwise.
        kinds = ["apply-patch+yaml", "json-patch+json", "merge-patch+json"]
        if resource.custom is None:
            kinds.append("strategic-merge-patch+json")
        content = {f"application/{kind}": {"schema": {"type": "object"}} for kind in kinds}
        one["patch"] = {
            **operation("patch", *writes, "force"),
            "requestBody": {"content": content, "required": True},
        }
    if "delete" in resource.verbs:
        one["delete"] = operation("delete", "dryRun")
    if "list" in resource.verbs:
        many["get"] = operation("list", "watch")
    if "create" in resource.verbs:
        many["post"] = operation("post", *writes)
    return {collection: many, f"{collection}/{{name}}": one} if one else {collection: many}
