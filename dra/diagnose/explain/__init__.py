"""`dra explain`: why a pod or a claim is pending, or how it was allocated. Pure over a `Cluster`."""

from __future__ import annotations

from dra.diagnose.explain.answer import explain
from dra.diagnose.explain.cluster import Cluster, Collection
from dra.diagnose.explain.model import Explanation, Reason

__all__ = ["Cluster", "Collection", "Explanation", "Reason", "explain"]
