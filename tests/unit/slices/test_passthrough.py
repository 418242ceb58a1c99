"""GPUs that can be passed through, as they are published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra.api.gpu_settings import parse_sharing
from dra.inventory.keep import with_siblings
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from dra.slices.validate import validate_slices
from tests.unit.inventory.inventory_samples import gpu, inventory, mig, vfio
from tests.unit.slices.mig_machines import GATE_OFF, NEW, OLD, machine


def pool(made, features=NEW, **options):
    built = build_pool(with_siblings(made), node_name="node-1", features=features, **options)
    specs = built.specs(generation=1)
    assert validate_slices(specs, counters_apart=features.counters_apart) == []
    return built


def names(built):
    return [device["name"] for device in built.devices]


def device(built, name):
    return next(each for each in built.devices if each["name"] == name)


def takes(built):
    """Give what each device takes of counters."""
    return {
        each["name"]: {name: value["value"] for name, value in entry["counters"].items()}
        for each in built.devices
        for entry in each.get("consumesCounters", ())
    }


def counter_sets(built):
    return {
        each["name"]: {name: value["value"] for name, value in each["counters"].items()}
        for part in built.slices
        for each in part.shared_counters or ()
    }


def test_a_gpu_that_is_passed_through_has_exactly_nvidias_attributes_and_capacity():
    function = vfio(3, driver="vfio-pci", iommufd=True, pcie_root="pci0000:0f", numa_node=1)
    (made,) = pool(inventory(vfio=[function])).devices
    assert made == {
        "name": "gpu-vfio-7",
        "attributes": {
            "type": {"string": "vfio"},
            # SHA-1 of the address in the namespace of DNS names: uuid.NewSHA1 of the reference driver.
            "uuid": {"string": "6cc136bf-e36b-5af2-b980-9de062c9444f"},
            "deviceID": {"string": "0x20b0"},
            "vendorID": {"string": "0x10de"},
            "productName": {"string": "GA100 [A100 SXM4 40GB]"},
            "iommuFDEnabled": {"bool": True},
            "resource.kubernetes.io/pciBusID": {"string": "0000:13:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:0f"},
            "resource.kubernetes.io/numaNode": {"int": 1},
        },
        "capacity": {"addressableMemory": {"value": "128Gi"}},
    }


def test_what_sysfs_does_not_tell_is_absent():
    (made,) = pool(inventory(vfio=[vfio(0, driver="vfio-pci", iommufd=False)])).devices
    absent = {"resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"}
    assert not absent & set(made["attributes"])
    assert made["attributes"]["iommuFDEnabled"] == {"bool": False}


def test_without_functions_nothing_changes():
    plain = build_pool(inventory(gpu(0), gpu(1)), node_name="node-1", features=NEW)
    assert [each.shared_counters for each in plain.slices] == [None]
    assert takes(plain) == {}


@pytest.mark.parametrize("features", [NEW, OLD], ids=["1.36", "1.34"])
def test_a_plain_gpu_and_its_function_draw_on_one_counter(features):
    built = pool(inventory(gpu(0), gpu(1), vfio=[vfio(0), vfio(1)]), features)
    assert names(built) == ["gpu-vfio-4", "gpu-0", "gpu-vfio-5", "gpu-1"]
    assert counter_sets(built) == {
        "gpu-0-counter-set": {"gpu": "1"},
        "gpu-1-counter-set": {"gpu": "1"},
    }
    # A little, so that a claim for monitoring has room beside the one that uses the GPU.
    assert takes(built) == {
        "gpu-vfio-4": {"gpu": "1"}, "gpu-0": {"gpu": "1m"}, "gpu-vfio-5": {"gpu": "1"}, "gpu-1": {"gpu": "1m"},
    }  # fmt: skip


def test_a_gpu_with_partitions_on_demand_shares_their_counters():
    found = machine("h100-nvl-x2")
    functions = [
        replace(vfio(), index=index, pci_address=each.pci_address) for index, each in enumerate(found.gpus)
    ]
    built = pool(replace(found, vfio=tuple(functions)), mig_mode="dynamic")
    taken = takes(built)
    slices = {f"memory-slice-{number}" for number in range(8)}
    assert taken["gpu-vfio-0"] == dict.fromkeys(slices, "1")
    assert taken["gpu-0"] == dict.fromkeys(slices, "1m")
    # Each partition takes whole slices of the same set.
    partitions = [name for name in taken if "-mig-" in name]
    assert len(partitions) == 2 * 25
    assert all(set(taken[name]) & slices for name in partitions)
    without = pool(found, mig_mode="dynamic")
    assert [name for name in names(built) if "vfio" not in name] == names(without)
    assert counter_sets(built) == counter_sets(without)


@pytest.mark.parametrize(
    ("in_use", "listed"),
    [
        ((), ["gpu-vfio-4", "gpu-0"]),
        (("gpu-0",), ["gpu-0"]),
        (("gpu-vfio-4",), ["gpu-vfio-4"]),
        (("gpu-0-mig-1g5gb-19-0",), ["gpu-0"]),
        (("gpu-1", "gpu-vfio-9"), ["gpu-vfio-4", "gpu-0"]),
    ],
)
def test_without_counters_the_one_that_is_held_hides_the_other(in_use, listed):
    built = pool(inventory(gpu(0), vfio=[vfio(0)]), GATE_OFF, in_use=in_use)
    assert names(built) == listed
    assert takes(built) == {}


def test_with_counters_what_is_held_changes_nothing():
    made = inventory(gpu(0), vfio=[vfio(0)])
    assert (
        pool(made, in_use=("gpu-vfio-4",)).slices == pool(made).slices == pool(made, in_use=("gpu-0",)).slices
    )


@pytest.mark.parametrize("features", [NEW, GATE_OFF], ids=["counters", "none"])
@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci"])
def test_a_gpu_that_a_vfio_driver_has_is_listed_as_that_alone(features, driver):
    built = pool(inventory(gpu(1), vfio=[vfio(0, driver=driver), vfio(1)]), features)
    assert names(built) == ["gpu-vfio-4", "gpu-vfio-5", "gpu-1"]
    assert "consumesCounters" not in device(built, "gpu-vfio-4")


def test_a_gpu_that_nvidias_driver_has_and_does_not_tell_of_is_not_offered():
    assert names(pool(inventory(vfio=[vfio(0)]))) == []
    # It may be on its way to the claim that holds it.
    assert names(pool(inventory(vfio=[vfio(0)]), in_use=("gpu-vfio-4",))) == ["gpu-vfio-4"]


@pytest.mark.parametrize("mig_mode", ["static", "none", "dynamic"])
def test_a_gpu_in_mig_mode_cannot_be_passed_through(mig_mode):
    cut = gpu(0, mig_enabled=True, mig_devices=(mig(0),))
    built = pool(inventory(cut, gpu(1), vfio=[vfio(0), vfio(1)]), mig_mode=mig_mode)
    assert "gpu-vfio-4" not in names(built)
    assert "gpu-vfio-5" in names(built)


def test_what_ails_the_gpu_ails_what_is_passed_through():
    ill = inventory(gpu(0, unusable="DRA-NVML-GPU-LOST"), gpu(1), vfio=[vfio(0), vfio(1)])
    xid = {"gpu-1": (Taint("gpu.nvidia.com/xid", "NoSchedule", "79"),)}
    built = pool(ill, taints=xid)
    assert [taint["key"] for taint in device(built, "gpu-vfio-4")["taints"]] == ["gpu.nvidia.com/gpu-lost"]
    assert device(built, "gpu-vfio-5")["taints"] == device(built, "gpu-1")["taints"]
    gone = pool(inventory(vfio=[vfio(0, driver="vfio-pci")]), taints={"gpu-0": xid["gpu-1"]})
    assert "taints" not in device(gone, "gpu-vfio-4")


def test_a_virtual_machine_shares_with_nobody():
    built = pool(inventory(gpu(0), vfio=[vfio(0)]), settings=parse_sharing("4"))
    assert device(built, "gpu-0")["allowMultipleAllocations"]
    assert "allowMultipleAllocations" not in device(built, "gpu-vfio-4")
    assert set(device(built, "gpu-vfio-4")["capacity"]) == {"addressableMemory"}


def test_an_old_server_without_room_keeps_the_gpu_and_says_what_it_leaves_out():
    """Before 1.35 all devices of a GPU stand in one slice, at most 64."""
    found = machine("h100-nvl-x2").gpus[0]
    more = [
        replace(each, profile_id=each.profile_id + 1000 * n) for n in range(3) for each in found.mig_profiles
    ]
    crowded = replace(found, mig_profiles=tuple(more))
    function = replace(vfio(), pci_address=crowded.pci_address)
    built = pool(inventory(crowded, vfio=[function]), OLD, mig_mode="dynamic")
    assert len(built.devices) == 64
    assert names(built)[-1] == "gpu-0"
    spoken_of = {problem.device for problem in built.problems if problem.code == "DRA-SLICE-ROOM"}
    assert "gpu-vfio-4" in spoken_of


def test_a_long_name_is_cut_and_spoken_of():
    function = vfio(0, driver="vfio-pci", product_name="é" * 40)
    built = pool(inventory(vfio=[function]))
    assert device(built, "gpu-vfio-4")["attributes"]["productName"] == {"string": "é" * 32}
    assert [problem.code for problem in built.problems] == ["DRA-SLICE-CUT"]


def test_before_counters_of_their_own_slice_every_gpu_has_its_slice():
    features = replace(ServerFeatures.of_version(1, 34), partitionable=True)
    built = pool(inventory(gpu(0), gpu(1), vfio=[vfio(0), vfio(1)]), features)
    assert [[each["name"] for each in part.devices] for part in built.slices] == [
        ["gpu-vfio-4", "gpu-0"], ["gpu-vfio-5", "gpu-1"],
    ]  # fmt: skip
