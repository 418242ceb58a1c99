"""Partitions made for claims by the real daemon: killed on the way, in use, and many at once with a slow driver."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dra.sim.kubelet import PrepareError, UnprepareError
from dra.sim.tree.proc import compute_instance_minor, gpu_instance_minor
from tests.process.harness import DRIVER, wait_until
from tests.process.invariants import published


def layout(node) -> list[tuple[int, int, int]]:
    """What the hardware has: GPU, first memory slice, compute instances."""
    slots = zip(node.machine.profile.gpus, node.machine.control.state.gpus, strict=True)
    return sorted((slot.minor, i.start, len(i.computes)) for slot, gpu in slots for i in gpu.instances)


def modes(node) -> list[int]:
    return [gpu.mig_current for gpu in node.machine.control.state.gpus]


def is_clean(node) -> bool:
    leftovers = (node.records(), node.cdi_files(), node.leftovers())
    return layout(node) == [] and not any(modes(node)) and leftovers == (set(), set(), [])


@pytest.mark.parametrize(
    "step", ["prepare:record-written", "prepare:effect-applied:1", "prepare:effect-applied:2"]
)
@pytest.mark.fault("F6")
def test_killed_while_a_partition_is_made(node, step):
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2-mig-2g20gb-14-2"))
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    view = kubelet.run_pod(pod).views["main"]
    assert view.gpus == (2,)
    assert layout(node) == [(2, 2, 1)]
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.parametrize("step", ["unprepare:effect-undone:2", "unprepare:effect-undone:1"])
@pytest.mark.fault("F7")
def test_killed_while_a_partition_is_destroyed(node, step):
    kubelet = node.kubelet()
    doomed = node.daemon(crash_at=step)
    before = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    pod = node.pod("p", node.claim("c", "gpu-2-mig-2g20gb-14-2"))
    kubelet.run_pod(pod)
    with pytest.raises(UnprepareError):
        kubelet.stop_pod(pod)
    assert doomed.wait(within_seconds=60) == -9
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert is_clean(node)


@pytest.mark.fault("F13")
def test_after_a_reboot_a_live_claims_partition_is_made_again_under_its_name_and_the_container_sees_the_new_one(
    node,
):
    """Nothing of the old boot is used; the hardware gives out other ids, and with them another UUID."""
    kubelet, daemon = node.kubelet(), node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    early, late = "gpu-2-mig-1g10gb-19-0", "gpu-2-mig-1g10gb-19-4"
    gone = node.pod("gone", node.claim("first", early, pods=("gone",)))
    stays = node.pod("p", node.claim("second", late))
    kubelet.run_pod(gone)
    before = instance_seen(node, kubelet.run_pod(stays).views["main"])
    kubelet.stop()
    daemon.kill()
    node.machine.control.reboot()
    assert layout(node) == []
    assert not any(modes(node))
    kubelet = node.kubelet()
    daemon = node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    view = kubelet.run_pod(stays).views["main"]
    after = instance_seen(node, view)
    assert (after.profile_id, after.start) == (before.profile_id, before.start) == (19, 4)
    assert after.gi != before.gi
    assert layout(node) == [(2, 4, 1)]
    (told,) = [
        entry for uid, record in node.read_records().items() if record["boot_id"] == node.machine.control.state.boot_id
        for entry in record["effects"] if entry["kind"] == "mig-device" and uid
    ]  # fmt: skip
    assert told["args"]["device"] == late
    assert told["outcome"]["gi"] == after.gi
    # Never prepared again, and so gone with its boot.
    kubelet.stop_pod(stays)
    for uid in node.records():
        node.record_file(uid).unlink()
    assert layout(node) == []
    wait_until(lambda: not any(modes(node)), what="the mode is off")


def instance_seen(node, view):
    """The instance whose two capability nodes a container has."""
    caps = {int(path.rpartition("cap")[2]) for path in view.device_nodes if "nvidia-caps/nvidia-cap" in path}
    (found,) = [
        instance
        for slot, gpu in zip(node.machine.profile.gpus, node.machine.control.state.gpus, strict=True)
        for instance in gpu.instances
        if caps
        == {gpu_instance_minor(slot.minor, instance.gi), compute_instance_minor(slot.minor, instance.gi, 0)}
    ]
    return found


@pytest.mark.fault("F8", "F23")
def test_the_partition_of_a_lost_record_is_still_ours_and_goes_once_its_claim_is_gone(node):
    kubelet, daemon = node.kubelet(), node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    claim = node.claim("c", "gpu-2-mig-2g20gb-14-2")
    kubelet.run_pod(node.pod("p", claim))
    kubelet.stop()
    daemon.kill()
    uid = claim["metadata"]["uid"]
    node.record_file(uid).unlink()
    node.cdi_file(uid).unlink()
    node.delete_claim("c")
    daemon = node.daemon()
    wait_until(lambda: daemon.logged("orphan_partition_destroyed"), what="the partition is destroyed")
    wait_until(lambda: is_clean(node), what="nothing is left")
    # It never looked as if somebody had made it by hand.
    devices = [device for each in node.wait_published() for device in each["spec"].get("devices", ())]
    assert len(devices) == 8 * 26


@pytest.mark.parametrize("arguments", [("--mig-mode=static",), ()])
@pytest.mark.fault("F14")
def test_a_layout_by_hand_that_a_reboot_took_is_told_and_only_made_again_where_that_is_wanted(
    node, arguments
):
    """The slices show what there is; a claim on a partition that is gone fails with an event, or gets it anew."""
    node.machine.control.set_mig_layout(2, [("3g.40gb", 4)])
    node.partitions = {}
    kubelet, daemon = node.kubelet(), node.daemon(*arguments)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    device = "gpu-2-mig-3g40gb-9-4"
    wait_until(lambda: device in published(node), what="the partition is published")
    claim = node.claim("c", device)
    pod = node.pod("p", claim)
    assert instance_seen(node, kubelet.run_pod(pod).views["main"]).start == 4
    kubelet.stop()
    daemon.kill()
    node.machine.control.reboot()
    kubelet, daemon = node.kubelet(), node.daemon(*arguments)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_until(lambda: "gpu-2" in published(node), what="the GPU is published as it is")
    if arguments:
        with pytest.raises(PrepareError, match=f"MIG device {device} does not exist"):
            kubelet.run_pod(pod)
        assert layout(node) == []
        wait_until(
            lambda: any(device in e["message"] for e in node.told_events(claim)), what="an event on the claim"
        )
    else:
        assert instance_seen(node, kubelet.run_pod(pod).views["main"]).start == 4
    kubelet.stop_pod(pod)
    assert layout(node) == []
    wait_until(lambda: is_clean(node), what="nothing is left")


@pytest.mark.skipif(
    not os.environ.get("DRA_TEST_SLOW"),
    reason="half a minute against the kubelet's limit of 45 s; set DRA_TEST_SLOW=1 (the engine's twin always runs)",
)
@pytest.mark.fault("F29")
def test_fifty_six_pods_with_partitions_start_while_each_nvml_call_takes_200_ms(node):
    kubelet = node.kubelet()
    daemon = node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    names = [f"gpu-{gpu}-mig-1g10gb-19-{at}" for gpu in range(8) for at in range(7)]
    claims = [node.claim(f"c{number}", name) for number, name in enumerate(names)]
    refs = [_ref(claim) for claim in claims]
    node.machine.control.set_fault("*", delay_seconds=0.2)
    began = time.monotonic()
    with ThreadPoolExecutor(len(refs)) as pool:
        answers = list(pool.map(lambda ref: connection.prepare([ref]).claims[ref.uid], refs))
    took = time.monotonic() - began
    node.machine.control.clear()
    assert [answer.error for answer in answers if answer.error] == []
    # What the daemon's own looks at the hardware cost must not be charged to the claims.
    assert daemon.logged("claim_prepare_failed") == []
    assert len(layout(node)) == 56
    assert took < 45
    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(lambda ref: connection.unprepare([ref]).claims[ref.uid].error, refs))
    assert set(ended) == {""}
    wait_until(lambda: layout(node) == [], what="all partitions are gone")
    assert not any(modes(node))


def _ref(claim):
    from dra.api.claim import ClaimRef

    meta = claim["metadata"]
    return ClaimRef(meta["namespace"], meta["name"], meta["uid"])
