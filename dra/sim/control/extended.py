"""Extended resources that a DeviceClass stands for (KEP-5004): which a pod asks for, and the claim that meets them.

Source: requests are named `container-<i>-request-<j>`; i counts init containers first, j the container's extended
resources in name order. A node whose allocatable has some of the resource serves it by its device plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dra.sim.control.api import Json
from dra.sim.control.claims import owner_reference
from dra.values import Quantity

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


def extended_claim(pod: Json, requests: Sequence[Json]) -> Json:
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
