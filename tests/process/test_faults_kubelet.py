"""Faults of the kubelet, of the scheduler and of claims' lives, against the real process.

Shown elsewhere in this folder, with the invariants: `test_life` (a restarted kubelet, sockets of a killed run, signals),
`test_crash` (every step of prepare, of its rollback and of unprepare).
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.harness import DRIVER, RESOURCE_API, new_uid, ref_of, wait_until
from tests.process.invariants import Vitals, check_invariants


def contents(slices):
    return [(each["metadata"]["name"], each["spec"]) for each in slices]


@pytest.mark.fault("F2")
def test_slices_that_the_kubelet_deletes_are_back_within_two_seconds_as_they_were(clean):
    """Same content, same generation."""
    node = clean.node
    before = node.slices()
    node.api.request("DELETE", f"{RESOURCE_API}/resourceslices?fieldSelector=spec.nodeName=node-a")
    assert node.slices() == []
    after = node.wait_published(seconds=60)
    assert contents(after) == contents(before)
    assert after[0]["metadata"]["uid"] != before[0]["metadata"]["uid"]
    check_invariants(node, clean.daemon, noted=["pool_restored"])


@pytest.mark.fault("F24")
def test_a_claim_made_anew_under_its_name_is_never_mixed_up_with_the_old_one(clean):
    """The new claim is refused while the old one holds the device, and the old one is let go by itself."""
    node = clean.node
    old = node.claim("again", "gpu-1")
    (first,) = clean.prepare(old)
    # As long as processes use its GPU, nothing lets go of the old claim.
    node.machine.control.add_process(1, pid=4711)
    node.delete_claim("again")
    new = node.claim("again", "gpu-1")
    (refused,) = clean.prepare(new)
    assert "DRA-DEVICE-HELD" in refused.error
    assert old["metadata"]["uid"] in refused.error or "default/again" in refused.error
    # Asked for the old UID under the name that the new claim has: refused, and the record stays as it was.
    (mixed_up,) = clean.prepare(old)
    assert "DRA-CLAIM-UID-MISMATCH" in mixed_up.error
    assert node.records() == {old["metadata"]["uid"]}
    node.machine.control.remove_process(4711)
    assert clean.unprepare(old) == [""]
    (second,) = clean.prepare(new)
    assert second.error == ""
    assert second.devices[0].device_name == first.devices[0].device_name
    assert second.devices[0].cdi_device_ids != first.devices[0].cdi_device_ids
    # A late unprepare of the old one does not touch the new one.
    assert clean.unprepare(old) == [""]
    assert node.records() == {new["metadata"]["uid"]}
    check_invariants(node, clean.daemon, told=["DRA-DEVICE-HELD", "DRA-CLAIM-UID-MISMATCH"])
    assert clean.unprepare(new) == [""]


@pytest.mark.fault("F25")
def test_a_late_prepare_after_unprepare_is_refused_while_no_pod_has_the_claim(clean):
    """A retry that arrives late does not take a device for nobody."""
    node = clean.node
    claim = node.claim("late", "gpu-2")
    assert clean.prepare(claim)[0].error == ""
    assert clean.unprepare(claim) == [""]
    path = f"{RESOURCE_API}/namespaces/default/resourceclaims/late"
    _, stored = node.api.request("GET", path)
    reserved = stored["status"].pop("reservedFor")
    assert node.api.request("PUT", f"{path}/status", stored)[0] == 200
    (late,) = clean.prepare(claim)
    assert "DRA-CLAIM-NOT-RESERVED" in late.error
    assert (node.records(), node.cdi_files()) == (set(), set())
    check_invariants(node, clean.daemon, told=["DRA-CLAIM-NOT-RESERVED"])
    _, stored = node.api.request("GET", path)
    stored["status"]["reservedFor"] = reserved
    assert node.api.request("PUT", f"{path}/status", stored)[0] == 200
    assert clean.prepare(claim)[0].error == ""
    assert clean.unprepare(claim) == [""]


@pytest.mark.fault("F26")
def test_a_second_claim_on_a_held_device_is_refused_at_once_and_the_holder_is_named(clean):
    """Whatever the scheduler decided. Monitoring and shares are allowed; after release the second one succeeds."""
    node = clean.node
    node.allow_monitoring()
    first, second = node.claim("holder", "gpu-3", pods=("train",)), node.claim("rival", "gpu-3")
    monitor = node.claim("monitor", "gpu-3", admin=True)
    assert clean.prepare(first)[0].error == ""
    took = []
    for _ in range(5):
        started = time.monotonic()
        (refused,) = clean.prepare(second)
        took.append(time.monotonic() - started)
        assert "DRA-DEVICE-HELD" in refused.error
        assert "default/holder" in refused.error
        assert "train" in refused.error
    assert sorted(took)[2] < 5
    assert clean.prepare(monitor)[0].error == ""
    check_invariants(node, clean.daemon, told=["DRA-DEVICE-HELD"])
    wait_until(lambda: node.told_events(second), what="the event on the refused claim")
    assert clean.unprepare(first) == [""]
    assert clean.prepare(second)[0].error == ""
    assert clean.unprepare(second, monitor) == ["", ""]
    shares = [node.claim(f"share-{n}", "gpu-3", share=str(uuid.UUID(int=n + 1 << 96))) for n in range(2)]
    answers = clean.prepare(*shares)
    assert [answer.error for answer in answers] == ["", ""]
    assert len({answer.devices[0].cdi_device_ids[0] for answer in answers}) == 2
    check_invariants(node, clean.daemon)
    assert clean.unprepare(*shares) == ["", ""]


@pytest.mark.fault("F28")
def test_fifty_claims_at_once_are_prepared_and_unprepared_in_time(clean):
    """Below the kubelet's 45 s by far (the bench has the figures); fifty more come while fifty go."""
    node = clean.node
    node.allow_monitoring()
    first = [node.claim(f"many-{n}", f"gpu-{n}") for n in range(8)]
    first += [node.claim(f"many-{n}", f"gpu-{n % 8}", admin=True) for n in range(8, 50)]
    second = [node.claim(f"more-{n}", f"gpu-{n % 8}", admin=True) for n in range(50)]
    connection = clean.connection

    def timed(method, claim):
        started = time.monotonic()
        entry = method([ref_of(claim)]).claims[claim["metadata"]["uid"]]
        return time.monotonic() - started, entry.error

    with ThreadPoolExecutor(100) as threads:
        begun = list(threads.map(timed, [connection.prepare] * 50, first))
        assert len(node.records()) == 50
        check_invariants(node, clean.daemon)
        mixed = [
            threads.submit(timed, method, claim)
            for pair in zip(first, second, strict=True)
            for method, claim in zip((connection.unprepare, connection.prepare), pair, strict=True)
        ]
        turned = [future.result() for future in mixed]
        check_invariants(node, clean.daemon)
        ended = list(threads.map(timed, [connection.unprepare] * 50, second))
    for results in (begun, turned, ended):
        assert {error for _, error in results} == {""}
        assert max(seconds for seconds, _ in results) < 45
    assert "DRA-LOCK-TIMEOUT" not in clean.daemon.log.read_text()


@pytest.mark.fault("F47")
def test_two_hundred_cycles_leave_no_descriptor_no_thread_and_no_memory_behind(clean):
    """I6."""
    node = clean.node
    claim = node.claim("cycle", "gpu-4")

    def cycle(times):
        for _ in range(times):
            assert clean.prepare(claim)[0].error == ""
            assert clean.unprepare(claim) == [""]

    cycle(40)
    before = Vitals.of(clean.daemon.process.pid)
    cycle(200)
    after = Vitals.of(clean.daemon.process.pid)
    # On a busy machine a few of gRPC's own come and go; a leak of one a cycle would be two hundred.
    assert after.descriptors < before.descriptors + 25
    assert after.threads < before.threads + 25
    assert after.resident_bytes <= before.resident_bytes * 1.05
    check_invariants(node, clean.daemon)


@pytest.mark.fault("F27")
def test_two_instances_give_a_contested_device_to_one_claim_and_the_last_keeps_its_sockets(node):
    """Two processes, one race; whichever instance stops, the other serves, and the slices stay."""
    kubelet = node.kubelet()
    old, new = node.daemon(pod_uid=new_uid()), node.daemon(pod_uid=new_uid())
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instances=2)
    before = node.wait_published()
    connections = kubelet.registry.connections(DRIVER)
    for round_ in range(5):
        claims = [node.claim(f"race-{round_}-{n}", "gpu-6") for n in range(2)]
        start, answers = threading.Barrier(2), {}

        def race(connection, claim, start=start, answers=answers):
            start.wait(5)
            uid = claim["metadata"]["uid"]
            answers[uid] = connection.prepare([ref_of(claim)]).claims[uid].error

        threads = [threading.Thread(target=race, args=pair) for pair in zip(connections, claims, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        winners = [uid for uid, error in answers.items() if not error]
        assert len(winners) == 1, answers
        assert all("DRA-DEVICE-HELD" in error for error in answers.values() if error)
        # Whichever prepared it, both answer alike, and either unprepares.
        (winner,) = [claim for claim in claims if claim["metadata"]["uid"] in winners]
        both = [connection.prepare([ref_of(winner)]).claims[winners[0]] for connection in connections]
        assert both[0] == both[1]
        assert connections[round_ % 2].unprepare([ref_of(winner)]).claims[winners[0]].error == ""
        assert node.records() == set()
    check_invariants(node, old)
    check_invariants(node, new)
    assert new.terminate(within_seconds=45) == 0
    wait_until(lambda: len(kubelet.registry.connections(DRIVER)) == 1, what="one instance is left")
    kept = node.claim("kept", "gpu-6")
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert connection.prepare([ref_of(kept)]).claims[kept["metadata"]["uid"]].error == ""
    assert contents(node.slices()) == contents(before)
    check_invariants(node, old)


@pytest.mark.parametrize("stopped_during", ["prepare", "unprepare"])
@pytest.mark.fault("F5")
def test_sigterm_while_calls_run_leaves_whole_claims_or_none(node, stopped_during):
    """Eight claims are under way when the driver is told to stop; the retry succeeds for all."""
    kubelet = node.kubelet()
    daemon = node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    claims = [node.claim(f"c{n}", f"gpu-{n}") for n in range(8)]
    refs = [ref_of(claim) for claim in claims]
    if stopped_during == "unprepare":
        assert not [e.error for e in connection.prepare(refs).claims.values() if e.error]
    call = getattr(connection, stopped_during)
    node.api.faults.set("delay", method="GET", path="/resourceclaims/c", seconds=0.3)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(call, [ref]) for ref in refs]
        time.sleep(0.05)
        assert daemon.terminate(within_seconds=45) == 0
        for answered in calls:
            answered.exception()
    node.check_consistent()
    node.api.faults.clear()
    node.daemon()
    again = kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=connection)
    answers = getattr(again, stopped_during)(refs).claims
    assert {answers[ref.uid].error for ref in refs} == {""}
    check_invariants(node)
    assert {entry.error for entry in again.unprepare(refs).claims.values()} == {""}
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
