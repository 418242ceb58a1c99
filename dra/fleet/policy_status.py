"""Gathers what the nodes say (`GpuNode`) into the status of each GpuNodePolicy, and removes what gone nodes left.

A node's driver writes one small object of its own; here, in one place, they are counted. Removed are GpuNodes and
ResourceSlices of our driver whose Node is gone: they have it as owner, but one that was made without (or by a dump
that was applied again) would stay for ever.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dra.api.policy import GROUP_VERSION, UnreadablePolicy, read_policy
from dra.errors import KubeError
from dra.fleet.copies import NOT_THERE, Copies
from dra.kube.client import KubeClient
from dra.kube.clock import Clock, SystemClock
from dra.kube.resources import GPU_NODE_POLICIES, GPU_NODES, NODES, RESOURCE_SLICES, Resource
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop

log = get_logger()
Json = dict[str, Any]

GATHER_SECONDS = 5.0
SWEEP_SECONDS = 60.0
# A Node that is made again under its name is back within this time; so long its things are kept.
GONE_SECONDS = 120.0
MAX_PROBLEMS = 20
_MESSAGE_BYTES = 512


def policy_status(
    policy: Mapping[str, Any],
    *,
    nodes: Iterable[Mapping[str, Any]],
    gpu_nodes: Iterable[Mapping[str, Any]],
    now: str,
) -> Json:
    """Give the status of a policy. Pure.

    Args:
        policy: as the API has it, with its status.
        nodes: all Nodes.
        gpu_nodes: all GpuNodes.
        now: RFC 3339: the transition time of a condition that changed.
    """
    metadata = policy.get("metadata") or {}
    name, generation = str(metadata.get("name") or ""), int(metadata.get("generation") or 0)
    read = read_policy(policy)
    wrong = read.problem if isinstance(read, UnreadablePolicy) else ""
    # Nodes that a policy chooses which cannot be read stand still: they are counted, as waiting.
    chooses = read.may_choose if isinstance(read, UnreadablePolicy) else read.chooses
    reports = {str((each.get("metadata") or {}).get("name")): each.get("status") or {} for each in gpu_nodes}
    chosen = [
        str(each["metadata"]["name"])
        for each in nodes
        if chooses((each.get("metadata") or {}).get("labels") or {})
    ]
    counts = dict.fromkeys(("matching", "applied", "waiting", "refused"), 0)
    problems: list[Json] = []
    for node in sorted(set(chosen) & reports.keys()):
        counts["matching"] += 1
        counts[_state_of(node, name, generation, reports[node], problems)] += 1
    return {
        "observedGeneration": generation,
        "nodes": counts,
        "problems": problems[:MAX_PROBLEMS],
        "conditions": [_applied(policy, wrong, counts, problems, generation, now)],
    }


def _state_of(
    node: str, policy: str, generation: int, report: Mapping[str, Any], problems: list[Json]
) -> str:
    """Say how far a node is with a policy, and note what is in the way."""
    seen = {str(each.get("name")): int(each.get("generation") or 0) for each in report.get("policies") or ()}
    if seen.get(policy, -1) != generation:
        text = next(
            (
                str(each.get("message"))
                for each in report.get("conditions") or ()
                if each.get("reason") == "PolicyInvalid"
            ),
            "its driver has not taken this generation yet",
        )
        problems.append({"node": node, "state": "Waiting", "message": text[:_MESSAGE_BYTES]})
        return "waiting"
    pending = [each for each in report.get("gpus") or () if each.get("state") != "Applied"]
    problems += [
        {
            "node": node, "gpu": str(gpu.get("device", "")), "state": str(gpu.get("state", "")),
            "message": str(gpu.get("message", ""))[:_MESSAGE_BYTES],
        }
        for gpu in pending
    ]  # fmt: skip
    if any(each.get("state") == "Refused" for each in pending):
        return "refused"
    return "waiting" if pending else "applied"


def _applied(
    policy: Mapping[str, Any],
    wrong: str,
    counts: Mapping[str, int],
    problems: list[Json],
    generation: int,
    now: str,
) -> Json:
    matching = counts["matching"]
    if wrong:
        status, reason, message = "False", "Invalid", wrong
    elif not matching:
        status, reason, message = "True", "NoNodes", "no node with a GPU driver has such labels"
    elif counts["refused"] or counts["waiting"]:
        status, reason = "False", "Refused" if counts["refused"] else "Waiting"
        first = problems[0]
        message = (
            f"{counts['applied']} of {matching} nodes are as it says; {first['node']}: {first['message']}"
        )
    else:
        status, reason = "True", "Applied"
        message = f"{matching} of {matching} nodes are as it says"
    before: Mapping[str, Any] = next(
        (
            each
            for each in (policy.get("status") or {}).get("conditions") or ()
            if each.get("type") == "Applied"
        ),
        {},
    )
    since = before.get("lastTransitionTime", now) if before.get("status") == status else now
    return {
        "type": "Applied", "status": status, "reason": reason, "message": message[:_MESSAGE_BYTES],
        "observedGeneration": generation, "lastTransitionTime": since,
    }  # fmt: skip


def left_by_gone_nodes(
    nodes: Iterable[Mapping[str, Any]],
    slices: Iterable[Mapping[str, Any]],
    gpu_nodes: Iterable[Mapping[str, Any]],
    *,
    driver: str,
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Give the slices and the GpuNodes whose Node does not exist. Pure."""
    there = {str((each.get("metadata") or {}).get("name")) for each in nodes}
    if not there:
        # No cluster is without a Node: that answer is not to be believed.
        return [], []
    lost = [
        each
        for each in slices
        if (spec := each.get("spec") or {}).get("driver") == driver
        and spec.get("nodeName")
        and spec["nodeName"] not in there
    ]
    return lost, [each for each in gpu_nodes if (each.get("metadata") or {}).get("name") not in there]


class PolicyStatus:
    """A part of `dra fleet`: looks every few seconds while it leads.

    Args:
        driver: whose slices are ours.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        driver: str,
        copies: Copies | None = None,
        gather_seconds: float = GATHER_SECONDS,
        sweep_seconds: float = SWEEP_SECONDS,
        gone_seconds: float = GONE_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._driver = client, driver
        self._copies = copies or Copies(client, driver=driver)
        self._sweep_seconds, self._gone_seconds = sweep_seconds, gone_seconds
        self._clock = clock or SystemClock()
        self._loop = Loop("policy-status", self.gather, self._sweep_when_due, seconds=gather_seconds)
        self._swept = float("-inf")
        self._gone_since: dict[str, float] = {}

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        self._loop.start()

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """End."""
        self._loop.stop(timeout_seconds=timeout_seconds)

    def gather(self) -> None:
        """Write the status of each policy that changed. Raises DraError."""
        policies = self._copies.all(GPU_NODE_POLICIES)
        if not policies:
            return
        nodes, gpu_nodes = self._copies.all(NODES), self._copies.all(GPU_NODES)
        now = dt.datetime.fromtimestamp(self._clock.wall(), tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for policy in policies:
            status = policy_status(policy, nodes=nodes, gpu_nodes=gpu_nodes, now=now)
            if status == policy.get("status"):
                continue
            self._write(policy["metadata"], status)

    def _write(self, metadata: Mapping[str, Any], status: Json) -> None:
        name = str(metadata["name"])
        # With the version that it was counted for: what somebody wrote meanwhile is not written over.
        known = {"name": name, "resourceVersion": metadata["resourceVersion"]}
        body = {"apiVersion": GROUP_VERSION, "metadata": known, "status": status}
        try:
            self._client.apply(GPU_NODE_POLICIES, name, body, subresource="status")
        except KubeError as error:
            if error.code != "DRA-API-CONFLICT":
                raise
            log.info("policy_status_outdated", policy=name, **error_fields(error))

    def _sweep_when_due(self) -> None:
        if self._clock.now() - self._swept >= self._sweep_seconds:
            self._swept = self._clock.now()
            self.sweep()

    def sweep(self) -> None:
        """Remove what nodes left that are gone for a while. Raises DraError."""
        # The Nodes last: one that is made meanwhile is not taken for gone.
        slices, gpu_nodes = self._copies.all(RESOURCE_SLICES), self._copies.all(GPU_NODES)
        lost, reports = left_by_gone_nodes(self._copies.all(NODES), slices, gpu_nodes, driver=self._driver)
        if lost or reports:
            # A copy can be behind; what goes is decided by what the API server says now.
            nodes = self._copies.now(NODES)
            lost, reports = left_by_gone_nodes(nodes, lost, reports, driver=self._driver)
        found: dict[str, Callable[[], None]] = {}
        for resource, objects in ((RESOURCE_SLICES, lost), (GPU_NODES, reports)):
            for each in objects:
                metadata = each["metadata"]
                found[str(metadata["uid"])] = self._deleting(resource, metadata)
        now = self._clock.now()
        self._gone_since = {uid: self._gone_since.get(uid, now) for uid in found}
        for uid, delete in found.items():
            if now - self._gone_since[uid] >= self._gone_seconds:
                delete()

    def _deleting(self, resource: Resource, metadata: Mapping[str, Any]) -> Callable[[], None]:
        def delete() -> None:
            name = str(metadata["name"])
            try:
                self._client.delete(
                    resource, name, uid=str(metadata["uid"]), resource_version=metadata["resourceVersion"]
                )
            except KubeError as error:
                # One that was written meanwhile has somebody who writes it.
                if error.code not in NOT_THERE | {"DRA-API-CONFLICT"}:
                    raise
            else:
                log.info("gone_node_cleaned", kind=resource.kind, name=name)

        return delete
