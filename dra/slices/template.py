"""Slices of a node that is not there yet, for an autoscaler that counts on what a new node of a group would bring. Pure.

A template has everything that selectors and constraints look at; what names one piece of hardware is put in place by
something of the same form, so that two devices of one GPU still agree and no real GPU is meant. Nothing is tainted.

Source: cluster-autoscaler, node group templates with ResourceSlices; the number of devices is compared with that of the
node that comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dra.slices.pool import PoolContent

_UUID = re.compile(r"(GPU|MIG)-[0-9A-Fa-f-]{36}")


def as_template(pool: PoolContent, node_name: str) -> PoolContent:
    """Give a pool as a template for nodes like the one that it is of; node and pool are called `node_name`."""
    names: dict[str, str] = {}
    slices = tuple(
        each
        if each.devices is None
        else replace(each, devices=[_device(device, names) for device in each.devices])
        for each in pool.slices
    )
    return replace(pool, node_name=node_name, pool_name=node_name, slices=slices)


def _device(device: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    made = {key: value for key, value in device.items() if key != "taints"}
    made["attributes"] = {
        name: {kind: _plain(value, names) for kind, value in each.items()}
        for name, each in device.get("attributes", {}).items()
    }
    return made


def _plain(value: Any, names: dict[str, str]) -> Any:
    if not isinstance(value, str) or not _UUID.fullmatch(value):
        return value
    # Numbered in order of appearance, in the form of a UUID.
    return names.setdefault(value, f"{value[:3]}-00000000-0000-0000-0000-{len(names) + 1:012}")
