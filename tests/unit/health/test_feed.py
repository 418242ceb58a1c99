"""Conditions of published devices, and the feed that streams read."""

from __future__ import annotations

import threading

from dra.health.feed import DeviceCondition, HealthFeed, plan_conditions
from dra.inventory.model import Gpu, Inventory, VfioFunction
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


def by_device(conditions):
    return {condition.device: (condition.state, condition.message) for condition in conditions}


def test_usable_gpus_and_their_partitions_are_healthy():
    inventory = Inventory(gpus=(gpu(0), gpu(1)))
    conditions = plan_conditions(
        inventory, pool="node-a", devices=["gpu-1", "gpu-0-mig-1g12gb-19-0", "gpu-0"]
    )
    assert conditions == (
        DeviceCondition("node-a", "gpu-0"),
        DeviceCondition("node-a", "gpu-0-mig-1g12gb-19-0"),
        DeviceCondition("node-a", "gpu-1"),
    )


def test_a_gpu_that_cannot_be_read_is_unhealthy_with_its_partitions_and_no_other():
    inventory = Inventory(gpus=(gpu(0, unusable="NVML lost it"), gpu(1)))
    conditions = plan_conditions(inventory, pool="p", devices=["gpu-0", "gpu-0-mig-1g12gb-19-0", "gpu-1"])
    assert by_device(conditions) == {
        "gpu-0": ("Unhealthy", "NVML lost it"),
        "gpu-0-mig-1g12gb-19-0": ("Unhealthy", "NVML lost it"),
        "gpu-1": ("Healthy", ""),
    }


def test_a_published_gpu_that_is_gone_is_unhealthy():
    conditions = plan_conditions(Inventory(gpus=(gpu(0),)), pool="p", devices=["gpu-0", "gpu-7"])
    assert by_device(conditions)["gpu-7"] == ("Unhealthy", "GPU 7 is not found on the node")


def test_a_foreign_name_is_unknown():
    (condition,) = plan_conditions(Inventory(), pool="p", devices=["nic-0"])
    assert condition.state == "Unknown"


def test_publishing_the_same_again_is_no_change():
    feed = HealthFeed()
    feed.publish((DeviceCondition("p", "gpu-0"),))
    version, _ = feed.current()
    feed.publish((DeviceCondition("p", "gpu-0"),))
    assert feed.current()[0] == version


def test_a_waiting_thread_wakes_on_change_on_close_and_when_its_client_is_gone():
    for wake in (
        lambda feed, _gone: feed.publish((DeviceCondition("p", "gpu-0"),)),
        lambda feed, _gone: feed.close(),
        lambda feed, gone: (gone.set(), feed.wake()),
    ):
        feed, gone, woke = HealthFeed(), threading.Event(), threading.Event()

        def wait(feed=feed, gone=gone, woke=woke):
            feed.wait(seen=0, timeout_seconds=60, gone=gone.is_set)
            woke.set()

        thread = threading.Thread(target=wait)
        thread.start()
        wake(feed, gone)
        assert woke.wait(60)
        thread.join()


def test_a_change_before_the_wait_is_not_missed():
    feed = HealthFeed()
    version, _ = feed.current()
    feed.publish((DeviceCondition("p", "gpu-0"),))
    assert feed.wait(seen=version, timeout_seconds=60)[1] == (DeviceCondition("p", "gpu-0"),)


def vfio(index, minor):
    return VfioFunction(
        index=index, pci_address=PciAddress(0, 16 + index, 0, 0), driver="nvidia" if minor is not None else "vfio-pci",
        on_vfio=minor is None, iommu_group=1, vendor_id=0x10DE, device_id=0x2330, product_name="", addressable_bytes=0,
        gpu_minor=minor,
    )  # fmt: skip


def test_a_gpu_that_can_be_passed_through_is_as_well_as_it_is_until_it_is_away():
    inventory = Inventory(
        gpus=(gpu(0), gpu(1, unusable="DRA-NVML-HUNG"), gpu(2), gpu(3)),
        vfio=(vfio(4, 0), vfio(5, 1), vfio(6, 2), vfio(7, 3), vfio(8, None)),
    )
    devices = [f"gpu-vfio-{index}" for index in range(4, 9)]
    conditions = by_device(
        plan_conditions(
            inventory, pool="n", devices=devices, unhealthy={"gpu-2": "XID 79"}, unknown={"gpu-3": "it is asleep"}
        )
    )  # fmt: skip
    assert conditions == {
        "gpu-vfio-4": ("Healthy", ""),
        "gpu-vfio-5": ("Unhealthy", "DRA-NVML-HUNG"),
        "gpu-vfio-6": ("Unhealthy", "XID 79"),
        "gpu-vfio-7": ("Unknown", "it is asleep"),
        "gpu-vfio-8": ("Unknown", "the GPU is passed through, and not watched by the node"),
    }
