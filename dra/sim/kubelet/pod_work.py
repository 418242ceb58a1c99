"""The life of one node's pods: prepared, run, reported, ended, deleted; where the pods come from is not known here.

One pod is worked on by one thread at a time, different pods side by side, as the kubelet's pod workers do it.
Source: kubelet pod workers and DRA manager: retries after 60 s (prepare) and 10 s (unprepare), unprepare before the
terminal status is reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dra.errors import KubeError
from dra.kube.resources import PODS, Resource
from dra.sim.kubelet.claims import DraManager, Json, PrepareError, UnprepareError
from dra.sim.kubelet.pods import (
    PodRuns,
    RunningPod,
    ended_status,
    now_text,
    pod_claim_resources,
    running_status,
    waiting_status,
)
from dra.sim.kubelet.versions import Timings
from dra.sim.runtime import CreateError
from dra.telemetry.log import get_logger

log = get_logger()

TICK_SECONDS = 0.2


class PodNode(Protocol):
    """The kubelet of the node, as far as its pods need it."""

    @property
    def timings(self) -> Timings: ...
    @property
    def manager(self) -> DraManager: ...
    @property
    def pods(self) -> PodRuns: ...

    def health(self) -> Mapping[tuple[str, str, str], tuple[str, str]]:
        """Give (state, message) of each device by driver, pool and device."""
        ...


class PodApi(Protocol):
    """The API server, as far as the life of a pod needs it. Both raise KubeError."""

    def patch(
        self, resource: Resource, name: str, body: Any, namespace: str | None = None, *, subresource: str = ""
    ) -> Json:
        """Merge a patch into an object."""
        ...

    def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_period_seconds: int | None = None,
    ) -> None:
        """Delete an object."""
        ...


class PodWork:
    """Looks at the pods of one node (`tick`) and has what is due done.

    Args:
        node: the kubelet.
        api: where statuses are written.
        submit: runs a call in a worker thread.
        wake: called when a pod was worked on, so that somebody looks again.
        tell: writes an Event about a pod: the pod, the reason, the message.
    """

    def __init__(
        self,
        node: PodNode,
        api: PodApi,
        *,
        submit: Callable[[Callable[[], None]], object],
        wake: Callable[[], None],
        tell: Callable[[Json, str, str], None],
    ) -> None:
        self._node, self._api = node, api
        self._submit, self._wake, self._tell = submit, wake, tell
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        # When a pod that failed is tried again, and the version of it that failed.
        self._later: dict[str, tuple[float, str]] = {}
        self._started: dict[str, str] = {}
        # Pods that ended here; the copy of the API may not say so yet.
        self._over: set[str] = set()

    @property
    def waits_for_retry(self) -> bool:
        """Whether some pod is to be tried again later."""
        return bool(self._later)

    def tick(self, pods: Sequence[Json], *, report_health: bool = False) -> None:
        """Look at all pods of the node once."""
        known = {pod["metadata"]["uid"] for pod in pods}
        for running in self._node.pods.all():
            uid = running.pod["metadata"]["uid"]
            if uid not in known and uid not in self._busy:
                self._node.pods.kill(uid)  # force-deleted; its claims are left to the reconcile loop
        self._over &= known
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid in self._busy or not self._is_due(pod):
                continue
            if self._needs_work(pod) or (report_health and self._node.pods.get(uid) is not None):
                with self._lock:
                    self._busy.add(uid)
                self._submit(lambda pod=pod: self._work(pod))  # type: ignore[misc]

    def _is_due(self, pod: Json) -> bool:
        at, version = self._later.get(pod["metadata"]["uid"], (0.0, ""))
        return time.monotonic() >= at or pod["metadata"]["resourceVersion"] != version

    def _needs_work(self, pod: Json) -> bool:
        if "deletionTimestamp" in pod["metadata"]:
            return True
        uid = pod["metadata"]["uid"]
        return not is_over(pod) and uid not in self._over and self._node.pods.get(uid) is None

    # -- one pod -----------------------------------------------------------------------------------

    def _work(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        try:
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            elif (running := self._node.pods.get(uid)) is not None:
                self._report(pod, running)
            else:
                self._begin(pod)
            self._later.pop(uid, None)
        except PrepareError as error:
            self._again(pod, self._node.timings.prepare_retry)
            self._tell(pod, "FailedPrepareDynamicResources", f"Failed to prepare dynamic resources: {error}")
        except UnprepareError as error:
            self._again(pod, self._node.timings.unprepare_retry)
            self._tell(pod, "FailedUnprepareDynamicResources", str(error))
        except CreateError as error:
            self._again(pod, self._node.timings.unprepare_retry)
            self._tell(pod, "Failed", f"Error: {error}")
            self._set_status(pod, waiting_status(pod, "CreateContainerError", str(error)))
        except KubeError as error:
            self._again(pod, TICK_SECONDS)
            log.info("sim_pod_status_failed", pod=pod["metadata"]["name"], error=str(error))
        except Exception:  # marked border: a worker must not vanish without a word
            self._again(pod, self._node.timings.unprepare_retry)
            log.exception("sim_pod_worker_failed", pod=pod["metadata"]["name"])
        finally:
            with self._lock:
                self._busy.discard(uid)
            self._wake()

    def _begin(self, pod: Json) -> None:
        """Start a pod, or take over one that an earlier kubelet process started."""
        uid = pod["metadata"]["uid"]
        if (pod.get("status") or {}).get("phase") == "Running":
            running = self._node.pods.restart_containers(pod)
        else:
            running = self._node.pods.run(pod)
        self._started.setdefault(uid, now_text())
        self._report(pod, running)

    def _report(self, pod: Json, running: RunningPod) -> None:
        uid = pod["metadata"]["uid"]
        if running.finished:
            self._node.pods.stop(pod)
            self._over.add(uid)
        resources = pod_claim_resources(self._node.manager, pod, self._node.health())
        started = (pod.get("status") or {}).get("startTime") or self._started.setdefault(uid, now_text())
        status = running_status(running, resources, started=started)
        current = pod.get("status") or {}
        if any(current.get(key) != value for key, value in status.items()):
            self._set_status(pod, status)

    def _end(self, pod: Json) -> None:
        """Stop a pod that was deleted, then let the API forget it."""
        self._node.pods.stop(pod)
        metadata = pod["metadata"]
        if not is_over(pod):
            self._set_status(pod, ended_status(pod, now=now_text()))
        try:
            self._api.delete(
                PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_period_seconds=0
            )
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _set_status(self, pod: Json, status: Json) -> None:
        metadata = pod["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            self._api.patch(PODS, metadata["name"], body, metadata["namespace"], subresource="status")
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _again(self, pod: Json, seconds: float) -> None:
        metadata = pod["metadata"]
        self._later[metadata["uid"]] = (time.monotonic() + seconds, metadata["resourceVersion"])


def is_over(pod: Json) -> bool:
    """Whether a pod has ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
