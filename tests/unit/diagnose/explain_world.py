"""A small cluster to explain: nodes with GPUs, claims, pods; each piece as the API gives it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from dra.diagnose.explain import Cluster, Collection, Explanation, explain

DRIVER = "gpu.nvidia.com"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
NOW = datetime(2026, 9, 1, 12, 0, tzinfo=UTC)
Json = dict[str, Any]


def meta(name: str, namespace: str = "", **more: Any) -> Json:
    base = {"name": name, "uid": f"uid-{namespace}-{name}"}
    return {**base, **({"namespace": namespace} if namespace else {}), **more}


def node(name: str, *, cpu: str = "64", taints: list[Json] | None = None, status: Json | None = None,
         allocatable: Json | None = None, **labels: str) -> Json:  # fmt: skip
    labels = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": meta(name, labels={"kubernetes.io/hostname": name, **labels}),
        "spec": {"taints": taints} if taints else {},
        "status": {"allocatable": {"cpu": cpu, "memory": "512Gi", "pods": "110", **(allocatable or {})}, **(status or {})},
    }  # fmt: skip


def gpu(index: int, product: str = H100, *, memory: str = "80Gi", **more: Any) -> Json:
    attributes = {
        "type": {"string": "gpu"}, "productName": {"string": product}, "uuid": {"string": f"GPU-{index:04}"},
        **more.pop("attributes", {}),
    }  # fmt: skip
    return {
        "name": f"gpu-{index}",
        "attributes": attributes,
        "capacity": {"memory": {"value": memory}},
        **more,
    }


def slice_of(node_name: str, devices: list[Json], *, name: str = "", generation: int = 1, count: int = 1,
             driver: str = DRIVER, pool: str = "", **spec: Any) -> Json:  # fmt: skip
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": meta(name or f"{node_name}-{driver}"),
        "spec": {
            "driver": driver, "nodeName": node_name, "devices": devices,
            "pool": {"name": pool or node_name, "generation": generation, "resourceSliceCount": count}, **spec,
        },
    }  # fmt: skip


def gpus(node_name: str, count: int = 2, product: str = H100, **more: Any) -> Json:
    return slice_of(node_name, [gpu(index, product) for index in range(count)], **more)


def device_class(name: str = "gpu.nvidia.com", kind: str = "gpu", **spec: Any) -> Json:
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": meta(name),
        "spec": {"selectors": [{"cel": {"expression": expression}}], **spec},
    }  # fmt: skip


def cel(*expressions: str) -> list[Json]:
    return [{"cel": {"expression": expression}} for expression in expressions]


def request(name: str = "gpu", **exactly: Any) -> Json:
    return {"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com", **exactly}}


def claim(name: str, *requests: Json, namespace: str = "team-a", status: Json | None = None,
          metadata: Json | None = None, **devices: Any) -> Json:  # fmt: skip
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": meta(name, namespace, **(metadata or {})),
        "spec": {"devices": {"requests": list(requests) or [request()], **devices}}, "status": status or {},
    }  # fmt: skip


def held(name: str, node_name: str, *devices: str, namespace: str = "team-b", pod: str = "train-0",
         driver: str = DRIVER, **result: Any) -> Json:  # fmt: skip
    """A claim of somebody else that has devices."""
    results = [
        {"request": "gpu", "driver": driver, "pool": node_name, "device": device, **result}
        for device in devices
    ]
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node_name]}]}
    reserved = [{"resource": "pods", "name": pod, "uid": f"uid-{namespace}-{pod}"}] if pod else []
    allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
    return claim(name, namespace=namespace, status={"allocation": allocation, "reservedFor": reserved})


def pod(name: str = "train", *claims: str, namespace: str = "team-a", cpu: str = "1", message: str = "",
        spec: Json | None = None, status: Json | None = None, template: str = "", **more: Any) -> Json:  # fmt: skip
    entries: list[Json] = [
        {"name": f"c{number}", "resourceClaimName": item} for number, item in enumerate(claims)
    ]
    if template:
        entries.append({"name": "made", "resourceClaimTemplateName": template})
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": meta(name, namespace, **more),
        "spec": {
            "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}],
            "resourceClaims": entries, **(spec or {}),
        },
        "status": {"phase": "Pending", **({"conditions": [condition]} if message else {}), **(status or {})},
    }  # fmt: skip


def event(about: Json, reason: str, message: str, **more: Any) -> Json:
    metadata = about["metadata"]
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": meta(f"{metadata['name']}.1", metadata["namespace"]),
        "involvedObject": {"kind": about["kind"], "name": metadata["name"], "namespace": metadata["namespace"],
                           "uid": metadata["uid"]},
        "type": "Warning", "reason": reason, "message": message, "lastTimestamp": "2026-09-01T11:58:00Z", **more,
    }  # fmt: skip


def cluster(*objects: Json, unread: dict[str, str] | None = None, version: str = "") -> Cluster:
    """Everything that is not in `unread` is known; there is a class `gpu.nvidia.com` unless another class is given."""
    collection = Collection()
    if not any(item["kind"] == "DeviceClass" for item in objects):
        collection.add(device_class())
    for item in objects:
        collection.add(item)
    return Cluster(collection.objects, unread or {}, version, NOW)


def ask(
    *objects: Json, subject: str = "pod/train", namespace: str | None = "team-a", **more: Any
) -> Explanation:
    """Explain the pod `train` of `team-a`."""
    return explain(cluster(*objects, **more), subject, namespace=namespace)


def holder_pod(
    name: str = "train-0", node_name: str = "n1", namespace: str = "team-b", cpu: str = "1"
) -> Json:
    return pod(name, namespace=namespace, cpu=cpu, spec={"nodeName": node_name}, status={"phase": "Running"})
