"""Claims of GPUs that are passed through, taken over from NVIDIA's driver and given back to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from passthrough_node import PassthroughNode
from prepare_fakes import KIND, POOL, make_claim, result, uid_of

from dra.api.claim import ClaimRef
from dra.prepare.imports.checkpoint import (
    Checkpoint,
    CheckpointClaim,
    CheckpointDevice,
    DeviceGroup,
    encode_checkpoint,
    parse_checkpoint,
)
from dra.prepare.imports.export import export_records
from dra.slices.passthrough import vfio_uuid

RELEASES = ("v25.12", "v0.4", "v0.5")


@pytest.fixture
def node(tmp_path):
    return PassthroughNode(tmp_path)


def leave(node, number, index, *, release="v0.5", completed=True):
    """Leave a claim of one function as NVIDIA's driver leaves it."""
    ref = ClaimRef("default", f"claim-{number}", uid_of(number))
    device = f"gpu-vfio-{index}"
    node.api.put(make_claim(ref, result(device)))
    address = node.whole.gpus[index].pci_address
    told = CheckpointDevice(
        "vfio", ("gpu",), POOL, device, (f"{KIND}={ref.uid}-{device}",),
        uuid=vfio_uuid(address), pci_bus_id=str(address),
    )  # fmt: skip
    groups = (DeviceGroup((told,)),) if completed else ()
    claim = CheckpointClaim(ref.uid, completed, groups, make_claim(ref, result(device))["status"])
    data = encode_checkpoint(Checkpoint((claim,), boot_id=node.boot_id), release=release)
    (node.state_dir / "checkpoint.json").write_bytes(data)
    node.cdi_file(ref).write_text(
        f"cdiVersion: 0.5.0\nkind: {KIND}\ndevices:\n- name: {ref.uid}-{device}\n  containerEdits:\n"
        f"    deviceNodes:\n    - path: /dev/vfio/2{index}\n"
    )
    node.bind_by_hand(index, "vfio-pci")
    return ref


@pytest.fixture(autouse=True)
def folders(node):
    node.cdi_root.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("release", RELEASES)
def test_a_claim_is_held_and_its_function_goes_back_to_nvidia_with_it(node, release):
    ref = leave(node, 1, 2, release=release)
    node.restart()
    assert node.refused(node.claim(2, "gpu-vfio-2")).code == "DRA-DEVICE-HELD"
    assert node.unprepare(ref) is None
    # NVIDIA's own driver switches it on too.
    assert node.hardware.persistence == {node.address(2): True}
    assert node.is_as_before()


def test_a_claim_that_goes_on_is_prepared_again_over_what_is_there(node):
    ref = leave(node, 1, 2)
    node.restart()
    writes = list(node.kernel.writes)
    node.prepared(ref)
    assert node.kernel.writes == writes
    assert node.nodes(ref)["gpu-vfio-2"] == ["/dev/vfio/22"]
    assert node.unprepare(ref) is None
    assert node.is_as_before()


@pytest.mark.parametrize("finish", ["prepare", "unprepare"])
def test_one_that_their_driver_had_only_begun_is_finished_or_undone(node, finish):
    ref = leave(node, 1, 2, completed=False)
    node.restart()
    if finish == "prepare":
        node.prepared(ref)
        node.look()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_a_device_that_is_not_on_the_bus_keeps_no_claim_from_being_taken_over(node):
    ref = leave(node, 1, 2, release="v25.12")
    text = (node.state_dir / "checkpoint.json").read_text().replace("gpu-vfio-2", "gpu-vfio-9")
    inner = json.loads(text)
    claims = parse_checkpoint((node.state_dir / "checkpoint.json").read_bytes()).claims
    (device,) = claims[0].groups[0].devices
    odd = replace(
        claims[0],
        groups=(DeviceGroup((replace(device, device="gpu-vfio-9"),)),),
        status=inner["v2"]["preparedClaims"][ref.uid]["status"],
    )
    data = encode_checkpoint(Checkpoint((odd,), boot_id=node.boot_id), release="v25.12")
    (node.state_dir / "checkpoint.json").write_bytes(data)
    node.restart()
    assert [entry["kind"] for entry in node.record(ref)["effects"]] == ["cdi-file"]
    assert node.unprepare(ref) is None


@pytest.mark.parametrize("release", RELEASES)
def test_the_way_back_has_the_form_that_their_driver_writes(node, release):
    ref = leave(node, 1, 2, release=release)
    theirs = (node.state_dir / "checkpoint.json").read_bytes()
    node.restart()
    found = exported(node, release)
    assert found.refused == ()
    ours = found.checkpoint
    (device,) = _devices(encode_checkpoint(ours, release=release), ref)
    assert [device] == _devices(theirs, ref)
    # Source: PreparedDevice and VfioDeviceInfo of the releases.
    assert (device["gpu"], device["mig"]) == (None, None)
    place = {} if release == "v25.12" else {"pciBusID": node.address(2)}
    assert device["vfio"]["info"] == {"uuid": vfio_uuid(node.whole.gpus[2].pci_address), **place}
    assert device["vfio"]["device"]["DeviceName"] == "gpu-vfio-2"


def _devices(data, ref):
    return json.loads(data)["v2"]["preparedClaims"][ref.uid]["preparedDevices"][0]["devices"]


def exported(node, release="v0.5"):
    return export_records(node.the_engine.store.records(), node.look(), boot_id=node.boot_id, release=release)


def test_what_their_driver_would_not_give_back_as_it_was_is_refused(node):
    node.bind_by_hand(1, "vfio-pci")
    node.prepared(node.claim(1, "gpu-vfio-1"))
    node.prepared(node.claim(2, "gpu-vfio-2"))
    found = exported(node)
    assert found.claims == (uid_of(2),)
    ((claim, why),) = found.refused
    assert (claim, "gpu-vfio-1 was bound to vfio-pci before" in why) == ("default/claim-1", True)
    for release in ("v25.3", "v25.8"):
        found = exported(node, release)
        assert found.claims == ()
        assert all(f"which {release} does not know" in why for _, why in found.refused)


def test_a_function_that_is_only_monitored_goes_into_it_too(node):
    node.prepared(node.claim(1, result("gpu-vfio-3", adminAccess=True)))
    (claim,) = exported(node).checkpoint.claims
    (device,) = claim.groups[0].devices
    assert (device.kind, device.pci_bus_id) == ("vfio", node.address(3))
