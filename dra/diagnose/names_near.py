"""What somebody may have meant who wrote the name of an attribute that a device does not have."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


def names_near(device: Mapping[str, Any], missing: str, *, driver: str) -> list[str]:
    """Give names of a device that look like a missing one, as expressions write them where they stand elsewhere.

    A name that the device does have was looked for in the wrong place: `memory` among the attributes, or an attribute
    of Kubernetes' domain in the driver's.

    Args:
        device: as a ResourceSlice has it.
        missing: the name, without a domain.
        driver: whose device it is; names without a domain are in this one.
    """
    places: dict[str, str] = {}
    lower: dict[str, str] = {}
    for group in ("attributes", "capacity"):
        for full in device.get(group) or {}:
            domain, _, name = full.rpartition("/")
            places.setdefault(name, f'device.{group}["{domain or driver}"].{name}')
            lower[name.lower()] = name
    if missing in places:
        return [places[missing]]
    return [
        lower[match] for match in difflib.get_close_matches(missing.lower(), list(lower), n=2, cutoff=0.7)
    ]
