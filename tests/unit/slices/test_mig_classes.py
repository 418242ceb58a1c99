"""DeviceClasses of MIG profiles: from what is published, and the ready ones in deploy/manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dra.allocator.extended import classes_by_resource, is_extended
from dra.cel import compile_selector
from dra.sim.nvml.mig_tables import MIG_TABLES
from dra.slices.mig_classes import LABEL, class_name, mig_classes, profiles_in, resource_name
from dra.values import is_dns_subdomain
from tests.unit.slices.mig_machines import machine, partitioned, pool_of
from tests.yaml_text import read_all

ROOT = Path(__file__).parents[3]
READY = ROOT / "deploy/manifests/deviceclasses-mig.yaml"


def specs(*profiles, **more):
    pools = [pool_of(partitioned(profile), **more) for profile in profiles]
    return [spec for pool in pools for spec in pool.specs(generation=1)]


def test_each_profile_of_a_cluster_has_one_class_and_the_resource_that_nvidias_device_plugin_has():
    made = mig_classes(profiles_in(specs("dgx-h100", "a100-80gb-x2")))
    assert {each["metadata"]["name"]: each["spec"]["extendedResourceName"] for each in made} == {
        "mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb",
        "mig-1g.10gb.me.nvidia.com": "nvidia.com/mig-1g.10gb.me",
        "mig-1g.20gb.nvidia.com": "nvidia.com/mig-1g.20gb",
        "mig-2g.20gb.nvidia.com": "nvidia.com/mig-2g.20gb",
        "mig-3g.40gb.nvidia.com": "nvidia.com/mig-3g.40gb",
        "mig-4g.40gb.nvidia.com": "nvidia.com/mig-4g.40gb",
        "mig-7g.80gb.nvidia.com": "nvidia.com/mig-7g.80gb",
    }
    assert [each["metadata"]["labels"][LABEL] for each in made][:2] == ["1g.10gb", "1g.10gb.me"]


def test_a_class_holds_its_profile_and_nothing_else():
    devices = [device for spec in specs("dgx-h100") for device in spec.get("devices") or ()]
    for made in mig_classes(profiles_in(specs("dgx-h100"))):
        select = compile_selector(made["spec"]["selectors"][0]["cel"]["expression"])
        held = {
            device["attributes"].get("profile", {}).get("string")
            for device in devices
            if select.evaluate(device, driver="gpu.nvidia.com")
        }
        assert held == {made["metadata"]["labels"][LABEL].replace(".me", "+me")}


def test_without_partitions_there_are_no_classes():
    assert profiles_in(pool_of(machine("l40s-x4")).specs(generation=1)) == []
    assert profiles_in([{"driver": "other.example.com", "devices": specs("dgx-h100")[1]["devices"]}]) == []


@pytest.mark.parametrize(
    "profile", ["", "'||true||'", "1g.10gb' || 'x", "1G.10GB", "x" * 200, "1g.10gb+" + "a" * 300]
)
def test_what_no_class_could_be_made_of_is_left_out(profile):
    spec = {
        "driver": "gpu.nvidia.com",
        "devices": [{"name": "d", "attributes": {"profile": {"string": profile}}}, {"name": "e"}],
    }
    assert mig_classes(profiles_in([spec])) == []


def test_names_that_somebody_else_has_are_not_taken():
    def somebodys(name, resource=""):
        spec = {"extendedResourceName": resource} if resource else {}
        return {"metadata": {"name": name}, "spec": spec}

    profiles = ["1g.10gb", "2g.20gb", "3g.40gb"]
    ours = mig_classes(profiles)
    made = mig_classes(
        profiles,
        existing=[
            somebodys("small", "nvidia.com/mig-1g.10gb"),
            somebodys("mig-2g.20gb.nvidia.com"),
            *ours[2:],
        ],
    )
    assert [each["metadata"]["name"] for each in made] == ["mig-1g.10gb.nvidia.com", "mig-3g.40gb.nvidia.com"]
    assert "extendedResourceName" not in made[0]["spec"]
    assert made[1] == ours[2]


def test_before_v1_classes_have_no_extended_resource():
    (made,) = mig_classes(["1g.10gb"], extended=False)
    assert set(made["spec"]) == {"selectors"}


@pytest.mark.parametrize("profile", sorted({p.name for table in MIG_TABLES.values() for p in table.profiles}))
def test_names_are_those_that_the_api_takes(profile):
    assert is_dns_subdomain(class_name(profile))
    assert is_extended(resource_name(profile))
    assert len(resource_name(profile).rpartition("/")[2]) <= 63


def test_the_ready_manifests_are_the_classes_of_all_gpus_that_are_known():
    """After a change: `python -m tests.unit.slices.test_mig_classes` writes the file anew."""
    assert list(read_all(READY.read_text(encoding="utf-8"))) == ready_classes()
    assert len(classes_by_resource(ready_classes())) == 2 * len(ready_classes())


def ready_classes():
    names = {profile.name for table in MIG_TABLES.values() for profile in table.profiles}
    attributes = [{"name": "d", "attributes": {"profile": {"string": name}}} for name in names]
    return mig_classes(profiles_in([{"driver": "gpu.nvidia.com", "devices": attributes}]))


if __name__ == "__main__":
    head = (
        "# A class for each MIG profile of the GPUs that are known, with the extended resource that NVIDIA's device plugin\n"
        "# has for it: a pod with nvidia.com/mig-1g.10gb: 1 gets its partition, made on demand or by hand. Leave out those\n"
        "# whose resource another DeviceClass of the cluster has already; the newest class wins.\n"
    )
    body = yaml.safe_dump_all(ready_classes(), sort_keys=False, width=200)
    READY.write_text(head + body, encoding="utf-8")
