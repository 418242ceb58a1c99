"""Deployments: a ReplicaSet for each pod template, and how their sizes move from the old to the new one.

Source: the deployment controller of kube-controller-manager 1.36.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra.sim.control.api import DEPLOYMENTS, REPLICA_SETS, ControlApi, Json
from dra.sim.control.pod_sets import condition, owned_metadata, template_hash

HASH_LABEL = "pod-template-hash"
_REVISION = "deployment.kubernetes.io/revision"


@dataclass(frozen=True, slots=True)
class SetSize:
    """A ReplicaSet in a rollout: how many pods it should have, has, and how many of them are available."""

    name: str
    wanted: int
    there: int
    available: int


def plan_rollout(
    desired: int, strategy: Mapping[str, Any], new: SetSize, old: Sequence[SetSize]
) -> dict[str, int]:
    """Give the sizes to set now, by name; empty if nothing is to be changed at this moment.

    `old` is ordered by age, the oldest first.
    """
    if strategy.get("type") == "Recreate":
        running = {each.name: 0 for each in old if each.wanted}
        if running:
            return running
        return {} if any(each.there for each in old) or new.wanted == desired else {new.name: desired}
    rolling = strategy.get("rollingUpdate") or {}
    surge = _share(rolling.get("maxSurge", "25%"), desired, up=True)
    missing = _share(rolling.get("maxUnavailable", "25%"), desired, up=False)
    if not surge and not missing:
        missing = 1
    total = new.wanted + sum(each.wanted for each in old)
    grown = min(desired, new.wanted + max(0, desired + surge - total))
    if new.wanted > desired:
        grown = desired
    if grown != new.wanted:
        return {new.name: grown}
    spare = total - (desired - missing) - (new.wanted - new.available)
    sizes: dict[str, int] = {}
    # Pods that do not work cost nothing and go first.
    for each in old:
        broken = min(each.wanted - min(each.available, each.wanted), max(0, spare))
        if broken:
            sizes[each.name] = each.wanted - broken
            spare -= broken
    spare = min(spare, new.available + sum(each.available for each in old) - (desired - missing))
    for each in old:
        size = sizes.get(each.name, each.wanted)
        gone = min(size, max(0, spare))
        if gone:
            sizes[each.name] = size - gone
            spare -= gone
    return sizes


def _share(value: Any, desired: int, *, up: bool) -> int:
    """Give `25%` or a number as a number of pods."""
    if isinstance(value, str) and value.endswith("%"):
        exact = int(value[:-1]) * desired / 100
        return math.ceil(exact) if up else math.floor(exact)
    return int(value)


class DeploymentController:
    """Keeps the ReplicaSets of Deployments."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api

    def sync(self, item: Json, sets: Sequence[Json], pods: Mapping[str, Sequence[Json]]) -> None:
        """Bring one Deployment a step on. Raises CallFailed."""
        wanted = template_hash(item["spec"]["template"])
        mine = sorted(sets, key=_revision_of)
        new = next(
            (each for each in mine if (each["metadata"].get("labels") or {}).get(HASH_LABEL) == wanted), None
        )
        if new is None:
            new = self._api.create(REPLICA_SETS, self._replica_set(item, wanted, mine))
        elif mine and new is not mine[-1]:
            # Back to an earlier template: it becomes the newest revision.
            new = self._set(new, revision=_revision_of(mine[-1]) + 1)
        old = [each for each in mine if each["metadata"]["uid"] != new["metadata"]["uid"]]
        by_name = {each["metadata"]["name"]: each for each in (*old, new)}
        if not item["spec"].get("paused"):
            sizes = plan_rollout(
                int(item["spec"].get("replicas", 1)),
                item["spec"].get("strategy") or {},
                _size(new, pods),
                [_size(each, pods) for each in old],
            )
            for name, size in sizes.items():
                by_name[name] = self._set(by_name[name], replicas=size)
                verb = "up" if size > int(old_size(name, (*old, new))) else "down"
                text = f"Scaled {verb} replica set {name} from {old_size(name, (*old, new))} to {size}"
                self._api.event(
                    item,
                    "Normal",
                    reason="ScalingReplicaSet",
                    message=text,
                    component="deployment-controller",
                )
        self._forget_old(item, [by_name[each["metadata"]["name"]] for each in old])
        status = deployment_status(
            item, by_name[new["metadata"]["name"]], list(by_name.values()), now=self._api.now()
        )
        if status != (item.get("status") or {}):
            self._api.replace(DEPLOYMENTS, {**item, "status": status}, subresource="status")

    def _replica_set(self, item: Json, wanted: str, mine: Sequence[Json]) -> Json:
        template = item["spec"]["template"]
        labels = {HASH_LABEL: wanted}
        metadata = owned_metadata(item, template, labels=labels)
        del metadata["generateName"]
        revision = _revision_of(mine[-1]) + 1 if mine else 1
        metadata |= {
            "name": f"{item['metadata']['name']}-{wanted}",
            "annotations": {_REVISION: str(revision)},
        }
        selector = item["spec"]["selector"]
        pod_labels = {**((template.get("metadata") or {}).get("labels") or {}), **labels}
        return {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": metadata,
            "spec": {
                "replicas": 0,
                "selector": {**selector, "matchLabels": {**(selector.get("matchLabels") or {}), **labels}},
                "template": {
                    **template,
                    "metadata": {**(template.get("metadata") or {}), "labels": pod_labels},
                },
            },
        }

    def _set(self, item: Json, *, replicas: int | None = None, revision: int | None = None) -> Json:
        changed = {**item}
        if replicas is not None:
            changed["spec"] = {**item["spec"], "replicas": replicas}
        if revision is not None:
            annotations = {**(item["metadata"].get("annotations") or {}), _REVISION: str(revision)}
            changed["metadata"] = {**item["metadata"], "annotations": annotations}
        return self._api.replace(REPLICA_SETS, changed)

    def _forget_old(self, item: Json, old: Sequence[Json]) -> None:
        limit = int(item["spec"].get("revisionHistoryLimit", 10))
        empty = [
            each
            for each in old
            if not each["spec"].get("replicas") and not (each.get("status") or {}).get("replicas")
        ]
        for each in empty[: max(0, len(empty) - limit)]:
            self._api.attempt(self._api.delete, REPLICA_SETS, each)


def old_size(name: str, sets: Sequence[Json]) -> int:
    """Give the size that a ReplicaSet had."""
    return next(int(each["spec"].get("replicas", 0)) for each in sets if each["metadata"]["name"] == name)


def _size(item: Json, pods: Mapping[str, Sequence[Json]]) -> SetSize:
    return SetSize(
        item["metadata"]["name"],
        int(item["spec"].get("replicas", 0)),
        len(pods.get(item["metadata"]["uid"], ())),
        int((item.get("status") or {}).get("availableReplicas", 0)),
    )


def _revision_of(item: Mapping[str, Any]) -> int:
    return int((item["metadata"].get("annotations") or {}).get(_REVISION, 0))


def deployment_status(item: Json, new: Json, sets: Sequence[Json], *, now: str) -> Json:
    """Give a Deployment's status, as `kubectl rollout status` and `kubectl wait` read it."""
    desired = int(item["spec"].get("replicas", 1))

    def total(name: str) -> int:
        return sum(int((each.get("status") or {}).get(name, 0)) for each in sets)

    updated = int((new.get("status") or {}).get("replicas", 0))
    available = total("availableReplicas")
    status: Json = {"observedGeneration": item["metadata"].get("generation", 1)}
    for name, value in (
        ("replicas", total("replicas")),
        ("updatedReplicas", updated),
        ("readyReplicas", total("readyReplicas")),
        ("availableReplicas", available),
        ("unavailableReplicas", max(0, max(desired, total("replicas")) - available)),
    ):
        if value:
            status[name] = value
    rolling = (item["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    enough = available >= desired - _share(rolling.get("maxUnavailable", 0), desired, up=False)
    done = updated == desired == total("replicas") == available
    old = (item.get("status") or {}).get("conditions") or []
    name = new["metadata"]["name"]
    status["conditions"] = [
        condition(
            "Available",
            on=enough,
            reason="MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable",
            message=f"Deployment {'has' if enough else 'does not have'} minimum availability.",
            old=old,
            now=now,
        ),
        condition(
            "Progressing",
            on=True,
            reason="NewReplicaSetAvailable" if done else "ReplicaSetUpdated",
            message=f'ReplicaSet "{name}" {"has successfully progressed" if done else "is progressing"}.',
            old=old,
            now=now,
        ),
    ]
    return status
