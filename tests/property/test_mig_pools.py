"""What is published of MIG can be made, alone and together; what cannot stand together is never given out together."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.inventory.names import MigName, parse_device_name
from dra.nvml.mig_control import MigOfGpu
from dra.sim.nvml.functions.mig_changes import add_compute_instance, add_gpu_instance
from dra.sim.nvml.memory import Status
from dra.sim.nvml.mig_tables import mig_table
from dra.sim.nvml.state import first_state
from dra.sim.profiles import PROFILES
from tests.unit.slices.mig_machines import (
    GATE_OFF,
    NEW,
    OLD,
    WITH_MIG,
    Scheduler,
    partitioned,
    pool_of,
    simulated,
    slices_of,
)

FEATURES = {"1.34": OLD, "1.36": NEW, "gate off": GATE_OFF}


class Bench:
    """One GPU of a machine: its published devices with their counters, and the simulated hardware beside them."""

    def __init__(self, profile):
        inventory = partitioned(profile)
        pool = pool_of(inventory)
        gpu = next(gpu for gpu in inventory.gpus if gpu.mig_profiles)
        self.machine = PROFILES[profile]
        self.slot = next(slot for slot in self.machine.gpus if slot.minor == gpu.minor)
        self.table = mig_table(self.slot.model.mig_table, self.machine.driver_version)
        self.capacity = self.amounts(
            each["counters"]
            for part in pool.slices
            for each in part.shared_counters or ()
            if each["name"] == f"gpu-{gpu.minor}-counter-set"
        )
        self.takes = {
            device["name"]: self.amounts(entry["counters"] for entry in device["consumesCounters"])
            for device in pool.devices
            if device.get("consumesCounters") and parse_device_name(device["name"]).minor == gpu.minor
        }
        self.partitions = [name for name in self.takes if isinstance(parse_device_name(name), MigName)]

    @staticmethod
    def amounts(counters):
        from dra.values import Quantity

        return {name: Quantity.of(each["value"]).nano for one in counters for name, each in one.items()}

    def counters_allow(self, names):
        return all(
            sum(self.takes[name].get(counter, 0) for name in names) <= amount
            for counter, amount in self.capacity.items()
        )

    def hardware_allows(self, names):
        """Whether a GPU takes these instances, made one after the other."""
        state = first_state(self.machine, salt="", layout="host")
        state.gpu(self.slot.uuid).mig_current = 1
        for name in map(parse_device_name, names):
            profile = self.table.by_id(name.profile_id)
            try:
                instance = add_gpu_instance(
                    state,
                    self.table,
                    self.slot.uuid,
                    profile_id=name.profile_id,
                    place=(name.start, profile.size),
                )
                whole = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[profile.slices]
                add_compute_instance(
                    state, self.table, self.slot.uuid, serial=instance.serial, profile_id=whole, start=0
                )
            except Status:
                return False
        return True

    def media(self, names):
        """How many have the media engines, of which there is one set."""
        return sum("-me-" in name for name in names)


BENCHES = {}


def bench(profile):
    if profile not in BENCHES:
        BENCHES[profile] = Bench(profile)
    return BENCHES[profile]


@pytest.mark.parametrize("profile", WITH_MIG)
def test_every_placement_that_is_published_can_be_made(profile):
    on = bench(profile)
    expected = {(each.profile_id, start) for each in on.table.profiles for start in each.starts}
    published = {(name.profile_id, name.start) for name in map(parse_device_name, on.partitions)}
    assert published == expected
    with simulated(profile) as (node, session):
        node.control.set_mig_mode(on.slot.minor, enabled=True)
        node.library().on_change = lambda: None  # the files of the machine are not looked at here
        by = {"address": on.slot.pci_address}
        for name in map(parse_device_name, on.partitions):
            made = MigOfGpu(session, on.slot.uuid, **by).create(profile_id=name.profile_id, start=name.start)
            (instance,) = node.control.state.gpu(on.slot.uuid).instances
            assert (instance.profile_id, instance.start) == (name.profile_id, name.start)
            assert len(instance.computes) == 1
            assert MigOfGpu(session, on.slot.uuid, **by).destroy(gi=made.gi, ci=made.ci, uuid=made.uuid)


@pytest.mark.parametrize("profile", WITH_MIG)
def test_no_two_or_three_are_given_out_together_that_the_hardware_refuses(profile):
    on = bench(profile)
    for count in (2, 3):
        for names in itertools.combinations(on.partitions, count):
            if on.counters_allow(names):
                assert on.hardware_allows(names), names


@pytest.mark.parametrize("profile", WITH_MIG)
def test_no_two_are_kept_apart_that_the_hardware_takes(profile):
    """Counters are no stricter than the hardware, but for the media engines: the simulator lends them twice."""
    on = bench(profile)
    for names in itertools.combinations(on.partitions, 2):
        if on.media(names) < 2:
            assert on.counters_allow(names) == on.hardware_allows(names), names


@pytest.mark.parametrize("profile", WITH_MIG)
def test_the_whole_gpu_goes_with_no_partition(profile):
    on = bench(profile)
    whole = [name for name in on.takes if name not in on.partitions]
    for gpu, partition in itertools.product(whole, on.partitions):
        assert on.counters_allow([gpu])
        assert not on.counters_allow([gpu, partition])


@settings(max_examples=150)
@given(profile=st.sampled_from(WITH_MIG), seed=st.integers(0, 2**32))
def test_any_full_layout_that_counters_allow_can_be_made_in_any_order(profile, seed):
    on = bench(profile)
    rng = random.Random(seed)
    chosen = []
    for name in rng.sample(on.partitions, len(on.partitions)):
        if on.counters_allow([*chosen, name]):
            chosen.append(name)
        elif on.media([*chosen, name]) < 2:
            assert not on.hardware_allows([*chosen, name]), (chosen, name)
    rng.shuffle(chosen)
    assert on.hardware_allows(chosen), chosen


@settings(max_examples=25)
@given(
    profile=st.sampled_from(WITH_MIG), version=st.sampled_from(["1.34", "1.36"]), seed=st.integers(0, 2**32)
)
def test_whatever_the_scheduler_gives_out_as_claims_come_and_go_can_be_made(profile, version, seed):
    on = bench(profile)
    rng = random.Random(seed)
    whole = partitioned(profile)
    first = tuple(gpu for gpu in whole.gpus if gpu.uuid == on.slot.uuid)
    scheduler = Scheduler(
        slices_of(pool_of(type(whole)(whole.driver_version, whole.cuda_version, first), FEATURES[version]))
    )
    names = [each.name for each in on.table.profiles]
    for _ in range(14):
        if scheduler.held and rng.random() < 0.3:
            scheduler.free(rng.choice(sorted(scheduler.held)))
            continue
        kind = rng.choices(["mig", "gpu"], [9, 1])[0]
        scheduler.ask(kind=kind, profile=rng.choice(names) if kind == "mig" else "")
        given_out = scheduler.devices
        if any(name not in on.partitions for name in given_out):
            assert len(given_out) == 1  # a whole GPU is alone
        else:
            assert on.hardware_allows(given_out), given_out


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("profile", list(PROFILES))
def test_every_machine_gets_a_valid_pool_from_every_server(profile, features):
    for mig_mode in ("dynamic", "static", "none"):
        made = pool_of(partitioned(profile), features, mig_mode=mig_mode)
        if not features.partitionable or mig_mode != "dynamic":
            assert not any(part.shared_counters for part in made.slices)
            assert not any("consumesCounters" in device for device in made.devices)
