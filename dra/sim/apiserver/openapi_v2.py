"""The OpenAPI v2 document, as JSON and as the protobuf that clients ask for.

kubectl reads it to validate a manifest of `kind: List`, and where a client knows no v3. It is made of the v3 documents.

Source: Swagger 2.0; openapiv2/OpenAPIv2.proto of gnostic (field numbers), which client-go decodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dra.sim.apiserver import openapi
from dra.sim.apiserver.registry import Registry

Json = dict[str, Any]

# What the answer is called; clients ask for it by the other name too, which is no well-formed media type.
PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
ASKED = frozenset({"application/com.github.proto-openapi.spec.v2@v1.0+protobuf", PROTOBUF})

_REF_V3, _REF_V2 = "#/components/schemas/", "#/definitions/"
_VERBS = ("get", "put", "post", "delete", "patch")


def document(registry: Registry) -> Json:
    """Give the document of all group versions."""
    definitions: Json = {}
    paths: Json = {}
    info: Json = {}
    for group, versions in registry.group_versions().items():
        for version in versions:
            made = openapi.document(registry, group, version)
            info = made["info"]
            definitions.update(
                (name, _schema(schema)) for name, schema in made["components"]["schemas"].items()
            )
            paths.update((path, _path(item)) for path, item in made["paths"].items())
    return {"swagger": "2.0", "info": info, "paths": paths, "definitions": definitions}


def _schema(schema: Json) -> Json:
    """Give a v3 schema in the words of v2, which has no `oneOf` and no `nullable`."""
    result: Json = {}
    for key, value in schema.items():
        if key == "$ref":
            result[key] = value.replace(_REF_V3, _REF_V2)
        elif key == "properties":
            result[key] = {name: _schema(each) for name, each in value.items()}
        elif key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
            result[key] = _schema(value)
        elif key == "oneOf" and "type" not in schema and all("type" in choice for choice in value):
            result["type"] = "string"  # a quantity, or a number or a name: v2 says it by the format at most
        elif key == "allOf" and len(value) == 1:
            result.update(_schema(value[0]))
        elif key not in {"allOf", "anyOf", "oneOf", "not", "nullable"}:
            result[key] = value
    return result


def _path(item: Json) -> Json:
    return {verb: _operation(item[verb]) for verb in _VERBS if verb in item}


def _operation(operation: Json) -> Json:
    responses = {
        code: {"description": "OK", "schema": _schema(answer["content"]["application/json"]["schema"])}
        for code, answer in operation["responses"].items()
    }
    parameters = [
        {"name": each["name"], "in": each["in"], **each["schema"]} for each in operation["parameters"]
    ]
    kept = {key: value for key, value in operation.items() if key != "requestBody"}
    return {**kept, "parameters": parameters, "responses": responses}


# -- protobuf ----------------------------------------------------------------------------------------------------


def encode(document: Json) -> bytes:
    """Give the document as gnostic's message `Document`."""
    info = _text(1, document["info"]["title"]) + _text(2, document["info"]["version"])
    paths = _named(2, document["paths"], _encode_path)
    definitions = _named(1, document["definitions"], _encode_schema)
    return _text(1, document["swagger"]) + _part(2, info) + _part(8, paths) + _part(9, definitions)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _part(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _text(number: int, content: str) -> bytes:
    return _part(number, content.encode()) if content else b""


def _yes(number: int, value: object) -> bytes:
    return _varint(number << 3) + b"\x01" if value else b""


def _named(number: int, entries: Mapping[str, Any], encode_one: Callable[[Any], bytes]) -> bytes:
    """Give a map as gnostic has it: a repeated pair of name and value."""
    return b"".join(
        _part(number, _text(1, name) + _part(2, encode_one(value))) for name, value in entries.items()
    )


def _any(value: object) -> bytes:
    # Field 2 is YAML, and JSON is YAML.
    return _text(2, json.dumps(value))


def _extensions(number: int, of: Json) -> bytes:
    return _named(number, {key: value for key, value in of.items() if key.startswith("x-")}, _any)


def _encode_path(item: Json) -> bytes:
    numbers = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}
    return b"".join(_part(numbers[verb], _encode_operation(operation)) for verb, operation in item.items())


def _encode_operation(operation: Json) -> bytes:
    parameters = b"".join(_part(8, _encode_parameter(each)) for each in operation["parameters"])
    responses = _named(1, operation["responses"], _encode_response)
    return parameters + _part(9, responses) + _extensions(13, operation)


def _encode_parameter(parameter: Json) -> bytes:
    query = _text(2, parameter["in"]) + _text(4, parameter["name"]) + _text(6, parameter["type"])
    query += _yes(20, parameter.get("uniqueItems"))
    return _part(1, _part(2, _part(3, query)))  # ParametersItem, Parameter, NonBodyParameter


def _encode_response(response: Json) -> bytes:
    return _part(
        1, _text(1, response["description"]) + _part(2, _part(1, _encode_schema(response["schema"])))
    )


def _encode_schema(schema: Json) -> bytes:
    out = _text(1, schema.get("$ref", "")) + _text(2, schema.get("format", ""))
    out += _text(4, schema.get("description", "")) + _texts(19, schema.get("required", ()))
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        out += _part(21, _part(1, _encode_schema(additional)))
    elif additional is not None:
        out += _part(21, _varint(2 << 3) + (b"\x01" if additional else b"\x00"))
    if "type" in schema:
        out += _part(22, _text(1, schema["type"]))
    if "items" in schema:
        out += _part(23, _part(1, _encode_schema(schema["items"])))
    if "properties" in schema:
        out += _part(25, _named(1, schema["properties"], _encode_schema))
    return out + _extensions(31, schema)


def _texts(number: int, values: Iterable[str]) -> bytes:
    return b"".join(_text(number, value) for value in values)
