"""Says how far the node is with its policies: the `GpuNode` object, and Events on policies and the node.

One object a node, owned by the Node, so that a fleet of thousands does not write into one policy's status: there
every node would be told of each other's news. `dra fleet` gathers them.
"""

from __future__ import annotations

import datetime as dt
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dra.api.policy import GROUP_VERSION
from dra.controller.policy_model import GpuReport, NodeReport
from dra.errors import DraError
from dra.kube.client import KubeClient
from dra.kube.clock import Clock, SystemClock
from dra.kube.events import EventRecorder, ObjectReference
from dra.kube.resources import GPU_NODES
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

_MESSAGE_BYTES = 1024
RETRY_SECONDS = 15.0
Json = dict[str, Any]


def node_status(report: NodeReport, *, now: str, before: Mapping[str, Any] | None = None) -> Json:
    """Give the status of a GpuNode. Pure.

    Args:
        report: what is to be said.
        now: RFC 3339; the transition time of a condition that changed.
        before: the status that was written last: a condition that stays keeps its time.
    """
    pending = [gpu for gpu in report.gpus if gpu.state != "Applied"]
    if report.problem:
        status, reason, message = "False", "PolicyInvalid", report.problem
    elif pending:
        worst = min(pending, key=lambda gpu: ("Refused", "Changing", "Waiting").index(gpu.state))
        status, reason, message = "False", worst.state, worst.message
    else:
        count = len(report.gpus)
        status, reason = "True", "Applied"
        message = f"{count} {'GPU is' if count == 1 else 'GPUs are'} as the policies say"
    conditions = [_condition("Applied", status, reason, message, now=now, before=before)]
    clash = "; ".join(report.conflicts)
    conditions.append(
        _condition(
            "Conflict", "True" if clash else "False", "PolicyConflict" if clash else "NoConflict",
            clash or "no two policies say different things", now=now, before=before,
        )
    )  # fmt: skip
    return {
        "policies": [{"name": name, "generation": generation} for name, generation in report.policies],
        "gpus": [_gpu(gpu) for gpu in report.gpus],
        "pending": len(pending),
        "conditions": conditions,
    }


def _gpu(gpu: GpuReport) -> Json:
    body: Json = {"device": gpu.device, "uuid": gpu.uuid, "product": gpu.product, "state": gpu.state}
    if gpu.code:
        body["code"] = gpu.code
    if gpu.message:
        body["message"] = gpu.message[:_MESSAGE_BYTES]
    if gpu.claims:
        body["claims"] = list(gpu.claims)
    return body


def _condition(
    type_: str, status: str, reason: str, message: str, *, now: str, before: Mapping[str, Any] | None
) -> Json:
    known: Mapping[str, Any] = next(
        (each for each in (before or {}).get("conditions", ()) if each.get("type") == type_), {}
    )
    since = known.get("lastTransitionTime", now) if known.get("status") == status else now
    return {
        "type": type_, "status": status, "reason": reason, "message": message[:_MESSAGE_BYTES],
        "lastTransitionTime": since,
    }  # fmt: skip


class PolicyReporter:
    """Writes in a thread of its own; of several reports that wait the last is written.

    Args:
        node_name: of the Node, and of the GpuNode.
        enabled: whether the definitions are installed: else nothing is written.
    """

    def __init__(
        self,
        client: KubeClient,
        events: EventRecorder,
        node_name: str,
        *,
        enabled: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        self._client, self._events, self._node_name, self._enabled = client, events, node_name, enabled
        self._clock = clock or SystemClock()
        self._queue: queue.SimpleQueue[NodeReport | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._node_uid = ""
        self._policies: dict[str, str] = {}
        self._written: Json | None = None

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        thread = threading.Thread(target=self._run, name="policy-report", daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self, *, timeout_seconds: float = 1.0) -> None:
        """End after the write under way."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def node_is(self, node: Mapping[str, Any]) -> None:
        """Take the Node, who owns what is written."""
        self._node_uid = str((node.get("metadata") or {}).get("uid") or "")

    def policies_are(self, policies: Mapping[str, str]) -> None:
        """Take the UIDs of the policies by name, for Events on them."""
        self._policies = dict(policies)

    def report(self, report: NodeReport) -> None:
        """Take the newest report; returns at once."""
        self._queue.put(report)

    def tell(
        self, policy: str, device: str, kind: Literal["Normal", "Warning"], reason: str, message: str
    ) -> None:
        """Say something in Events: on the policy, if there is one, and on the node."""
        text = f"{self._node_name}: {message}" if self._node_name not in message else message
        if policy and policy in self._policies:
            about = ObjectReference(GROUP_VERSION, "GpuNodePolicy", policy, self._policies[policy])
            self._events.emit(about, kind, reason, text)
        if device:
            about = ObjectReference("v1", "Node", self._node_name, self._node_uid or self._node_name)
            self._events.emit(about, kind, reason, text)

    def _run(self) -> None:
        waiting: NodeReport | None = None
        while True:
            try:
                news = self._queue.get(timeout=RETRY_SECONDS if waiting is not None else None)
            except queue.Empty:
                news = waiting
            if news is None:
                return
            while not self._queue.empty():
                later = self._queue.get()
                if later is None:
                    return
                news = later
            waiting = None if self._write(news) else news

    def _write(self, report: NodeReport) -> bool:
        """Write a report; whether it need not be tried again."""
        if not self._enabled():
            return True
        status = node_status(report, now=self._now(), before=self._written)
        if status == self._written:
            return True
        metadata: Json = {"name": self._node_name}
        if self._node_uid:
            metadata["ownerReferences"] = [
                {"apiVersion": "v1", "kind": "Node", "name": self._node_name, "uid": self._node_uid}
            ]
        body = {"apiVersion": GROUP_VERSION, "metadata": metadata}
        try:
            self._client.apply(GPU_NODES, self._node_name, body)
            self._client.apply(
                GPU_NODES, self._node_name, {**body, "metadata": {"name": self._node_name}, "status": status},
                subresource="status",
            )  # fmt: skip
        except DraError as error:
            log.warning("policy_report_not_written", **error_fields(error))
            return False
        self._written = status
        return True

    def _now(self) -> str:
        moment = dt.datetime.fromtimestamp(self._clock.wall(), tz=dt.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
