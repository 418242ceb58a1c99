"""Machine profiles."""

from __future__ import annotations

import re
import uuid

import pytest

from dra.sim.profiles import PROFILES, cuda_version_of, machine_profile

ALL = sorted(PROFILES)


def test_the_machines_of_the_design_are_there():
    counts = {name: len(PROFILES[name].gpus) for name in ALL}
    expected = {
        "dgx-a100": 8, "dgx-h100": 8, "hgx-h200": 8, "hgx-b200": 8, "gb200": 4, "l40s-x4": 4, "t4-x1": 1,
        "a100-l4": 4, "a2-megagpu-16g": 16,
    }  # fmt: skip
    assert expected.items() <= counts.items()


@pytest.mark.parametrize("name", ALL)
def test_nothing_in_a_machine_is_there_twice(name):
    gpus = PROFILES[name].gpus
    for what in ("uuid", "serial", "minor", "pci_address"):
        assert len({getattr(gpu, what) for gpu in gpus}) == len(gpus), what
    nodes = [gpu.drm for gpu in gpus if gpu.drm]
    assert len(set(nodes)) == len(nodes)


def test_no_two_machines_share_a_gpu():
    uuids = [gpu.uuid for profile in PROFILES.values() for gpu in profile.gpus]
    assert len(set(uuids)) == len(uuids)


@pytest.mark.parametrize("name", ALL)
def test_a_machine_is_well_formed(name):
    profile = PROFILES[name]
    assert profile.cuda_version == cuda_version_of(profile.driver_version)
    for gpu in profile.gpus:
        assert str(uuid.UUID(gpu.uuid.removeprefix("GPU-"))) == gpu.uuid.removeprefix("GPU-")
        assert re.fullmatch(r"pci[0-9a-f]{4}:[0-9a-f]{2}", gpu.root)
        assert int(gpu.root[3:7], 16) == gpu.pci_address.domain
        assert -1 <= gpu.numa_node < profile.numa_nodes


def test_one_machine_has_minors_that_are_not_the_index_and_one_a_version_with_a_leading_zero():
    mixed = sorted(PROFILES["a100-l4"].gpus, key=lambda gpu: gpu.pci_address)
    assert [gpu.minor for gpu in mixed] == [2, 0, 3, 1]
    assert PROFILES["t4-x1"].driver_version == "535.104.05"


def test_uuids_stay_and_a_salt_gives_other_boards():
    assert machine_profile("dgx-h100").gpus[0].uuid == "GPU-352a5eca-8ec3-5b7c-983e-2fdc0c4d156c"
    first, second = machine_profile("t4-x1", salt="node-1"), machine_profile("t4-x1", salt="node-2")
    assert len({first.gpus[0].uuid, second.gpus[0].uuid, machine_profile("t4-x1").gpus[0].uuid}) == 3
    assert machine_profile("t4-x1", salt="node-1") == first


def test_an_unknown_machine_is_refused_with_those_there_are():
    with pytest.raises(KeyError, match=r"cray-1.*dgx-h100"):
        machine_profile("cray-1")
