"""The server's own columns for each built-in kind. Source: pkg/printers/internalversion of Kubernetes 1.36."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dra.sim.apiserver.columns import AGE, NAME, Column, at, counted, custom_columns, duration_since
from dra.sim.apiserver.registry import Resource

Json = dict[str, Any]
Cell = Callable[[Json, float], Any]


def _wide(name: str, value: Cell, **more: Any) -> Column:
    return Column(name, value, priority=1, **more)


def _none(value: Any) -> Any:
    return "<none>" if value in (None, "") else value


def _or_none(path: str) -> Cell:
    return at(path, default="<none>")


def claim_state(obj: Json, _: float) -> str:
    """Give the state of a claim: pending, or what holds, joined by commas."""
    status = obj.get("status") or {}
    states = []
    if obj["metadata"].get("deletionTimestamp"):
        states.append("deleted")
    if status.get("allocation") is None:
        states += [] if states else ["pending"]
    else:
        states.append("allocated")
        if status.get("reservedFor"):
            states.append("reserved")
    return ",".join(states)


def _container_reason(statuses: list[Json], reason: str) -> tuple[str, int, bool]:
    """Give the reason that the container states add, restarts, and whether one runs."""
    restarts = sum(int(s.get("restartCount") or 0) for s in statuses)
    running = False
    for status in reversed(statuses):
        state = status.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated")
        if waiting.get("reason"):
            reason = waiting["reason"]
        elif ended is not None:
            if ended.get("reason"):
                reason = ended["reason"]
            elif ended.get("signal"):
                reason = f"Signal:{ended['signal']}"
            else:
                reason = f"ExitCode:{ended.get('exitCode', 0)}"
        elif status.get("ready") and state.get("running") is not None:
            running = True
    return reason, restarts, running


def _conditions(obj: Json) -> dict[str, Json]:
    return {c.get("type", ""): c for c in (obj.get("status") or {}).get("conditions") or []}


def pod_status(obj: Json, _: float) -> str:
    """Give what `kubectl get pods` shows as status."""
    status = obj.get("status") or {}
    reason = status.get("reason") or status.get("phase") or ""
    scheduled = _conditions(obj).get("PodScheduled") or {}
    if scheduled.get("reason") == "SchedulingGated":
        reason = "SchedulingGated"
    started = status.get("initContainerStatuses") or []
    total = len((obj.get("spec") or {}).get("initContainers") or [])
    for i, init in enumerate(started):
        state = init.get("state") or {}
        ended = state.get("terminated")
        if ended is not None and not ended.get("exitCode"):
            continue
        if ended is not None:
            return f"Init:{ended.get('reason') or 'ExitCode:' + str(ended.get('exitCode'))}"
        waiting = (state.get("waiting") or {}).get("reason")
        if waiting and waiting != "PodInitializing":
            return f"Init:{waiting}"
        return f"Init:{i}/{total}"
    reason, _restarts, running = _container_reason(status.get("containerStatuses") or [], reason)
    if reason == "Completed" and running:
        ready = (_conditions(obj).get("Ready") or {}).get("status") == "True"
        reason = "Running" if ready else "NotReady"
    if obj["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return reason


def _pod_ready(obj: Json, _: float) -> str:
    statuses = (obj.get("status") or {}).get("containerStatuses") or []
    ready = sum(1 for s in statuses if s.get("ready") and (s.get("state") or {}).get("running") is not None)
    return f"{ready}/{len((obj.get('spec') or {}).get('containers') or [])}"


def _pod_restarts(obj: Json, now: float) -> str:
    statuses = (obj.get("status") or {}).get("containerStatuses") or []
    count = sum(int(s.get("restartCount") or 0) for s in statuses)
    ended = [((s.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for s in statuses]
    last = max((e for e in ended if e), default=None)
    return f"{count} ({duration_since(last, now)} ago)" if count and last else str(count)


def _pod_ip(obj: Json, _: float) -> str:
    status = obj.get("status") or {}
    first = (status.get("podIPs") or [{}])[0].get("ip")
    return str(_none(first or status.get("podIP")))


def _gates(obj: Json, _: float) -> str:
    gates = (obj.get("spec") or {}).get("readinessGates") or []
    conditions = _conditions(obj)
    met = sum(1 for g in gates if (conditions.get(g.get("conditionType")) or {}).get("status") == "True")
    return f"{met}/{len(gates)}" if gates else "<none>"


def _node_status(obj: Json, _: float) -> str:
    ready = _conditions(obj).get("Ready")
    text = "Unknown" if ready is None else "Ready" if ready.get("status") == "True" else "NotReady"
    return f"{text},SchedulingDisabled" if (obj.get("spec") or {}).get("unschedulable") else text


def _node_roles(obj: Json, _: float) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = obj["metadata"].get("labels") or {}
    roles = {key.removeprefix(prefix) for key in labels if key.startswith(prefix)} - {""}
    if labels.get("kubernetes.io/role"):
        roles.add(labels["kubernetes.io/role"])
    return ",".join(sorted(roles)) or "<none>"


def _address(kind: str) -> Cell:
    def cell(obj: Json, _: float) -> str:
        addresses = (obj.get("status") or {}).get("addresses") or []
        return next((a.get("address", "") for a in addresses if a.get("type") == kind), "<none>")

    return cell


def _unknown(path: str) -> Cell:
    return at(path, default="<unknown>")


def _seen(obj: Json, now: float, *, first: bool) -> str:
    stamp = obj.get("firstTimestamp" if first else "lastTimestamp")
    series = obj.get("series") or {}
    if not first and series.get("lastObservedTime"):
        stamp = series["lastObservedTime"]
    return duration_since(stamp or obj.get("eventTime"), now)


def _event_object(obj: Json, _: float) -> str:
    involved = obj.get("involvedObject") or {}
    name = involved.get("name") or ""
    kind = (involved.get("kind") or "").lower()
    return f"{kind}/{name}" if name else kind


def _event_source(obj: Json, _: float) -> str:
    source = obj.get("source") or {}
    parts = [source.get("component") or obj.get("reportingComponent") or "", source.get("host") or ""]
    return ", ".join(part for part in parts if part)


def _event_count(obj: Json, _: float) -> int:
    series = obj.get("series") or {}
    return int(series.get("count") or obj.get("count") or 1)


def _template_containers(key: str) -> Cell:
    def cell(obj: Json, _: float) -> str:
        spec = ((obj.get("spec") or {}).get("template") or {}).get("spec") or {}
        return ",".join(str(c.get(key, "")) for c in spec.get("containers") or [])

    return cell


def _selector(obj: Json, _: float) -> str:
    selector = (obj.get("spec") or {}).get("selector") or {}
    labels = selector.get("matchLabels") or {}
    return ",".join(f"{k}={v}" for k, v in sorted(labels.items())) or "<none>"


_TEMPLATE = [
    _wide("Containers", _template_containers("name")),
    _wide("Images", _template_containers("image")),
    _wide("Selector", _selector),
]


def _job_template(cell: Cell) -> Cell:
    """Read from a CronJob's job template what `cell` reads from a job."""

    def inner(obj: Json, now: float) -> Any:
        return cell((obj.get("spec") or {}).get("jobTemplate") or {}, now)

    return inner


def _last_schedule(obj: Json, now: float) -> str:
    last = (obj.get("status") or {}).get("lastScheduleTime")
    return duration_since(last, now) if last else "<none>"


def _ready_of(obj: Json, _: float) -> str:
    return f"{(obj.get('status') or {}).get('readyReplicas', 0)}/{(obj.get('spec') or {}).get('replicas', 0)}"


def _job_status(obj: Json, _: float) -> str:
    conditions = _conditions(obj)
    for kind in ("Complete", "Failed", "Suspended"):
        if (conditions.get(kind) or {}).get("status") == "True":
            return kind
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    return "Running"


def _job_completions(obj: Json, _: float) -> str:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    done = status.get("succeeded", 0)
    if spec.get("completions") is not None:
        return f"{done}/{spec['completions']}"
    parallel = spec.get("parallelism") or 0
    return f"{done}/1 of {parallel}" if parallel > 1 else f"{done}/1"


def _job_duration(obj: Json, now: float) -> str:
    from datetime import datetime

    status = obj.get("status") or {}
    started, ended = status.get("startTime"), status.get("completionTime")
    if not started:
        return ""
    return duration_since(started, datetime.fromisoformat(ended).timestamp() if ended else now)


def _node_selector(obj: Json, _: float) -> str:
    spec = ((obj.get("spec") or {}).get("template") or {}).get("spec") or {}
    return ",".join(f"{k}={v}" for k, v in sorted((spec.get("nodeSelector") or {}).items())) or "<none>"


def _integer(name: str, path: str) -> Column:
    return Column(name, counted(path), type="integer")


def _service_ports(obj: Json, _: float) -> str:
    ports = (obj.get("spec") or {}).get("ports") or []
    shown = []
    for port in ports:
        node = f":{port['nodePort']}" if port.get("nodePort") else ""
        shown.append(f"{port.get('port')}{node}/{port.get('protocol', 'TCP')}")
    return ",".join(shown) or "<none>"


_NODE_INFO = "status.nodeInfo"
_WORKLOAD = "status"
COLUMNS: dict[str, list[Column]] = {
    "resource.k8s.io/resourceslices": [
        NAME,
        Column("Node", at("spec.nodeName")),
        Column("Driver", at("spec.driver")),
        Column("Pool", at("spec.pool.name")),
        AGE,
    ],
    "resource.k8s.io/resourceclaims": [NAME, Column("State", claim_state), AGE],
    "resource.k8s.io/devicetaintrules": [
        NAME,
        Column("Key", at("spec.taint.key")),
        Column("Value", at("spec.taint.value")),
        Column("Effect", at("spec.taint.effect")),
        Column(
            "TimeAdded",
            lambda o, now: duration_since(((o.get("spec") or {}).get("taint") or {}).get("timeAdded"), now),
        ),
        AGE,
    ],
    "/pods": [
        NAME,
        Column("Ready", _pod_ready),
        Column("Status", pod_status),
        Column("Restarts", _pod_restarts),
        AGE,
        _wide("IP", _pod_ip),
        _wide("Node", _or_none("spec.nodeName")),
        _wide("Nominated Node", _or_none("status.nominatedNodeName")),
        _wide("Readiness Gates", _gates),
    ],
    "/events": [
        Column("Last Seen", lambda o, now: _seen(o, now, first=False)),
        Column("Type", at("type")),
        Column("Reason", at("reason")),
        Column("Object", _event_object),
        _wide("Subobject", at("involvedObject.fieldPath")),
        _wide("Source", _event_source),
        Column("Message", lambda o, _: (o.get("message") or "").strip()),
        _wide("First Seen", lambda o, now: _seen(o, now, first=True)),
        _wide("Count", _event_count),
        _wide("Name", lambda o, _: o["metadata"]["name"], format="name"),
    ],
    "/nodes": [
        NAME,
        Column("Status", _node_status),
        Column("Roles", _node_roles),
        AGE,
        Column("Version", at(f"{_NODE_INFO}.kubeletVersion")),
        _wide("Internal-IP", _address("InternalIP")),
        _wide("External-IP", _address("ExternalIP")),
        _wide("OS-Image", _unknown(f"{_NODE_INFO}.osImage")),
        _wide("Kernel-Version", _unknown(f"{_NODE_INFO}.kernelVersion")),
        _wide("Container-Runtime", _unknown(f"{_NODE_INFO}.containerRuntimeVersion")),
    ],
    "/namespaces": [NAME, Column("Status", at("status.phase")), AGE],
    "/configmaps": [
        NAME,
        Column("Data", lambda o, _: len(o.get("data") or {}) + len(o.get("binaryData") or {})),
        AGE,
    ],
    "/secrets": [
        NAME,
        Column("Type", at("type")),
        Column("Data", lambda o, _: len(o.get("data") or {})),
        AGE,
    ],
    "/services": [
        NAME,
        Column("Type", at("spec.type")),
        Column("Cluster-IP", _or_none("spec.clusterIP")),
        Column("External-IP", lambda _o, _now: "<none>"),
        Column("Port(s)", _service_ports),
        AGE,
        _wide("Selector", lambda o, _: _pairs((o.get("spec") or {}).get("selector"))),
    ],
    "apps/deployments": [
        NAME,
        Column("Ready", _ready_of),
        Column("Up-to-date", counted(f"{_WORKLOAD}.updatedReplicas")),
        Column("Available", counted(f"{_WORKLOAD}.availableReplicas")),
        AGE,
        *_TEMPLATE,
    ],
    "apps/replicasets": [
        NAME,
        _integer("Desired", "spec.replicas"),
        _integer("Current", f"{_WORKLOAD}.replicas"),
        _integer("Ready", f"{_WORKLOAD}.readyReplicas"),
        AGE,
        *_TEMPLATE,
    ],
    "apps/statefulsets": [NAME, Column("Ready", _ready_of), AGE, *_TEMPLATE[:2]],
    "apps/daemonsets": [
        NAME,
        _integer("Desired", f"{_WORKLOAD}.desiredNumberScheduled"),
        _integer("Current", f"{_WORKLOAD}.currentNumberScheduled"),
        _integer("Ready", f"{_WORKLOAD}.numberReady"),
        _integer("Up-to-date", f"{_WORKLOAD}.updatedNumberScheduled"),
        _integer("Available", f"{_WORKLOAD}.numberAvailable"),
        Column("Node Selector", _node_selector),
        AGE,
        *_TEMPLATE,
    ],
    "batch/jobs": [
        NAME,
        Column("Status", _job_status),
        Column("Completions", _job_completions),
        Column("Duration", _job_duration),
        AGE,
        *_TEMPLATE,
    ],
    "batch/cronjobs": [
        NAME,
        Column("Schedule", at("spec.schedule")),
        Column("Timezone", _or_none("spec.timeZone")),
        Column("Suspend", lambda o, _: str(bool((o.get("spec") or {}).get("suspend")))),
        Column("Active", lambda o, _: len((o.get("status") or {}).get("active") or []), type="integer"),
        Column("Last Schedule", _last_schedule),
        AGE,
        _wide("Containers", _job_template(_template_containers("name"))),
        _wide("Images", _job_template(_template_containers("image"))),
        _wide("Selector", _job_template(_selector)),
    ],
    "coordination.k8s.io/leases": [NAME, Column("Holder", at("spec.holderIdentity")), AGE],
    "apiextensions.k8s.io/customresourcedefinitions": [
        NAME,
        Column("Created At", lambda o, _: o["metadata"].get("creationTimestamp"), type="date"),
    ],
}


def _pairs(labels: Json | None) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted((labels or {}).items())) or "<none>"


def columns_of(resource: Resource, version: str) -> list[Column]:
    """Give the columns of a resource in a version."""
    if resource.custom is not None:
        return custom_columns(resource.custom.columns.get(version) or [])
    return COLUMNS.get(resource.key, [NAME, AGE])
