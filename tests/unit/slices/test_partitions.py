import random
from collections import Counter
from dataclasses import replace

import pytest

from dra.host.paths import HostPaths
from dra.inventory.names import parse_device_name
from dra.inventory.ownership import Owned, scan_with_owned
from dra.inventory.scan import Scanner
from dra.nvml.mig_control import MigOfGpu
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from tests.unit.slices.mig_machines import (
    GATE_OFF,
    NEW,
    OLD,
    Scheduler,
    machine,
    partitioned,
    pool_of,
    simulated,
    slices_of,
)

# What the reference driver publishes for an A100 40GB under driver 580.
SET = {
    "memory": "40320Mi", "multiprocessors": "98", "copy-engines": "7", "decoders": "5", "encoders": "0",
    "jpeg-engines": "1", "ofa-engines": "1",
} | {f"memory-slice-{number}": "1" for number in range(8)}  # fmt: skip


def names(pool):
    return [device["name"] for device in pool.devices]


def by_name(pool, name):
    return next(device for device in pool.devices if device["name"] == name)


def amounts(counters):
    return {name: counter["value"] for name, counter in counters.items()}


def one_gpu(inventory, **changes):
    return replace(inventory, gpus=(replace(inventory.gpus[0], **changes),))


def test_the_counter_set_of_an_a100_is_that_of_nvidias_driver():
    made = pool_of(partitioned("dgx-a100"))
    sets = [each for part in made.slices for each in part.shared_counters or ()]
    assert [each["name"] for each in sets] == [f"gpu-{minor}-counter-set" for minor in range(8)]
    assert amounts(sets[0]["counters"]) == SET


def test_a_partition_that_could_be_made_has_the_fields_of_nvidias_driver_and_no_uuid():
    made = pool_of(partitioned("dgx-a100"))
    device = by_name(made, "gpu-0-mig-1g10gb-15-6")
    (entry,) = device["consumesCounters"]
    assert entry["counterSet"] == "gpu-0-counter-set"
    assert amounts(entry["counters"]) == {
        "memory": "9984Mi", "multiprocessors": "14", "copy-engines": "1", "decoders": "1", "encoders": "0",
        "jpeg-engines": "0", "ofa-engines": "0", "memory-slice-6": "1", "memory-slice-7": "1",
    }  # fmt: skip
    assert amounts(device["capacity"]) == {
        "memory": "9984Mi", "multiprocessors": "14", "copyEngines": "1", "decoders": "1", "encoders": "0",
        "jpegEngines": "0", "ofaEngines": "0",
    }  # fmt: skip
    attributes = device["attributes"]
    assert "uuid" not in attributes
    assert attributes["type"] == {"string": "mig"}
    assert attributes["profile"] == {"string": "1g.10gb"}
    assert attributes["parentUUID"] == {"string": partitioned("dgx-a100").gpus[0].uuid}
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0000:07:00.0"}


def test_the_whole_gpu_excludes_every_partition_leaves_room_for_monitors_and_keeps_nvmls_memory():
    inventory = partitioned("dgx-h100")
    made = pool_of(inventory)
    whole = by_name(made, "gpu-0")
    assert whole["consumesCounters"] == [
        {
            "counterSet": "gpu-0-counter-set",
            "counters": {f"memory-slice-{n}": {"value": "1m"} for n in range(8)},
        }
    ]
    static = by_name(pool_of(inventory, mig_mode="static"), "gpu-0")
    assert whole["attributes"] == static["attributes"]
    assert whole["capacity"]["memory"] == static["capacity"]["memory"]


@pytest.mark.parametrize(
    ("profile", "mode_on", "wholes", "partitions"),
    [
        ("dgx-h100", False, 8, 8 * 25),  # Hopper: both
        ("dgx-a100", False, 8, 0),  # Ampere: what the mode says, which needs a reset
        ("dgx-a100", True, 0, 8 * 25),
        ("hgx-b200", False, 8, 8 * 25),
        ("a30-x2", True, 0, 2 * 13),
        ("a100-l4", True, 2, 2 * 25),  # the L4s stay as they are
        ("l40s-x4", False, 4, 0),
    ],
)
def test_what_is_listed_follows_from_what_the_gpu_can_do_while_it_runs(profile, mode_on, wholes, partitions):
    made = pool_of(machine(profile, mig_mode_on=mode_on))
    kinds = Counter(device["attributes"]["type"]["string"] for device in made.devices)
    assert (kinds["gpu"], kinds["mig"]) == (wholes, partitions)


def test_a_monitor_gets_every_gpu_while_whole_gpus_are_in_use_and_takes_nothing():
    """Kubernetes counts a device once more for admin access (its issue 140729); there is room for that."""
    scheduler = Scheduler(slices_of(pool_of(partitioned("dgx-h100"))))
    for _ in range(4):
        scheduler.ask(kind="gpu")
    for _ in range(2):
        scheduler.ask(kind="gpu", allocationMode="All", adminAccess=True)
        (*_, monitor) = scheduler.held.values()
        results = monitor["status"]["allocation"]["devices"]["results"]
        assert sorted(result["device"] for result in results) == [f"gpu-{n}" for n in range(8)]
    # Monitored GPUs are given out all the same, whole and in parts.
    assert scheduler.ask(kind="gpu")[1] == "gpu-4"
    assert scheduler.ask(profile="1g.10gb")[1].startswith("gpu-5-mig")
    # Of a GPU with a partition in use the whole is nobody's, not even a monitor's: that is the same rule.
    assert scheduler.ask(kind="gpu", allocationMode="All", adminAccess=True) is None
    assert scheduler.ask(profile="1g.10gb", adminAccess=True) is not None


def test_gpus_without_mig_have_no_counters():
    made = pool_of(machine("a100-l4", mig_mode_on=True))
    assert {part["name"] for each in made.slices for part in each.shared_counters or ()} == {
        "gpu-2-counter-set",
        "gpu-3-counter-set",
    }
    assert "consumesCounters" not in by_name(made, "gpu-0")


def test_from_1_35_counters_stand_apart_at_most_eight_sets_in_a_slice():
    made = pool_of(partitioned("a2-megagpu-16g"))
    assert [len(part.shared_counters) for part in made.slices if part.shared_counters] == [8, 8]
    assert all((part.shared_counters is None) != (part.devices is None) for part in made.slices)
    assert max(len(part.devices or ()) for part in made.slices) <= 64
    assert len(made.devices) == 16 * 25
    for part in made.slices:
        owners = Counter(parse_device_name(device["name"]).minor for device in part.devices or ())
        assert all(count == 25 for count in owners.values())  # a GPU is not torn apart


def test_before_1_35_each_counter_set_stands_beside_its_devices():
    made = pool_of(partitioned("dgx-h100"), OLD)
    assert len(made.slices) == 8
    for minor, part in enumerate(made.slices):
        assert [each["name"] for each in part.shared_counters] == [f"gpu-{minor}-counter-set"]
        assert len(part.devices) == 26
    mixed = pool_of(machine("a100-l4", mig_mode_on=True), OLD)
    assert [bool(part.shared_counters) for part in mixed.slices] == [True, False, True, False]


def test_the_same_devices_are_offered_whatever_the_layout():
    inventory = machine("a100-l4", mig_mode_on=True)
    assert names(pool_of(inventory, OLD)) == names(pool_of(inventory, NEW))


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100"])
def test_a_server_that_drops_counters_gets_what_exists(profile):
    inventory = machine(profile)
    assert pool_of(inventory, GATE_OFF) == pool_of(inventory, mig_mode="static")
    assert not any("consumesCounters" in device for device in pool_of(inventory, GATE_OFF).devices)


def test_a_gpu_with_more_devices_than_an_old_slice_holds_keeps_the_smallest_and_the_whole():
    gpu = partitioned("dgx-h100").gpus[0]
    many = tuple(
        replace(profile, name=f"{profile.name}+v{copy}", profile_id=profile.profile_id + 100 * copy)
        for copy in range(4)
        for profile in gpu.mig_profiles
    )
    inventory = one_gpu(partitioned("dgx-h100"), mig_profiles=many)
    assert len(pool_of(inventory).devices) == 101
    old = build_pool(inventory, node_name="node-1", features=OLD, mig_mode="dynamic")
    assert len(old.devices) == 64
    assert names(old)[-1] == "gpu-0"
    assert {problem.code for problem in old.problems} == {"DRA-SLICE-ROOM"}
    assert len(old.problems) == 37


def test_taints_of_a_gpu_hold_for_its_partitions_also_those_that_are_not_made():
    taints = {"gpu-1": (Taint("gpu.nvidia.com/xid", "NoSchedule", "79"),)}
    made = pool_of(partitioned("dgx-h100"), taints=taints)
    tainted = {parse_device_name(device["name"]).minor for device in made.devices if device.get("taints")}
    assert tainted == {1}
    assert sum(bool(device.get("taints")) for device in made.devices) == 26
    assert [len(part.devices or ()) for part in made.slices] == [
        len(part.devices or ()) for part in pool_of(partitioned("dgx-h100")).slices
    ]


def test_no_partitions_are_listed_where_nobody_wants_them():
    inventory = machine("a100-l4", mig_mode_on=True)
    assert names(pool_of(inventory, mig_mode="none")) == ["gpu-0", "gpu-1"]


# What is on the hardware


class Live:
    """GPU 0 of a simulated DGX H100, scanned as the daemon does; `ours` is what its records would say."""

    def __init__(self, node, session):
        self.node, self.session = node, session
        self.ours = Owned()
        scanner = Scanner(session, HostPaths(**node.paths_kwargs()))
        self.look = scan_with_owned(lambda: scanner.scan(profiles=True), lambda: self.ours)
        self.slot = node.profile.gpus[0]

    def pool(self):
        return pool_of(self.look())

    def create(self, profile_id, start):
        return MigOfGpu(self.session, self.slot.uuid).create(profile_id=profile_id, start=start)


@pytest.fixture
def live():
    with simulated("dgx-h100") as (node, session):
        yield Live(node, session)


def test_nothing_published_changes_when_a_partition_of_ours_comes_and_goes(live):
    before = live.pool()
    live.ours = Owned(frozenset({"gpu-0-mig-1g10gb-19-3"}), frozenset({live.slot.uuid}))
    assert live.pool() == before
    made = live.create(19, 3)
    assert live.pool() == before
    MigOfGpu(live.session, live.slot.uuid).destroy(gi=made.gi, ci=made.ci, uuid=made.uuid)
    assert live.pool() == before  # the mode is still on, and ours
    MigOfGpu(live.session, live.slot.uuid).mode_off_if_empty()
    live.ours = Owned()
    assert live.pool() == before


def test_partitions_made_by_hand_make_a_gpu_static_and_no_other(live):
    live.node.control.set_mig_layout(0, [("3g.40gb", 4), ("1g.10gb", 0)])
    made = live.pool()
    of_first = [device for device in made.devices if parse_device_name(device["name"]).minor == 0]
    assert [device["name"] for device in of_first] == ["gpu-0-mig-1g10gb-19-0", "gpu-0-mig-3g40gb-9-4"]
    assert all("uuid" in device["attributes"] for device in of_first)
    assert not any("consumesCounters" in device for device in of_first)
    assert len(made.devices) == 2 + 7 * 26


def test_a_partition_by_hand_beside_ours_withdraws_what_could_be_made_and_ours_keeps_its_name(live):
    live.ours = Owned(frozenset({"gpu-0-mig-1g10gb-19-3"}), frozenset({live.slot.uuid}))
    live.create(19, 3)
    live.node.control.create_mig(0, "3g.40gb", 4)
    assert [name for name in names(live.pool()) if name.startswith("gpu-0")] == [
        "gpu-0-mig-1g10gb-19-3",
        "gpu-0-mig-3g40gb-9-4",
    ]


def test_a_gpu_that_somebody_put_in_mig_mode_is_offered_in_parts_only(live):
    live.node.control.set_mig_mode(0, enabled=True)
    made = live.pool()
    assert "gpu-0" not in names(made)
    assert "gpu-0-mig-7g80gb-0-0" in names(made)
    live.ours = Owned(frozenset({"gpu-0-mig-1g10gb-19-3"}))  # the mode was on: it is not ours
    live.create(19, 3)
    assert live.pool() == made


def test_a_record_that_is_struck_during_a_look_still_counts(live):
    made = live.create(19, 0)
    gpu_0 = Owned(frozenset({"gpu-0-mig-1g10gb-19-0"}), frozenset({live.slot.uuid}))
    answers = iter((gpu_0, Owned(), Owned(), gpu_0))
    scanner = Scanner(live.session, HostPaths(**live.node.paths_kwargs()))
    look = scan_with_owned(lambda: scanner.scan(profiles=True), lambda: next(answers))
    for _ in ("destroyed and struck", "recorded and created"):
        (seen,) = look().gpus[0].mig_devices
        assert (seen.uuid, seen.ours) == (made.uuid, True)


# Order


def test_within_a_gpu_small_partitions_come_first_and_the_whole_last():
    listed = names(pool_of(one_gpu(partitioned("dgx-h100"))))
    assert listed[:7] == [f"gpu-0-mig-1g10gb-19-{start}" for start in (6, 5, 4, 3, 2, 1, 0)]
    assert listed[14:18] == [f"gpu-0-mig-1g20gb-15-{start}" for start in (6, 4, 2, 0)]
    assert listed[-5:-2] == ["gpu-0-mig-3g40gb-9-4", "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-4g40gb-5-0"]
    assert listed[-1] == "gpu-0"


def test_a_claim_that_names_no_profile_gets_the_smallest():
    scheduler = Scheduler(slices_of(pool_of(one_gpu(partitioned("dgx-h100")))))
    assert scheduler.ask()[1] == "gpu-0-mig-1g10gb-19-6"


def by_names(slices):
    """Order the devices as NVIDIA's driver does: by name."""
    return [
        {
            **each,
            "spec": {
                **each["spec"],
                "devices": sorted(each["spec"].get("devices") or [], key=lambda device: device["name"]),
            },
        }
        for each in slices
    ]


def stranded_by(slices, *, seed, profiles, steps):
    """Let claims come and go; give the memory slices that lay free when a claim of no more slices was refused."""
    rng = random.Random(seed)
    scheduler = Scheduler(slices)
    size = {
        device["name"]: sum(name.startswith("memory-slice") for name in entry["counters"])
        for each in slices
        for device in each["spec"].get("devices") or ()
        for entry in device["consumesCounters"]
    }
    sizes = {
        device["attributes"]["profile"]["string"]: size[device["name"]]
        for each in slices
        for device in each["spec"].get("devices") or ()
        if "profile" in device["attributes"]
    }
    stranded = 0
    for _ in range(steps):
        if scheduler.held and rng.random() < 0.4:
            scheduler.free(rng.choice(list(scheduler.held)))
            continue
        profile = rng.choice(profiles)
        if scheduler.ask(profile=profile) is None:
            free = 8 - sum(size[device] for device in scheduler.devices)
            stranded += free if free >= sizes[profile] else 0
    return stranded


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100"])
def test_this_order_strands_fewer_memory_slices_than_the_order_of_names(profile):
    inventory = one_gpu(partitioned(profile))
    ours = slices_of(pool_of(inventory))
    theirs = by_names(ours)
    wanted = [
        each.name for each in inventory.gpus[0].mig_profiles if "+" not in each.name and each.name[0] != "7"
    ]
    totals = [
        sum(stranded_by(slices, seed=seed, profiles=wanted, steps=40) for seed in range(12))
        for slices in (ours, theirs)
    ]
    assert totals[0] < 0.85 * totals[1], totals


def test_after_small_partitions_the_half_for_a_4g_is_still_free():
    """Name order puts a 1g in its middle."""
    inventory = one_gpu(partitioned("dgx-h100"))
    ours = slices_of(pool_of(inventory))
    for slices, fits in ((ours, True), (by_names(ours), False)):
        scheduler = Scheduler(slices)
        for profile in ("1g.10gb", "1g.10gb", "1g.10gb"):
            assert scheduler.ask(profile=profile)
        assert (scheduler.ask(profile="4g.40gb") is not None) == fits
