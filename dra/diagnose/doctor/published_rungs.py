"""What the API has of a node: its slices, and the claims that were allocated and prepared there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dra.cdi.spec import device_name, kind_of
from dra.diagnose.doctor.cdi_rung import specs_on_disk
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, note, warning
from dra.diagnose.explain.cluster import CLAIM, NODE, POD, SLICE, Cluster, Json
from dra.errors import DraError
from dra.host.boot import boot_id
from dra.prepare import set_aside
from dra.prepare.record import Record, decode_record
from dra.values.words import counted

# Pods that see all GPUs whatever was allocated are expected in these namespaces.
_SYSTEM = ("kube-system", "gpu-operator", "nvidia-gpu-operator", "dra-driver-nvidia-gpu")


def slices_of(cluster: Cluster, node: str, driver: str) -> list[Json]:
    """Give a driver's slices of a node, by name."""
    found = [
        item for item in cluster.all(SLICE)
        if item["spec"].get("nodeName") == node and item["spec"].get("driver") == driver
    ]  # fmt: skip
    return sorted(found, key=lambda item: str(item["metadata"]["name"]))


def look_at_slices(
    cluster: Cluster | None, node: str, driver: str, *, offline: str = "", gpus: int | None = None
) -> Looked:
    """Whether the node's pool is published, whole, and what of it is tainted. `gpus` is how many NVML has."""
    if cluster is None:
        return Looked("", unknown=offline)
    if not cluster.knows(SLICE):
        return Looked("", unknown=f"ResourceSlices {cluster.unread[SLICE]}")
    found = slices_of(cluster, node, driver)
    if not found:
        raise_missing = error(
            "DRA-SLICES-MISSING",
            f"{driver} has published no slice for node {node}",
            "The plugin's log has pool_not_published with the API's reason (RBAC, the admission policy, no resource.k8s.io); "
            "right after a start of the kubelet wait half a minute.",
        )
        return Looked("", (raise_missing,))
    findings: list[Finding] = []
    generation = max(int(item["spec"]["pool"].get("generation") or 0) for item in found)
    current = [item for item in found if int(item["spec"]["pool"].get("generation") or 0) == generation]
    wanted = int(current[0]["spec"]["pool"].get("resourceSliceCount") or 0)
    if len(current) != wanted:
        findings.append(
            error(
                "DRA-POOL-INCOMPLETE",
                f"the pool of node {node} has {len(current)} of {wanted} slices: the scheduler uses none of it",
                "The publisher is at work, or is refused: the plugin's log has pool_not_published with the reason.",
            )
        )
    if len(current) < len(found):
        findings.append(
            note(
                "DRA-POOL-OLD-SLICES",
                f"{len(found) - len(current)} slices of older generations are still there; the publisher removes them",
            )
        )
    devices = [device for item in current for device in item["spec"].get("devices") or []]
    whole = sum(1 for device in devices if _type(device) == "gpu")
    if gpus is not None and gpus and not devices:
        findings.append(
            error(
                "DRA-POOL-EMPTY",
                f"NVML has {gpus} GPUs, the pool of node {node} has no device",
                "Restart the plugin's pod if this stays: it may hold an NVML that was replaced.",
            )
        )
    findings += _taints(devices, node)
    text = f"{len(devices)} devices ({whole} whole GPUs) in {len(current)} slice{'s' * (len(current) != 1)}, generation {generation}"
    return Looked(text, tuple(findings))


def _type(device: Json) -> str:
    attributes = device.get("attributes") or {}
    found = attributes.get("type") or attributes.get("gpu.nvidia.com/type") or {}
    return str(found.get("string") or "")


def _taints(devices: list[Json], node: str) -> Iterator[Finding]:
    """Say each taint once: a GPU that may be cut is published with dozens of partitions, which have its taints too."""
    tainted: dict[tuple[str, str], list[Json]] = {}
    for device in devices:
        for taint in device.get("taints") or []:
            value = f"={taint['value']}" if taint.get("value") else ""
            since = f" since {taint['timeAdded']}" if taint.get("timeAdded") else ""
            effect = str(taint.get("effect"))
            tainted.setdefault((f"{taint['key']}{value}:{effect}{since}", effect), []).append(device)
    for (taint_text, effect), found in tainted.items():
        whole = [str(device["name"]) for device in found if _type(device) == "gpu"]
        names = sorted(whole) or sorted(str(device["name"]) for device in found)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts = f" (with {len(found) - len(whole)} partitions)" if whole and len(found) > len(whole) else ""
        are = "is" if len(names) == 1 else "are"
        text = f"{', '.join(names[:3])}{more} of node {node}{parts} {are} tainted {taint_text}"
        if effect in ("NoSchedule", "NoExecute"):
            yield warning(
                "DRA-DEVICE-TAINTED",
                text,
                "dra doctor on that node says what is wrong with it; docs/troubleshooting.md lists the keys.",
            )
        else:
            yield note("DRA-DEVICE-TAINTED", text)


# -- claims ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordOnDisk:
    """A claim's record: what it says, or why it cannot be used."""

    uid: str
    record: Record | None
    trouble: str = ""
    code: str = ""


def records_on_disk(ctx: NodeContext) -> list[RecordOnDisk]:
    """Read the node's claim records; changes nothing, unlike the store, which sets damaged ones aside."""
    directory = ctx.paths.state_dir(ctx.driver) / "claims"
    found = []
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []
    for name in names:
        uid = name.removesuffix(".json")
        if uid == name:
            if (claim := set_aside.claim_of(name)) is not None:
                found.append(RecordOnDisk(claim, None, f"{name} was set aside", "DRA-RECORD-CORRUPT"))
            continue
        try:
            found.append(RecordOnDisk(uid, decode_record((directory / name).read_bytes(), uid=uid)))
        except DraError as problem:
            found.append(RecordOnDisk(uid, None, problem.message, problem.code))
        except OSError as problem:
            found.append(RecordOnDisk(uid, None, f"{directory / name}: {problem.strerror}", "DRA-HOST-IO"))
    # What was set aside is done with once the record has been rebuilt.
    rebuilt = {each.uid for each in found if each.record is not None}
    return [each for each in found if each.record is not None or each.uid not in rebuilt]


def look_at_claims(ctx: NodeContext) -> Looked:
    """Whether records, CDI files and the API agree about what is prepared on this node."""
    now = boot_id(ctx.paths)
    records = records_on_disk(ctx)
    findings: list[Finding] = []
    specs = {
        name.partition("=")[2]
        for spec in specs_on_disk(ctx)
        if spec.kind == kind_of(ctx.driver)
        for name in spec.names()
    }
    for each in records:
        findings += _record_findings(ctx, each, now, specs)
    findings += _api_findings(
        ctx, {each.uid for each in records if each.record and each.record.state == "prepared"}
    )
    findings += _foreign_checkpoint(ctx)
    prepared = sum(1 for each in records if each.record is not None and each.record.is_complete(now))
    return Looked(
        f"{counted(prepared, 'claim')} prepared, {counted(len(records), 'record')}", tuple(findings)
    )


def _record_findings(ctx: NodeContext, each: RecordOnDisk, now: str, specs: set[str]) -> Iterator[Finding]:
    record = each.record
    if record is None:
        yield warning(
            each.code,
            f"the record of claim UID {each.uid} cannot be used: {each.trouble}",
            "It is rebuilt when the claim is prepared again; until then its devices count as held.",
        )
        return
    if record.boot_id != now:
        yield note(
            "DRA-RECORD-OLD-BOOT", f"claim {record.ref} was prepared before the last reboot and not since"
        )
        return
    if record.state != "prepared":
        yield warning(
            "DRA-CLAIM-HALF",
            f"claim {record.ref} is {record.state}",
            "The kubelet calls again within two minutes; the plugin's log has the reason if it stays so.",
        )
        return
    lacking = [d.device for d in record.devices if device_name(each.uid, d.device, d.share_id) not in specs]
    if lacking:
        yield warning(
            "DRA-CDI-FILE-MISSING",
            f"claim {record.ref} is prepared and no CDI file defines {', '.join(lacking)}",
            "The plugin writes it again within a minute, or at the next prepare.",
        )
    if ctx.cluster is not None and ctx.cluster.knows(CLAIM):
        claim = ctx.cluster.find(CLAIM, record.ref.name, record.ref.namespace)
        if claim is None or claim["metadata"].get("uid") != each.uid:
            yield warning(
                "DRA-CLAIM-GONE",
                f"claim {record.ref} (UID {each.uid}) is prepared here and not in the API any more",
                "The plugin releases it once no process uses its GPU; end such processes (nvidia-smi) if it stays.",
            )


def _api_findings(ctx: NodeContext, prepared: set[str]) -> Iterator[Finding]:
    if ctx.cluster is None or not ctx.cluster.knows(POD):
        return
    running = {
        str(pod["metadata"].get("uid")): pod
        for pod in ctx.cluster.all(POD)
        if (pod.get("spec") or {}).get("nodeName") == ctx.node_name
        and (pod.get("status") or {}).get("phase") in ("Pending", "Running")
    }
    for claim in ctx.cluster.all(CLAIM):
        status = claim.get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        ours = [r for r in results if r.get("driver") == ctx.driver and r.get("pool") == ctx.node_name]
        users = [ref for ref in status.get("reservedFor") or [] if str(ref.get("uid")) in running]
        if ours and users and claim["metadata"].get("uid") not in prepared:
            meta = claim["metadata"]
            yield warning(
                "DRA-CLAIM-NOT-PREPARED",
                f"claim {meta.get('namespace')}/{meta['name']} is allocated here for pod {users[0]['name']} and not prepared",
                f"dra doctor claim/{meta['name']} -n {meta.get('namespace')} says why.",
            )
    yield from privileged_pods(list(running.values()))


def privileged_pods(pods: list[Json]) -> Iterator[Finding]:
    """Name pods that see every GPU of the node although they asked for none."""
    seen = []
    for pod in pods:
        meta, spec = pod["metadata"], pod.get("spec") or {}
        if meta.get("namespace") in _SYSTEM:
            continue
        parts = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
        if any((part.get("securityContext") or {}).get("privileged") for part in parts):
            seen.append(f"{meta.get('namespace')}/{meta['name']}")
    if seen:
        yield note(
            "DRA-POD-PRIVILEGED",
            f"privileged pods see all GPUs of the node, whatever they were given: {', '.join(sorted(seen)[:5])}"
            + ("…" if len(seen) > 5 else ""),
            "Use admin access for monitoring, and Pod Security admission elsewhere.",
        )


def _foreign_checkpoint(ctx: NodeContext) -> Iterator[Finding]:
    path = ctx.paths.state_dir(ctx.driver) / "checkpoint.json"
    if path.is_file():
        yield warning(
            "DRA-CHECKPOINT-FOREIGN",
            f"{path} is a checkpoint of NVIDIA's driver that was not taken over",
            "Start this driver (it imports it), or remove the file if that driver is gone for good and nothing is prepared.",
        )


def node_exists(cluster: Cluster, name: str) -> bool:
    """Whether the API knows the node, or does not say."""
    return not cluster.knows(NODE) or cluster.find(NODE, name) is not None
