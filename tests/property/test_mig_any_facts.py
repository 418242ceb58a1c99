"""Whatever NVML says about MIG profiles, a node that offers partitions on demand publishes a valid pool."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dra.inventory.model import MigProfile
from dra.slices.features import ServerFeatures
from dra.slices.pool import build_pool
from dra.slices.validate import validate_slices
from tests.examples import examples
from tests.property.test_slices_any_facts import COUNT, INVENTORY, PROFILE_NAME

PROFILE = st.builds(
    MigProfile,
    name=PROFILE_NAME, profile_id=st.integers(0, 200), memory_mib=COUNT, multiprocessors=COUNT, copy_engines=COUNT,
    decoders=COUNT, encoders=COUNT, jpeg_engines=COUNT, ofa_engines=COUNT,
    placements=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=16, unique=True).map(tuple),
)  # fmt: skip
OFFER = st.lists(PROFILE, max_size=6).map(tuple)
FEATURES = st.builds(
    lambda minor, on: replace(ServerFeatures.of_version(1, minor), partitionable=on),
    st.integers(33, 37),
    st.booleans(),
)


@st.composite
def nodes(draw):
    inventory = draw(INVENTORY)
    gpus = [
        replace(
            gpu,
            mig_capable=True,
            mig_profiles=draw(OFFER),
            compute_capability=(draw(st.integers(8, 10)), 0),
            mig_devices=tuple(replace(mig, ours=draw(st.booleans())) for mig in gpu.mig_devices),
            mig_mode_ours=draw(st.booleans()),
        )
        for gpu in inventory.gpus
    ]
    return replace(inventory, gpus=tuple(gpus))


@settings(max_examples=examples(60))
@given(nodes(), FEATURES, st.sampled_from(["dynamic", "static", "none"]))
def test_the_pool_is_always_valid(inventory, features, mig_mode):
    made = build_pool(inventory, node_name="node-1", features=features, mig_mode=mig_mode)
    assert validate_slices(made.specs(generation=1), counters_apart=features.counters_apart) == []
    assert "DRA-SLICE-INVALID" not in {problem.code for problem in made.problems}
    if not features.partitionable:
        assert not any(part.shared_counters for part in made.slices)


@settings(max_examples=examples(50))
@given(nodes(), FEATURES)
def test_every_gpu_that_can_be_had_whole_is_listed_and_last_of_its_gpu(inventory, features):
    if not features.device_taints:
        inventory = replace(inventory, gpus=tuple(replace(gpu, unusable="") for gpu in inventory.gpus))
    made = build_pool(inventory, node_name="node-1", features=features, mig_mode="dynamic")
    listed = [device["name"] for device in made.devices]
    for gpu in inventory.gpus:
        name = f"gpu-{gpu.minor}"
        if gpu.mig_enabled:
            continue
        assert name in listed
        assert not any(other.startswith(f"{name}-") for other in listed[listed.index(name) :])
