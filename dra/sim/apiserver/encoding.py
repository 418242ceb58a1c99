"""A body in the encoding that the client wants."""

from __future__ import annotations

from typing import Any

from dra.sim.apiserver.exchange import Response, dump
from dra.sim.apiserver.negotiate import Wanted


def encode(wanted: Wanted, status: int, body: Any) -> Response:
    """Answer in JSON or YAML."""
    if wanted.encoding == "yaml":
        return Response(status, to_yaml(body), "application/yaml")
    return Response(status, dump(body, pretty=wanted.pretty))


def to_yaml(body: Any) -> bytes:
    """Give YAML with sorted keys, as the server writes it."""
    import yaml

    return str(yaml.safe_dump(body, default_flow_style=False, sort_keys=True)).encode()
