"""What the doctor reads of a running cluster: as `explain`, and this node by name where nodes may not be listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dra.diagnose.explain.cluster import NODE, Cluster
from dra.diagnose.explain.live import read_live
from dra.errors import KubeError
from dra.kube.resources import NODES

if TYPE_CHECKING:
    from dra.kube.client import KubeClient


def read_cluster(client: KubeClient, namespace: str, *, node_name: str = "") -> Cluster:
    """Read what the ladders need.

    Raises:
        KubeError: the API server cannot be reached, knows nobody of this name, or has no resource.k8s.io.
    """
    cluster = read_live(client, namespace)
    if not node_name or cluster.knows(NODE):
        return cluster
    try:
        node = client.get(NODES, node_name)
    except KubeError as error:
        if error.status not in {403, 404}:
            raise
        return cluster
    objects = {**cluster.objects, NODE: {("", node_name): node}}
    return Cluster(
        objects, {**cluster.unread, NODE: f"only node {node_name} may be read"}, cluster.version, cluster.now
    )
