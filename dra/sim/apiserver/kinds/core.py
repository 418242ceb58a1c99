"""Namespaces and events: the small kinds of the core group that have rules of their own."""

from __future__ import annotations

from typing import Any

from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds.base import Strategy

Json = dict[str, Any]


class NamespaceStrategy(Strategy):
    """Namespaces are labels, carry their name as a label and a finalizer that waits for their content."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Set phase, finalizer and label."""
        finalizers = list((new.get("spec") or {}).get("finalizers") or [])
        if "kubernetes" not in finalizers:
            finalizers.append("kubernetes")
        new["spec"] = {**(new.get("spec") or {}), "finalizers": finalizers}
        new["status"] = {"phase": "Active"}
        name = new["metadata"].get("name")
        if name:
            new["metadata"]["labels"] = {
                **(new["metadata"].get("labels") or {}),
                "kubernetes.io/metadata.name": name,
            }

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Finalizers of the spec change through the subresource `finalize` only."""
        super().prepare_update(new, old, call)
        new["spec"] = {
            **(new.get("spec") or {}),
            "finalizers": (old.get("spec") or {}).get("finalizers") or [],
        }
        name = new["metadata"]["name"]
        labels = new["metadata"].get("labels") or {}
        new["metadata"]["labels"] = {**labels, "kubernetes.io/metadata.name": name}


class EventStrategy(Strategy):
    """Events may be made by a PUT and have no status."""

    def __post_init__(self) -> None:
        self.create_on_put = True
