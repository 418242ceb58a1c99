"""A pool as ResourceSlice objects, as `kubectl get -o yaml` would show them. Pure."""

from __future__ import annotations

from typing import Any

from dra.slices.pool import PoolContent

API_VERSION = "resource.k8s.io/v1"
MAX_NAME = 253


def slice_name(pool: PoolContent, index: int) -> str:
    """Give the object name of a slice: its index first, for slices are read in the order of their names."""
    return f"{index:05x}-{pool.driver}-{pool.node_name}"[:MAX_NAME].rstrip("-.")


def slice_manifests(pool: PoolContent, *, generation: int = 1) -> list[dict[str, Any]]:
    """Give the pool's slices as complete v1 objects."""
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name(pool, index)},
            "spec": spec,
        }
        for index, spec in enumerate(pool.specs(generation=generation))
    ]
