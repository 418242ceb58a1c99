"""Extended resources that a DeviceClass stands for (KEP-5004): which a pod asks for, and the claim that meets them.

Source: requests are named `container-<i>-request-<j>`; i counts init containers first, j the container's extended
resources in name order. A node whose allocatable has some of the resource serves it by its device plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

from dra.values import Quantity

Json = dict[str, Any]

IMPLICIT_PREFIX = "deviceclass.resource.kubernetes.io/"
EXTENDED_CLAIM_ANNOTATION = "resource.kubernetes.io/extended-resource-claim"


def classes_by_resource(classes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Give the class of each extended resource name: the newest class wins, then the lower name."""
    found: dict[str, str] = {}
    ordered = sorted(classes, key=lambda item: item["metadata"]["name"])
    ordered.sort(key=lambda item: item["metadata"].get("creationTimestamp") or "", reverse=True)
    for item in ordered:
        name = item["metadata"]["name"]
        found.setdefault(f"{IMPLICIT_PREFIX}{name}", name)
        explicit = (item.get("spec") or {}).get("extendedResourceName")
        if explicit:
            found.setdefault(explicit, name)
    return found


def is_extended(resource: str) -> bool:
    """Whether a resource name is an extended one: qualified, and not Kubernetes' own."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and (domain == IMPLICIT_PREFIX[:-1] or not domain.endswith("kubernetes.io"))


def extended_requests(pod: Mapping[str, Any], classes: Mapping[str, str]) -> tuple[list[Json], list[Json]]:
    """Give the requests of a pod's extended-resource claim, and the mappings for the pod's status."""
    spec = pod.get("spec") or {}
    requests: list[Json] = []
    mappings: list[Json] = []
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    for number, container in enumerate(containers):
        asked = wanted(container)
        for position, (resource, amount) in enumerate(sorted(asked.items())):
            if resource not in classes or amount <= 0:
                continue
            name = f"container-{number}-request-{position}"
            exactly = {"deviceClassName": classes[resource], "allocationMode": "ExactCount", "count": amount}
            requests.append({"name": name, "exactly": exactly})
            mappings.append(
                {"containerName": container["name"], "resourceName": resource, "requestName": name}
            )
    return requests, mappings


def wanted(container: Mapping[str, Any]) -> dict[str, int]:
    """Give the extended resources of a container in whole units."""
    resources = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: Quantity.of(str(amount)).value for name, amount in merged.items() if is_extended(name)}


def extended_claim(pod: Mapping[str, Any], requests: Sequence[Json]) -> Json:
    """Give the claim that the scheduler makes for a pod's extended resources."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": "<extended-resources>",
            "generateName": f"{pod['metadata']['name']}-extended-resources-",
            "namespace": pod["metadata"]["namespace"],
            "annotations": {EXTENDED_CLAIM_ANNOTATION: "true"},
            "ownerReferences": [owner_reference(pod)],
        },
        "spec": {"devices": {"requests": list(requests)}},
    }


def owner_reference(pod: Mapping[str, Any]) -> Json:
    """Give a controlling owner reference to a pod."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def plugin_resources(
    pod: Mapping[str, Any],
    node: Mapping[str, Any],
    placed: Sequence[Mapping[str, Any]],
    classes: Container[str],
) -> tuple[set[str], str | None]:
    """Give the extended resources that a node serves by a device plugin, and why it cannot (None if it can).

    `classes` holds the names that a DeviceClass stands for: a node without a plugin for those uses claims.
    """
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    served: set[str] = set()
    asked: Counter[str] = Counter()
    for container in (pod.get("spec") or {}).get("containers") or []:
        asked.update(wanted(container))
    for resource, amount in asked.items():
        total = Quantity.of(str(allocatable.get(resource, "0"))).value
        if total > 0:
            served.add(resource)
            used = sum(
                wanted(container).get(resource, 0)
                for other in placed
                if not (other.get("status") or {}).get("extendedResourceClaimStatus")
                for container in (other.get("spec") or {}).get("containers") or []
            )
            if used + amount > total:
                return served, f"Insufficient {resource}"
        elif resource not in classes:
            return served, f"Insufficient {resource}"
    return served, None
