"""How a simulated cluster is: nodes, drivers, slices, pods, claims, faults. Read from the API server and the nodes."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from dra.sim.cluster import SimCluster
from dra.sim.cluster_node import DRIVER
from dra.sim.switchboard import Switchboard

Json = dict[str, Any]


def cluster_status(cluster: SimCluster, switchboard: Switchboard) -> Json:
    """Give the state as JSON. `nodes[].driver` is `running`, `stopped` or `in-process`."""
    pods, claims, slices = cluster.pods(), cluster.claims(), cluster.slices()
    pods_on = Counter(pod["spec"].get("nodeName", "") for pod in pods)
    held = Counter(
        result["pool"]
        for claim in claims
        for result in ((claim.get("status") or {}).get("allocation") or {})
        .get("devices", {})
        .get("results", ())
        if result["driver"] == DRIVER and not result.get("adminAccess")
    )
    faults = switchboard.active()
    nodes: list[Json] = []
    for name, profile in cluster.wanted:
        mine = [item["spec"] for item in slices if item["spec"].get("nodeName") == name]
        real = cluster.nodes.get(name)
        runs = real is not None and real.driver_runs
        process = real.process if real is not None else None
        nodes.append(
            {
                "name": name,
                "profile": profile,
                "driver": "in-process" if real is None else "running" if runs else "stopped",
                "pid": process.pid if runs and process is not None else None,
                "registered": None if real is None else real.registered,
                "slices": len(mine),
                "devices": sum(len(spec.get("devices") or ()) for spec in mine),
                "devicesInUse": held[name],
                "pods": pods_on[name],
                "faults": [fault["fault"] for fault in faults if fault["target"] == name],
                "log": "" if real is None else str(real.log),
            }
        )
    return {
        "root": str(cluster.root),
        "version": cluster.version,
        "pid": os.getpid(),
        "url": cluster.api.url,
        "kubeconfig": str(cluster.kubeconfig),
        "nodes": nodes,
        "pods": dict(Counter(pod["status"].get("phase", "Unknown") for pod in pods)),
        "claims": {
            "total": len(claims),
            "allocated": sum(1 for claim in claims if (claim.get("status") or {}).get("allocation")),
            "reserved": sum(1 for claim in claims if (claim.get("status") or {}).get("reservedFor")),
        },
        "faults": faults,
    }


def is_well(status: Json) -> bool:
    """Whether every node has its driver and slices."""
    return all(
        node["driver"] != "stopped" and node["registered"] is not False and node["slices"]
        for node in status["nodes"]
    )
