"""Whatever NVML says, a node publishes a valid pool and loses no GPU."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dra.inventory.diff import diff
from dra.inventory.model import Gpu, Inventory, MigDevice, MigProfile
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.taints import Taint
from dra.slices.validate import validate_slices
from dra.values import PciAddress
from tests.examples import examples

TEXT = st.text(max_size=90)
COUNT = st.integers(0, 2**70)
ADDRESS = st.builds(
    PciAddress, st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7)
)
# A profile's name as drivers of some day may write it.
PROFILE_NAME = st.text("0123456789gb.+-,meAll_é ", min_size=1, max_size=24)
PROFILE = st.builds(
    MigProfile,
    name=PROFILE_NAME, profile_id=st.integers(0, 10**6), memory_mib=COUNT, multiprocessors=COUNT, copy_engines=COUNT,
    decoders=COUNT, encoders=COUNT, jpeg_engines=COUNT, ofa_engines=COUNT, placements=st.just(()),
)  # fmt: skip
MIG = st.builds(
    MigDevice,
    uuid=TEXT, profile=PROFILE, gpu_instance_id=COUNT, compute_instance_id=COUNT, start=st.integers(0, 63),
    size=st.integers(0, 40),
)  # fmt: skip
GPU = st.builds(
    Gpu,
    minor=st.integers(0, 10**6),
    uuid=TEXT,
    pci_address=ADDRESS,
    product_name=TEXT,
    brand=TEXT,
    architecture=TEXT,
    compute_capability=st.tuples(COUNT, COUNT),
    memory_bytes=st.none() | COUNT,
    addressing_mode=st.none() | TEXT,
    numa_node=st.none() | st.integers(0, 2**70),
    pcie_root=st.none() | TEXT,
    mig_enabled=st.booleans(),
    mig_devices=st.lists(MIG, max_size=4).map(tuple),
    unusable=st.sampled_from(["", "DRA-NVML-GPU-LOST", "DRA-NVML-HUNG"]),
)
INVENTORY = st.builds(
    Inventory,
    driver_version=TEXT | st.from_regex(r"\d{1,25}(\.\d{1,25}){0,4}", fullmatch=True),
    cuda_version=st.none() | st.tuples(COUNT, COUNT),
    gpus=st.lists(GPU, max_size=6, unique_by=lambda gpu: gpu.minor).map(tuple),
)
TAINT = st.builds(
    Taint,
    key=TEXT | st.just("gpu.nvidia.com/xid"),
    effect=st.sampled_from(["NoSchedule", "NoExecute", "None"]),
    value=TEXT | st.just("79"),
)
FEATURES = st.integers(32, 37).map(lambda minor: ServerFeatures.of_version(1, minor))


@st.composite
def nodes(draw):
    inventory = draw(INVENTORY)
    names = [f"gpu-{gpu.minor}" for gpu in inventory.gpus]
    keys = st.sampled_from(names) if names else st.nothing()
    taints = draw(st.dictionaries(keys, st.lists(TAINT, max_size=20).map(tuple), max_size=3)) if names else {}
    return inventory, taints


def build(inventory, features, taints=None):
    return build_pool(inventory, node_name="node-1", features=features, taints=taints)


@settings(max_examples=examples(60))
@given(nodes(), FEATURES)
def test_the_pool_is_always_valid(node, features):
    inventory, taints = node
    made = build(inventory, features, taints)
    specs = made.specs(generation=1)
    assert validate_slices(specs) == []
    json.dumps(specs).encode()
    if not features.device_taints:
        assert not any("taints" in device for device in made.devices)


@settings(max_examples=examples(50))
@given(nodes())
def test_every_whole_gpu_is_listed_whatever_its_facts(node):
    inventory, taints = node
    made = build(inventory, ServerFeatures.of_version(1, 36), taints)
    listed = {device["name"] for device in made.devices}
    for gpu in inventory.gpus:
        if not gpu.mig_enabled:
            assert f"gpu-{gpu.minor}" in listed


@settings(max_examples=examples(50))
@given(nodes(), FEATURES)
def test_every_gpu_that_is_not_listed_is_spoken_of(node, features):
    inventory, taints = node
    made = build(inventory, features, taints)
    known = {device["name"] for device in made.devices} | {problem.device for problem in made.problems}
    assert {f"gpu-{gpu.minor}" for gpu in inventory.gpus if not gpu.mig_enabled} <= known


@settings(max_examples=examples(50))
@given(nodes(), FEATURES, st.randoms(use_true_random=False))
def test_the_same_facts_give_the_same_pool(node, features, shuffler):
    inventory, taints = node
    gpus = list(inventory.gpus)
    shuffler.shuffle(gpus)
    assert build(inventory, features, taints) == build(replace(inventory, gpus=tuple(gpus)), features, taints)


@settings(max_examples=examples(50))
@given(INVENTORY, INVENTORY)
def test_a_difference_is_empty_exactly_for_equal_inventories(one, other):
    assert not diff(one, one)
    if {gpu.uuid for gpu in one.gpus} != {gpu.uuid for gpu in other.gpus}:
        assert diff(one, other)
    there, back = diff(one, other), diff(other, one)
    assert (there.added, there.removed) == (back.removed, back.added)
