"""The driver on a node, as far as the API shows it: its pod, the node's condition, what the slices say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dra.allocator.pod_filters import is_done
from dra.diagnose.explain.cluster import NODE, POD, Cluster, Json, full_name, since_text

_REGISTRY = "plugins_registry"
# Labels that node feature discovery and the GPU operator set on nodes with an NVIDIA GPU.
_GPU_LABELS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")


@dataclass(frozen=True, slots=True)
class PluginPod:
    """A driver's pod: `name`, and what is wrong with it with its time; empty if it is ready."""

    name: str
    trouble: str
    ready_since: str


class DriverState:
    """Answers for each node whether a driver seems to be there and why it may have published nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pods: dict[str, list[PluginPod]] = {}
        for pod in cluster.all(POD):
            node = (pod.get("spec") or {}).get("nodeName")
            if node and not is_done(pod) and _is_plugin(pod):
                self._pods.setdefault(node, []).append(_plugin_pod(pod, cluster))

    def not_ready(self, node: Mapping[str, object]) -> str:
        """Say since when a node is not ready; empty if it is, or if that is not known."""
        status = node.get("status")
        for condition in (status if isinstance(status, Mapping) else {}).get("conditions") or []:
            if condition.get("type") == "Ready" and condition.get("status") != "True":
                return f"the node is not ready{since_text(condition.get('lastTransitionTime'), self._cluster.now)}"
        return ""

    def plugins(self, node: str) -> list[PluginPod]:
        """Give the pods of DRA drivers on a node."""
        return self._pods.get(node, [])

    def why_no_slice(self, node: Mapping[str, object], driver: str) -> str:
        """Say why a node has no slice of a driver, if there is a sign that it should; empty if there is none."""
        return self.no_slice(node, driver)[0]

    def no_slice(self, node: Mapping[str, object], driver: str) -> tuple[str, str]:
        """Give that and what to do, where it is another thing than to look at the driver's pod."""
        if not self._cluster.knows(NODE):
            return "", ""
        metadata = node.get("metadata")
        assert isinstance(metadata, Mapping)
        not_ready = self.not_ready(node)
        pods = self.plugins(str(metadata["name"]))
        broken = next((pod for pod in pods if pod.trouble), None)
        if broken is not None:
            return f"driver pod {broken.name} {broken.trouble}" + (f"; {not_ready}" if not_ready else ""), ""
        if pods:
            since = since_text(pods[0].ready_since, self._cluster.now)
            return (
                f"driver pod {pods[0].name} runs{since} and has published no slice of {driver or 'its devices'}",
                "",
            )
        labels = metadata.get("labels") or {}
        label = next((name for name in _GPU_LABELS if labels.get(name) == "true"), "")
        if label and not_ready:
            remedy = (
                f"Bring the node back; kubectl describe node {metadata['name']} says why it is not ready."
            )
            return f"{not_ready} (it has label {label})", remedy
        if label and self._cluster.knows(POD):
            remedy = (
                "Install the driver; if it is, see why its DaemonSet leaves the node out (labels, taints)."
            )
            return f"it has label {label}, but no pod of a DRA driver runs there", remedy
        return "", ""


def _is_plugin(pod: Json) -> bool:
    """Tell whether a pod registers a DRA driver with the kubelet: it mounts the registry and says that it is one.

    CSI drivers mount the registry too.
    """
    spec = pod.get("spec") or {}
    mounts = [(volume.get("hostPath") or {}).get("path") or "" for volume in spec.get("volumes") or []]
    if not any(path.rstrip("/").endswith(_REGISTRY) for path in mounts):
        return False
    words = [pod["metadata"]["name"], str(pod["metadata"].get("labels") or "")]
    for container in spec.get("containers") or []:
        words += [str(container.get("image")), *map(str, container.get("command") or [])]
    return any("dra" in word for word in words)


def _plugin_pod(pod: Json, cluster: Cluster) -> PluginPod:
    status = pod.get("status") or {}
    for entry in status.get("containerStatuses") or []:
        waiting = (entry.get("state") or {}).get("waiting")
        if waiting:
            ended = ((entry.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
            started = ended or _transition(status, "Ready")
            return PluginPod(
                full_name(pod),
                f"is not running: {waiting.get('reason') or 'waiting'}{since_text(started, cluster.now)}",
                "",
            )
    changed = _transition(status, "Ready")
    if any(item.get("type") == "Ready" and item.get("status") != "True" for item in _conditions(status)):
        return PluginPod(full_name(pod), f"is not ready{since_text(changed, cluster.now)}", "")
    if status.get("phase") not in (None, "Running"):
        return PluginPod(
            full_name(pod), f"is {status['phase']}{since_text(status.get('startTime'), cluster.now)}", ""
        )
    return PluginPod(full_name(pod), "", changed)


def _conditions(status: Json) -> Iterable[Json]:
    return status.get("conditions") or []


def _transition(status: Json, kind: str) -> str:
    return next(
        (
            str(item.get("lastTransitionTime") or "")
            for item in _conditions(status)
            if item.get("type") == kind
        ),
        "",
    )
