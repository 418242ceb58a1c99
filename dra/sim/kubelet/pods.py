"""Pods of one node: prepared, created, run, stopped, as the kubelet's pod workers do it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dra.sim.kubelet.claims import DraManager, Json, container_requests
from dra.sim.kubelet.programs import Program, ProgramEnd, code_when_stopped, run_program
from dra.sim.runtime import ContainerView, Runtime


@dataclass(slots=True)
class RunningPod:
    """A pod with its containers: what each sees and what its program did."""

    pod: Json
    views: dict[str, ContainerView] = field(default_factory=dict)
    ends: dict[str, ProgramEnd] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all programs have ended and the pod does not restart them."""
        restarts = self.pod["spec"].get("restartPolicy", "Always")
        codes = [end.exit_code for end in self.ends.values()]
        if None in codes or restarts == "Always":
            return False
        return restarts == "Never" or not any(codes)

    @property
    def succeeded(self) -> bool:
        """Whether all programs ended with 0."""
        return all(end.exit_code == 0 for end in self.ends.values())


_MOST_LOGS = 1000


class PodRuns:
    """The pods that run on this node. `run` and `stop` may be called from several threads, not for one pod at once."""

    def __init__(
        self, manager: DraManager, *, runtime: Runtime | None = None, program: Program = run_program
    ) -> None:
        self._manager, self._runtime, self._program = manager, runtime, program
        self._lock = threading.Lock()
        self._running: dict[str, RunningPod] = {}
        # What containers printed, by pod and container; it outlives the pod for a while, as logs on a node do.
        self._printed: dict[str, dict[str, str]] = {}

    def run(self, pod: Json) -> RunningPod:
        """Prepare the pod's claims and create its containers. Repeatable: a running pod gets a new sandbox.

        Raises:
            PrepareError: a claim could not be prepared.
            CreateError: a container could not be created.
        """
        self._manager.prepare(pod)
        running = RunningPod(pod)
        for container in [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]:
            self._create(running, container)
        with self._lock:
            self._running[pod["metadata"]["uid"]] = running
        return running

    def _create(self, running: RunningPod, container: Json) -> None:
        if self._runtime is None:
            return
        env = {entry["name"]: str(entry.get("value", "")) for entry in container.get("env") or ()}
        view = self._runtime.create(self._manager.cdi_ids(running.pod, container), env=env)
        running.views[container["name"]] = view
        running.ends[container["name"]] = end = self._program(container, view)
        with self._lock:
            self._printed.setdefault(running.pod["metadata"]["uid"], {})[container["name"]] = end.output
            while len(self._printed) > _MOST_LOGS:
                del self._printed[next(iter(self._printed))]

    def printed(self, pod_uid: str, container: str) -> str | None:
        """Give what a container printed, None if nothing is known of it."""
        with self._lock:
            return self._printed.get(pod_uid, {}).get(container)

    def restart_containers(self, pod: Json) -> RunningPod:
        """Create the containers again inside the living sandbox: no prepare call, the CDI names are remembered."""
        running = RunningPod(pod)
        for container in pod["spec"]["containers"]:
            self._create(running, container)
        with self._lock:
            self._running[pod["metadata"]["uid"]] = running
        return running

    def stop(self, pod: Json) -> None:
        """Stop the containers, then unprepare the claims that nobody else uses.

        Raises:
            UnprepareError: the pod stays Terminating; call again.
        """
        self.kill(pod["metadata"]["uid"])
        self._manager.unprepare(pod)

    def kill(self, pod_uid: str) -> None:
        """End a pod's containers and nothing else, as after a forced deletion."""
        with self._lock:
            self._running.pop(pod_uid, None)

    def get(self, pod_uid: str) -> RunningPod | None:
        """Give a pod that runs."""
        return self._running.get(pod_uid)

    def all(self) -> list[RunningPod]:
        """Give the pods that run."""
        with self._lock:
            return list(self._running.values())


def now_text() -> str:
    """Give the time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def running_status(running: RunningPod, resources: Mapping[str, list[Json]], *, started: str) -> Json:
    """Give the pod status of a pod whose containers were created.

    `resources` holds `allocatedResourcesStatus` by container.
    """
    phase = "Running"
    if running.finished:
        phase = "Succeeded" if running.succeeded else "Failed"
    ready = phase == "Running"
    statuses = [
        _container_status(container, running.ends.get(container["name"]), resources, started=started)
        for container in running.pod["spec"]["containers"]
    ]
    return {
        "phase": phase,
        "startTime": started,
        "conditions": [
            {
                "type": kind,
                "status": "True" if ready or kind == "PodScheduled" else "False",
                "lastTransitionTime": started,
            }
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": statuses,
    }


def ended_status(pod: Json, *, now: str) -> Json:
    """Give the status of a pod that was deleted and whose containers were stopped.

    Source: kubelet since 1.27: a deleted pod gets a final phase before it goes; claims and finalizers wait for it.
    """
    known = {each["name"]: each for each in (pod.get("status") or {}).get("containerStatuses") or ()}
    statuses: list[Json] = []
    for container in pod["spec"]["containers"]:
        old = known.get(container["name"])
        if old is None or "running" not in (old.get("state") or {}):
            statuses += [old] if old is not None else []
            continue
        code = code_when_stopped(container)
        ended = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "startedAt": old["state"]["running"].get("startedAt", now),
            "finishedAt": now,
        }
        statuses.append({**old, "ready": False, "started": False, "state": {"terminated": ended}})
    codes = [(each.get("state") or {}).get("terminated", {}).get("exitCode") for each in statuses]
    well = len(codes) == len(pod["spec"]["containers"]) and not any(code != 0 for code in codes)
    old_conditions = (pod.get("status") or {}).get("conditions") or []
    conditions = [
        {**each, "status": "False", "lastTransitionTime": now}
        if each.get("type") in {"Ready", "ContainersReady"}
        else each
        for each in old_conditions
    ]
    return {
        "phase": "Succeeded" if well else "Failed",
        "containerStatuses": statuses,
        "conditions": conditions,
    }


def _container_status(
    container: Json, end: ProgramEnd | None, resources: Mapping[str, list[Json]], *, started: str
) -> Json:
    code = None if end is None else end.exit_code
    state: Json = {"running": {"startedAt": started}}
    if code is not None:
        reason = "Completed" if code == 0 else "Error"
        state = {
            "terminated": {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": started}
        }
    status: Json = {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": code is None,
        "started": code is None,
        "restartCount": 0,
        "state": state,
    }
    if resources.get(container["name"]):
        status["allocatedResourcesStatus"] = resources[container["name"]]
    return status


def waiting_status(pod: Json, reason: str, message: str) -> Json:
    """Give the pod status of a pod whose containers could not be created."""
    waiting = {"waiting": {"reason": reason, "message": message[:1000]}}
    return {
        "phase": "Pending",
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container.get("image", ""),
                "imageID": "",
                "ready": False,
                "started": False,
                "restartCount": 0,
                "state": waiting,
            }
            for container in pod["spec"]["containers"]
        ],
    }


def pod_claim_resources(
    manager: DraManager, pod: Json, health: Mapping[tuple[str, str, str], tuple[str, str]]
) -> dict[str, list[Json]]:
    """Give `allocatedResourcesStatus` of each container: the health of the devices of its claims.

    `health` holds (state, message) by driver, pool and device. Claims of extended resources are left out, as the
    kubelet does.
    """
    entries = {entry["name"]: entry for entry in pod["spec"].get("resourceClaims") or ()}
    found: dict[str, list[Json]] = {}
    for container in pod["spec"]["containers"]:
        uses = (container.get("resources") or {}).get("claims") or ()
        names = container_requests(pod, {**container, "name": ""})
        for use, (claim_name, request) in zip(uses, names, strict=False):
            if use["name"] not in entries:
                continue
            label = f"claim:{use['name']}" + (f"/{request}" if request else "")
            cached = manager.cache.claims.get((pod["metadata"]["namespace"], claim_name))
            resources = {}
            for device in cached.devices if cached is not None else ():
                if request and device.request_names and request not in device.request_names:
                    continue
                state, message = health.get((device.driver, device.pool, device.device), ("Unknown", ""))
                key = (
                    device.cdi_ids[0] if device.cdi_ids else f"{device.driver}/{device.pool}/{device.device}"
                )
                resources[key] = {"resourceID": key, "health": state} | (
                    {"message": message} if message else {}
                )
            found.setdefault(container["name"], []).append(
                {"name": label, "resources": list(resources.values())}
            )
    return found
