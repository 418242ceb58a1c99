"""Inventory and server features become the pool and the streamed health."""

from __future__ import annotations

from dra.health.feed import HealthFeed
from dra.inventory.diff import diff
from dra.inventory.model import Gpu, Inventory
from dra.plugin.pool_source import PoolSource, narrow
from dra.slices.features import ServerFeatures
from dra.values import PciAddress


def gpu(minor, *, unusable=""):
    return Gpu(
        minor=minor,
        uuid=f"GPU-{minor}",
        pci_address=PciAddress.parse(f"0000:{minor + 16:02x}:00.0"),
        product_name="NVIDIA H100 80GB HBM3",
        brand="Nvidia",
        architecture="Hopper",
        compute_capability=(9, 0),
        memory_bytes=80 << 30,
        unusable=unusable,
    )


def inventory(*gpus):
    return Inventory(driver_version="580.95.05", cuda_version=(13, 0), gpus=gpus)


def source():
    pools, feed = [], HealthFeed()
    made = PoolSource("gpu.nvidia.com", "node-a", feed=feed)
    made.publish_to(pools.append)

    def look(*gpus):
        made.inventory_changed(inventory(*gpus), diff(Inventory(), inventory(*gpus)))

    return made, look, pools, feed


def names(pool):
    return [device["name"] for device in pool.devices]


def test_nothing_is_published_before_the_hardware_was_looked_at():
    made, _, pools, _ = source()
    made.server_is((1, 36))
    assert pools == []
    assert not made.looked


def test_an_inventory_is_published_and_its_devices_are_healthy():
    made, look, pools, feed = source()
    look(gpu(0), gpu(1))
    assert names(pools[-1]) == ["gpu-0", "gpu-1"]
    assert [(c.device, c.state) for c in feed.current()[1]] == [("gpu-0", "Healthy"), ("gpu-1", "Healthy")]
    assert made.looked


def test_a_node_without_gpus_publishes_an_empty_pool():
    _, look, pools, feed = source()
    look()
    assert names(pools[-1]) == []
    assert feed.current()[1] == ()


def test_an_unusable_gpu_is_tainted_and_unhealthy():
    _, look, pools, feed = source()
    look(gpu(0), gpu(1, unusable="DRA-NVML-GPU-LOST"))
    assert [bool(device.get("taints")) for device in pools[-1].devices] == [False, True]
    assert [c.state for c in feed.current()[1]] == ["Healthy", "Unhealthy"]


def test_on_a_server_without_taints_an_unusable_gpu_is_withheld_and_comes_back_with_the_upgrade():
    made, look, pools, _ = source()
    look(gpu(0), gpu(1, unusable="DRA-NVML-GPU-LOST"))
    made.server_is((1, 34))
    assert names(pools[-1]) == ["gpu-0"]
    made.server_is((1, 36))
    assert names(pools[-1]) == ["gpu-0", "gpu-1"]


def test_a_server_that_drops_taints_gets_the_pool_without_the_device_and_the_guess_stays():
    made, look, pools, _ = source()
    look(gpu(0), gpu(1, unusable="DRA-NVML-GPU-LOST"))
    made.server_is((1, 36))
    made.server_dropped(("DRADeviceTaints",))
    assert names(pools[-1]) == ["gpu-0"]
    before = len(pools)
    made.server_dropped(())
    assert len(pools) == before


def test_each_gate_switches_off_its_own_feature():
    full = ServerFeatures.of_version(1, 36)
    assert not narrow(full, ["DRADeviceTaints"]).device_taints
    assert not narrow(full, ["DRAPartitionableDevices"]).partitionable
    assert not narrow(full, ["DRAConsumableCapacity"]).consumable
    assert narrow(full, ["Other"]) == full
