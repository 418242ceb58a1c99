"""The OpenAPI v2 document of the simulated API server, as clients read it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.exchange import Request, Response

ASKED = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"
ANSWERED = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


def get(accept: str | None) -> Response:
    server = SimApiServer()
    return server.api.handle(Request("GET", "/openapi/v2?timeout=32s", {"accept": accept} if accept else {}))


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def fields(data: bytes) -> list[tuple[int, bytes]]:
    """Take a protobuf message apart; numbers come as no bytes."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    at = 0
    found = []
    while at < len(data):
        tag = varint()
        size = varint()
        if tag & 7 == 0:
            found.append((tag >> 3, b""))
            continue
        assert tag & 7 == 2
        found.append((tag >> 3, data[at : at + size]))
        at += size
    return found


def named(message: bytes, number: int) -> dict[str, bytes]:
    return {
        dict(fields(pair))[1].decode(): dict(fields(pair))[2]
        for key, pair in fields(message)
        if key == number
    }


@pytest.mark.parametrize(
    "accept", [None, "*/*", "application/json", f"text/html, application/json;q=0.5, {ASKED};q=0.1"]
)
def test_the_json_document_is_closed_and_says_which_field_checks_a_patch_takes(accept: str | None) -> None:
    response = get(accept)
    assert (response.status, response.content_type) == (200, "application/json")
    document = json.loads(response.body)
    assert document["swagger"] == "2.0"
    known = {f"#/definitions/{name}" for name in document["definitions"]}
    assert references(document) <= known
    assert "oneOf" not in response.body.decode()
    patch = document["paths"]["/api/v1/namespaces/{name}"]["patch"]
    assert {"name": "fieldValidation", "in": "query", "type": "string", "uniqueItems": True} in patch[
        "parameters"
    ]
    claim = document["definitions"]["io.k8s.api.resource.v1.ResourceClaim"]
    assert claim["properties"]["spec"] == {"$ref": "#/definitions/io.k8s.api.resource.v1.ResourceClaimSpec"}


def test_the_protobuf_document_has_the_same_paths_and_definitions() -> None:
    response = get(ASKED)
    assert (response.status, response.content_type) == (200, ANSWERED)
    document = json.loads(get("application/json").body)
    top = dict(fields(response.body))
    assert top[1] == b"2.0"
    paths, definitions = named(top[8], 2), named(top[9], 1)
    assert list(paths) == list(document["paths"])
    assert list(definitions) == list(document["definitions"])
    patch = dict(fields(paths["/api/v1/namespaces/{name}"]))[8]
    kind = dict(fields(named(patch, 13)["x-kubernetes-group-version-kind"]))[2]
    assert json.loads(kind) == {"group": "", "version": "v1", "kind": "Namespace"}
    claim = dict(fields(definitions["io.k8s.api.resource.v1.ResourceClaim"]))
    spec = dict(fields(named(claim[25], 1)["spec"]))
    assert spec[1] == b"#/definitions/io.k8s.api.resource.v1.ResourceClaimSpec"


def test_a_form_that_is_not_there_is_refused() -> None:
    assert get("text/html").status == 406
