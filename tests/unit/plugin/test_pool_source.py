"""Inventory and server features become the pool and the streamed health."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra.api.claim import ClaimRef
from dra.api.gpu_settings import GpuSettings, MigSettings, NodeSettings
from dra.errors import HostError
from dra.health.feed import HealthFeed
from dra.inventory.diff import diff
from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile
from dra.inventory.ownership import Owned
from dra.plugin.owned import owned_by
from dra.plugin.pool_source import PoolSource, narrow
from dra.prepare.record import JournalEntry, Record
from dra.prepare.store import RecordStore
from dra.slices.features import ServerFeatures
from dra.slices.taints import Taint
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


PROFILE = MigProfile("7g.80gb", 0, 81152, 132, 8, 7, 0, 7, 1, ((0, 8),))


def with_partition(number, *, ours):
    mig = MigDevice(f"MIG-{number}", PROFILE, 0, 0, 0, 8, ours=ours)
    return replace(
        gpu(0),
        mig_capable=True,
        mig_enabled=True,
        mig_mode_ours=ours,
        mig_profiles=(PROFILE,),
        mig_devices=(mig,),
    )


def test_partitions_that_come_and_go_for_claims_publish_nothing_new_and_those_of_a_static_gpu_do():
    for settings, ours, published in (
        (NodeSettings(), True, 1),
        (NodeSettings(), False, 2),
        (NodeSettings(GpuSettings(mig=MigSettings(mode="static"))), True, 2),
    ):
        pools = []
        made = PoolSource(
            "gpu.nvidia.com", "node-a", feed=HealthFeed(), mig_mode="dynamic", settings=settings
        )
        made.publish_to(pools.append)
        for number in (1, 2):
            now = inventory(with_partition(number, ours=ours))
            made.inventory_changed(now, diff(Inventory(), now))
        assert len(pools) == published


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


# Taints

XID = Taint("gpu.nvidia.com/xid", "NoSchedule", "79")
REMARK = Taint("gpu.nvidia.com/xid", "None", "13")
DRAINING = Taint("gpu.nvidia.com/draining", "NoSchedule")


def taints(pool):
    return {device["name"]: device["taints"] for device in pool.devices if "taints" in device}


def test_taints_of_each_source_are_published_until_it_takes_them_back():
    made, look, pools, feed = source()
    made.set_taints("health", {"gpu-1": (XID,)}, unhealthy={"gpu-1": "XID 79"})
    assert pools == []
    look(gpu(0), gpu(1))
    assert taints(pools[-1]) == {"gpu-1": [XID.as_json()]}
    assert [(c.device, c.state, c.message) for c in feed.current()[1]] == [
        ("gpu-0", "Healthy", ""), ("gpu-1", "Unhealthy", "XID 79"),
    ]  # fmt: skip
    made.set_taints("policy", {"gpu-0": (DRAINING,), "gpu-1": (DRAINING,)})
    assert taints(pools[-1]) == {
        "gpu-0": [DRAINING.as_json()], "gpu-1": [DRAINING.as_json(), XID.as_json()],
    }  # fmt: skip
    made.set_taints("health", {})
    assert taints(pools[-1]) == {"gpu-0": [DRAINING.as_json()], "gpu-1": [DRAINING.as_json()]}
    assert [c.state for c in feed.current()[1]] == ["Healthy", "Healthy"]


def test_the_same_taints_again_publish_nothing():
    made, look, pools, _ = source()
    look(gpu(0))
    made.set_taints("health", {"gpu-0": (XID,)})
    before = len(pools)
    made.set_taints("health", {"gpu-0": (XID,), "gpu-1": ()})
    made.set_taints("policy", {})
    assert len(pools) == before


def test_a_remark_is_for_servers_that_know_the_effect_none():
    made, look, pools, _ = source()
    look(gpu(0))
    made.set_taints("health", {"gpu-0": (REMARK,)})
    assert taints(pools[-1]) == {"gpu-0": [REMARK.as_json()]}
    made.server_is((1, 34))
    # Neither a taint, nor withheld: nothing keeps pods away from it.
    assert taints(pools[-1]) == {}
    assert names(pools[-1]) == ["gpu-0"]


def test_taints_of_a_gpu_hold_for_its_partitions():
    pools, feed = [], HealthFeed()
    made = PoolSource("gpu.nvidia.com", "node-a", feed=feed, mig_mode="dynamic")
    made.publish_to(pools.append)
    content = inventory(replace(gpu(0), mig_capable=True, mig_profiles=(PROFILE,)), gpu(1))
    made.inventory_changed(content, diff(Inventory(), content))
    made.set_taints("health", {"gpu-0": (XID,)}, unhealthy={"gpu-0": "XID 79"})
    ill = {"gpu-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1"}
    assert set(taints(pools[-1])) == ill
    assert {c.device for c in feed.current()[1] if c.state == "Unhealthy"} == ill
    made.set_taints(
        "health", {"gpu-0-mig-1g10gb-19-1": (XID,)}, unhealthy={"gpu-0-mig-1g10gb-19-1": "XID 43"}
    )
    assert set(taints(pools[-1])) == {"gpu-0-mig-1g10gb-19-1"}
    assert {c.device for c in feed.current()[1] if c.state == "Unhealthy"} == {"gpu-0-mig-1g10gb-19-1"}


# Partitions on demand

PROFILE = MigProfile("1g.10gb", 19, 9984, 16, 1, 1, 0, 1, 0, ((0, 1), (1, 1)))


def dynamic(keeps=lambda version: version >= (1, 33)):
    pools = []
    made = PoolSource("gpu.nvidia.com", "node-a", feed=HealthFeed(), mig_mode="dynamic", keeps_counters=keeps)
    made.publish_to(pools.append)
    content = inventory(replace(gpu(0), mig_capable=True, mig_profiles=(PROFILE,)))
    made.inventory_changed(content, diff(Inventory(), content))
    return made, pools


@pytest.mark.parametrize(("mig_mode", "asked"), [("dynamic", True), ("static", False), ("none", False)])
@pytest.mark.parametrize("passthrough", [False, True])
def test_the_server_is_asked_about_counters_where_something_would_use_them(mig_mode, asked, passthrough):
    questions = []
    made = PoolSource(
        "gpu.nvidia.com", "node-a", feed=HealthFeed(), mig_mode=mig_mode, passthrough=passthrough,
        keeps_counters=questions.append,
    )  # fmt: skip
    made.server_is((1, 35))
    assert questions == ([(1, 35)] if asked or passthrough else [])


def layout(pool):
    """Say what each slice holds: (counter sets, devices)."""
    return [(len(part.shared_counters or ()), len(part.devices or ())) for part in pool.slices]


def test_partitions_on_demand_take_the_shape_of_the_servers_version():
    made, pools = dynamic()
    made.server_is((1, 36))
    assert layout(pools[-1]) == [(1, 0), (0, 3)]
    made.server_is((1, 34))
    assert layout(pools[-1]) == [(1, 3)]
    made.server_is((1, 32))
    assert names(pools[-1]) == ["gpu-0"]


def test_a_server_that_drops_counters_gets_what_exists():
    made, pools = dynamic()
    made.server_is((1, 35))
    made.server_dropped(("DRAPartitionableDevices",))
    assert names(pools[-1]) == ["gpu-0"]
    assert "consumesCounters" not in pools[-1].devices[0]


@pytest.mark.parametrize(
    ("version", "answer", "offered"),
    [((1, 35), True, 3), ((1, 36), False, 1), ((1, 35), None, 1), ((1, 36), None, 3)],
)
def test_what_the_server_says_of_counters_goes_before_its_version(version, answer, offered):
    made, pools = dynamic(lambda _version: answer)
    made.server_is(version)
    assert len(pools[-1].devices) == offered


def test_partitions_are_not_offered_unless_asked_for():
    made, look, pools, _ = source()
    look(replace(gpu(0), mig_capable=True, mig_profiles=(PROFILE,)))
    made.server_is((1, 36))
    assert names(pools[-1]) == ["gpu-0"]


# What the records say is ours


def store_in(directory):
    made = RecordStore(directory, report=lambda _damage: None, salvage=lambda _uid: ())
    made.open()
    return made


def entry(kind, **args):
    return JournalEntry(kind, args)


def test_partitions_and_modes_of_this_boot_are_ours_also_another_instances(tmp_path):
    mine, other = store_in(tmp_path), store_in(tmp_path)
    ref = ClaimRef(uid="c1", namespace="default", name="claim")
    device = "gpu-0-mig-1g10gb-19-1"
    journal = (entry("mig-mode", gpu="GPU-0"), entry("mig-device", device=device, gpu="GPU-0"))
    assert owned_by(mine, "boot-2") == Owned()
    other.put(Record(ref=ref, state="preparing", boot_id="boot-2", journal=journal), fsync=False)
    assert owned_by(mine, "boot-2") == Owned(frozenset({device}), frozenset({"GPU-0"}))
    assert owned_by(mine, "boot-3") == Owned()


def test_a_disk_that_does_not_answer_leaves_ours_ours(tmp_path, monkeypatch):
    store = store_in(tmp_path)
    ref = ClaimRef(uid="c1", namespace="default", name="claim")
    journal = (entry("mig-device", device="gpu-0-mig-1g10gb-19-1", gpu="GPU-0"),)
    store.put(Record(ref=ref, state="preparing", boot_id="boot", journal=journal), fsync=False)
    before = owned_by(store, "boot")
    assert before.devices

    def refuse(**_options):
        raise HostError("DRA-HOST-IO", "the disk does not answer")

    monkeypatch.setattr(store, "refresh", refuse)
    assert owned_by(store, "boot") == before
