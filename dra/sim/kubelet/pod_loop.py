"""Follows the pods that the API binds to a kubelet's node and has them worked on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from dra.errors import DraError
from dra.kube.client import KubeClient
from dra.kube.events import EventRecorder, ObjectReference
from dra.kube.reflector import Change, Reflector, ReflectorOptions
from dra.kube.resources import PODS
from dra.sim.kubelet.claims import Json
from dra.sim.kubelet.node import SimKubelet
from dra.sim.kubelet.pod_work import TICK_SECONDS, PodWork, is_over
from dra.telemetry.log import error_fields, get_logger

log = get_logger()

_WORKERS = 16


class PodLoop:
    """Runs the pods of one kubelet. Start it after the kubelet, stop it before."""

    def __init__(self, kubelet: SimKubelet, client: KubeClient) -> None:
        self._kubelet = kubelet
        self._events = EventRecorder(client, component="kubelet", host=kubelet.node_name)
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._health_news = threading.Event()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="pod-worker")
        self._work = PodWork(
            kubelet, client, submit=self._workers.submit, wake=self._changed.set, tell=self._tell
        )
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
            self._changed.wait(TICK_SECONDS)
            self._changed.clear()
            if self._reflector.synced.is_set() and not self._stop.is_set():
                news = self._health_news.is_set()
                self._health_news.clear()
                self._work.tick(self._reflector.objects(), report_health=news)

    def _tell(self, pod: Json, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        about = ObjectReference("v1", "Pod", metadata["name"], metadata["uid"], metadata["namespace"])
        try:
            self._events.emit(about, "Warning", reason, message)
        except DraError as error:
            log.info("sim_event_failed", **error_fields(error))
