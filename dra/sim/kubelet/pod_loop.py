"""The life of the pods that the API binds to this node: prepared, run, reported, ended, deleted.

One pod is worked on by one thread at a time, different pods side by side, as the kubelet's pod workers do it.
Source: kubelet pod workers and DRA manager: retries after 60 s (prepare) and 10 s (unprepare), unprepare before the
terminal status is reported.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dra.errors import DraError, KubeError
from dra.kube.client import KubeClient
from dra.kube.events import EventRecorder, ObjectReference
from dra.kube.reflector import Change, Reflector, ReflectorOptions
from dra.kube.resources import PODS
from dra.sim.kubelet.claims import Json, PrepareError, UnprepareError
from dra.sim.kubelet.node import SimKubelet
from dra.sim.kubelet.pods import (
    RunningPod,
    now_text,
    pod_claim_resources,
    running_status,
    waiting_status,
)
from dra.sim.runtime import CreateError
from dra.telemetry.log import error_fields, get_logger

log = get_logger()

_TICK_SECONDS = 0.2
_WORKERS = 16


class PodLoop:
    """Runs the pods of one kubelet. Start it after the kubelet, stop it before."""

    def __init__(self, kubelet: SimKubelet, client: KubeClient) -> None:
        self._kubelet, self._client, self._timings = kubelet, client, kubelet.timings
        self._events = EventRecorder(client, component="kubelet", host=kubelet.node_name)
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        # When a pod that failed is tried again, and the version of it that failed.
        self._later: dict[str, tuple[float, str]] = {}
        self._started: dict[str, str] = {}
        # Pods that ended here; the copy of the API may not say so yet.
        self._over: set[str] = set()
        self._health_news = threading.Event()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="pod-worker")
        self._reflector = Reflector(
            client,
            PODS,
            on_change=self._pod_changed,
            options=ReflectorOptions(
                field_selector=f"spec.nodeName={kubelet.node_name}", requests_per_second=10, burst=20
            ),
        )
        self._thread = threading.Thread(target=self._run, name="kubelet-pods", daemon=True)
        kubelet.active_pods_are(self._active)
        kubelet.listen_health(self._health_changed)

    def start(self) -> None:
        """Follow the node's pods."""
        self._reflector.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop following; containers go on."""
        self._stop.set()
        self._changed.set()
        self._reflector.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._workers.shutdown(wait=True)
        self._events.stop()

    # -- what there is to do -----------------------------------------------------------------------

    def _pod_changed(self, _change: Change) -> None:
        self._changed.set()

    def _health_changed(self) -> None:
        self._health_news.set()
        self._changed.set()

    def _active(self) -> set[str]:
        if not self._reflector.synced.is_set():
            # Before all pods are known nothing may count as gone.
            return {uid for claim in self._kubelet.manager.cache.claims.values() for uid in claim.pod_uids}
        return {pod["metadata"]["uid"] for pod in self._reflector.objects() if not is_over(pod)}

    def _run(self) -> None:
        while not self._stop.is_set():
            self._changed.wait(_TICK_SECONDS)
            self._changed.clear()
            if self._reflector.synced.is_set() and not self._stop.is_set():
                self._tick()

    def _tick(self) -> None:
        pods = self._reflector.objects()
        known = {pod["metadata"]["uid"] for pod in pods}
        for running in self._kubelet.pods.all():
            uid = running.pod["metadata"]["uid"]
            if uid not in known and uid not in self._busy:
                self._kubelet.pods.kill(uid)  # force-deleted; its claims are left to the reconcile loop
        self._over &= known
        report_health = self._health_news.is_set()
        self._health_news.clear()
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid in self._busy or not self._is_due(pod):
                continue
            if self._needs_work(pod) or (report_health and self._kubelet.pods.get(uid) is not None):
                with self._lock:
                    self._busy.add(uid)
                self._workers.submit(self._work, pod)

    def _is_due(self, pod: Json) -> bool:
        at, version = self._later.get(pod["metadata"]["uid"], (0.0, ""))
        return time.monotonic() >= at or pod["metadata"]["resourceVersion"] != version

    def _needs_work(self, pod: Json) -> bool:
        if "deletionTimestamp" in pod["metadata"]:
            return True
        uid = pod["metadata"]["uid"]
        return not is_over(pod) and uid not in self._over and self._kubelet.pods.get(uid) is None

    # -- one pod -----------------------------------------------------------------------------------

    def _work(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        try:
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            elif (running := self._kubelet.pods.get(uid)) is not None:
                self._report(pod, running)
            else:
                self._begin(pod)
            self._later.pop(uid, None)
        except PrepareError as error:
            self._again(pod, self._timings.prepare_retry)
            self._event(pod, "FailedPrepareDynamicResources", f"Failed to prepare dynamic resources: {error}")
        except UnprepareError as error:
            self._again(pod, self._timings.unprepare_retry)
            self._event(pod, "FailedUnprepareDynamicResources", str(error))
        except CreateError as error:
            self._again(pod, self._timings.unprepare_retry)
            self._event(pod, "Failed", f"Error: {error}")
            self._set_status(pod, waiting_status(pod, "CreateContainerError", str(error)))
        except KubeError as error:
            self._again(pod, _TICK_SECONDS)
            log.info("sim_pod_status_failed", pod=pod["metadata"]["name"], error=str(error))
        except Exception:  # marked border: a worker must not vanish without a word
            self._again(pod, self._timings.unprepare_retry)
            log.exception("sim_pod_worker_failed", pod=pod["metadata"]["name"])
        finally:
            with self._lock:
                self._busy.discard(uid)
            self._changed.set()

    def _begin(self, pod: Json) -> None:
        """Start a pod, or take over one that an earlier kubelet process started."""
        uid = pod["metadata"]["uid"]
        if (pod.get("status") or {}).get("phase") == "Running":
            running = self._kubelet.pods.restart_containers(pod)
        else:
            running = self._kubelet.run_pod(pod)
        self._started.setdefault(uid, now_text())
        self._report(pod, running)

    def _report(self, pod: Json, running: RunningPod) -> None:
        uid = pod["metadata"]["uid"]
        if running.finished:
            self._kubelet.stop_pod(pod)
            self._over.add(uid)
        resources = pod_claim_resources(self._kubelet.manager, pod, self._kubelet.health())
        started = (pod.get("status") or {}).get("startTime") or self._started.setdefault(uid, now_text())
        status = running_status(running, resources, started=started)
        current = pod.get("status") or {}
        if any(current.get(key) != value for key, value in status.items()):
            self._set_status(pod, status)

    def _end(self, pod: Json) -> None:
        """Stop a pod that was deleted, then let the API forget it."""
        self._kubelet.stop_pod(pod)
        metadata = pod["metadata"]
        try:
            self._client.delete(
                PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_period_seconds=0
            )
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _set_status(self, pod: Json, status: Json) -> None:
        metadata = pod["metadata"]
        try:
            self._client.patch(
                PODS, metadata["name"], {"metadata": {"uid": metadata["uid"]}, "status": status}, metadata["namespace"],
                subresource="status",
            )  # fmt: skip
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    def _again(self, pod: Json, seconds: float) -> None:
        metadata = pod["metadata"]
        self._later[metadata["uid"]] = (time.monotonic() + seconds, metadata["resourceVersion"])

    def _event(self, pod: Json, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        about = ObjectReference("v1", "Pod", metadata["name"], metadata["uid"], metadata["namespace"])
        try:
            self._events.emit(about, "Warning", reason, message)
        except DraError as error:
            log.info("sim_event_failed", **error_fields(error))


def is_over(pod: Json) -> bool:
    """Whether a pod has ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
