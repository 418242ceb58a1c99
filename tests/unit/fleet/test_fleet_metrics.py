"""What `dra fleet` tells of the fleet: GPUs by state, and memory slices that nobody can get."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import replace

import pytest

from dra.fleet.election import ElectionTimes
from dra.fleet.metrics import fleet_samples
from dra.fleet.process import Fleet, FleetSettings
from dra.host.paths import HostPaths
from dra.inventory.scan import Scanner
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.sim.apiserver import SimApiServer
from dra.sim.node import SimulatedNode
from dra.slices.features import NEWEST
from dra.slices.pool import build_pool
from dra.slices.taints import Taint

DRIVER = "gpu.nvidia.com"
QUICK = ElectionTimes(lease=5.0, renew=4.0, retry=0.1)


@pytest.fixture(scope="module")
def pool_of(tmp_path_factory):
    machine = SimulatedNode("dgx-h100", tmp_path_factory.mktemp("m"), real_nodes=False)
    session = NvmlSession(InjectedLibrary(machine.library))
    inventory = Scanner(session, HostPaths(**machine.paths_kwargs())).scan(profiles=True)

    def slices(**options):
        pool = build_pool(inventory, node_name="n1", features=NEWEST, **options)
        return [{"spec": spec} for spec in pool.specs(generation=1)]

    yield slices
    session.close()


def claim(device, *, admin=False):
    result = {"driver": DRIVER, "pool": "n1", "device": device, "request": "r"}
    if admin:
        result["adminAccess"] = True
    return {
        "metadata": {"namespace": "a", "name": device},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


def values(slices, claims):
    gpus, parts = fleet_samples(slices, claims, driver=DRIVER)
    return (
        {each.labels[1]: each.value for each in gpus.series},
        {each.labels[1]: each.value for each in parts.series},
    )


def test_whole_gpus_are_counted_by_state(pool_of):
    slices = pool_of(mig_mode="static", taints={"gpu-7": (Taint("k", "NoSchedule"),)})
    gpus, parts = values(slices, [claim("gpu-0"), claim("gpu-1")])
    assert gpus == {"allocated": 2, "tainted": 1, "free": 5}
    assert parts == {}


def test_slices_on_which_no_partition_fits_are_stranded(pool_of):
    slices = pool_of(mig_mode="dynamic")
    gpus, parts = values(slices, [])
    assert gpus == {"allocated": 0, "tainted": 0, "free": 8}
    assert parts == {"allocated": 0, "free": 64, "stranded": 0}
    # Seven 1g take seven of eight slices, and the eighth is of no use to anybody.
    sevenths = [claim(f"gpu-0-mig-1g10gb-19-{at}") for at in range(7)]
    gpus, parts = values(slices, sevenths)
    assert gpus["allocated"] == 1
    assert parts == {"allocated": 7, "free": 56, "stranded": 1}
    assert values(slices, [claim("gpu-1")])[1] == {"allocated": 8, "free": 56, "stranded": 0}
    assert values(slices, [claim("gpu-1", admin=True)])[1]["allocated"] == 0


def test_a_gpu_that_is_passed_through_is_allocated_with_all_its_slices(pool_of):
    slices = pool_of(mig_mode="dynamic")
    devices = [device for each in slices for device in each["spec"].get("devices") or ()]
    attributes = next(device for device in devices if device["name"] == "gpu-1")["attributes"]
    place = {name: value for name, value in attributes.items() if name.endswith("/pciBusID")}
    slices[-1]["spec"]["devices"].append({"name": "gpu-vfio-4", "attributes": place})
    gpus, parts = values(slices, [claim("gpu-vfio-4")])
    assert gpus == {"allocated": 1, "tainted": 0, "free": 7}
    assert parts == {"allocated": 8, "free": 56, "stranded": 0}


def test_they_are_served_beside_the_health(tmp_path, monkeypatch, pool_of):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = SimApiServer().start()
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
    for number, each in enumerate(pool_of(mig_mode="static")):
        server.create(
            "/apis/resource.k8s.io/v1/resourceslices",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "metadata": {"name": f"s{number}"},
                **each,
            },
        )
    server.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    settings = FleetSettings(identity="a", namespace="team", kubeconfig=str(kubeconfig), port=0, times=QUICK)
    replicas = [Fleet(settings), Fleet(replace(settings, identity="b"))]

    def scraped(fleet):
        with urllib.request.urlopen(f"http://127.0.0.1:{fleet.port}/metrics", timeout=30) as answer:
            return (
                'dra_fleet_gpus{product="NVIDIA H100 80GB HBM3",state="free"} 8.0' in answer.read().decode()
            )

    try:
        for each in replicas:
            each.start()
        end = time.monotonic() + 60
        while not any(map(scraped, replicas)):
            assert time.monotonic() < end
            time.sleep(0.05)
        # The others say nothing: a sum over the replicas is the number of GPUs.
        assert [scraped(each) for each in replicas].count(True) == 1
    finally:
        for each in replicas:
            each.stop()
        server.stop()
