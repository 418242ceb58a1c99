"""The kubelet deletes ResourceSlices: all of its node when it starts, a driver's when that is gone.

Source: kubelet DRA plugin manager (DeleteCollection with field selectors; 30 s after the last connection ended).
"""

from __future__ import annotations

import threading
from typing import Protocol

from dra.errors import KubeError
from dra.kube.resources import RESOURCE_SLICES, Resource
from dra.telemetry.log import get_logger

log = get_logger()


class SliceDeleter(Protocol):
    """The part of the API that wiping needs."""

    def delete_collection(
        self, resource: Resource, namespace: str | None = None, *, field_selector: str = ""
    ) -> None:
        """Delete what the selector chooses; raises KubeError."""


class SliceWiper:
    """Wipes at start, and after a delay in which no instance of a driver is connected."""

    def __init__(self, api: SliceDeleter | None, node_name: str, *, delay_seconds: float) -> None:
        self._api, self._node, self._delay = api, node_name, delay_seconds
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.wiped: list[str] = []

    def wipe_node(self) -> None:
        """Delete the slices of all drivers of this node, in the background until it works."""
        if self._api is not None:
            threading.Thread(target=self._until_done, args=("",), name="kubelet-wipe", daemon=True).start()

    def connected(self, driver: str) -> None:
        """An instance is connected: a wipe that is due is called off."""
        with self._lock:
            timer = self._timers.pop(driver, None)
        if timer is not None:
            timer.cancel()

    def disconnected(self, driver: str) -> None:
        """No instance is connected: wipe after the delay. A wipe that is due is not put off."""
        with self._lock:
            if driver in self._timers or self._stopped.is_set():
                return
            timer = threading.Timer(self._delay, self._fire, args=(driver,))
            timer.daemon = True
            self._timers[driver] = timer
            timer.start()

    def stop(self) -> None:
        """Call off everything."""
        self._stopped.set()
        with self._lock:
            timers, self._timers = list(self._timers.values()), {}
        for timer in timers:
            timer.cancel()

    def _fire(self, driver: str) -> None:
        with self._lock:
            self._timers.pop(driver, None)
        self._until_done(driver)

    def _until_done(self, driver: str) -> None:
        delay = 1.0
        while not self._stopped.is_set():
            try:
                self._wipe(driver)
            except KubeError as error:
                log.info("sim_slice_wipe_failed", driver=driver, error=str(error))
                self._stopped.wait(delay)
                delay = min(delay * 2, 300.0)
            else:
                return

    def _wipe(self, driver: str) -> None:
        selector = f"spec.nodeName={self._node}" + (f",spec.driver={driver}" if driver else "")
        if self._api is not None:
            self._api.delete_collection(RESOURCE_SLICES, field_selector=selector)
        self.wiped.append(driver)
        log.info("sim_slices_wiped", node=self._node, driver=driver or "all")
