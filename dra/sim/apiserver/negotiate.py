"""What the client wants back: JSON or YAML, the object itself, a Table or only its metadata.

Source: content negotiation of k8s.io/apiserver (endpoints/handlers/negotiation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dra.sim.apiserver.status import ApiFailure

Shape = Literal["", "Table", "PartialObjectMetadata", "PartialObjectMetadataList"]

_KNOWN = {"application/json": "json", "application/yaml": "yaml"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The chosen representation; `version` is that of meta.k8s.io for tables and metadata."""

    encoding: Literal["json", "yaml"] = "json"
    shape: Shape = ""
    version: str = "v1"
    pretty: bool = False


def not_acceptable(*, watch: bool = False) -> ApiFailure:
    """406 as the handlers word it."""
    types = (
        "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch"
        if watch
        else "application/json, application/yaml, application/vnd.kubernetes.protobuf"
    )
    return ApiFailure(406, "NotAcceptable", f"only the following media types are accepted: {types}")


def router_not_acceptable() -> ApiFailure:
    """406 as the router words it, before any handler is reached."""
    return ApiFailure(
        406,
        "NotAcceptable",
        "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, "
        "application/vnd.kubernetes.protobuf",
        details={},
    )


def clauses(accept: str) -> list[tuple[str, dict[str, str]]]:
    """Split an Accept header into media types and parameters, in order of preference."""
    found: list[tuple[float, int, str, dict[str, str]]] = []
    for position, clause in enumerate(accept.split(",")):
        media, *rest = [part.strip() for part in clause.split(";")]
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        try:
            quality = float(parameters.pop("q", "1"))
        except ValueError:
            quality = 0.0
        if media:
            found.append((-quality, position, media.lower(), parameters))
    return [(media, parameters) for _, _, media, parameters in sorted(found, key=lambda f: f[:2])]


def _shape(parameters: dict[str, str]) -> tuple[bool, Shape, str]:
    wanted = parameters.get("as", "")
    if not wanted:
        version = parameters.get("v")
        return version is None, "", "v1"
    fits = parameters.get("g") == "meta.k8s.io" and parameters.get("v") in {"v1", "v1beta1"}
    known = wanted in {"Table", "PartialObjectMetadata", "PartialObjectMetadataList"}
    return fits and known, wanted, parameters.get("v", "v1")  # type: ignore[return-value]


def negotiate(accept: str | None, *, user_agent: str = "", pretty: str = "", watch: bool = False) -> Wanted:
    """Choose a representation.

    Raises:
        ApiFailure: 406.
    """
    listed = clauses(accept) if accept and accept.strip() else [("*/*", {})]
    indent = pretty in {"1", "true"} or (
        not pretty and user_agent.startswith(("curl", "Wget", "Mozilla/5.0"))
    )
    supported = False
    for media, parameters in listed:
        encoding = "json" if media == "*/*" else _KNOWN.get(media)
        if encoding is None:
            supported = supported or media == "application/vnd.kubernetes.protobuf"
            continue
        supported = True
        fits, shape, version = _shape(parameters)
        if not fits or (watch and encoding == "yaml"):
            continue
        explicit = parameters.get("pretty", "")
        return Wanted(encoding, shape, version, indent or explicit in {"1", "true"})  # type: ignore[arg-type]
    if not supported:
        raise router_not_acceptable()
    raise not_acceptable(watch=watch)
