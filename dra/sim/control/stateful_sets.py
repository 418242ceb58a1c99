"""StatefulSets: numbered pods with names that stay, made and replaced in order.

Source: the StatefulSet controller of kube-controller-manager 1.36. Not simulated: `maxUnavailable` of updates, deletion of
volume claims.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dra.allocator.pod_filters import is_done
from dra.sim.control.api import REVISIONS, STATEFUL_SETS, VOLUME_CLAIMS, ControlApi, Json
from dra.sim.control.pod_sets import PodSetWriter, is_active, is_ready, pod_from_template, template_hash

REVISION = "controller-revision-hash"
_INDEX = "apps.kubernetes.io/pod-index"
_NAME = "statefulset.kubernetes.io/pod-name"


class StatefulSetController:
    """Keeps the pods of StatefulSets."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api
        self._writer = PodSetWriter(api, "statefulset-controller")

    def sync(self, item: Json, pods: Sequence[Json], revisions: Sequence[Json]) -> None:
        """Bring one StatefulSet a step on, and write its status. Raises CallFailed."""
        update = f"{item['metadata']['name']}-{template_hash(item['spec']['template'])}"
        revisions = self._revised(item, update, revisions)
        current = (item.get("status") or {}).get("currentRevision") or update
        templates = {each["metadata"]["name"]: each["data"]["spec"]["template"] for each in revisions}
        templates[update] = item["spec"]["template"]
        self._act(
            item, _by_number(item, pods), templates, current if current in templates else update, update
        )
        status = stateful_set_status(item, pods, current=current, update=update)
        if status != (item.get("status") or {}):
            self._api.replace(STATEFUL_SETS, {**item, "status": status}, subresource="status")

    def _revised(self, item: Json, update: str, revisions: Sequence[Json]) -> list[Json]:
        """Make sure that the template is kept as a revision, the newest one; old ones go."""
        ordered = sorted(revisions, key=lambda each: int(each.get("revision") or 0))
        known = next((each for each in ordered if each["metadata"]["name"] == update), None)
        newest = int(ordered[-1].get("revision") or 0) if ordered else 0
        if known is None:
            made = self._api.create(REVISIONS, _revision(item, update, newest + 1))
            ordered.append(made)
        elif known is not ordered[-1]:
            known = self._api.replace(REVISIONS, {**known, "revision": newest + 1})
            ordered = [each for each in ordered if each["metadata"]["name"] != update] + [known]
        used = {update, (item.get("status") or {}).get("currentRevision")}
        spare = [each for each in ordered if each["metadata"]["name"] not in used]
        for each in spare[: max(0, len(spare) - int(item["spec"].get("revisionHistoryLimit", 10)))]:
            self._api.attempt(self._api.delete, REVISIONS, each)
        return ordered

    def _act(
        self, item: Json, there: dict[int, Json], templates: dict[str, Any], current: str, update: str
    ) -> None:
        spec = item["spec"]
        first = int((spec.get("ordinals") or {}).get("start") or 0)
        wanted = range(first, first + int(spec.get("replicas", 1)))
        partition = int(((spec.get("updateStrategy") or {}).get("rollingUpdate") or {}).get("partition") or 0)
        ordered = spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        for number in wanted:
            pod = there.get(number)
            if pod is not None and is_done(pod) and not pod["metadata"].get("deletionTimestamp"):
                self._writer.delete(item, pod)
                return
            if pod is None:
                revision = current if number < partition else update
                self._make(item, number, templates[revision], revision)
            if ordered and (pod is None or not _healthy(pod)):
                return
        for number in sorted((n for n in there if n not in wanted), reverse=True):
            if is_active(there[number]):
                self._writer.delete(item, there[number])
            if ordered:
                return
        if (spec.get("updateStrategy") or {}).get("type") == "OnDelete":
            return
        for number in sorted((n for n in wanted if n >= partition), reverse=True):
            pod = there.get(number)
            if pod is None or not _healthy(pod):
                # One after the other: the next goes when this one works.
                if pod is not None and is_active(pod) and _revision_of(pod) != update:
                    self._writer.delete(item, pod)
                return
            if _revision_of(pod) != update:
                self._writer.delete(item, pod)
                return

    def _make(self, item: Json, number: int, template: Json, revision: str) -> None:
        name = f"{item['metadata']['name']}-{number}"
        for claim in volume_claims(item, name):
            namespace, claim_name = claim["metadata"]["namespace"], claim["metadata"]["name"]
            if self._api.get(VOLUME_CLAIMS, claim_name, namespace) is None:
                self._api.create(VOLUME_CLAIMS, claim)
        self._writer.create(item, numbered_pod(item, number, template, revision))


def _by_number(item: Json, pods: Sequence[Json]) -> dict[int, Json]:
    prefix = f"{item['metadata']['name']}-"
    found: dict[int, Json] = {}
    for pod in pods:
        name = pod["metadata"]["name"]
        text = name.removeprefix(prefix)
        if name.startswith(prefix) and text.isdecimal():
            found[int(text)] = pod
    return found


def _healthy(pod: Json) -> bool:
    return is_active(pod) and is_ready(pod)


def _revision_of(pod: Json) -> str:
    return str((pod["metadata"].get("labels") or {}).get(REVISION, ""))


def _revision(item: Json, name: str, number: int) -> Json:
    meta = item["metadata"]
    owner = {
        "apiVersion": "apps/v1", "kind": "StatefulSet", "name": meta["name"], "uid": meta["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    labels = (item["spec"]["template"].get("metadata") or {}).get("labels") or {}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": {**labels, REVISION: name},
            "ownerReferences": [owner],
        },
        "data": {"spec": {"template": {**item["spec"]["template"], "$patch": "replace"}}},
        "revision": number,
    }


def numbered_pod(item: Json, number: int, template: Json, revision: str) -> Json:
    """Give the pod with a number."""
    name = f"{item['metadata']['name']}-{number}"
    labels = {REVISION: revision, _NAME: name, _INDEX: str(number)}
    plain = {key: value for key, value in template.items() if key != "$patch"}
    pod = pod_from_template(item, plain, labels=labels)
    del pod["metadata"]["generateName"]
    pod["metadata"]["name"] = name
    spec = pod["spec"]
    spec["hostname"] = name
    if item["spec"].get("serviceName"):
        spec["subdomain"] = item["spec"]["serviceName"]
    claims = {
        each["metadata"]["name"]: {"claimName": f"{each['metadata']['name']}-{name}"}
        for each in item["spec"].get("volumeClaimTemplates") or []
    }
    if claims:
        others = [volume for volume in spec.get("volumes") or [] if volume["name"] not in claims]
        spec["volumes"] = [
            *({"name": volume, "persistentVolumeClaim": source} for volume, source in claims.items()),
            *others,
        ]
    return pod


def volume_claims(item: Json, pod: str) -> list[Json]:
    """Give the volume claims of a pod."""
    made = []
    for template in item["spec"].get("volumeClaimTemplates") or []:
        meta = template["metadata"]
        labels = {**(meta.get("labels") or {}), **((item["spec"]["selector"] or {}).get("matchLabels") or {})}
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": f"{meta['name']}-{pod}",
                "namespace": item["metadata"]["namespace"],
                "labels": labels,
                "annotations": meta.get("annotations") or {},
            },
            "spec": json.loads(json.dumps(template.get("spec") or {})),
        }
        made.append(claim)
    return made


def stateful_set_status(item: Json, pods: Sequence[Json], *, current: str, update: str) -> Json:
    """Give a StatefulSet's status; once all pods are of the newest revision, that is the current one."""
    active = [pod for pod in pods if is_active(pod)]
    ready = sum(map(is_ready, active))
    updated = sum(1 for pod in active if _revision_of(pod) == update)
    wanted = int(item["spec"].get("replicas", 1))
    if updated == len(active) == wanted == ready:
        current = update
    status: Json = {
        "replicas": len(active),
        "availableReplicas": ready,
        "observedGeneration": item["metadata"].get("generation", 1),
        "currentRevision": current,
        "updateRevision": update,
        "collisionCount": 0,
    }
    for name, value in (
        ("readyReplicas", ready),
        ("currentReplicas", sum(1 for pod in active if _revision_of(pod) == current)),
        ("updatedReplicas", updated),
    ):
        if value:
            status[name] = value
    return status
