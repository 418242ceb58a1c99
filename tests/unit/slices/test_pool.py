from dataclasses import replace

import pytest

from dra.inventory.model import Inventory
from dra.slices.features import NEWEST, ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from dra.slices.validate import validate_slices
from dra.values import PciAddress
from tests.unit.inventory.inventory_samples import PROFILE, gpu, inventory, mig

OLD = ServerFeatures.of_version(1, 34)


def pool(content, features=NEWEST, **options):
    made = build_pool(content, node_name="node-1", features=features, **options)
    assert validate_slices(made.specs(generation=1)) == []
    return made


def names(made):
    return [device["name"] for device in made.devices]


def test_a_whole_gpu_has_exactly_the_attributes_and_capacity_of_nvidias_driver():
    one = gpu(3, addressing_mode="HMM", pcie_root="pci0000:0f", numa_node=1)
    (device,) = pool(inventory(one, driver="535.104.05")).devices
    assert device == {
        "name": "gpu-3",
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": "GPU-00000000-0000-0000-0000-000000000003"},
            "productName": {"string": "NVIDIA A100-SXM4-40GB"},
            "brand": {"string": "Nvidia"},
            "architecture": {"string": "Ampere"},
            "cudaComputeCapability": {"version": "8.0.0"},
            "driverVersion": {"version": "535.104.5"},
            "cudaDriverVersion": {"version": "13.0.0"},
            "addressingMode": {"string": "HMM"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:13:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:0f"},
            "resource.kubernetes.io/numaNode": {"int": 1},
        },
        "capacity": {"memory": {"value": "40Gi"}},
    }


def test_what_a_gpu_does_not_have_is_absent_as_with_nvidias_driver():
    (device,) = pool(inventory(gpu(0, memory_bytes=None))).devices
    assert "capacity" not in device
    absent = {"addressingMode", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"}
    assert not absent & set(device["attributes"])


def test_a_mig_device_has_exactly_the_attributes_and_capacities_of_nvidias_driver():
    parent = gpu(0, mig_enabled=True, mig_devices=(mig(2),), addressing_mode="None", numa_node=0)
    (device,) = pool(inventory(parent)).devices
    assert device["name"] == "gpu-0-mig-1g5gb-19-2"
    assert device["attributes"] == {
        "type": {"string": "mig"},
        "uuid": {"string": "MIG-2"},
        "parentUUID": {"string": parent.uuid},
        "profile": {"string": "1g.5gb"},
        "productName": {"string": "NVIDIA A100-SXM4-40GB"},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": "Ampere"},
        "cudaComputeCapability": {"version": "8.0.0"},
        "driverVersion": {"version": "580.95.5"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "addressingMode": {"string": "None"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:10:00.0"},
        "resource.kubernetes.io/numaNode": {"int": 0},
    }
    assert device["capacity"] == {
        "memory": {"value": "4864Mi"},
        "multiprocessors": {"value": "14"},
        "copyEngines": {"value": "1"},
        "decoders": {"value": "0"},
        "encoders": {"value": "0"},
        "jpegEngines": {"value": "0"},
        "ofaEngines": {"value": "0"},
        "memorySlice2": {"value": "1"},
    }


def test_a_gpu_in_mig_mode_lists_its_partitions_smallest_first_and_not_itself():
    large = replace(PROFILE, name="3g.20gb", profile_id=9)
    devices = (mig(4, profile=large, size=4), mig(1), mig(0))
    made = pool(inventory(gpu(0, mig_enabled=True, mig_devices=devices), gpu(1), gpu(2, mig_enabled=True)))
    assert names(made) == ["gpu-0-mig-1g5gb-19-0", "gpu-0-mig-1g5gb-19-1", "gpu-0-mig-3g20gb-9-4", "gpu-1"]


def test_media_extensions_and_dots_make_the_names_nvidias_driver_makes():
    profile = replace(PROFILE, name="1g.12gb+me", profile_id=20)
    made = pool(inventory(gpu(0, mig_enabled=True, mig_devices=(mig(3, profile=profile),))))
    assert names(made) == ["gpu-0-mig-1g12gb-me-20-3"]


def test_gpus_are_ordered_by_their_place_in_the_machine_not_by_minor():
    first, second = (
        gpu(7, pci_address=PciAddress(0, 0x10, 0, 0)),
        gpu(0, pci_address=PciAddress(0x10000, 1, 0, 0)),
    )
    made = pool(inventory(second, first))
    assert names(made) == ["gpu-7", "gpu-0"]
    assert made.devices[1]["attributes"]["resource.kubernetes.io/pciBusID"] == {"string": "10000:01:00.0"}


def test_no_gpus_are_one_slice_without_devices():
    made = pool(Inventory())
    assert [each.devices for each in made.slices] == [[]]
    assert made.specs(generation=4)[0]["pool"] == {"name": "node-1", "generation": 4, "resourceSliceCount": 1}


def test_a_long_name_is_cut_at_a_character_and_reported_and_the_device_stays():
    (device,) = (made := pool(inventory(gpu(0, product_name="N" * 63 + "é" * 3)))).devices
    assert device["attributes"]["productName"] == {"string": "N" * 63}
    assert [(each.device, each.field, each.code) for each in made.problems] == [
        ("gpu-0", "productName", "DRA-SLICE-CUT")
    ]


@pytest.mark.parametrize("text", ["", "no digits", "r580", "99999999999999999999999.1.2"])
def test_a_version_that_is_none_is_left_out_and_reported_and_the_device_stays(text):
    (device,) = (made := pool(inventory(gpu(0), driver=text))).devices
    assert "driverVersion" not in device["attributes"]
    assert [(each.device, each.field) for each in made.problems] == [("gpu-0", "driverVersion")]


@pytest.mark.parametrize(
    ("text", "version"), [("580.65.06", "580.65.6"), ("12.4", "12.4.0"), ("1.2.3.4", "1.2.3")]
)
def test_driver_versions_become_semantic_versions(text, version):
    (device,) = pool(inventory(gpu(0), driver=text)).devices
    assert device["attributes"]["driverVersion"] == {"version": version}


def test_an_unusable_gpu_is_listed_with_a_taint_that_keeps_pods_away():
    made = pool(inventory(gpu(0), gpu(1, unusable="DRA-NVML-GPU-LOST"), gpu(2, unusable="DRA-NVML-HUNG")))
    assert [device.get("taints") for device in made.devices] == [
        None,
        [{"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule"}],
        [{"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule", "value": "DRA-NVML-HUNG"}],
    ]


def test_a_gpu_known_only_by_name_still_has_every_attribute_cel_may_ask_for():
    bare = gpu(0, product_name="", brand="Unknown", architecture="Unknown", compute_capability=(0, 0),
               memory_bytes=None, unusable="DRA-NVML-GPU-LOST")  # fmt: skip
    whole, broken = pool(inventory(gpu(1), bare)).devices[::-1]
    assert set(whole["attributes"]) == set(broken["attributes"])
    assert broken["capacity"] == {"memory": {"value": "0"}}


def test_a_server_without_taints_is_not_shown_what_must_not_be_given_out():
    content = inventory(gpu(0), gpu(1), gpu(2))
    ill = (Taint("gpu.nvidia.com/xid", "NoSchedule", "79"),)
    made = pool(content, OLD, taints={"gpu-1": ill, "gpu-2": (Taint("gpu.nvidia.com/xid", "None", "13"),)})
    assert names(made) == ["gpu-0", "gpu-2"]
    assert all("taints" not in device for device in made.devices)
    assert [(each.device, each.code) for each in made.problems] == [("gpu-1", "DRA-SLICE-WITHHELD")]
    assert names(pool(content, taints={"gpu-1": ill})) == ["gpu-0", "gpu-1", "gpu-2"]


def test_taints_of_a_gpu_hold_for_its_partitions():
    content = inventory(gpu(0, mig_enabled=True, mig_devices=(mig(0), mig(1))))
    lost, own = (
        Taint("gpu.nvidia.com/gpu-lost", "NoSchedule"),
        Taint("gpu.nvidia.com/xid", "NoSchedule", "79"),
    )
    made = pool(content, taints={"gpu-0": (lost,), "gpu-0-mig-1g5gb-19-1": (own,)})
    keys = [[taint["key"] for taint in device["taints"]] for device in made.devices]
    assert keys == [["gpu.nvidia.com/gpu-lost"], ["gpu.nvidia.com/gpu-lost", "gpu.nvidia.com/xid"]]


def test_a_taint_keeps_the_time_it_was_given():
    taint = Taint("gpu.nvidia.com/xid", "NoSchedule", "79", "2026-01-01T00:00:00Z")
    (device,) = pool(inventory(gpu(0)), taints={"gpu-0": (taint,)}).devices
    assert device["taints"] == [
        {
            "key": "gpu.nvidia.com/xid",
            "effect": "NoSchedule",
            "value": "79",
            "timeAdded": "2026-01-01T00:00:00Z",
        }
    ]


def test_too_many_taints_lose_the_informational_ones_first():
    taints = tuple(Taint(f"example.com/{n}", "None") for n in range(16)) + (
        Taint("example.com/z", "NoExecute"),
    )
    made = pool(inventory(gpu(0)), taints={"gpu-0": taints})
    (device,) = made.devices
    assert len(device["taints"]) == 16
    assert {"key": "example.com/z", "effect": "NoExecute"} in device["taints"]
    assert "1 of its taints" in made.problems[0].message


def test_a_taint_the_server_would_refuse_is_left_out_and_reported():
    made = pool(
        inventory(gpu(0)), taints={"gpu-0": (Taint("bad key", "NoSchedule"), Taint("a/b", "NoSchedule"))}
    )
    assert made.devices[0]["taints"] == [{"key": "a/b", "effect": "NoSchedule"}]
    assert "bad key" in made.problems[0].message


def test_the_effect_none_waits_for_a_server_that_knows_it():
    no_none = replace(NEWEST, taint_effect_none=False)
    (device,) = pool(inventory(gpu(0)), no_none, taints={"gpu-0": (Taint("a/b", "None"),)}).devices
    assert "taints" not in device


def many(count):
    return [
        gpu(n, mig_enabled=True, mig_devices=(mig(0),), pci_address=PciAddress(n >> 8, n & 0xFF, 0, 0))
        for n in range(count)
    ]


def test_a_taint_moves_no_device_to_another_slice():
    content = inventory(*many(130))
    calm = pool(content)
    ill = pool(content, taints={"gpu-5": (Taint("gpu.nvidia.com/gpu-lost", "NoSchedule"),)})
    assert [len(each.devices) for each in calm.slices] == [64, 64, 2]
    assert [[d["name"] for d in each.devices] for each in ill.slices] == [
        [d["name"] for d in each.devices] for each in calm.slices
    ]
    assert [a.devices == b.devices for a, b in zip(calm.slices, ill.slices, strict=True)] == [
        False,
        True,
        True,
    ]


def test_a_server_without_taints_gets_full_slices():
    assert [len(each.devices) for each in pool(inventory(*many(130)), OLD).slices] == [128, 2]


def test_a_second_device_of_one_name_is_left_out_rather_than_the_pool_lost():
    made = pool(inventory(gpu(0), gpu(0, uuid="GPU-other", pci_address=PciAddress(0, 0x20, 0, 0))))
    assert names(made) == ["gpu-0"]
    assert made.problems[0].code == "DRA-SLICE-DUPLICATE"


def test_the_same_inventory_gives_the_same_pool_in_whatever_order_it_comes():
    gpus = [gpu(n) for n in range(4)]
    assert pool(inventory(*gpus)) == pool(inventory(*reversed(gpus)))


def test_a_name_the_server_would_refuse_is_said_before_it_is_sent():
    made = build_pool(inventory(gpu(0)), node_name="Node_1", features=NEWEST)
    assert {each.code for each in made.problems} == {"DRA-SLICE-INVALID"}
    assert "'Node_1'" in made.problems[0].message


def test_every_slice_carries_the_pool_its_generation_and_their_number():
    made = pool(inventory(*many(70)), driver="gpu.example.com", pool_name="node-1/gpus")
    specs = made.specs(generation=3)
    assert [spec["pool"] for spec in specs] == [
        {"name": "node-1/gpus", "generation": 3, "resourceSliceCount": 2}
    ] * 2
    assert {(spec["driver"], spec["nodeName"]) for spec in specs} == {("gpu.example.com", "node-1")}
