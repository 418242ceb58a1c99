"""The ladders: a node seen from itself, a node and the whole cluster seen through the API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dra.allocator.pod_filters import is_done
from dra.diagnose.doctor.cdi_rung import look_at_cdi
from dra.diagnose.doctor.context import DRIVER, NodeContext, node_info
from dra.diagnose.doctor.driver_rungs import look_at_device_nodes, look_at_driver, look_at_nvml
from dra.diagnose.doctor.kubelet_rung import (
    allocatable_gpus,
    device_plugin_warning,
    look_at_kubelet,
    version_findings,
)
from dra.diagnose.doctor.model import Finding, Looked, Report, climb, error, note, warning
from dra.diagnose.doctor.mps_rung import look_at_mps
from dra.diagnose.doctor.passthrough_rung import look_at_passthrough
from dra.diagnose.doctor.published_rungs import (
    look_at_claims,
    look_at_slices,
    node_exists,
    privileged_pods,
    slices_of,
)
from dra.diagnose.doctor.runtime_rung import look_at_runtime
from dra.diagnose.explain.cluster import CLAIM, CLASS, NODE, POD, SLICE, Cluster, Json, full_name
from dra.diagnose.explain.plugin_state import DriverState
from dra.values.words import counted

GPU_CLASS, EXTENDED_NAME = "gpu.nvidia.com", "nvidia.com/gpu"
_GPU_LABELS = ("nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present")


def diagnose_node(ctx: NodeContext) -> Report:
    """Climb the ladder of the node that this process sees."""
    return climb(
        f"node/{ctx.node_name}",
        (
            ("driver", lambda: look_at_driver(ctx)),
            ("nvml", lambda: look_at_nvml(ctx)),
            ("device-nodes", lambda: look_at_device_nodes(ctx)),
            ("cdi", lambda: look_at_cdi(ctx)),
            ("runtime", lambda: look_at_runtime(ctx)),
            ("kubelet", lambda: look_at_kubelet(ctx)),
            ("slices", lambda: look_at_slices(
                ctx.cluster, ctx.node_name, ctx.driver, offline=ctx.offline,
                gpus=sum(1 for gpu in ctx.inventory.gpus if not gpu.unusable),
            )),
            ("claims", lambda: look_at_claims(ctx)),
            ("mps", lambda: look_at_mps(ctx)),
            *((("passthrough", lambda: look_at_passthrough(ctx)),) if ctx.passthrough else ()),
        ),
    )  # fmt: skip


def diagnose_node_from_api(cluster: Cluster, name: str, driver: str = DRIVER) -> Report:
    """Climb the ladder of a node as the API shows it: from afar its files are not seen."""
    return climb(
        f"node/{name}",
        (
            ("node", lambda: _look_at_node(cluster, name)),
            ("plugin-pods", lambda: _look_at_pod_on(cluster, name)),
            ("slices", lambda: look_at_slices(cluster, name, driver)),
            ("claims", lambda: _look_at_claims_on(cluster, name, driver)),
        ),
    )


def diagnose_cluster(cluster: Cluster, driver: str = DRIVER) -> Report:
    """Climb the ladder of the cluster."""
    return climb(
        "cluster",
        (
            ("api", lambda: _look_at_api(cluster)),
            ("classes", lambda: _look_at_classes(cluster)),
            ("plugin-pods", lambda: _look_at_pods(cluster)),
            ("nodes", lambda: _look_at_nodes(cluster, driver)),
            ("slices", lambda: _look_at_all_slices(cluster, driver)),
            ("claims", lambda: _look_at_all_claims(cluster, driver)),
        ),
    )


# -- one node ----------------------------------------------------------------------------------------------


def _look_at_node(cluster: Cluster, name: str) -> Looked:
    if not cluster.knows(NODE):
        return Looked("", unknown=f"Nodes {cluster.unread[NODE]}")
    node = cluster.find(NODE, name)
    if node is None:
        return Looked(
            "",
            (error("DRA-NODE-UNKNOWN", f"there is no node {name}", "kubectl get nodes shows their names."),),
        )
    findings = list(_node_findings(cluster, node))
    info = node_info(node)
    text = f"kubelet {info.get('kubeletVersion') or '?'}, {info.get('containerRuntimeVersion') or 'runtime unknown'}"
    return Looked(text, tuple(findings))


def _node_findings(cluster: Cluster, node: Json) -> Iterator[Finding]:
    name, info = node["metadata"]["name"], node_info(node)
    not_ready = DriverState(cluster).not_ready(node)
    if not_ready:
        yield error("DRA-NODE-NOT-READY", f"{name}: {not_ready}", "Repair the node or its kubelet first.")
    yield from version_findings(str(info.get("kubeletVersion") or ""), f"the kubelet of {name}")
    runtime = str(info.get("containerRuntimeVersion") or "")
    if runtime.startswith("docker://"):
        yield error(
            "DRA-RUNTIME-UNSUPPORTED",
            f"{name} runs {runtime}: cri-dockerd drops CDI devices",
            "Use containerd or CRI-O on GPU nodes.",
        )
    if runtime.startswith("containerd://1."):
        yield note("DRA-RUNTIME-CDI-UNSURE", f"{name} runs {runtime}, in which CDI is off unless enable_cdi = true",
                   "dra doctor on the node reads its configuration.")  # fmt: skip
    counts = allocatable_gpus(node)
    if counts:
        seen = ", ".join(f"{key}: {count}" for key, count in sorted(counts.items()))
        yield device_plugin_warning(name, f"the node offers {seen}")


def _is_simulated(node: Json | None) -> bool:
    """Tell a node of `dra sim`, whose driver is no pod."""
    return node is not None and str(node_info(node).get("containerRuntimeVersion") or "").startswith("sim://")


def _look_at_pod_on(cluster: Cluster, name: str) -> Looked:
    if not cluster.knows(POD):
        return Looked("", unknown=f"Pods {cluster.unread[POD]}")
    pods = DriverState(cluster).plugins(name)
    if not pods and _is_simulated(cluster.find(NODE, name)):
        return Looked("simulated: a process, no pod")
    if not pods:
        finding = error(
            "DRA-PLUGIN-POD-MISSING",
            f"no pod of a DRA driver runs on node {name}",
            "Check the DaemonSet's node affinity and tolerations against the node's labels and taints: "
            "kubectl describe daemonset -n dra-driver-nvidia-gpu.",
        )
        return Looked("", (finding,))
    broken = [error("DRA-PLUGIN-POD-DOWN", f"pod {pod.name} {pod.trouble}", f"kubectl logs -n {pod.name.partition('/')[0]} {pod.name.partition('/')[2]} says why.")
              for pod in pods if pod.trouble]  # fmt: skip
    if len(broken) < len(pods):
        broken = [warning(each.code, each.message, each.remedy) for each in broken]
    return Looked(", ".join(pod.name for pod in pods), tuple(broken))


def _look_at_claims_on(cluster: Cluster, name: str, driver: str) -> Looked:
    if not cluster.knows(CLAIM):
        return Looked("", unknown=f"ResourceClaims {cluster.unread[CLAIM]}")
    here = [
        claim for claim in cluster.all(CLAIM) if any(r.get("pool") == name for r in _results(claim, driver))
    ]
    pods = [
        pod
        for pod in cluster.all(POD)
        if (pod.get("spec") or {}).get("nodeName") == name and not is_done(pod)
    ]
    return Looked(f"{counted(len(here), 'claim')} allocated there", tuple(privileged_pods(pods)))


def _results(claim: Json, driver: str) -> list[Json]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return [r for r in (allocation.get("devices") or {}).get("results") or [] if r.get("driver") == driver]


# -- the cluster -------------------------------------------------------------------------------------------


def _look_at_api(cluster: Cluster) -> Looked:
    if not cluster.knows(SLICE):
        return Looked("", unknown=f"ResourceSlices {cluster.unread[SLICE]}")
    findings = tuple(
        Finding(each.severity, each.code.replace("KUBELET", "API"), each.message, each.remedy)
        for each in version_findings(cluster.version, "the API server")
        if each.code in ("DRA-KUBELET-TOO-OLD", "DRA-KUBELET-NEW")
    )
    return Looked(f"{cluster.version or 'version unknown'}, resource.k8s.io is served", findings)


def _look_at_classes(cluster: Cluster) -> Looked:
    if not cluster.knows(CLASS):
        return Looked("", unknown=f"DeviceClasses {cluster.unread[CLASS]}")
    classes = {str(item["metadata"]["name"]): item for item in cluster.all(CLASS)}
    findings = []
    if GPU_CLASS not in classes:
        findings.append(
            error(
                "DRA-CLASS-MISSING",
                f"there is no DeviceClass {GPU_CLASS}",
                "Install the chart, or apply deploy/manifests/deviceclasses.yaml.",
            )
        )
    names: dict[str, list[str]] = defaultdict(list)
    for name, item in classes.items():
        extended = (item.get("spec") or {}).get("extendedResourceName")
        if extended:
            names[extended].append(name)
    for extended, owners in sorted(names.items()):
        if len(owners) > 1:
            findings.append(
                warning(
                    "DRA-EXTENDED-NAME-TWICE",
                    f"{extended} is the extended resource of {', '.join(sorted(owners))}: the newest class wins",
                    "Leave it to one class.",
                )
            )
    # One for each MIG profile that there is or may be; nobody reads sixty names.
    profiles = [name for name in classes if name.startswith("mig-")]
    shown = sorted(set(classes) - set(profiles)) + ([f"{len(profiles)} of MIG profiles"] if profiles else [])
    return Looked(", ".join(shown) or "none", tuple(findings))


def _look_at_pods(cluster: Cluster) -> Looked:
    if not (cluster.knows(POD) and cluster.knows(NODE)):
        kind = POD if not cluster.knows(POD) else NODE
        return Looked("", unknown=f"{kind}s {cluster.unread[kind]}")
    state = DriverState(cluster)
    pods = [pod for node in cluster.all(NODE) for pod in state.plugins(str(node["metadata"]["name"]))]
    if not pods and any(_is_simulated(node) for node in cluster.all(NODE)):
        return Looked("simulated: processes, no pods")
    if not pods:
        finding = error(
            "DRA-PLUGIN-POD-MISSING", "no pod of a DRA driver runs on any node",
            "Install the driver; if it is installed, no node matches its affinity: label GPU nodes nvidia.com/gpu.present=true, "
            "or install node feature discovery.",
        )  # fmt: skip
        return Looked("", (finding,))
    down = [pod for pod in pods if pod.trouble]
    make = error if len(down) == len(pods) else warning
    findings = tuple(
        make("DRA-PLUGIN-POD-DOWN", f"pod {pod.name} {pod.trouble}", "kubectl logs of that pod says why.")
        for pod in down
    )
    return Looked(f"{len(pods) - len(down)} of {len(pods)} driver pods are ready", findings)


def _look_at_nodes(cluster: Cluster, driver: str) -> Looked:
    if not cluster.knows(NODE):
        return Looked("", unknown=f"Nodes {cluster.unread[NODE]}")
    state = DriverState(cluster)
    findings: list[Finding] = []
    gpu_nodes = bare = 0
    for node in sorted(cluster.all(NODE), key=lambda each: str(each["metadata"]["name"])):
        name, labels = str(node["metadata"]["name"]), node["metadata"].get("labels") or {}
        labelled = any(labels.get(label) == "true" for label in _GPU_LABELS)
        published = bool(slices_of(cluster, name, driver))
        if not (labelled or published or state.plugins(name)):
            continue
        gpu_nodes += 1
        # One bad node is no broken cluster.
        findings += [
            Finding(
                "warning" if each.severity == "error" else each.severity, each.code, each.message, each.remedy
            )
            for each in _node_findings(cluster, node)
        ]
        if not published:
            bare += 1
            why = state.why_no_slice(node, driver)
            findings.append(
                warning(
                    "DRA-SLICES-MISSING",
                    f"node {name} has published nothing" + (f": {why}" if why else ""),
                    f"dra doctor node/{name}, there: dra doctor.",
                )
            )
    if gpu_nodes and gpu_nodes == bare:
        findings.append(
            error(
                "DRA-SLICES-MISSING",
                "no node has published a device",
                "The findings above say why, node by node.",
            )
        )
    return Looked(f"{gpu_nodes} GPU nodes, {gpu_nodes - bare} of them publish", tuple(findings))


def _look_at_all_slices(cluster: Cluster, driver: str) -> Looked:
    nodes = sorted(
        {
            str(item["spec"].get("nodeName") or "")
            for item in cluster.all(SLICE)
            if item["spec"].get("driver") == driver
        }
    )
    findings: list[Finding] = []
    devices = 0
    for node in nodes:
        devices += sum(len(item["spec"].get("devices") or []) for item in slices_of(cluster, node, driver))
        found = look_at_slices(cluster, node, driver).findings
        findings += [
            Finding("warning", f.code, f.message, f.remedy) if f.severity == "error" else f for f in found
        ]
        if not node_exists(cluster, node):
            findings.append(
                warning(
                    "DRA-SLICE-OF-GONE-NODE",
                    f"slices of node {node} are there, the node is not",
                    "The garbage collector removes them; delete them if it does not.",
                )
            )
    return Looked(f"{counted(len(nodes), 'pool')}, {counted(devices, 'device')}", tuple(findings))


def _look_at_all_claims(cluster: Cluster, driver: str) -> Looked:
    if not cluster.knows(CLAIM):
        return Looked("", unknown=f"ResourceClaims {cluster.unread[CLAIM]}")
    claims = list(cluster.all(CLAIM))
    allocated = [claim for claim in claims if _results(claim, driver)]
    pools = {
        str(item["spec"]["pool"]["name"])
        for item in cluster.all(SLICE)
        if item["spec"].get("driver") == driver
    }
    findings = [
        warning(
            "DRA-CLAIM-POOL-GONE",
            f"claim {full_name(claim)} has a device of pool {gone}, which nobody publishes",
            "Start the driver on that node, or delete the pods that use the claim.",
        )
        for claim in allocated
        if (gone := next((r["pool"] for r in _results(claim, driver) if r.get("pool") not in pools), ""))
    ]
    waiting = sum(1 for claim in claims if not (claim.get("status") or {}).get("allocation"))
    if waiting:
        findings.append(
            note(
                "DRA-CLAIMS-PENDING",
                f"{waiting} claims have no device yet",
                "dra explain claim/NAME says why.",
            )
        )
    return Looked(f"{counted(len(allocated), 'claim')} allocated, {waiting} wait", tuple(findings))
