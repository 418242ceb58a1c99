"""Whether a server keeps counters is asked, and leaves nothing behind."""

from __future__ import annotations

import pytest

from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.resources import RESOURCE_SLICES
from dra.plugin.counters import server_keeps_counters, server_keeps_shares
from dra.sim.apiserver.server import SimApiServer


@pytest.fixture
def client(tmp_path):
    made = []

    def connect(minor, **options):
        api = SimApiServer(version=f"1.{minor}", **options).start()
        kubeconfig = api.write_kubeconfig(tmp_path / f"kubeconfig-{len(made)}")
        made.extend(
            (api.stop, (connected := KubeClient(Connection(KubeOptions(kubeconfig=str(kubeconfig))))).close)
        )
        return connected

    yield connect
    for end in reversed(made):
        end()


def ask(client, minor):
    return server_keeps_counters(client, (1, minor), driver="gpu.nvidia.com", node_name="node-a")


@pytest.mark.parametrize("minor", [34, 35, 36])
@pytest.mark.parametrize("on", [True, False])
def test_the_gate_is_seen_whatever_the_version(client, minor, on):
    api = client(minor, features={"DRAPartitionableDevices": on})
    assert ask(api, minor) is on
    assert api.list(RESOURCE_SLICES).items == ()


@pytest.mark.parametrize("minor", [34, 35, 36])
@pytest.mark.parametrize("on", [True, False])
def test_whether_shares_are_kept_is_seen_whatever_the_version(client, minor, on):
    api = client(minor, features={"DRAConsumableCapacity": on})
    assert server_keeps_shares(api, (1, minor), driver="gpu.nvidia.com", node_name="node-a") is on
    assert api.list(RESOURCE_SLICES).items == ()


def test_versions_without_counters_are_not_asked(client):
    class Refusing:
        def create(self, *_args, **_options):
            raise AssertionError("asked")

    assert server_keeps_counters(Refusing(), (1, 32), driver="d", node_name="n") is False


def test_a_server_that_does_not_answer_leaves_the_question_open(tmp_path):
    api = SimApiServer(version="1.36").start()
    kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
    api.stop()
    gone = KubeClient(Connection(KubeOptions(kubeconfig=str(kubeconfig))))
    assert ask(gone, 36) is None
    gone.close()
