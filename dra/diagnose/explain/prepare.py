"""Allocated, bound to a node, and still not running: what the kubelet and the driver said about preparing it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dra.diagnose.explain.cluster import EVENT, NODE, SLICE, Cluster, Json, full_name, since_text
from dra.diagnose.explain.model import Reason
from dra.diagnose.explain.plugin_state import DriverState

FAILED = "FailedPrepareDynamicResources"
_CODE = re.compile(r"(DRA-[A-Z0-9]+(?:-[A-Z0-9]+)*): (.*)", re.DOTALL)
_UNREGISTERED = re.compile(r"(?:driver|plugin)(?: name)? \"?([\w.-]+)\"? (?:is not registered|not found in)")


def why_not_running(pod: Json, claims: Sequence[Json], cluster: Cluster) -> list[Reason]:
    """Give what keeps a pod that has a node from running, as far as it concerns its claims."""
    node = str(pod["spec"]["nodeName"])
    found = [*_not_reserved(pod, claims), *_failures(pod, node, cluster), *_claim_events(claims, cluster)]
    if not found:
        found += _node_trouble(node, cluster)
    if not found:
        found += _gone_slices(claims, cluster)
    if found:
        return found
    waiting = _waiting(pod)
    if waiting:
        return [Reason("not-devices", f"its devices are not in the way: {waiting}", "")]
    since = since_text((pod.get("status") or {}).get("startTime"), cluster.now)
    known = "" if cluster.knows(EVENT) else f" (Events {cluster.unread[EVENT]})"
    return [
        Reason(
            "preparing",
            f"the kubelet of node {node} prepares it{since}; no failure is reported{known}",
            "If it stays so, look at the kubelet's and the driver's log on that node.",
            nodes=(node,),
        )
    ]


def events_of(uid: str, name: str, namespace: str, cluster: Cluster) -> list[Json]:
    """Give the Events on an object, newest first."""
    found = []
    for event in cluster.all(EVENT):
        about = event.get("involvedObject") or event.get("regarding") or {}
        same = about.get("name") == name and about.get("namespace", namespace) == namespace
        if same and (not about.get("uid") or not uid or about["uid"] == uid):
            found.append(event)
    return sorted(found, key=event_time, reverse=True)


def event_time(event: Mapping[str, object]) -> str:
    """Give the time at which an Event was last seen; empty if it has none."""
    series = event.get("series")
    observed = series.get("lastObservedTime") if isinstance(series, Mapping) else None
    times = (observed, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((str(time) for time in times if time), "")


def event_text(event: Mapping[str, object]) -> str:
    """Give what an Event says."""
    return " ".join(str(event.get("message") or event.get("note") or "").split())


def _failures(pod: Json, node: str, cluster: Cluster) -> list[Reason]:
    metadata = pod["metadata"]
    events = events_of(str(metadata.get("uid") or ""), metadata["name"], metadata["namespace"], cluster)
    newest = next((event for event in events if event.get("reason") == FAILED), None)
    if newest is None:
        return []
    count = newest.get("count") or (newest.get("series") or {}).get("count") or 1
    times = f", {count} times" if count > 1 else ""
    when = since_text(event_time(newest), cluster.now).replace(" since ", " last at ")
    return [_failure(event_text(newest), node, cluster, suffix=f"{times}{when}")]


def _failure(text: str, node: str, cluster: Cluster, *, suffix: str) -> Reason:
    unregistered = _UNREGISTERED.search(text)
    if unregistered is not None:
        driver = unregistered[1]
        node_object = cluster.find(NODE, node) or {"metadata": {"name": node}}
        why = DriverState(cluster).why_no_slice(node_object, driver)
        return Reason(
            "driver-not-registered",
            f"driver {driver} is not registered with the kubelet of node {node}{suffix}",
            "Start the driver there; the kubelet tries again by itself. dra doctor on the node finds the broken step.",
            details=(why,) if why else (),
            nodes=(node,),
        )
    coded = _CODE.search(text)
    if coded is None:
        return Reason(
            "prepare-failed", f"node {node} could not prepare it{suffix}: {text}", "", nodes=(node,)
        )
    code, rest = coded[1], coded[2]
    message, remedy = _split(rest)
    return Reason(
        "prepare-failed",
        f"node {node} could not prepare it{suffix}: {code}: {message}",
        remedy,
        nodes=(node,),
    )


def _split(text: str) -> tuple[str, str]:
    """Split `message. Remedy.`, as an error writes itself."""
    parts = re.split(r"\. (?=[A-Z])", text, maxsplit=1)
    return (parts[0].rstrip("."), parts[1]) if len(parts) == 2 else (text.rstrip("."), "")


def _claim_events(claims: Iterable[Json], cluster: Cluster) -> list[Reason]:
    """Give our driver's warnings on the claims, where the pod's own Event does not have them."""
    found = []
    for claim in claims:
        metadata = claim["metadata"]
        events = events_of(str(metadata.get("uid") or ""), metadata["name"], metadata["namespace"], cluster)
        coded = [
            (event, _CODE.search(event_text(event))) for event in events if event.get("type") == "Warning"
        ]
        for event, match in coded[:1]:
            if match is not None:
                message, remedy = _split(match[2])
                when = since_text(event_time(event), cluster.now).replace(" since ", " last at ")
                text = f"claim {metadata['name']}{when}: {match[1]}: {message}"
                found.append(Reason("claim-warning", text, remedy, claim=metadata["name"]))
    return found


def _not_reserved(pod: Json, claims: Sequence[Json]) -> list[Reason]:
    found = []
    uid = pod["metadata"].get("uid")
    for claim in claims:
        status = claim.get("status") or {}
        reserved = status.get("reservedFor") or []
        name = claim["metadata"]["name"]
        if not status.get("allocation"):
            text = f"the pod has a node, but claim {name} is not allocated"
        elif not any(entry.get("uid") == uid for entry in reserved):
            others = ", ".join(str(entry.get("name")) for entry in reserved) or "nobody"
            text = f"the pod has a node, but claim {name} is reserved for {others}, not for it"
        else:
            continue
        remedy = (
            "Do not set spec.nodeName: a pod with claims must pass the scheduler. Delete and create it again."
        )
        found.append(Reason("not-reserved", text, remedy, claim=name))
    return found


def _node_trouble(node: str, cluster: Cluster) -> list[Reason]:
    node_object = cluster.find(NODE, node)
    if node_object is None:
        if cluster.knows(NODE):
            text = f"node {node} does not exist any more"
            return [Reason("node-gone", text, "Delete the pod so that it is scheduled again.", nodes=(node,))]
        return []
    state = DriverState(cluster)
    not_ready = state.not_ready(node_object)
    if not_ready:
        return [
            Reason("node-not-ready", f"{node}: {not_ready}", "Repair the node or its kubelet.", nodes=(node,))
        ]
    broken = next((item for item in state.plugins(node) if item.trouble), None)
    if broken is None:
        return []
    text = f"driver pod {broken.name} on node {node} {broken.trouble}"
    return [Reason("driver-down", text, "Look at that pod's log.", nodes=(node,))]


def _gone_slices(claims: Iterable[Json], cluster: Cluster) -> list[Reason]:
    if not cluster.knows(SLICE):
        return []
    pools = {(item["spec"]["driver"], item["spec"]["pool"]["name"]) for item in cluster.all(SLICE)}
    found = []
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or []:
            if (result["driver"], result["pool"]) not in pools:
                text = (
                    f"device {result['device']} of claim {claim['metadata']['name']} is in pool {result['pool']} of"
                    f" {result['driver']}, which is published no more"
                )
                remedy = "Check that the driver runs on that node; preparing still works once it does."
                found.append(Reason("slice-missing", text, remedy, claim=full_name(claim)))
                break
    return found


def _waiting(pod: Json) -> str:
    status = pod.get("status") or {}
    for entry in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            message = f" ({waiting['message']})" if waiting.get("message") else ""
            return f"container {entry.get('name')} waits: {waiting['reason']}{message}"
    return ""
