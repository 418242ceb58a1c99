"""Node selection: does a v1 NodeSelector match a v1 Node. Source: k8s.io/component-helpers nodeaffinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def node_matches(selector: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Tell whether any term of the selector matches the node; a term without requirements matches nothing."""
    labels = node.get("metadata", {}).get("labels") or {}
    fields = {"metadata.name": node.get("metadata", {}).get("name", "")}
    for term in selector.get("nodeSelectorTerms") or []:
        expressions = term.get("matchExpressions") or []
        names = term.get("matchFields") or []
        if not expressions and not names:
            continue
        if all(_requirement(item, labels) for item in expressions) and all(
            _requirement(item, fields) for item in names
        ):
            return True
    return False


def _requirement(requirement: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    key, operator = requirement["key"], requirement["operator"]
    wanted: Sequence[str] = requirement.get("values") or ()
    present = key in values
    match operator:
        case "In":
            return present and values[key] in wanted
        case "NotIn":
            return not present or values[key] not in wanted
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "Gt" | "Lt":
            return present and _compare(values[key], wanted, greater=operator == "Gt")
        case _:
            return False


def _compare(value: str, wanted: Sequence[str], *, greater: bool) -> bool:
    try:
        left, right = int(value), int(wanted[0])
    except (ValueError, IndexError):
        return False
    return left > right if greater else left < right
