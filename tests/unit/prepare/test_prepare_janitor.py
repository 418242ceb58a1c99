"""What nobody unprepares is released; what somebody needs is left alone."""

from __future__ import annotations

import os
import threading
import time

import pytest
from prepare_fakes import Killed, make_claim, make_inventory, result, uid_of, wait_until

from dra.api.claim import ClaimRef
from dra.errors import KubeError
from dra.prepare import steps
from dra.prepare.record import decode_record


def test_a_claim_that_is_still_wanted_is_left_alone(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    report = node.janitor().sweep()
    assert (report.released, report.waiting, report.rebuilt) == ([], [], [])
    assert node.record(ref)["state"] == "prepared"
    assert node.cdi_file(ref).exists()
    assert node.notices == []


def gone(node, ref):
    node.api.delete(ref)


def replaced(node, ref):
    node.api.put(make_claim(ClaimRef(ref.namespace, ref.name, uid_of(77)), result("gpu-5")))


def deallocated(node, ref):
    node.api.put({**make_claim(ref), "status": {}})


def moved(node, ref):
    node.api.put(make_claim(ref, result("gpu-0", pool="node-b")))


@pytest.mark.parametrize("change", [gone, replaced, deallocated, moved])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_claim_that_is_no_longer_ours_is_released_by_the_next_sweep_with_an_event(node, change, restarted):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    change(node, ref)
    if restarted:
        node.restart()

    assert node.janitor().sweep().released == [ref.uid]
    assert node.files() == []
    (notice,) = node.notices
    assert (notice.ref, notice.reason, notice.warning) == (ref, "StaleClaimReleased", False)
    node.prepared(node.claim(2, "gpu-0"))


def test_a_claim_whose_devices_are_in_use_is_released_once_they_are_not(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.api.delete(ref)
    node.in_use.add(ref.uid)
    janitor = node.janitor()
    for _ in range(3):
        assert janitor.sweep().waiting == [ref.uid]
        node.now += 60
    assert [notice.reason for notice in node.notices] == ["StaleClaimInUse"]
    assert node.cdi_file(ref).exists()

    node.in_use.clear()
    assert janitor.sweep().released == [ref.uid]


@pytest.mark.fault("F22")
def test_a_claim_whose_devices_stay_in_use_is_released_after_the_grace_with_a_warning(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.api.delete(ref)
    node.in_use.add(ref.uid)
    janitor = node.janitor(grace_seconds=600)
    janitor.sweep()
    node.now += 599
    assert janitor.sweep().released == []
    node.now += 1
    assert janitor.sweep().released == [ref.uid]
    warned = [notice for notice in node.notices if notice.warning]
    assert "although processes still use them" in warned[-1].message


def test_a_claim_that_no_pod_reserves_is_kept_until_the_kubelet_had_its_turn(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.api.put(make_claim(ref, result("gpu-0"), pods=()))
    janitor = node.janitor()
    janitor.sweep()
    node.now += 149
    assert janitor.sweep().waiting == [ref.uid]
    node.now += 1
    assert janitor.sweep().released == [ref.uid]


def test_a_claim_that_is_reserved_again_starts_its_time_anew(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    janitor = node.janitor()
    for _ in range(3):
        node.api.put(make_claim(ref, result("gpu-0"), pods=()))
        assert janitor.sweep().released == []
        node.now += 149
        assert janitor.sweep().released == []
        node.api.put(make_claim(ref, result("gpu-0")))
        assert janitor.sweep().waiting == []
        node.now += 149


def test_an_api_that_is_down_releases_nothing_and_costs_one_question(node):
    refs = [node.claim(n, f"gpu-{n}") for n in range(3)]
    for ref in refs:
        node.prepared(ref)
    node.api.down = True
    before = node.api.gets.total()
    report = node.janitor().sweep()
    assert not report.api_answered
    assert report.released == []
    assert node.api.gets.total() == before + 1
    assert all(node.cdi_file(ref).exists() for ref in refs)


def test_one_claim_that_the_api_refuses_to_give_does_not_keep_others_from_being_swept(node):
    odd, stale = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    node.prepared(odd)
    node.prepared(stale)
    node.api.delete(stale)
    get = node.api.get

    def refuse(namespace, name, timeout_seconds):
        if name == odd.name:
            raise KubeError("DRA-KUBE-FORBIDDEN", "not allowed", status=403)
        return get(namespace, name, timeout_seconds)

    node.api.get = refuse
    assert node.janitor().sweep().released == [stale.uid]
    assert node.cdi_file(odd).exists()


def test_a_claim_prepared_again_while_it_is_judged_is_not_released(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    record = decode_record(node.record_file(ref).read_bytes(), uid=ref.uid)
    node.claim(1, "gpu-1")
    node.prepared(ref)
    assert not node.the_engine.unprepare_if(ref.uid, record, "judged too late")
    assert node.cdi_file(ref).exists()


# -- files ----------------------------------------------------------------------------------------------------


def test_orphan_specs_of_ours_go_and_those_of_others_stay(node):
    node.cdi_root.mkdir(exist_ok=True)
    orphan = ClaimRef("default", "x", uid_of(9))
    node.prepared(node.claim(9, "gpu-0", name="x"))
    node.record_file(orphan).unlink()
    node.api.delete(orphan)
    foreign = ["nvidia.yaml", "k8s.gpu.example.com-claim_1.yaml", "k8s.gpu.nvidia.com-device_base.yaml"]
    for name in foreign:
        (node.cdi_root / name).write_text("{}")
    lookalike = node.cdi_root / f"k8s.gpu.nvidia.com-claim_{uid_of(8)}.yaml"
    lookalike.write_text("kind: somebody.else/claim\n")
    node.restart()
    node.janitor().sweep()
    assert not node.cdi_file(orphan).exists()
    assert sorted(path.name for path in node.cdi_root.iterdir()) == sorted([*foreign, lookalike.name])


def test_a_spec_without_a_record_whose_claim_lives_gets_its_record_back(node):
    """The state directory was lost while pods run."""
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    node.record_file(ref).unlink()
    node.restart()
    janitor = node.janitor()
    node.api.down = True
    janitor.sweep()
    assert node.cdi_file(ref).exists()
    assert node.refused(node.claim(2, "gpu-0")).code == "DRA-KUBE-UNREACHABLE"
    node.api.down = False
    assert node.refused(node.claim(2, "gpu-0")).code == "DRA-DEVICE-HELD"
    assert janitor.sweep().rebuilt == [ref.uid]
    assert node.prepared(ref) == first


def test_a_lost_record_whose_claim_is_gone_is_kept_while_its_device_is_in_use(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.record_file(ref).write_bytes(b"")
    node.api.delete(ref)
    node.in_use.add(ref.uid)
    node.restart()
    janitor = node.janitor()
    assert janitor.sweep().waiting == [ref.uid]
    node.in_use.clear()
    assert janitor.sweep().released == [ref.uid]
    assert node.files() == []


def test_a_garbled_name_in_a_lost_record_does_not_get_a_live_claim_released(node):
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    data = node.record_file(ref).read_bytes().replace(b'"claim-1"', b'"claim-X"')
    node.record_file(ref).write_bytes(data)
    node.restart()
    assert node.janitor().sweep().rebuilt == [ref.uid]
    assert node.prepared(ref) == first


def test_specs_of_claims_that_nvidias_driver_prepared_are_left_alone(node):
    uid = uid_of(5)
    (node.state_dir / "checkpoint.json").write_text(f'{{"v2": {{"preparedClaims": {{"{uid}": {{}}}}}}}}')
    node.cdi_root.mkdir(exist_ok=True)
    spec = node.cdi_root / f"k8s.gpu.nvidia.com-claim_{uid}.yaml"
    spec.write_text(f"kind: k8s.gpu.nvidia.com/claim\ndevices:\n- name: {uid}-gpu-0\n")
    node.janitor().sweep()
    assert spec.exists()
    assert node.notices == []


@pytest.mark.fault("F12", "F42")
def test_leftovers_of_dead_writes_go_and_young_ones_stay_whatever_the_time_of_day(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    old = [
        node.state_dir / "claims" / f".{ref.uid}.json.0123456789ab.dra-tmp",
        node.cdi_root / f".k8s.gpu.nvidia.com-claim_{ref.uid}.yaml.0123456789ab.dra-tmp",
    ]
    at_work = node.state_dir / "claims" / f".{ref.uid}.json.cccccccccccc.dra-tmp"
    young = node.state_dir / "claims" / f".{ref.uid}.json.ba9876543210.dra-tmp"
    foreign = node.cdi_root / ".nvidia.yaml.0123456789ab.dra-tmp"
    for path in (*old, at_work, foreign):
        path.write_text("half")
    janitor = node.janitor()
    janitor.sweep()
    # By the time of day all are hours old: the clock was set.
    past = time.time() - 7200
    node.now += 59
    at_work.write_text("whole")
    for path in (at_work, young):
        path.write_text("half")
        os.utime(path, (past, past))
    janitor.sweep()
    assert all(path.exists() for path in (*old, at_work, young, foreign))
    node.now += 1
    janitor.sweep()
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (at_work, young, foreign))
    node.now += 59
    janitor.sweep()
    assert not any(path.exists() for path in (at_work, young))
    assert foreign.exists()


# -- reboot ---------------------------------------------------------------------------------------------------


def test_after_a_reboot_stale_records_go_whatever_uses_the_gpu_and_live_ones_stay(node):
    live, stale = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    first = node.prepared(live)
    node.prepared(stale)
    node.api.delete(stale)
    node.reboot()
    node.in_use.add(stale.uid)
    assert node.janitor().sweep().released == [stale.uid]
    assert node.record(live)["boot_id"] == "boot-1"
    assert node.prepared(live) == first
    node.check_invariants()


# -- the thread -----------------------------------------------------------------------------------------------


def test_the_thread_sweeps_at_start_and_on_request_and_survives_a_bug(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.api.delete(ref)
    janitor = node.janitor(interval_seconds=3600)
    janitor.start()
    wait_until(lambda: node.files() == [])

    again = node.claim(2, "gpu-0")
    node.prepared(again)
    get, failed = node.api.get, threading.Event()

    def bug(*args, **more):
        node.api.get = get
        failed.set()
        raise ZeroDivisionError

    node.api.get = bug
    janitor.request()
    assert failed.wait(60)
    node.api.delete(again)
    janitor.request()
    wait_until(lambda: node.files() == [])
    janitor.stop()
    assert not janitor._thread.is_alive()


def test_a_refused_second_holder_makes_the_stale_first_one_go(node):
    first = node.claim(1, "gpu-0")
    node.prepared(first)
    node.api.delete(first)
    second = node.claim(2, "gpu-0")
    janitor = node.janitor(interval_seconds=3600)
    swept = []
    node.ports = {"conflict": lambda uid: swept.append(uid) or janitor.request(uid)}
    node.the_engine = node.new_engine()
    janitor = node.janitor(interval_seconds=3600)
    assert node.refused(second).code == "DRA-DEVICE-HELD"
    assert swept == [first.uid]
    janitor.start()
    wait_until(lambda: not node.record_file(first).exists())
    node.prepared(second)
    janitor.stop()


@pytest.mark.parametrize("step", steps.unprepare_steps())
def test_a_release_killed_anywhere_is_finished_by_the_next_sweep(node, step):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.api.delete(ref)
    node.kill_at = step
    with pytest.raises(Killed):
        node.janitor().sweep()
    node.restart()
    node.janitor().sweep()
    assert node.files() == []


def test_a_cdi_spec_that_somebody_removed_is_written_again_without_the_api(node):
    ref = node.claim(1, "gpu-0", "gpu-1")
    node.prepared(ref)
    before, record = node.cdi_file(ref).read_bytes(), node.record(ref)
    node.cdi_file(ref).unlink()
    node.api.down = True
    assert node.janitor().restore_specs() == 1
    assert node.cdi_file(ref).read_bytes() == before
    assert node.record(ref)["state"] == record["state"]
    assert node.janitor().restore_specs() == 0


def test_the_spec_of_a_claim_that_was_unprepared_meanwhile_is_not_written(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    (record,) = node.the_engine.store.records()
    node.unprepare(ref)
    assert node.the_engine.restore_spec(record) is False
    assert not node.cdi_file(ref).exists()


def test_the_spec_of_a_claim_of_an_earlier_boot_is_left_to_the_next_prepare(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.reboot()
    assert node.janitor().restore_specs() == 0
    assert not node.cdi_file(ref).exists()


def test_one_spec_that_cannot_be_written_does_not_keep_the_others_away(node):
    lost, kept = node.claim(1, "gpu-7"), node.claim(2, "gpu-0")
    for ref in (lost, kept):
        node.prepared(ref)
        node.cdi_file(ref).unlink()
    node.inventory = node.fresh = make_inventory(7)
    assert node.janitor().restore_specs() == 1
    assert node.cdi_file(kept).exists()
    assert not node.cdi_file(lost).exists()
