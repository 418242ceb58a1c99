"""The cluster that all tests of this folder share, and the pods of each test.

What runs depends on what there is; the rest skips and says why.

* `KUBEBUILDER_ASSETS` names a directory with etcd, kube-apiserver and kubectl: what concerns the API alone.
* Also kube-controller-manager, kube-scheduler, kubelet, containerd with its shim and ctr, and runc in it, and root
  rights: everything, on a node in a network namespace of its own.
* `DRA_TEST_DRIVER_ROOT` names the root of an NVIDIA driver, real or a mock with the same C interface: the examples
  run on its GPUs too. Variables that a mock wants are handed on.

The driver runs with the token of its service account, bound to a pod of its node, under its own role and policy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real.assets import why_no_control_plane, why_no_driver_root, why_no_node
from tests.e2e.real.cluster import Cluster
from tests.e2e.real.driver import DRIVER_ROOT, SIMULATED


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A control plane, and a node if this machine can carry one."""
    if reason := why_no_control_plane():
        pytest.skip(reason)
    # Short: the paths of sockets are limited.
    directory = Path(tempfile.mkdtemp(prefix="dra", dir="/tmp"))
    made = Cluster(directory)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def node_cluster(cluster: Cluster) -> Cluster:
    """The cluster with its node."""
    if reason := why_no_node() or cluster.why_no_node:
        pytest.skip(reason)
    return cluster


@pytest.fixture
def on(node_cluster: Cluster) -> Iterator[Cluster]:
    """A node on which the driver runs with simulated GPUs; afterwards nothing may be left on it."""
    node_cluster.use_driver(SIMULATED)
    yield node_cluster
    node_cluster.leave_nothing()


@pytest.fixture(params=[SIMULATED, DRIVER_ROOT], scope="module")
def driver_kind(request: pytest.FixtureRequest) -> str:
    """Where the GPUs come from."""
    if request.param == DRIVER_ROOT and (reason := why_no_driver_root()):
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def on_each(node_cluster: Cluster, driver_kind: str) -> Iterator[Cluster]:
    """As `on`, for each kind of GPUs."""
    node_cluster.use_driver(driver_kind)
    yield node_cluster
    node_cluster.leave_nothing()
