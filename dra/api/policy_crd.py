"""The CustomResourceDefinitions of `gpudra.dev`: `GpuNodePolicy`, made from its models, and `GpuNode`.

Structural schemas: no `$ref`, no `anyOf` with null, no `additionalProperties: false` (what is unknown is pruned, and
refused by clients with strict validation). What JSON Schema cannot say stands as a CEL rule beside the model's own
check. Source: apiextensions.k8s.io/v1, structural schemas; KEP-2876.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.api.policy import GROUP, VERSION
from dra.api.policy_models import GROUP_BLOCKS, MAX_PARTITIONS, MAX_TEXT_BYTES, OWN_ATTRIBUTES, json_schema

Json = dict[str, Any]

# By model: (rule, message). The models check the same in Python.
_RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "LabelRequirement": (
        (
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "values are needed with In and NotIn, and must be absent else",
        ),
    ),
    "Sharing": (
        (
            "(self.strategy == 'shares') == has(self.shares)",
            "shares is needed with the strategy shares, and must be absent else",
        ),
    ),
    "Mig": (
        ("!has(self.layout) || self.mode == 'static'", "layout is for the mode static only"),
        (
            f"!has(self.layout) || self.layout.map(profile, self.layout[profile]).sum() <= {MAX_PARTITIONS}",
            f"layout has more than {MAX_PARTITIONS} partitions",
        ),
    ),
    "AttributeValue": (
        (
            "[has(self.string), has(self.int), has(self.bool), has(self.version)].filter(given, given).size() == 1",
            "exactly one of string, int, bool and version must be given",
        ),
        (
            f"!has(self.string) || bytes(self.string).size() <= {MAX_TEXT_BYTES}",
            f"string has more than {MAX_TEXT_BYTES} bytes",
        ),
    ),
    "GpuGroup": (
        (
            " || ".join(f"has(self.{name})" for name in GROUP_BLOCKS),
            f"a group must have one of {', '.join(GROUP_BLOCKS)}",
        ),
        (
            f"!has(self.attributes) || !{list(OWN_ATTRIBUTES)}.exists(name, name in self.attributes)",
            f"the driver sets the attributes {', '.join(OWN_ATTRIBUTES)} itself",
        ),
    ),
    "PolicySpec": (
        (
            "self.gpus.all(one, self.gpus.exists_one(other, "
            + " && ".join(
                f"(has(one.match.{name}) ? one.match.{name} : '') == (has(other.match.{name}) ? other.match.{name} : '')"
                for name in ("uuid", "product", "pciAddress")
            )
            + "))",
            "two groups of gpus have the same match",
        ),
    ),
}

_EXACT = 2**53 - 1


def structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Json:
    """Turn a schema as pydantic writes it into a structural one."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        merged = {**definitions[name], **{key: value for key, value in schema.items() if key != "$ref"}}
        return structural(merged, definitions)
    if "anyOf" in schema:
        (inner,) = (each for each in schema["anyOf"] if each.get("type") != "null")
        merged = {**{k: v for k, v in schema.items() if k not in ("anyOf", "default")}, **inner}
        if "description" in schema:
            merged["description"] = schema["description"]
        return structural(merged, definitions)
    made = {
        key: schema[key]
        for key in (
            "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength",
            "minItems", "maxItems", "minProperties", "maxProperties", "required",
        )
        if key in schema
    }  # fmt: skip
    if "const" in schema:
        made["enum"] = [schema["const"]]
    default = _plain_default(schema)
    if default is not None:
        made["default"] = default
    rules = [{"rule": rule, "message": message} for rule, message in _RULES.get(schema.get("title", ""), ())]
    if "properties" in schema:
        made["properties"] = {
            name: structural(each, definitions) for name, each in schema["properties"].items()
        }
    elif "patternProperties" in schema:
        ((pattern, each),) = schema["patternProperties"].items()
        made["additionalProperties"] = structural(each, definitions)
        rules.append(
            {"rule": f"self.all(key, key.matches(r'{pattern}'))", "message": f"keys must match {pattern}"}
        )
    elif isinstance(schema.get("additionalProperties"), Mapping):
        made["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    if "items" in schema:
        made["items"] = structural(schema["items"], definitions)
    if made.get("type") == "integer":
        made["format"] = "int64"
        # The API server reads a bound as a double and refuses every value where the double is not exact; what is left
        # out are the bounds of int64, which hold anyway.
        for bound in ("minimum", "maximum"):
            if abs(made.get(bound, 0)) >= _EXACT:
                del made[bound]
    if rules:
        made["x-kubernetes-validations"] = rules
    return made


def _plain_default(schema: Mapping[str, Any]) -> Any:
    default = schema.get("default")
    if isinstance(default, Mapping):
        return {key: value for key, value in default.items() if value is not None}
    return default


def policy_crd() -> Json:
    """Give the CustomResourceDefinition of GpuNodePolicy."""
    schema = json_schema()
    spec = structural(schema, schema["$defs"])
    text = {"type": "string"}
    number = {"type": "integer", "format": "int32"}
    status: Json = {
        "type": "object",
        "description": "What the nodes say, gathered by `dra fleet`.",
        "properties": {
            "observedGeneration": {"type": "integer", "format": "int64"},
            "nodes": {
                "type": "object",
                "description": "How many nodes it chooses, and how far they are.",
                "properties": dict.fromkeys(("matching", "applied", "waiting", "refused"), number),
            },
            "problems": {
                "type": "array",
                "description": "Nodes that wait or refuse, the first twenty.",
                "maxItems": 20,
                "items": {
                    "type": "object",
                    "properties": dict.fromkeys(("node", "gpu", "state", "message"), text),
                },
            },
            "conditions": _conditions(),
        },
    }
    return _crd(
        plural="gpunodepolicies",
        kind="GpuNodePolicy",
        short=["gnp"],
        description="How the GPUs of some nodes are shared, cut, held back and published.",
        properties={"spec": spec, "status": status},
        required=["spec"],
        columns=[
            ("Weight", "integer", ".spec.weight"),
            ("Nodes", "integer", ".status.nodes.matching"),
            ("Applied", "integer", ".status.nodes.applied"),
            ("Waiting", "integer", ".status.nodes.waiting"),
            ("Refused", "integer", ".status.nodes.refused"),
        ],
    )


def node_crd() -> Json:
    """Give the CustomResourceDefinition of GpuNode: what a node's driver says of its GPUs and policies."""
    text = {"type": "string"}
    status: Json = {
        "type": "object",
        "properties": {
            "policies": {
                "type": "array",
                "maxItems": 64,
                "description": "GpuNodePolicies that choose the node, the uppermost first.",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": text,
                        "generation": {"type": "integer", "format": "int64"},
                    },
                },
            },
            "gpus": {"type": "array", "maxItems": 64, "items": _gpu_report()},
            "pending": {
                "type": "integer",
                "format": "int32",
                "description": "GPUs that are not as they should be.",
            },
            "conditions": _conditions(),
        },
    }
    return _crd(
        plural="gpunodes",
        kind="GpuNode",
        short=[],
        description="What the GPU driver of a node says of its GPUs; written by the driver, owned by the Node.",
        properties={"status": status},
        required=[],
        columns=[
            ("Applied", "string", ".status.conditions[?(@.type=='Applied')].status"),
            ("Pending", "integer", ".status.pending"),
            ("Message", "string", ".status.conditions[?(@.type=='Applied')].message"),
        ],
    )


def _gpu_report() -> Json:
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["device"],
        "properties": {
            "device": {**text, "description": "Name in the ResourceSlice: gpu-0."},
            "uuid": text,
            "product": text,
            "state": {
                **text,
                "enum": ["Applied", "Waiting", "Changing", "Refused"],
                "description": "Applied: as the policies say. Waiting: for the claims that are named.",
            },
            "code": {**text, "description": "Stable code of why it is refused: DRA-…"},
            "message": text,
            "claims": {
                "type": "array",
                "maxItems": 64,
                "items": text,
                "description": "Claims (namespace/name) that it waits for.",
            },
        },
    }


def _conditions() -> Json:
    text = {"type": "string"}
    return {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {**text, "maxLength": 316},
                "status": {**text, "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {**text, "format": "date-time"},
                "reason": {**text, "minLength": 1, "maxLength": 1024},
                "message": {**text, "maxLength": 32768},
            },
        },
    }


def _crd(
    *,
    plural: str,
    kind: str,
    short: list[str],
    description: str,
    properties: Json,
    required: list[str],
    columns: list[tuple[str, str, str]],
) -> Json:
    names: Json = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    if short:
        names["shortNames"] = short
    text = {"type": "string"}
    schema: Json = {
        "type": "object",
        "description": description,
        "properties": {
            "apiVersion": text,
            "kind": text,
            "metadata": {"type": "object"},
            **properties,
        },
    }
    if required:
        schema["required"] = required
    printed = [{"name": name, "type": kind_, "jsonPath": path} for name, kind_, path in columns]
    printed.append({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"})
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": names,
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": printed,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }
