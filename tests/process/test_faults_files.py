"""Faults of files, disks and reboots, against the real process.

Reboots without MIG. Shown elsewhere, on the engine alone: damage of every kind (`unit/prepare/test_prepare_record`),
every disk fault at every call (`unit/prepare/test_prepare_disks`), orphans (`unit/prepare/test_prepare_janitor`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from tests.process.conftest import SOON, Running
from tests.process.harness import DRIVER, wait_until
from tests.process.invariants import check_invariants, published


@pytest.fixture
def mounts():
    """Mount a small tmpfs; gives a function that changes its options."""
    mounted = []

    def mount(path):
        path.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=200", "tmpfs", str(path)],
            check=False,
            capture_output=True,
        )
        if made.returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(path)
        return lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)

    yield mount
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=True)


def started(node, *arguments, **options):
    """Start a daemon and wait until the kubelet has registered it."""
    kubelet = node._kubelets[-1] if node._kubelets else node.kubelet()
    before = kubelet.connection(DRIVER)
    daemon = node.daemon(*arguments, periods=SOON, **options)
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    return Running(node, daemon, kubelet)


def prepared(node):
    """Give the claims that are completely prepared."""
    try:
        return {uid for uid, record in node.read_records().items() if record["state"] == "prepared"}
    except (FileNotFoundError, ValueError):
        return set()  # something was removed, or is damaged, at this moment


def set_aside(node):
    """Give the claims of which a damaged file was kept."""
    return {path.name.partition(".")[0] for path in (node.state_dir / "claims").glob("*.corrupt-*")}


def uid_of(claim):
    return claim["metadata"]["uid"]


def devices(entries):
    assert [entry.error for entry in entries] == [""] * len(entries)
    return [[(d.device_name, tuple(d.cdi_device_ids)) for d in entry.devices] for entry in entries]


def seal(content):
    """Give a record's bytes with the right checksum: over the sorted JSON without it."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}).encode()


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda _data: b"",
    "random": lambda _data: os.urandom(700),
    "flipped": lambda data: data.replace(b'"state":"prepared"', b'"state":"unprepared"'),
    "checksum": lambda data: data.replace(b'"checksum":"', b'"checksum":"0'),
}


@pytest.mark.fault("F8")
def test_damaged_records_are_set_aside_and_rebuilt_and_live_claims_keep_their_devices(node):
    """At start and while the driver runs; each kind of damage, a lost directory, a claim that is gone meanwhile."""
    first = started(node)
    claims = {kind: node.claim(kind, f"gpu-{n}") for n, kind in enumerate([*DAMAGE, "gone", "whole"])}
    before = dict(zip(claims, devices(first.prepare(*claims.values())), strict=True))
    first.daemon.kill()
    for kind, damage in {**DAMAGE, "gone": DAMAGE["truncated"]}.items():
        path = node.record_file(uid_of(claims[kind]))
        path.write_bytes(damage(path.read_bytes()))
    node.delete_claim("gone")
    second = started(node)
    live = {kind: claim for kind, claim in claims.items() if kind != "gone"}
    wanted = {uid_of(claim) for claim in live.values()}
    wait_until(lambda: prepared(node) == wanted and node.records() == wanted, what="all are rebuilt")
    damaged = {uid_of(claims[kind]) for kind in DAMAGE}
    wait_until(lambda: set_aside(node) == damaged, what="the damaged files lie beside the records")
    for kind in DAMAGE:
        events = wait_until(lambda kind=kind: node.told_events(claims[kind]), what=f"the event on {kind}")
        assert {"ClaimRecordLost", "ClaimRecordRebuilt"} & {event["reason"] for event in events}
    rival = node.claim("rival", "gpu-0")
    assert "DRA-DEVICE-HELD" in second.prepare(rival)[0].error
    check_invariants(node, told=["DRA-RECORD-CORRUPT", "DRA-DEVICE-HELD"], noted=["claim_prepared"])
    assert dict(zip(live, devices(second.prepare(*live.values())), strict=True)) == {
        kind: before[kind] for kind in live
    }

    # Under the running driver: one file cut in place, then the whole directory removed.
    victim = node.record_file(uid_of(claims["whole"]))
    victim.write_bytes(victim.read_bytes()[:100])
    wait_until(lambda: prepared(node) == wanted, what="the record is rebuilt under the running driver")
    (node.state_dir / "claims").rename(node.root / "claims-of-before")
    wait_until(lambda: prepared(node) == wanted, what="the directory is back")
    check_invariants(node)
    assert devices(second.prepare(*live.values())) == [before[kind] for kind in live]
    assert second.unprepare(*live.values()) == [""] * len(live)
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])


@pytest.mark.fault("F9")
def test_records_of_other_versions_are_read_kept_or_left_alone(node):
    """Of N-1 (fields missing), of N+1 that N may read (unknown fields stay), of N+1 that N must not touch."""
    first = started(node)
    older, newer, strange = (node.claim(n, f"gpu-{i}") for i, n in enumerate(["older", "newer", "strange"]))
    before = devices(first.prepare(older, newer, strange))
    first.daemon.kill()

    def rewrite(claim, change):
        path = node.record_file(uid_of(claim))
        content = json.loads(path.read_bytes())
        change(content)
        path.write_bytes(seal(content))

    def as_older(content):
        for later in ("readable_from", "consumers", "configs", "cdi"):
            content.pop(later)
        for result in content["results"]:
            result.pop("consumed_capacity")

    def as_newer(content):
        content.update(version=2, readable_from=1, future={"kept": [1, 2]})
        content["results"][0]["nvlink"] = "kept"

    rewrite(older, as_older)
    rewrite(newer, as_newer)
    rewrite(strange, lambda content: content.update(version=9, readable_from=9))
    untouched = node.record_file(uid_of(strange)).read_bytes()
    second = started(node)
    assert devices(second.prepare(older, newer)) == before[:2]
    # A CDI file that is gone makes the driver write the record again; the unknown is still in it.
    node.cdi_file(uid_of(newer)).unlink()
    assert devices(second.prepare(newer)) == before[1:2]
    content = json.loads(node.record_file(uid_of(newer)).read_bytes())
    assert content["future"] == {"kept": [1, 2]}
    assert content["results"][0]["nvlink"] == "kept"
    (refused,) = second.prepare(strange)
    assert "DRA-RECORD-NEWER" in refused.error
    assert "DRA-DEVICE-HELD" in second.prepare(node.claim("rival", "gpu-2"))[0].error
    assert node.record_file(uid_of(strange)).read_bytes() == untouched
    check_invariants(node, told=["DRA-RECORD-NEWER", "DRA-DEVICE-HELD"])
    # What this version writes says that the first version can read it.
    assert content["readable_from"] == 1
    assert second.unprepare(older, newer) == ["", ""]
    assert "DRA-RECORD-NEWER" in second.unprepare(strange)[0]


@pytest.mark.parametrize("where", ["state", "claims", "cdi"])
@pytest.mark.fault("F10", "F11")
def test_a_full_and_a_read_only_disk_are_errors_that_name_the_path_and_pass_without_a_restart(
    node, mounts, where
):
    path = {"state": node.state_dir, "claims": node.state_dir / "claims", "cdi": node.root / "var/run/cdi"}[
        where
    ]
    remount = mounts(path)
    run = started(node)
    node.wait_published()
    kept, claim = node.claim("kept", "gpu-0"), node.claim("c", "gpu-1")
    before = devices(run.prepare(kept))
    with (path / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(b"x" * 1024):
                pass
        except OSError:
            pass
    (full,) = run.prepare(claim)
    assert "DRA-HOST-NO-SPACE" in full.error
    assert str(path) in full.error
    check_invariants(node, told=["DRA-HOST-NO-SPACE"])
    # Only what would be written fails: a prepared claim is answered.
    assert devices(run.prepare(kept)) == before
    (path / "filler").unlink()
    assert devices(run.prepare(claim))
    assert run.unprepare(claim) == [""]

    if where == "state":
        return  # what the driver keeps open there would keep it from turning read-only
    remount("ro")
    (refused,) = run.prepare(claim)
    assert "DRA-HOST-READ-ONLY" in refused.error
    assert str(path) in refused.error
    check_invariants(node, told=["DRA-HOST-READ-ONLY"])
    remount("rw")
    assert devices(run.prepare(claim))
    check_invariants(node)
    assert run.unprepare(claim, kept) == ["", ""]
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])


@pytest.mark.fault("F11")
def test_a_cdi_directory_or_file_removed_by_hand_is_made_again_by_the_next_prepare(clean):
    node = clean.node
    claims = [node.claim(f"cdi-{n}", f"gpu-{n}") for n in range(2)]
    before = devices(clean.prepare(*claims))
    node.cdi_file(uid_of(claims[0])).unlink()
    assert devices(clean.prepare(claims[0])) == before[:1]
    check_invariants(node, clean.daemon)
    shutil.rmtree(node.root / "var/run/cdi")
    assert devices(clean.prepare(*claims)) == before
    check_invariants(node, clean.daemon)
    node.cdi_file(uid_of(claims[1])).write_text("{}")
    assert devices(clean.prepare(claims[1])) == before[1:]
    check_invariants(node, clean.daemon)
    assert clean.unprepare(*claims) == ["", ""]


FOREIGN = {
    "nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n",
    "k8s.compute-domain.nvidia.com-claim_1.yaml": '{"cdiVersion":"0.5.0","kind":"k8s.compute-domain.nvidia.com/claim"}',
    "vendor.example-claim_1.json": '{"cdiVersion":"0.5.0","kind":"vendor.example/net","devices":[]}',
    "notes.txt": "of a person",
}


@pytest.mark.fault("F12", "F23")
def test_what_nobody_wants_is_removed_at_start_and_foreign_files_stay(node):
    """Orphan CDI files, and a claim that was force-deleted while the driver was down."""
    first = started(node)
    gone, live = node.claim("gone", "gpu-0"), node.claim("live", "gpu-1")
    before = devices(first.prepare(gone, live))
    first.daemon.kill()
    node.delete_claim("gone")
    cdi = node.root / "var/run/cdi"
    for name, text in FOREIGN.items():
        (cdi / name).write_text(text)
    orphan = "11111111-2222-4333-8444-555555555555"
    text = node.cdi_file(uid_of(live)).read_text().replace(uid_of(live), orphan).replace("gpu-1", "gpu-5")
    node.cdi_file(orphan).write_text(text)
    second = started(node)
    wait_until(lambda: node.cdi_files() == {uid_of(live)}, what="the orphans are gone")
    wait_until(lambda: node.records() == {uid_of(live)}, what="the deleted claim is released")
    assert {name: (cdi / name).read_text() for name in FOREIGN} == FOREIGN
    events = wait_until(lambda: node.told_events(gone), what="the event on the deleted claim")
    assert "StaleClaimReleased" in {event["reason"] for event in events}
    check_invariants(node, noted=["claim_released"])
    assert devices(second.prepare(live)) == before[1:]
    # The devices of both are free.
    others = [node.claim(f"next-{n}", f"gpu-{n}") for n in (0, 5)]
    assert devices(second.prepare(*others))
    assert second.unprepare(live, *others) == ["", "", ""]


def nodes_of(node, claim):
    spec = json.loads(node.cdi_file(uid_of(claim)).read_text())
    edits = [spec.get("containerEdits", {}), *(device["containerEdits"] for device in spec["devices"])]
    return {entry["path"]: entry.get("major") for edit in edits for entry in edit.get("deviceNodes", ())}


@pytest.mark.fault("F13", "F14")
def test_after_a_reboot_no_stale_device_number_is_used_and_a_lost_gpu_is_told(node):
    """Without MIG: the records of before count for nothing, the slices show the truth."""
    first = started(node)
    kept, lost = node.claim("kept", "gpu-0"), node.claim("lost", "gpu-7")
    before = devices(first.prepare(kept, lost))
    uvm = nodes_of(node, kept)["/dev/nvidia-uvm"]
    first.daemon.kill()
    control = node.machine.control
    control.remove_gpu(7)
    control.reboot()
    assert control.state.majors["nvidia-uvm"] != uvm
    second = started(node)
    wait_until(lambda: len(published(node)) == 7, what="seven GPUs are published")
    assert node.cdi_files() == set()
    assert devices(second.prepare(kept)) == before[:1]
    assert nodes_of(node, kept)["/dev/nvidia-uvm"] == control.state.majors["nvidia-uvm"]
    (failed,) = second.prepare(lost)
    assert "DRA-DEVICE-UNKNOWN" in failed.error
    wait_until(lambda: node.told_events(lost), what="the event on the claim whose GPU is gone")
    assert second.unprepare(lost) == [""]
    check_invariants(node, told=["DRA-DEVICE-UNKNOWN"])
    assert second.unprepare(kept) == [""]
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
