"""Taints and tolerations of devices (KEP-5055)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Tell whether a toleration covers a taint: by key, operator, value and effect; empty means any."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    match toleration.get("operator") or "Equal":
        case "Exists":
            return True
        case "Equal":
            return bool(toleration.get("key")) and (toleration.get("value") or "") == (
                taint.get("value") or ""
            )
        case _:
            return False


def untolerated(
    taints: Iterable[Mapping[str, Any]], tolerations: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Give the taints that keep a request away: NoSchedule or NoExecute without a toleration."""
    return [
        taint
        for taint in taints
        if taint.get("effect") in {"NoSchedule", "NoExecute"}
        and not any(tolerates(toleration, taint) for toleration in tolerations)
    ]
