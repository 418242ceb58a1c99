"""Custom resources: from a definition to a served resource, and pruning and defaulting by its structural schema.

Source: k8s.io/apiextensions-apiserver (structural schemas, pruning, defaulting).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.decode import DecodeError, Findings, decode
from dra.sim.apiserver.registry import Resource
from dra.sim.apiserver.validation.custom_rules import RuleTree, compile_rules

Json = dict[str, Any]

DEFINITIONS = "apiextensions.k8s.io/customresourcedefinitions"
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
# From here on Go writes a double with an exponent.
_LONG_WRITTEN = 1e21


@dataclass(frozen=True, slots=True)
class Custom:
    """What a definition says, by version."""

    schemas: dict[str, Json] = field(default_factory=dict)
    selectable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    columns: dict[str, list[Json]] = field(default_factory=dict)
    scales: dict[str, Json] = field(default_factory=dict)
    rules: dict[str, RuleTree] = field(default_factory=dict)
    terminating: bool = False


def resource_of(definition: Json) -> Resource:
    """Give the resource that a definition serves."""
    spec = definition["spec"]
    names = spec["names"]
    versions = [v for v in spec["versions"] if v.get("served")]
    storage = next((v["name"] for v in spec["versions"] if v.get("storage")), versions[0]["name"])
    subresources: dict[str, tuple[str, ...]] = {}
    for version in versions:
        for name in version.get("subresources") or {}:
            subresources[name] = ("get", "patch", "update")
    schemas = {v["name"]: (v.get("schema") or {}).get("openAPIV3Schema") or {} for v in versions}
    custom = Custom(
        schemas=schemas,
        selectable={
            v["name"]: tuple(f["jsonPath"].lstrip(".") for f in v.get("selectableFields") or [])
            for v in versions
        },
        columns={v["name"]: v.get("additionalPrinterColumns") or [] for v in versions},
        scales={v["name"]: (v.get("subresources") or {}).get("scale") or {} for v in versions},
        rules={name: compile_rules(schema) for name, schema in schemas.items()},
        terminating=bool(definition["metadata"].get("deletionTimestamp")),
    )
    return Resource(
        spec["group"],
        names["plural"],
        names["kind"],
        spec.get("scope") == "Namespaced",
        {v["name"]: "" for v in versions},
        storage=storage,
        singular=names.get("singular") or names["kind"].lower(),
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        subresources=subresources,
        verbs=("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"),
        list_kind=names.get("listKind") or f"{names['kind']}List",
        custom=custom,
    )


def shape(obj: Json, schema: Json, findings: Findings) -> Json:
    """Give a custom object pruned and defaulted; unknown fields go to `findings`.

    Raises:
        DecodeError: the metadata has a wrong type.
    """
    result = {k: v for k, v in obj.items() if k in {"apiVersion", "kind"}}
    meta = Findings()
    result["metadata"] = decode(obj.get("metadata") or {}, "meta_v1.ObjectMeta", meta)
    findings.problems += [p.replace('field "', 'field "metadata.') for p in meta.problems]
    body = {k: v for k, v in obj.items() if k not in {"apiVersion", "kind", "metadata"}}
    result.update(_prune(body, {"type": "object", **schema}, "", findings, root=True))
    return result


def as_stored(value: Any) -> Any:
    """Give a value as it comes back from a store of JSON: 2.0 is written as 2."""
    if isinstance(value, dict):
        return {key: as_stored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_stored(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _LONG_WRITTEN:
        return int(value)
    return value


def prune(value: Any, schema: Json, findings: Findings) -> Any:
    """Give a value pruned and defaulted by its schema."""
    return _prune(value, schema, "", findings)


def _prune(value: Any, schema: Json, path: str, findings: Findings, *, root: bool = False) -> Any:
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        keeps = schema.get("x-kubernetes-preserve-unknown-fields")
        for key in getattr(value, "duplicates", ()):
            findings.duplicate(f"{path}{key}")
        result: Json = {}
        embedded = bool(schema.get("x-kubernetes-embedded-resource"))
        for key, item in value.items():
            if embedded and key in {"apiVersion", "kind"}:
                result[key] = item
            elif embedded and key == "metadata" and isinstance(item, dict):
                meta = Findings()
                result[key] = decode(item, "meta_v1.ObjectMeta", meta)
                findings.problems += [p.replace('field "', f'field "{path}metadata.') for p in meta.problems]
            elif key in properties:
                known = properties[key]
                if item is None and not known.get("nullable"):
                    # A null that is not allowed gives way to the default, or goes.
                    continue
                result[key] = _prune(item, known, f"{path}{key}.", findings)
            elif isinstance(extra, dict):
                result[key] = _prune(item, extra, f"{path}{key}.", findings)
            elif keeps or extra is True or (not properties and schema.get("type") != "object"):
                result[key] = item
            else:
                findings.unknown(f"{path}{key}")
        for key, known in properties.items():
            if key not in result and "default" in known and not (root and key == "metadata"):
                # A default may lack what its own schema has defaults for.
                result[key] = _prune(copy.deepcopy(known["default"]), known, "", Findings())
        return result
    if isinstance(value, list):
        items = schema.get("items") or {}
        at = path.rstrip(".")
        return [_prune(item, items, f"{at}[{i}].", findings) for i, item in enumerate(value)]
    return value


__all__ = ["CLEANUP", "DEFINITIONS", "Custom", "DecodeError", "prune", "resource_of", "shape"]
