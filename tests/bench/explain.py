"""How long `dra explain` takes on the dumps of large clusters, and how much memory: the whole command, in its own process.

Whole GPUs: 1,000 nodes with 8 GPUs each. Partitions: 100 nodes with 8 GPUs and every MIG placement of theirs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.figure import Figure

MIB = 1 << 20
# (profile, memory slices, where it may start) of an H100 with 80 GB.
PLACEMENTS = (
    ("1g.10gb", 1, range(7)),
    ("1g.20gb", 2, range(0, 8, 2)),
    ("2g.20gb", 2, range(0, 6, 2)),
    ("3g.40gb", 4, range(0, 8, 4)),
    ("4g.40gb", 4, range(1)),
    ("7g.80gb", 8, range(1)),
)
DRIVER = "gpu.nvidia.com"


def figures() -> list[Figure]:
    """Measure both clusters, once with a selector that nothing meets and once with everything taken."""
    found = []
    with tempfile.TemporaryDirectory(prefix="dra-bench-explain-") as folder:
        for name, partitions in (
            ("1,000 nodes x 8 GPUs", False),
            ("100 nodes x 8 GPUs, all MIG placements", True),
        ):
            dump = Path(folder, f"{'mig' if partitions else 'whole'}.json")
            objects = cluster(100 if partitions else 1000, partitions=partitions)
            dump.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
            for pod, what in (("odd", "nothing matches"), ("full", "all are taken")):
                seconds, memory = explain(dump, pod)
                found.append(Figure(f"explain, {name}, {what}", seconds, "s", 5, "-"))
                found.append(Figure(f"explain, {name}, {what}, memory", memory, "MiB", 500, "-"))
    return found


def explain(dump: Path, pod: str, *options: str) -> tuple[float, float]:
    """Run the command; give seconds and its largest resident memory in MiB."""
    command = [sys.executable, "-m", "dra.cli.main", "explain", f"pod/{pod}", "-f", str(dump), *options]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    taken = time.perf_counter() - start
    if process.returncode != 1:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return taken, _kib(usage) / 1024


def _kib(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss


def cluster(nodes: int, *, partitions: bool) -> list[dict[str, Any]]:
    """Give the objects: every GPU is held, and two pods wait."""
    objects: list[dict[str, Any]] = [_class("gpu.nvidia.com", "gpu"), _class("mig.nvidia.com", "mig")]
    for index in range(nodes):
        name = f"node-{index:04}"
        allocatable = {"cpu": "192", "memory": "2048Gi", "pods": "110"}
        objects.append(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
             "status": {"allocatable": allocatable}}
        )  # fmt: skip
        objects += _slices(name, partitions=partitions)
        for gpu in range(8):
            objects += _holder(name, f"gpu-{gpu}-mig-1g-3" if partitions else f"gpu-{gpu}", f"{index}-{gpu}")
    kind = "mig.nvidia.com" if partitions else "gpu.nvidia.com"
    model = f'device.attributes["{DRIVER}"].productName == "NVIDIA B300"'
    size = f'device.attributes["{DRIVER}"].profile == "4g.40gb"' if partitions else ""
    objects += _waiting("odd", kind, model) + _waiting("full", kind, size)
    return objects


def _class(name: str, kind: str) -> dict[str, Any]:
    expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": spec,
    }


def _slices(node: str, *, partitions: bool) -> list[dict[str, Any]]:
    devices = [_gpu(node, index, partitions=partitions) for index in range(8)]
    counters: list[dict[str, Any]] = []
    if partitions:
        for index in range(8):
            counters.append(
                {"name": f"gpu-{index}-counter-set", "counters": {
                    "memory": {"value": "80Gi"},
                    **{f"memory-slice-{slot}": {"value": "1"} for slot in range(8)}}}
            )  # fmt: skip
            devices += _partitions(node, index)
    chunks = (
        [devices[start : start + 64] for start in range(0, len(devices), 64)] if partitions else [devices]
    )
    bodies: list[dict[str, Any]] = [{"devices": chunk} for chunk in chunks]
    if counters:
        bodies.append({"sharedCounters": counters})
    pool = {"name": node, "generation": 1, "resourceSliceCount": len(bodies)}
    return [
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"{number:05}-{node}"},
         "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, **body}}
        for number, body in enumerate(bodies)
    ]  # fmt: skip


def _gpu(node: str, index: int, *, partitions: bool) -> dict[str, Any]:
    device: dict[str, Any] = {
        "name": f"gpu-{index}",
        "attributes": {
            "type": {"string": "gpu"}, "uuid": {"string": f"GPU-{node}-{index}"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"}, "brand": {"string": "Nvidia"},
            "architecture": {"string": "Hopper"}, "cudaComputeCapability": {"version": "9.0.0"},
            "driverVersion": {"version": "580.126.20"}, "cudaDriverVersion": {"version": "13.0.0"},
            "resource.kubernetes.io/pciBusID": {"string": f"0000:{index:02x}:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": f"pci0000:{index // 2:02x}"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }  # fmt: skip
    if partitions:
        counters = {
            "memory": {"value": "80Gi"},
            **{f"memory-slice-{slot}": {"value": "1"} for slot in range(8)},
        }
        device["consumesCounters"] = [{"counterSet": f"gpu-{index}-counter-set", "counters": counters}]
    return device


def _partitions(node: str, index: int) -> list[dict[str, Any]]:
    found = []
    for profile, size, starts in PLACEMENTS:
        for start in starts:
            counters = {f"memory-slice-{slot}": {"value": "1"} for slot in range(start, min(start + size, 8))}
            counters["memory"] = {"value": f"{size * 10}Gi"}
            whole = _gpu(node, index, partitions=False)
            found.append(
                {"name": f"gpu-{index}-mig-{profile.partition('.')[0]}-{start}" if profile != "1g.20gb"
                 else f"gpu-{index}-mig-1g20-{start}",
                 "attributes": {**whole["attributes"], "type": {"string": "mig"}, "profile": {"string": profile}},
                 "capacity": {"memory": {"value": f"{size * 10}Gi"}},
                 "consumesCounters": [{"counterSet": f"gpu-{index}-counter-set", "counters": counters}]}
            )  # fmt: skip
    return found


def _holder(node: str, device: str, name: str) -> list[dict[str, Any]]:
    pod = f"train-{name}"
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    result = {"request": "gpu", "driver": DRIVER, "pool": node, "device": device}
    return [
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
         "metadata": {"name": f"claim-{name}", "namespace": "work", "uid": f"c-{name}"},
         "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
         "status": {"allocation": {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": [term]}},
                    "reservedFor": [{"resource": "pods", "name": pod, "uid": f"p-{name}"}]}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": "work", "uid": f"p-{name}"},
         "spec": {"nodeName": node, "resourceClaims": [{"name": "gpu", "resourceClaimName": f"claim-{name}"}],
                  "containers": [{"name": "main", "resources": {"requests": {"cpu": "8", "memory": "64Gi"}}}]},
         "status": {"phase": "Running"}},
    ]  # fmt: skip


def _waiting(name: str, class_name: str, expression: str) -> list[dict[str, Any]]:
    exactly: dict[str, Any] = {"deviceClassName": class_name}
    if expression:
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return [
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
         "metadata": {"name": name, "namespace": "work", "uid": f"c-{name}"},
         "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "work", "uid": f"p-{name}"},
         "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                  "containers": [{"name": "main", "resources": {"requests": {"cpu": "8"}}}]},
         "status": {"phase": "Pending"}},
    ]  # fmt: skip


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure.what:70} {figure.value:8.2f} {figure.unit} (budget {figure.budget:g})")
