"""A node is taken over from NVIDIA's driver: its claims stay, hold their devices, and can be unprepared; kill -9 safe."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from prepare_fakes import KIND, POOL, Killed, make_claim, opaque, result, uid_of

from dra.api.claim import ClaimRef
from dra.errors import DraError, HostError
from dra.inventory.model import NODE, Inventory, ScanProblem
from dra.prepare.imports.checkpoint import (
    RELEASES,
    Checkpoint,
    CheckpointClaim,
    CheckpointDevice,
    DeviceGroup,
    encode_checkpoint,
)

NVIDIA_SPEC = """---
cdiVersion: 0.5.0
kind: k8s.gpu.nvidia.com/claim
devices:
- name: {name}
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
"""


def gpu(uid, minor, **more):
    cdi = (f"{KIND}={uid}-gpu-{minor}",)
    uuid = f"GPU-{minor:08d}-0000-0000-0000-000000000000"
    return CheckpointDevice("gpu", ("gpu",), POOL, f"gpu-{minor}", cdi, uuid=uuid, **more)


def claim(number, *minors, completed=True, mps="", sliced=None, configs=(), **names):
    uid = uid_of(number)
    results = [result(f"gpu-{minor}") for minor in minors]
    status = make_claim(ClaimRef("default", f"claim-{number}", uid), *results, configs=configs)["status"]
    groups = (DeviceGroup(tuple(gpu(uid, minor) for minor in minors), mps, sliced),) if completed else ()
    return CheckpointClaim(uid, completed, groups, status, **names)


def leave(node, *claims, release="v0.5", boot_id="boot-1"):
    """Leave the node as NVIDIA's driver leaves it."""
    node.state_dir.mkdir(parents=True, exist_ok=True)
    node.cdi_root.mkdir(parents=True, exist_ok=True)
    data = encode_checkpoint(Checkpoint(tuple(claims), boot_id=boot_id), release=release)
    (node.state_dir / "checkpoint.json").write_bytes(data)
    for each in claims:
        for group in each.groups:
            for device in group.devices:
                name = device.cdi_ids[-1].partition("=")[2]
                spec(node, each.uid).write_text(NVIDIA_SPEC.format(name=name))


def spec(node, uid):
    return node.cdi_root / f"k8s.gpu.nvidia.com-claim_{uid}.yaml"


def ref(number, name=True):
    return ClaimRef("default", f"claim-{number}" if name else "", uid_of(number))


def files(node):
    return sorted(path.name for path in node.state_dir.glob("checkpoint.json*"))


@pytest.mark.parametrize("release", RELEASES)
def test_live_claims_stay_hold_their_devices_and_are_unprepared(node, release):
    leave(node, claim(1, 0), claim(2, 1, 2), release=release)
    node.restart()
    assert files(node) == ["checkpoint.json.imported-1"]
    assert {hold.device for hold in node.the_engine.store.holds("boot-1")} == {"gpu-0", "gpu-1", "gpu-2"}
    # Nobody else gets them, and the holder is named by what is known.
    assert node.refused(node.claim(7, "gpu-2")).code == "DRA-DEVICE-HELD"
    # What runs is undisturbed.
    assert "deviceNodes" in spec(node, uid_of(1)).read_text() and spec(node, uid_of(2)).exists()
    # The kubelet ends one without the API server.
    node.api.down = True
    assert node.unprepare(ref(2)) is None
    assert not spec(node, uid_of(2)).exists() and not node.record_file(ref(2)).exists()
    node.api.down = False
    node.prepared(node.claim(7, "gpu-2"))


def test_a_prepare_of_an_imported_claim_is_answered_and_its_spec_becomes_ours(node):
    leave(node, claim(1, 0))
    node.restart()
    (device,) = node.prepared(node.claim(1, "gpu-0"))
    assert (device.device, device.cdi_ids) == ("gpu-0", (f"{KIND}={uid_of(1)}-gpu-0",))
    assert json.loads(spec(node, uid_of(1)).read_text())["kind"] == KIND
    record = node.record(ref(1))
    assert record["claim"]["name"] == "claim-1" and record["imported_from"]["form"] == 2


def test_while_the_driver_is_replaced_an_imported_claim_is_answered_as_it_stands(node):
    leave(node, claim(1, 0))
    node.restart()
    node.claim(1, "gpu-0")
    node.inventory = node.fresh = no_driver()
    assert [device.device for device in node.prepared(ref(1))] == ["gpu-0"]
    spec(node, uid_of(1)).write_text("devices: [\n")
    assert isinstance(node.prepare(ref(1)), DraError)


def no_driver():
    problem = ScanProblem(NODE, "DRA-NVML-DRIVER-NOT-LOADED", "the driver is not loaded", "wait")
    return Inventory(problems=(problem,))


def test_a_slow_api_server_is_no_reason_to_refuse_an_imported_claim(node):
    leave(node, claim(1, 0))
    node.restart()
    node.api.put(make_claim(ref(1), result("gpu-0")))
    node.api.hang()
    assert [device.device for device in node.prepared(ref(1))] == ["gpu-0"]


def test_the_name_of_a_claim_is_found_out_by_its_uid_and_one_that_is_gone_is_released(node):
    leave(node, claim(1, 0), claim(2, 1))
    node.restart()
    node.claim(1, "gpu-0")
    node.api.claims["default", "claim-1"]["metadata"]["name"] = "other"
    node.api.claims["default", "other"] = node.api.claims.pop(("default", "claim-1"))
    janitor = node.janitor()
    assert janitor.sweep().released == [uid_of(2)]
    assert node.record(ref(1))["claim"] == {"namespace": "default", "name": "other", "uid": uid_of(1)}
    assert not spec(node, uid_of(2)).exists() and spec(node, uid_of(1)).exists()
    assert janitor.sweep().released == []


@pytest.mark.parametrize("kill_at", ["first", "second", "import:records-written", "import:retired"])
def test_killed_at_any_step_the_next_start_goes_on(node, kill_at):
    leave(node, claim(1, 0), claim(2, 1))
    steps = {"first": f"import:record-written:{uid_of(1)}", "second": f"import:record-written:{uid_of(2)}"}
    node.kill_at = steps.get(kill_at, kill_at)
    with pytest.raises(Killed):
        node.new_engine()
    node.restart()
    assert files(node) == ["checkpoint.json.imported-1"]
    assert {hold.device for hold in node.the_engine.store.holds("boot-1")} == {"gpu-0", "gpu-1"}
    assert node.unprepare(ref(1)) is None and node.unprepare(ref(2)) is None
    node.restart()
    assert node.files() == []


def test_a_claim_that_is_prepared_here_already_is_not_imported_over(node):
    own = node.prepared(node.claim(1, "gpu-5"))
    leave(node, claim(1, 0))
    node.restart()
    assert node.record(ref(1))["results"][0]["device"] == "gpu-5"
    assert own[0].device == "gpu-5"


def test_a_half_prepared_claim_holds_its_device_until_it_is_unprepared(node):
    leave(node, claim(5, 4, completed=False, name="half", namespace="default"))
    node.restart()
    assert node.record(ref(5))["state"] == "preparing"
    assert node.refused(node.claim(7, "gpu-4")).code == "DRA-DEVICE-HELD"
    assert node.unprepare(ClaimRef("default", "half", uid_of(5))) is None
    node.prepared(node.claim(7, "gpu-4"))


def test_claims_of_an_earlier_boot_hold_nothing_and_their_specs_go(node):
    leave(node, claim(1, 0), boot_id="boot-0")
    node.restart()
    assert not spec(node, uid_of(1)).exists()
    node.prepared(node.claim(7, "gpu-0"))
    assert node.unprepare(ref(1)) is None


def test_a_checkpoint_without_boot_id_counts_for_this_boot(node):
    leave(node, claim(1, 0), release="v25.12")
    node.restart()
    assert node.refused(node.claim(7, "gpu-0")).code == "DRA-DEVICE-HELD"


def test_a_damaged_checkpoint_is_set_aside_and_its_claims_are_rebuilt_from_cdi_files_and_the_api(node):
    leave(node, claim(1, 0), claim(2, 1))
    path = node.state_dir / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-40])
    node.restart()
    assert files(node) == ["checkpoint.json.corrupt-1"]
    node.claim(1, "gpu-0")
    report = node.janitor().sweep()
    assert report.rebuilt == [uid_of(1)] and report.released == [uid_of(2)]
    assert node.record(ref(1))["state"] == "prepared"


def test_while_nvidias_plugin_is_at_work_nothing_is_imported_and_nothing_is_lost(node, monkeypatch):
    monkeypatch.setattr("dra.prepare.imports.takeover.LOCK_WAIT_SECONDS", 0.05)
    leave(node, claim(1, 0))
    node.the_engine = None
    lock = os.open(node.state_dir / "pu.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    engine = node.restart()  # it starts all the same
    assert files(node) == ["checkpoint.json"]
    problem = engine.unprepare([ref(1)])[uid_of(1)]
    assert isinstance(problem, DraError) and problem.code == "DRA-LOCK-TIMEOUT" and problem.retryable
    assert spec(node, uid_of(1)).exists()
    os.close(lock)
    assert engine.unprepare([ref(1)])[uid_of(1)] is None
    assert files(node) == ["checkpoint.json.imported-1"] and not spec(node, uid_of(1)).exists()


def test_a_full_disk_is_retried_and_no_claim_passes_for_unknown(node, monkeypatch):
    leave(node, claim(1, 0), claim(2, 1))
    from dra.prepare.store import RecordStore

    put = RecordStore.put

    def full(self, record, **how):
        if record.ref.uid == uid_of(2):
            raise HostError("DRA-HOST-NO-SPACE", "no space")
        put(self, record, **how)

    monkeypatch.setattr(RecordStore, "put", full)
    node.restart()
    assert files(node) == ["checkpoint.json"]
    assert node.unprepare(ref(2)).code == "DRA-HOST-NO-SPACE"
    monkeypatch.setattr(RecordStore, "put", put)
    assert node.unprepare(ref(2)) is None
    assert files(node) == ["checkpoint.json.imported-1"]
    assert {hold.device for hold in node.the_engine.store.holds("boot-1")} == {"gpu-0"}


def test_of_the_checkpoints_that_were_put_by_the_newest_five_of_a_kind_are_kept(node):
    node.state_dir.mkdir(parents=True, exist_ok=True)
    others = ["checkpoint.json.imported-x", "checkpoint.json.bak"]
    for name in others:
        (node.state_dir / name).write_text("somebody's")
    (node.state_dir / "checkpoint.json.imported-2").mkdir()
    for number in range(9, 12):
        (node.state_dir / f"checkpoint.json.imported-{number}").write_text(str(number))
    for turn in range(6):
        leave(node, claim(turn, turn))
        node.restart()
        (node.state_dir / "checkpoint.json").write_text(f"damaged {turn}")
        node.restart()
    imported = [f"checkpoint.json.imported-{number}" for number in range(13, 18)]
    damaged = [f"checkpoint.json.corrupt-{number}" for number in range(2, 7)]
    assert files(node) == sorted([*others, *imported, *damaged])
    assert (node.state_dir / "checkpoint.json.corrupt-6").read_text() == "damaged 5"
    # The claims of all of them are there.
    assert {hold.device for hold in node.the_engine.store.holds("boot-1")} == {f"gpu-{n}" for n in range(6)}


def test_an_older_checkpoint_that_cannot_be_removed_is_in_nobodys_way(node, monkeypatch):
    node.state_dir.mkdir(parents=True, exist_ok=True)
    for number in range(1, 6):
        (node.state_dir / f"checkpoint.json.imported-{number}").mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dra.prepare.imports.retired.shutil.rmtree", refuse)
    leave(node, claim(1, 0))
    node.restart()
    assert files(node) == [f"checkpoint.json.imported-{number}" for number in range(1, 7)]
    assert {hold.device for hold in node.the_engine.store.holds("boot-1")} == {"gpu-0"}


# -- what unprepare undoes


class Deployments:
    def __init__(self, node):
        self.deleted = []
        node.ports["delete_deployment"] = self.deleted.append


def mps_claim(node, number=3, minor=3):
    config = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": "MPS"},
    }
    each = claim(number, minor, mps=f"{uid_of(number)}-0a1b2", configs=[opaque(config)])
    leave(node, each)
    folder = node.state_dir / "mps" / f"{uid_of(number)}-0a1b2"
    for name in ("pipe", "shm", "log"):
        (folder / name).mkdir(parents=True)
    return folder


def test_an_mps_daemon_of_nvidias_driver_serves_until_its_claim_ends(node):
    deployments = Deployments(node)
    folder = mps_claim(node)
    node.restart()
    # Prepared again, as after a restart of the kubelet: nothing may take the GPU from its containers.
    node.api.put(make_claim(ref(3), result("gpu-3")))
    before = spec(node, uid_of(3)).read_text()
    record = node.record(ref(3))
    node.api.claims["default", "claim-3"]["status"] = {
        "allocation": {"devices": {"results": [result("gpu-3")], "config": [
            opaque({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "MPS"}})]}},
        "reservedFor": [{"resource": "pods", "name": "pod-a", "uid": "uid-of-pod-a"}],
    }  # fmt: skip
    (device,) = node.prepared(ref(3))
    assert device.cdi_ids == (f"{KIND}={uid_of(3)}-gpu-3",)
    assert spec(node, uid_of(3)).read_text() == before and node.record(ref(3)) == record
    assert folder.is_dir() and deployments.deleted == []
    assert node.unprepare(ref(3)) is None
    assert deployments.deleted == [f"mps-control-daemon-{uid_of(3)}-0a1b2"]
    assert not folder.exists() and not spec(node, uid_of(3)).exists()


def test_without_the_option_the_deployment_is_left_and_the_directory_goes(node):
    folder = mps_claim(node)
    node.restart()
    assert node.unprepare(ref(3)) is None
    assert not folder.exists()


def test_a_deployment_that_cannot_be_deleted_does_not_keep_the_pod(node):
    def refuse(name):
        raise HostError("DRA-API-FORBIDDEN", "no right")

    node.ports["delete_deployment"] = refuse
    mps_claim(node)
    node.restart()
    assert node.unprepare(ref(3)) is None


def test_nothing_outside_of_the_mps_directory_is_ever_removed(node):
    from dra.errors import RecordError
    from dra.prepare.imports import revive_foreign_mps

    for bad in ("../../claims", "", "x", f"{uid_of(1)}-zz/../..", f"{uid_of(1)}"):
        with pytest.raises(ValueError, match="no id of a daemon"):
            revive_foreign_mps({"id": bad}, Path(node.state_dir), None)
    assert RecordError is not None


def mig_device(uid, instances=(7, 0)):
    name = "gpu-2-mig-1g10gb-19-6"
    return CheckpointDevice(
        "mig", ("mig",), POOL, name, (f"{KIND}={uid}-{name}",), uuid="MIG-x", parent_uuid="GPU-2", instances=instances
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [True, False])
def test_partitions_are_ours_to_destroy_only_where_nvidias_driver_made_them(node, dynamic):
    uid = uid_of(4)
    status = make_claim(ref(4), result("gpu-2-mig-1g10gb-19-6", request="mig"))["status"]
    each = CheckpointClaim(uid, True, (DeviceGroup((mig_device(uid),)),), status)
    leave(node, each)
    destroyed = []

    class Control:
        def destroy(self, gpu, partition, **place):
            destroyed.append((gpu, partition.uuid, place))
            return True

        def leave_mode(self, gpu):
            destroyed.append((gpu, "mode"))

    node.ports["mig"] = Control()
    node.settings |= {"create_partitions": True, "imported_partitions_are_ours": dynamic}
    node.restart()
    assert node.unprepare(ref(4)) is None
    expected = [("GPU-2", "MIG-x", {"profile_id": 19, "start": 6}), ("GPU-2", "mode")]
    assert destroyed == (expected if dynamic else [])


def test_names_of_mig_devices_of_old_releases_stand_for_the_same_placement(node):
    from dra.inventory.names import MigName, is_profile, parse_device_name

    name = parse_device_name("gpu-2-mig-19-6-1")
    assert name == MigName(2, "", 19, 6)
    assert is_profile(name, "1g.10gb") and is_profile(parse_device_name("gpu-0-mig-1g10gb-19-0"), "1g.10gb")
    assert not is_profile(parse_device_name("gpu-0-mig-1g10gb-19-0"), "1g.5gb")
