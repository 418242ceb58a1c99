"""Fetching one ResourceClaim, as prepare asks for it."""

from __future__ import annotations

from typing import Any

from dra.kube.client import KubeClient
from dra.kube.resources import RESOURCE_CLAIMS


class ClaimReader:
    """Claims from the API server, never from a cache: the answer decides what a container gets."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def get(self, namespace: str, name: str, timeout_seconds: float) -> dict[str, Any]:
        """Give the claim in the shape of v1.

        Raises:
            KubeError: DRA-API-NOT-FOUND if it is gone, DRA-API-TIMEOUT after `timeout_seconds`, and the rest.
        """
        return self._client.get(RESOURCE_CLAIMS, name, namespace, timeout_seconds=timeout_seconds)
