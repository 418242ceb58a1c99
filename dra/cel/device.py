"""The device as an expression sees it, built once per device.

Source: k8s.io/dynamic-resource-allocation/cel: names without a domain belong to the driver; a domain that no name has is
an empty map; one attribute that cannot be converted makes every expression fail on this device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dra.cel.errors import Failure
from dra.cel.functions.quantities import CelQuantity, parse_quantity, parse_semver

_EMPTY: dict[str, Any] = {}


class DomainMap(dict[str, Any]):
    """Domain -> names; a missing domain reads as an empty map, and is not `in` it."""

    __slots__ = ()

    def __missing__(self, domain: str) -> dict[str, Any]:
        return _EMPTY


class DeviceView:
    """`device` in an expression. `failure` is set where an attribute could not be converted."""

    __slots__ = ("failure", "fields")

    def __init__(self, device: Mapping[str, Any], *, driver: str, list_types: bool = False) -> None:
        """Convert a v1 device (`attributes`, `capacity`, `allowMultipleAllocations`)."""
        self.failure: Failure | None = None
        attributes, capacity = DomainMap(), DomainMap()
        self.fields: dict[str, Any] = {
            "driver": driver,
            "attributes": attributes,
            "capacity": capacity,
            "allowMultipleAllocations": bool(device.get("allowMultipleAllocations") or False),
        }
        try:
            for domain, name, value in _qualified(device.get("attributes") or {}, driver):
                attributes.setdefault(domain, {})[name[0]] = _attribute(name[1], value, list_types=list_types)
            for domain, name, value in _qualified(device.get("capacity") or {}, driver):
                capacity.setdefault(domain, {})[name[0]] = _quantity(name[1], value)
        except Failure as failure:
            self.failure = failure


def _qualified(entries: Mapping[str, Any], driver: str) -> Iterator[tuple[str, tuple[str, str], Any]]:
    # Names with a domain last: written out they win over the short form of the same name.
    for full in sorted(entries, key=lambda key: ("/" in key, key)):
        domain, slash, name = full.partition("/")
        yield (domain, (name, full), entries[full]) if slash else (driver, (full, full), entries[full])


def _attribute(name: str, value: Any, *, list_types: bool) -> Any:
    if isinstance(value, Mapping):
        if value.get("int") is not None:
            return int(value["int"])
        if value.get("bool") is not None:
            return bool(value["bool"])
        if value.get("string") is not None:
            return str(value["string"])
        if value.get("version") is not None:
            return _version(name, value["version"])
        if list_types:
            for kind in ("ints", "bools", "strings"):
                if value.get(kind) is not None:
                    return list(value[kind])
            if value.get("versions") is not None:
                return [_version(name, text) for text in value["versions"]]
    raise Failure("unsupported_attribute", f"attribute {name}: unsupported attribute value")


def _version(name: str, text: str) -> Any:
    try:
        return parse_semver(text)
    except Failure as failure:
        raise Failure(
            "attribute_version", f"attribute {name}: parse semantic version: {failure.text}"
        ) from None


def _quantity(name: str, value: Any) -> CelQuantity:
    raw = value.get("value") if isinstance(value, Mapping) else value
    try:
        return parse_quantity(str(raw))
    except Failure as failure:
        raise Failure("quantity_parse", f"capacity {name}: {failure.text}") from None
