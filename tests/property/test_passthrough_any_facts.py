"""Whatever a node is like, nobody gets a GPU, or a part of it, that a virtual machine has or may get; nor the reverse."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dra.api.gpu_settings import parse_sharing
from dra.inventory.keep import Kept, plan_inventory, with_siblings
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, VfioName, parse_device_name, parse_vfio_name
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.validate import validate_slices
from dra.values import PciAddress
from tests.unit.inventory.inventory_samples import mig, vfio
from tests.unit.slices.mig_machines import Scheduler, machine, slices_of

# One of each kind: with partitions on demand, in MIG mode, with MIG off, without MIG.
KINDS = [
    lambda: machine("h100-nvl-x2").gpus[0],
    lambda: machine("a30-x2", mig_mode_on=True).gpus[0],
    lambda: machine("a30-x2").gpus[0],
    lambda: machine("l40s-x4").gpus[0],
]
FEATURES = st.builds(
    lambda minor, counters: replace(ServerFeatures.of_version(1, minor), partitionable=counters),
    st.integers(33, 37), st.booleans(),
)  # fmt: skip


@st.composite
def nodes(draw):
    """Give an inventory as a scan gives it, and what claims hold."""
    gpus, functions, held = [], [], []
    for place in range(draw(st.integers(1, 3))):
        gpu = replace(
            draw(st.sampled_from(KINDS))(), minor=7 - place, uuid=f"GPU-{place}", pci_address=PciAddress(0, place, 0, 0)
        )  # fmt: skip
        if draw(st.booleans()) and gpu.mig_profiles:
            gpu = replace(gpu, mig_enabled=True, mig_devices=(mig(0, profile=gpu.mig_profiles[0]),))
        gpu = replace(gpu, unusable=draw(st.sampled_from(["", "", "DRA-NVML-GPU-LOST"])))
        driver = draw(st.sampled_from(["nvidia", "nvidia", "vfio-pci", ""]))
        if driver:
            function = replace(
                vfio(), index=place, pci_address=gpu.pci_address, driver=driver, on_vfio=driver != "nvidia"
            )
            functions.append(function)
        # NVML of an old session may still tell of a GPU that is away.
        if driver == "nvidia" or draw(st.booleans()):
            gpus.append(gpu)
        who = draw(st.sampled_from(["", "gpu", "vfio"]))
        if who:
            held.append(str(GpuName(gpu.minor) if who == "gpu" else VfioName(place)))
    return Inventory("580.95.05", (13, 0), tuple(gpus), vfio=tuple(functions)), tuple(held)


def pool_of(node, features, *, mig_mode="dynamic", sharing="exclusive"):
    scanned, held = node
    found = plan_inventory(Kept(Inventory()), scanned, in_use=held).inventory
    pool = build_pool(
        found, node_name="node-1", features=features, mig_mode=mig_mode, in_use=held, settings=parse_sharing(sharing)
    )  # fmt: skip
    assert validate_slices(pool.specs(generation=1), counters_apart=features.counters_apart) == []
    return found, pool


def places(found):
    """Give the place on the bus of each device name that may be listed."""
    by_minor = {gpu.minor: gpu.pci_address for gpu in found.gpus}
    by_index = {each.index: each.pci_address for each in found.vfio}

    def place(name):
        passed = parse_vfio_name(name)
        return by_index[passed.index] if passed else by_minor[parse_device_name(name).minor]

    return place


@settings(max_examples=80, deadline=None)
@given(
    nodes(), st.integers(34, 37), st.sampled_from(["dynamic", "static", "none"]), st.sampled_from(["exclusive", "2"]),
    st.lists(st.sampled_from(["gpu", "mig", "vfio"]), min_size=3, max_size=8),
)  # fmt: skip
def test_where_counters_are_kept_the_scheduler_never_gives_out_both(node, minor, mig_mode, sharing, kinds):
    features = replace(ServerFeatures.of_version(1, minor), partitionable=True)
    found, pool = pool_of(node, features, mig_mode=mig_mode, sharing=sharing)
    scheduler = Scheduler(slices_of(pool))
    for kind in kinds:
        scheduler.ask(kind=kind)
    place = places(found)
    passed = {place(name) for name in scheduler.devices if parse_vfio_name(name)}
    others = {place(name) for name in scheduler.devices if not parse_vfio_name(name)}
    assert not passed & others


@settings(max_examples=150, deadline=None)
@given(nodes(), st.integers(33, 37), st.sampled_from(["dynamic", "static", "none"]))
def test_where_they_are_not_what_is_held_hides_the_other(node, minor, mig_mode):
    features = replace(ServerFeatures.of_version(1, minor), partitionable=False)
    found, pool = pool_of(node, features, mig_mode=mig_mode)
    held, place = set(node[1]), places(found)
    listed = {device["name"] for device in pool.devices}
    taken = {place(name): name for name in held if name in listed}
    for name in listed - held:
        holder = taken.get(place(name))
        assert holder is None or not (parse_vfio_name(name) or parse_vfio_name(holder)), (name, holder)


@settings(max_examples=150, deadline=None)
@given(nodes(), FEATURES, st.sampled_from(["dynamic", "static", "none"]))
def test_what_a_vfio_driver_has_is_no_gpu_and_what_none_has_is_not_passed_through(node, features, mig_mode):
    found, pool = pool_of(node, features, mig_mode=mig_mode)
    held, place = set(node[1]), places(found)
    away = {each.pci_address for each in node[0].vfio if each.on_vfio}
    minors_held = {name.minor for name in map(parse_device_name, held) if name}
    for device in pool.devices:
        name = device["name"]
        if parse_vfio_name(name):
            assert place(name) in {each.pci_address for each in node[0].vfio}
        elif place(name) in away:
            # Somebody took it from the claim that has it: it stays, and nobody else gets it.
            assert parse_device_name(name).minor in minors_held
    for gpu in found.gpus:
        cut = gpu.mig_enabled and not gpu.mig_mode_ours
        index = next((each.index for each in found.vfio if each.pci_address == gpu.pci_address), None)
        if cut and str(VfioName(index)) not in held:
            assert str(VfioName(index)) not in {device["name"] for device in pool.devices}


@settings(max_examples=100, deadline=None)
@given(nodes(), FEATURES)
def test_where_nothing_can_be_passed_through_nothing_changes(node, features):
    scanned, held = node
    bare = replace(scanned, vfio=())
    plain = build_pool(bare, node_name="node-1", features=features, mig_mode="dynamic")
    assert build_pool(bare, node_name="node-1", features=features, mig_mode="dynamic", in_use=held) == plain
    assert with_siblings(bare) == bare
