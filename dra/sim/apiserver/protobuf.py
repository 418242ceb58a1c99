"""Objects that clients send as protobuf although they could send JSON. Placeholder for the few kinds needed."""

from __future__ import annotations

from typing import Any

from dra.sim.apiserver.status import ApiFailure


def decode_object(body: bytes) -> dict[str, Any]:
    """Give the object in a protobuf body.

    Raises:
        ApiFailure: 415, the kind is not known here.
    """
    raise ApiFailure(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})
