"""Faults of the API server and of what others do in it, against the real process.

Shown elsewhere, with a clock that does not wait: the pauses between attempts, silent watches and contests
(`unit/kube/test_reflector`, `unit/controller/test_publisher`); the grace of processes (`unit/prepare/test_prepare_janitor`).
"""

from __future__ import annotations

import statistics
import threading
import time

import pytest

from dra.kube import reflector
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.resources import RESOURCE_SLICES
from dra.prepare import janitor
from tests.process.conftest import SOON
from tests.process.harness import DRIVER, RESOURCE_API, ref_of, wait_until
from tests.process.invariants import check_invariants, expected, published

SLICES = "/resourceslices"


def wipe(node):
    node.api.request("DELETE", f"{RESOURCE_API}/resourceslices")


def edit(node, *, writer="a-person"):
    """Change a slice as `kubectl edit` does."""
    path = f"{RESOURCE_API}/resourceslices"
    obj = next(each for each in node.api.request("GET", path)[1]["items"] if each["spec"].get("devices"))
    obj["spec"]["devices"] = obj["spec"]["devices"][:1]
    status, answer = node.api.request("PUT", f"{path}/{obj['metadata']['name']}?fieldManager={writer}", obj)
    assert status in (200, 409), answer
    return status == 200


def requests_of(node, path, *, since=0.0):
    """Give the driver's requests to a path, without the kubelet's."""
    return [
        entry
        for entry in node.api.requests.find("*", path)
        if entry.user_agent == f"dra/{DRIVER}" and entry.at >= since
    ]


@pytest.mark.fault("F15")
def test_without_an_api_server_it_starts_registers_and_publishes_soon_after_it_is_there(node):
    """Connections are refused from the start; six seconds are enough for the longest pause."""
    node.api.stop()
    daemon = node.daemon("--healthcheck-port=0")
    kubelet = node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    # Calls are answered: a claim is refused with the cause, what is unknown is unprepared.
    connection = kubelet.connection(DRIVER)
    unknown = {
        "metadata": {"namespace": "default", "name": "c", "uid": "0f0f0f0f-1111-4222-8333-444444444444"}
    }
    started = time.monotonic()
    (refused,) = connection.prepare([ref_of(unknown)]).claims.values()
    assert "DRA-API-" in refused.error
    assert time.monotonic() - started < 30
    assert connection.unprepare([ref_of(unknown)]).claims[unknown["metadata"]["uid"]].error == ""
    wait_until(lambda: time.monotonic() - daemon.started > 6)
    assert daemon.process.poll() is None
    node.api.start()
    back = time.monotonic()
    node.wait_published(seconds=60)
    assert time.monotonic() - back < 90
    check_invariants(node, daemon, told=["DRA-API-UNREACHABLE"])


@pytest.mark.fault("F16", "F17")
def test_an_api_server_that_hangs_costs_the_new_claim_eight_seconds_and_others_nothing(clean):
    """Others are served meanwhile; a prepared claim is answered from its record (the bench has the figures)."""
    node = clean.node
    hung, other = node.claim("hung", "gpu-0"), node.claim("other", "gpu-1")
    known = [node.claim(f"known-{n}", f"gpu-{n}") for n in range(2, 7)]
    assert {entry.error for entry in clean.prepare(*known)} == {""}
    node.api.faults.set("freeze", method="GET", path="/resourceclaims/hung")
    outcome = []

    def call():
        started = time.monotonic()
        (entry,) = clean.prepare(hung)
        outcome.append((entry.error, time.monotonic() - started))

    thread = threading.Thread(target=call)
    thread.start()
    others = []
    for _ in range(3):
        began = time.monotonic()
        assert clean.prepare(other)[0].error == ""
        assert clean.unprepare(other) == [""]
        others.append(time.monotonic() - began)
    assert statistics.median(others) < 7, others
    everything = node.api.faults.set("freeze", method="GET", path="/resourceclaims/")
    took = []
    for claim in known * 4:
        began = time.monotonic()
        assert clean.prepare(claim)[0].error == ""
        took.append(time.monotonic() - began)
    assert statistics.median(took) < 5, took
    # The first question about each claim waits for the API server: 40 ms, and what a busy machine adds.
    first = [
        next(
            line["duration_ms"]
            for line in clean.daemon.logged("claim_prepared")[-20:]
            if line["claim_uid"] == uid
        )
        for uid in (claim["metadata"]["uid"] for claim in known)
    ]
    assert statistics.median(first) < 5000, first
    thread.join(40)
    node.api.faults.clear(everything)
    ((error, seconds),) = outcome
    assert "DRA-API-TIMEOUT" in error
    assert "default/hung" in error
    assert seconds < 30
    node.api.faults.clear()
    assert clean.prepare(hung)[0].error == ""
    check_invariants(node, clean.daemon)
    assert clean.unprepare(hung, *known) == [""] * 6


@pytest.mark.fault("F4", "F16")
def test_an_api_server_that_hangs_does_not_keep_the_driver_from_stopping(node):
    daemon, kubelet = node.daemon(), node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    node.api.faults.set("freeze")
    wipe(node)
    wait_until(lambda: [r for r in node.api.faults._faults if r.hits], what="a request hangs")
    assert daemon.terminate(within_seconds=45) == 0
    assert list(node.registry.iterdir()) == []


@pytest.mark.fault("F18")
def test_refusals_conflicts_and_broken_answers_end_with_the_pool_published_without_a_hot_loop(clean):
    """429 with Retry-After, 409, 500, connections that break off in the middle of a body."""
    node = clean.node
    faults = node.api.faults
    busy = faults.set("error", method="POST", path=SLICES, code=429, retry_after=2, times=1)
    begun = time.monotonic()
    wipe(node)
    node.wait_published(seconds=60)
    assert busy.hits == 1
    posts = [entry.at for entry in requests_of(node, SLICES, since=begun) if entry.method == "POST"]
    assert posts[1] - posts[0] >= 2
    check_invariants(node, clean.daemon, told=["DRA-API-THROTTLED"])

    begun = time.monotonic()
    faults.set("error", method="PUT", path=SLICES, code=409, times=2)
    faults.set("drop", method="GET", path=SLICES, watch=False, after_bytes=200, times=3)
    faults.set("error", method="*", path=SLICES, code=500, times=4)
    assert edit(node)
    wait_until(lambda: published(node) == expected(node), seconds=30, what="the pool is restored")
    seconds = time.monotonic() - begun
    # At most one request a second, beside what the repair itself takes (13, more where lists and edits cross) and a burst;
    # a hot loop would be hundreds.
    assert len(requests_of(node, SLICES, since=begun)) <= seconds + 25
    check_invariants(node, clean.daemon)


@pytest.mark.fault("F18", "F20")
def test_a_watch_that_is_gone_or_broken_is_listed_again_and_an_edit_meanwhile_is_undone(clean):
    """Deleted and edited slices are as they were within seconds."""
    node = clean.node
    before = [each["spec"].get("devices") for each in node.slices()]
    for disturb in (node.api.expire_watches, node.api.break_connections):
        disturb()
        assert edit(node)
        wait_until(lambda: published(node) == expected(node), what="the edit is undone")
        assert [each["spec"].get("devices") for each in node.slices()] == before
        check_invariants(node, clean.daemon, noted=["pool_restored"])


QUICK_WATCH = {
    **SOON,
    "dra.kube.reflector:ReflectorOptions.watch_seconds": 2,
    "dra.kube.reflector:ReflectorOptions.slack_seconds": 1.0,
}


@pytest.mark.fault("F19", "F20")
def test_a_silent_watch_is_given_up_and_another_writer_is_named_and_not_fought(node):
    """A watch of two seconds for fifty; and a second program that publishes the same pool."""
    assert reflector.WATCH_SECONDS + reflector.SLACK_SECONDS < 60
    daemon = node.daemon("--mig-mode=static", periods=QUICK_WATCH)
    node.wait_published()
    stalled = node.api.faults.set("stall", path=SLICES)
    wait_until(lambda: stalled.hits, what="the watch is silent")
    assert edit(node)
    wait_until(lambda: published(node) == expected(node), what="the edit is undone")
    node.api.faults.clear()
    check_invariants(node, daemon)

    rival = KubeClient(
        Connection(KubeOptions(kubeconfig=str(node.kubeconfig), user_agent="rival")),
        field_manager="rival-operator",
    )
    stop = threading.Event()

    def fight():
        while not stop.wait(0.1):
            for obj in rival.list(RESOURCE_SLICES).items:
                if len(obj["spec"]["devices"]) > 1:
                    obj["spec"]["devices"] = obj["spec"]["devices"][:1]
                    try:
                        rival.replace(RESOURCE_SLICES, obj["metadata"]["name"], obj)
                    except Exception as error:  # noqa: BLE001 - a conflict with the driver
                        assert "CONFLICT" in str(error), error  # noqa: PT017

    thread = threading.Thread(target=fight)
    begun = time.monotonic()
    thread.start()
    try:
        wait_until(lambda: daemon.logged("pool_contested"), what="the other writer is named")
        wait_until(lambda: time.monotonic() - begun > 6)
    finally:
        stop.set()
        thread.join(10)
        rival.close()
    writes = [
        entry for entry in requests_of(node, SLICES, since=begun) if entry.method in ("PUT", "POST", "DELETE")
    ]
    # Three at once, then after 1, 2 and 4 s.
    assert 3 <= len(writes) <= 8, writes
    assert "rival-operator" in daemon.logged("pool_contested")[0]["error"]
    wait_until(lambda: published(node) == expected(node), what="the pool is restored")
    check_invariants(node, daemon, told=["DRA-POOL-CONTESTED"], noted=["pool_restored"])


@pytest.mark.fault("F21")
def test_an_attribute_that_the_api_server_refuses_is_left_out_and_all_devices_are_published(node):
    slot = next(slot for slot in node.machine.profile.gpus if slot.minor == 3)
    cause = {
        "field": "spec.devices[3].attributes[uuid].string",
        "reason": "FieldValueTooLong",
        "message": "Too long: may not be more than 8 bytes",
    }
    node.api.faults.set("error", path=SLICES, code=422, reason="Invalid", body=slot.uuid, causes=(cause,))
    daemon = node.daemon("--mig-mode=static")
    node.wait_published()
    wanted = {
        name: ("" if name == "gpu-3" else uuid, taint) for name, (uuid, taint) in expected(node).items()
    }
    assert published(node) == wanted
    (line,) = wait_until(lambda: daemon.logged("device_refused"))
    assert line["error_code"] == "DRA-SLICE-REFUSED"
    assert "gpu-3" in line["error"]
    assert "uuid" in line["error"]
    assert line["remedy"]
    assert daemon.process.poll() is None
    assert len([entry for entry in requests_of(node, SLICES) if entry.method == "POST"]) == 2


@pytest.mark.fault("F22")
def test_a_claim_deleted_under_a_running_driver_is_released_once_no_process_uses_its_gpu(clean):
    """Here twice a second, in production within the minute that is allowed."""
    assert janitor.INTERVAL_SECONDS <= 45
    node = clean.node
    control = node.machine.control
    claim, next_one = node.claim("force-deleted", "gpu-5"), node.claim("next", "gpu-5", pods=("q",))
    assert clean.prepare(claim)[0].error == ""
    control.add_process(5, pid=4242)
    node.delete_claim("force-deleted")
    told = wait_until(lambda: node.told_events(claim), what="an event says why it is not released")
    assert {event["reason"] for event in told} == {"StaleClaimInUse"}
    assert "DRA-DEVICE-HELD" in clean.prepare(next_one)[0].error
    assert node.records() == {claim["metadata"]["uid"]}
    check_invariants(node, clean.daemon, noted=["stale_claim"])
    control.remove_process(4242)
    wait_until(lambda: node.records() == set(), what="the claim is released")
    wait_until(
        lambda: "StaleClaimReleased" in {event["reason"] for event in node.told_events(claim)},
        what="the event of the release",
    )
    assert clean.prepare(next_one)[0].error == ""
    check_invariants(node, clean.daemon, noted=["claim_released"])
    assert clean.unprepare(next_one) == [""]


@pytest.mark.fault("F22")
def test_a_404_for_everything_releases_no_claim_and_is_told_as_what_it_is(clean):
    """What a proxy answers, or an API server that does not serve the group for a while."""
    node = clean.node
    claims = [node.claim(f"kept-{n}", f"gpu-{n}") for n in range(3)]
    new = node.claim("new", "gpu-6")
    assert {entry.error for entry in clean.prepare(*claims)} == {""}
    wanted = {claim["metadata"]["uid"] for claim in claims}
    for reason in ("", "NotFound"):
        fault = node.api.faults.set(
            "error", path="/apis/resource.k8s.io", code=404, reason=reason, message="404 page not found"
        )
        # Several sweeps of half a second, with the second look after half a second.
        seen = len(clean.daemon.logged("sweep_incomplete"))
        wait_until(
            lambda seen=seen: len(clean.daemon.logged("sweep_incomplete")) > seen + 5, what="sweeps are over"
        )
        assert {entry.error for entry in clean.prepare(*claims)} == {""}
        error = clean.prepare(new)[0].error
        assert "DRA-API-NOT-SERVED" in error
        assert "at the moment" in error
        assert node.records() == wanted
        assert node.cdi_files()
        node.api.faults.clear(fault)
        begun = time.monotonic()
        wait_until(lambda: clean.prepare(new)[0].error == "", what="the group is found again")
        assert time.monotonic() - begun < 40
        assert clean.unprepare(new) == [""]
    check_invariants(node, clean.daemon, told=["DRA-API-NOT-SERVED"])
    assert clean.unprepare(*claims) == [""] * 3
