"""What the workload controllers have in common: pods from a template, by owner, and how many of them work.

Pods belong to whom their controlling owner reference names; pods without one are not adopted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dra.allocator.pod_filters import is_done
from dra.sim.control.api import PODS, CallFailed, ControlApi, Json

# The letters of generated names: no vowels, nothing that reads like a word.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


def template_hash(template: Mapping[str, Any]) -> str:
    """Give ten letters that tell pod templates apart."""
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:10])


def controlled(objects: Iterable[Json]) -> dict[str, list[Json]]:
    """Index objects by the UID of their controller."""
    found: dict[str, list[Json]] = {}
    for item in objects:
        for reference in item["metadata"].get("ownerReferences") or []:
            if reference.get("controller"):
                found.setdefault(reference["uid"], []).append(item)
    return found


def owned_metadata(owner: Json, template: Json, *, labels: Mapping[str, str] | None = None) -> Json:
    """Give the metadata of a pod (or ReplicaSet) that a workload makes from a template."""
    metadata = template.get("metadata") or {}
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "generateName": f"{owner['metadata']['name']}-",
        "namespace": owner["metadata"]["namespace"],
        "labels": {**(metadata.get("labels") or {}), **(labels or {})},
        "annotations": dict(metadata.get("annotations") or {}),
        "ownerReferences": [reference],
    }


def pod_from_template(owner: Json, template: Json, *, labels: Mapping[str, str] | None = None) -> Json:
    """Give a pod that a workload makes."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": owned_metadata(owner, template, labels=labels),
        "spec": json.loads(json.dumps(template["spec"])),
    }


def is_active(pod: Mapping[str, Any]) -> bool:
    """Whether a pod runs or will run."""
    return not is_done(pod) and not pod["metadata"].get("deletionTimestamp")


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's containers are ready."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


def first_to_go(pods: Sequence[Json]) -> list[Json]:
    """Order pods by who goes first: not on a node, then not ready, then the youngest. Source: ReplicaSet controller."""

    def rank(pod: Json) -> tuple[bool, bool]:
        return bool(pod["spec"].get("nodeName")), is_ready(pod)

    youngest_first = sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
    return sorted(youngest_first, key=rank)


def condition(kind: str, *, on: bool, reason: str, message: str, old: Sequence[Json], now: str) -> Json:
    """Give a condition; its time moves only when its status does."""
    status = "True" if on else "False"
    same = [item for item in old if item.get("type") == kind and item.get("status") == status]
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastUpdateTime": same[0].get("lastUpdateTime", now) if same else now,
        "lastTransitionTime": same[0]["lastTransitionTime"] if same else now,
    }


class PodSetWriter:
    """Makes and deletes pods for workloads, with the events that `kubectl describe` shows."""

    def __init__(self, api: ControlApi, component: str) -> None:
        self._api, self._component = api, component

    def create(self, owner: Json, pod: Json) -> None:
        """Make a pod. Raises CallFailed, after an event."""
        try:
            made = self._api.create(PODS, pod)
        except CallFailed as error:
            text = f"Error creating: {error.message}"
            self._api.event(owner, "Warning", reason="FailedCreate", message=text, component=self._component)
            raise
        text = f"Created pod: {made['metadata']['name']}"
        self._api.event(owner, "Normal", reason="SuccessfulCreate", message=text, component=self._component)

    def delete(self, owner: Json, pod: Json) -> None:
        """Delete a pod. Raises CallFailed."""
        self._api.delete(PODS, pod)
        text = f"Deleted pod: {pod['metadata']['name']}"
        self._api.event(owner, "Normal", reason="SuccessfulDelete", message=text, component=self._component)
