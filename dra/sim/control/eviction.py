"""Deletes the pods whose claims hold a device with a NoExecute taint.

Source: KEP-5055, the device taint eviction controller of kube-controller-manager.
"""

from __future__ import annotations

from dra.sim.control.api import CLAIMS, PODS, SLICES, TAINT_RULES, ControlApi, Json
from dra.sim.control.taints import plan_evictions, tainted_slices


class TaintEviction:
    """One `sync` deletes the pods that are due now."""

    def __init__(self, api: ControlApi) -> None:
        self._api = api

    def sync(self) -> float | None:
        """Do one round; gives the seconds until the next eviction is due, None if there is none."""
        now = self._api.server.api.clock()
        slices = tainted_slices(self._api.list(SLICES), self._api.list(TAINT_RULES))
        evictions = plan_evictions(self._api.list(CLAIMS), slices, now=now)
        if not evictions:
            return None
        pods = {pod["metadata"]["uid"]: pod for pod in self._api.list(PODS)}
        later: list[float] = []
        for eviction in evictions:
            pod = pods.get(eviction.pod_uid)
            if pod is None or pod["metadata"].get("deletionTimestamp"):
                continue
            if eviction.at > now:
                later.append(eviction.at - now)
            else:
                self._api.attempt(self._evict, pod, eviction.why)
        return min(later, default=None)

    def _evict(self, pod: Json, why: str) -> None:
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "DeletionByDeviceTaintManager",
            "message": f"Device Taint manager: deleting due to NoExecute taint: {why}",
            "lastTransitionTime": self._api.now(),
        }
        status = dict(pod.get("status") or {})
        others = [item for item in status.get("conditions") or [] if item.get("type") != "DisruptionTarget"]
        status["conditions"] = [*others, condition]
        pod = self._api.replace(PODS, {**pod, "status": status}, subresource="status")
        self._api.event(
            pod,
            "Normal",
            reason="DeviceTaintManagerEviction",
            message=f"Marking for deletion: {why}",
            component="device-taint-eviction",
        )
        self._api.delete(PODS, pod)
