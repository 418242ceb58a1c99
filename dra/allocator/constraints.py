"""`matchAttribute` and `distinctAttribute` over the devices of a claim.

With list attributes (KEP-5491) a scalar counts as a list of one: match needs a value that all devices have in
common, distinct needs that no value occurs twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.allocator.model import Device

_SCALARS = ("int", "bool", "string", "version")
_LISTS = ("ints", "bools", "strings", "versions")

# (kind, value): values of different kinds never match.
Value = tuple[str, Any]


def attribute_values(device: Device, name: str, *, lists: bool) -> frozenset[Value] | None:
    """Give the values of an attribute by its full name; None when the device does not have it (or not readably).

    An unqualified attribute belongs to the driver's own domain.
    """
    attributes = device.raw.get("attributes") or {}
    attribute = attributes.get(name)
    if attribute is None:
        domain, _, identifier = name.rpartition("/")
        if domain == device.id.driver:
            attribute = attributes.get(identifier)
    if not attribute:
        return None
    for kind in _SCALARS:
        if attribute.get(kind) is not None:
            return frozenset([(kind, attribute[kind])])
    if lists:
        for kind, scalar in zip(_LISTS, _SCALARS, strict=True):
            kind_name = "int" if scalar == "int" else scalar
            if attribute.get(kind):
                return frozenset((kind_name, value) for value in attribute[kind])
    return None


def _applies(names: Sequence[str], request: str) -> bool:
    """Tell whether a constraint's `requests` cover a request `base` or `base/sub`."""
    return not names or request in names or request.partition("/")[0] in names


@dataclass(slots=True)
class MatchAttribute:
    """All devices of the named requests have one value of the attribute in common."""

    attribute: str
    requests: tuple[str, ...]
    lists: bool
    # What is still common, one entry a device.
    _common: list[frozenset[Value]] = field(default_factory=list)

    def add(self, request: str, device: Device) -> bool:
        """Take a device in; False (and nothing changed) if it does not fit."""
        if not _applies(self.requests, request):
            return True
        values = attribute_values(device, self.attribute, lists=self.lists)
        if values is None:
            return False
        common = values & self._common[-1] if self._common else values
        if not common:
            return False
        self._common.append(common)
        return True

    def remove(self, request: str, device: Device) -> None:  # noqa: ARG002
        """Undo the newest `add` of a device."""
        if _applies(self.requests, request):
            self._common.pop()


@dataclass(slots=True)
class DistinctAttribute:
    """No two devices of the named requests have a value of the attribute in common.

    Every device counts: the scheduler of 1.36 remembers one value a request only, so that it lets two equal
    devices of one request with a count pass when a third one lies between them.
    """

    attribute: str
    requests: tuple[str, ...]
    lists: bool
    _seen: list[frozenset[Value]] = field(default_factory=list)

    def add(self, request: str, device: Device) -> bool:
        """Take a device in; False (and nothing changed) if it does not fit."""
        if not _applies(self.requests, request):
            return True
        values = attribute_values(device, self.attribute, lists=self.lists)
        if values is None or any(values & other for other in self._seen):
            return False
        self._seen.append(values)
        return True

    def remove(self, request: str, device: Device) -> None:  # noqa: ARG002
        """Undo the newest `add` of a device."""
        if _applies(self.requests, request):
            self._seen.pop()


Constraint = MatchAttribute | DistinctAttribute


def make_constraint(raw: Mapping[str, Any], *, lists: bool, distinct: bool) -> Constraint | None:
    """Make a claim's constraint; None when it is of a kind that is not known (or whose gate is off)."""
    requests = tuple(raw.get("requests") or ())
    if raw.get("matchAttribute"):
        return MatchAttribute(raw["matchAttribute"], requests, lists)
    if raw.get("distinctAttribute") and distinct:
        return DistinctAttribute(raw["distinctAttribute"], requests, lists)
    return None
