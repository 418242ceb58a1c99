"""The fleet's copies say all that is asked of them, weigh little, and are not read again and again."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from dra.errors import KubeError
from dra.fleet.classes import wanted_classes
from dra.fleet.copies import Copies, keeper_of
from dra.fleet.metrics import fleet_samples
from dra.fleet.policy_status import left_by_gone_nodes, policy_status
from dra.fleet.templates import wanted_by
from dra.host.paths import HostPaths
from dra.inventory.scan import scan
from dra.kube.resources import GPU_NODES, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from dra.nvml.node import session_of
from dra.sim.node import SimulatedNode
from dra.slices.features import NEWEST
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from tests.unit.fleet.test_fleet_policy_status import NOW, install, node, policy, slice_of
from tests.unit.fleet.test_fleet_policy_status import api as _api
from tests.unit.fleet.test_fleet_policy_status import client as _client
from tests.unit.fleet.test_fleet_templates import pod, until

DRIVER = "gpu.nvidia.com"
api, client = _api, _client


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Slices as they are published, as text, of a machine by its name and the mode of its partitions."""

    def of(profile, mode):
        machine = SimulatedNode(profile, tmp_path_factory.mktemp("m"), real_nodes=False)
        session = session_of(HostPaths(**machine.paths_kwargs()), library=machine.library)
        try:
            inventory = scan(session, HostPaths(**machine.paths_kwargs()), profiles=True)
        finally:
            session.close()
        pool = build_pool(
            inventory,
            node_name="n1",
            features=NEWEST,
            mig_mode=mode,
            taints={"gpu-1": (Taint("k", "NoSchedule"),)},
        )
        specs = pool.specs(generation=1)
        return json.dumps(
            [{"metadata": {"name": f"s{at}", "uid": f"u{at}"}, "spec": each} for at, each in enumerate(specs)]
        )

    return of


def claim(device):
    result = {"driver": DRIVER, "pool": "n1", "device": device, "request": "r"}
    return {
        "metadata": {"namespace": "a", "name": device, "managedFields": [{"manager": "x"}]},
        "spec": {"devices": {"requests": [{"name": "r"}]}},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


@pytest.mark.parametrize(
    ("profile", "mode"), [("dgx-h100", "dynamic"), ("l40s-x4", "static"), ("a100-l4", "dynamic")]
)
def test_what_is_counted_and_made_is_the_same_from_the_copies(published, profile, mode):
    whole = json.loads(published(profile, mode))
    small = [keeper_of(RESOURCE_SLICES)(each) for each in whole]
    claims = [claim("gpu-0"), claim("gpu-2-mig-1g10gb-19-0")]
    less = [keeper_of(RESOURCE_CLAIMS)(each) for each in claims]
    assert fleet_samples(small, less, driver=DRIVER) == fleet_samples(whole, claims, driver=DRIVER)
    classes = [
        wanted_classes([each["spec"] for each in listed], [], driver=DRIVER, extended=True)
        for listed in (small, whole)
    ]
    assert classes[0] == classes[1]
    nodes = [node("n2", pool="a")]
    fewer = [keeper_of(NODES)(each) for each in nodes]
    lost = [left_by_gone_nodes(n, s, [], driver=DRIVER) for n, s in ((nodes, whole), (fewer, small))]
    assert [[each["metadata"]["uid"] for each in found] for found, _ in lost][0] == [
        each["metadata"]["uid"] for each in lost[1][0]
    ]
    assert lost[0][0]
    chosen = policy(nodeSelector={"matchLabels": {"pool": "a"}})
    report = {"metadata": {"name": "n2"}, "status": {}}
    assert policy_status(chosen, nodes=fewer, gpu_nodes=[report], now=NOW) == policy_status(
        chosen, nodes=nodes, gpu_nodes=[keeper_of(GPU_NODES)(report)], now=NOW
    )


def test_pods_say_what_they_need():
    pods = tuple(
        {**pod(name), "status": {"phase": phase}} for name, phase in (("a", "Pending"), ("b", "Failed"))
    )
    assert wanted_by(tuple(map(keeper_of(PODS), pods))) == wanted_by(pods)
    assert wanted_by(pods).asks


def test_a_copy_weighs_a_tenth_of_what_is_published_at_most(published):
    text = published("dgx-h100", "dynamic")

    def weight(make):
        tracemalloc.start()
        try:
            kept = [make() for _ in range(4)]
            return tracemalloc.get_traced_memory()[0], kept
        finally:
            tracemalloc.stop()

    whole, _ = weight(lambda: json.loads(text))
    small, _ = weight(lambda: [keeper_of(RESOURCE_SLICES)(each) for each in json.loads(text)])
    assert small < whole / 10


def test_it_is_read_once_and_then_followed(api, client):
    install(api)
    api.create("/api/v1/nodes", node("n"))
    api.create("/apis/resource.k8s.io/v1/resourceslices", slice_of("theirs", "n", "other.example"))
    copies = Copies(client, driver=DRIVER)
    copies.start()
    try:
        assert [each["metadata"]["name"] for each in copies.all(NODES)] == ["n"]
        api.create("/apis/resource.k8s.io/v1/resourceslices", slice_of("ours", "n"))
        until(lambda: [each["metadata"]["name"] for each in copies.all(RESOURCE_SLICES)] == ["ours"])
        api.create("/api/v1/nodes", node("later"))
        until(lambda: len(copies.all(NODES)) == 2)
        assert api.requests.count("GET", "/nodes", watch=False) == 1
    finally:
        copies.stop()


def test_without_a_definition_there_are_none_and_an_api_that_fails_is_an_error(api, client):
    copies = Copies(client, driver=DRIVER)
    fault = api.faults.set("error", path="/nodes", code=500)
    copies.start()
    try:
        assert copies.all(GPU_NODES) == ()
        with pytest.raises(KubeError, match="DRA-API-INTERNAL"):
            copies.all(NODES)
        api.faults.clear(fault)
        api.create("/api/v1/nodes", node("n"))

        def known():
            try:
                return copies.all(NODES)
            except KubeError:
                return ()

        until(known)
    finally:
        copies.stop()
