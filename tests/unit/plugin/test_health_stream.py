"""The health stream as a kubelet reads it."""

from __future__ import annotations

import time

import grpc
import pytest

from dra.health.feed import DeviceCondition, HealthFeed
from dra.pb.services import PREPARE_V1, WATCH_HEALTH_V1, WATCH_HEALTH_V1ALPHA1
from dra.plugin.call_pool import CallPool
from dra.plugin.health_service import HealthService
from dra.plugin.server import UnixServer, build_server

GOOD = (DeviceCondition("node-a", "gpu-0"), DeviceCondition("node-a", "gpu-1"))
BAD = (GOOD[0], DeviceCondition("node-a", "gpu-1", "Unhealthy", "GPU lost"))


@pytest.fixture
def serve(short_dir):
    made = []

    def make(feed, **options):
        service, pool = HealthService(feed, **options), CallPool("service", threads=4)
        server = UnixServer(
            short_dir / "h.sock", driver="d", build=lambda: build_server(service.methods(), pool=pool)
        )
        server.open()
        made.append((feed, server, service, pool))
        return short_dir / "h.sock"

    yield make
    for feed, server, service, pool in made:
        feed.close()
        server.close(grace_seconds=0)
        service.shut()
        pool.shutdown()


def states(message):
    return {entry.device.device_name: (entry.health, entry.message) for entry in message.devices}


@pytest.mark.parametrize("method", [WATCH_HEALTH_V1, WATCH_HEALTH_V1ALPHA1], ids=["v1", "v1alpha1"])
def test_the_complete_list_comes_at_once_and_on_each_change(serve, dial, method):
    feed = HealthFeed()
    feed.publish(GOOD)
    stream = dial(serve(feed, clock=lambda: 1234.9)).call(method, timeout=20)
    first = next(stream)
    assert states(first) == {"gpu-0": (1, ""), "gpu-1": (1, "")}
    assert {entry.device.pool_name for entry in first.devices} == {"node-a"}
    assert {entry.last_updated_time for entry in first.devices} == {1234}
    assert {entry.health_check_timeout_seconds for entry in first.devices} == {30}
    feed.publish(BAD)
    assert states(next(stream)) == {"gpu-0": (1, ""), "gpu-1": (2, "GPU lost")}


def test_an_unchanged_list_is_sent_again_before_the_kubelet_would_show_unknown(serve, dial):
    feed = HealthFeed()
    feed.publish(GOOD)
    now = iter(range(1000, 2000))
    stream = dial(serve(feed, resend_seconds=0.05, clock=lambda: next(now))).call(WATCH_HEALTH_V1, timeout=20)
    sent = [next(stream) for _ in range(3)]
    assert states(sent[0]) == states(sent[1]) == states(sent[2])
    # The kubelet counts from the time in it.
    times = [{entry.last_updated_time for entry in message.devices} for message in sent]
    assert times == [{1000}, {1001}, {1002}]
    # After all that: a change is told in whole.
    feed.publish(BAD)
    while states(message := next(stream)) == states(sent[0]):
        pass
    assert states(message) == {"gpu-0": (1, ""), "gpu-1": (2, "GPU lost")}


def test_the_resend_interval_is_a_third_of_what_the_kubelet_allows():
    from dra.plugin.health_service import KUBELET_TIMEOUT_SECONDS, RESEND_SECONDS

    assert RESEND_SECONDS * 3 <= KUBELET_TIMEOUT_SECONDS


def test_a_node_without_devices_says_so_with_an_empty_list(serve, dial):
    stream = dial(serve(HealthFeed())).call(WATCH_HEALTH_V1, timeout=20)
    assert states(next(stream)) == {}


def test_closing_the_feed_ends_all_streams_at_once(serve, dial):
    feed = HealthFeed()
    path = serve(feed)
    streams = [dial(path).call(WATCH_HEALTH_V1, timeout=20) for _ in range(3)]
    for stream in streams:
        next(stream)
    started = time.monotonic()
    feed.close()
    assert [list(stream) for stream in streams] == [[], [], []]
    assert time.monotonic() - started < 15


def test_a_flood_of_streams_is_refused_and_the_kubelets_call_still_answers(plugin, dial):
    endpoint = plugin()
    path = endpoint.sockets.service
    flood = [dial(path).call(WATCH_HEALTH_V1, timeout=30) for _ in range(200)]
    outcomes = []
    for stream in flood:
        try:
            next(stream)
            outcomes.append("open")
        except grpc.RpcError as error:
            outcomes.append(error.code().name)
    assert outcomes.count("open") == 6
    assert outcomes.count("RESOURCE_EXHAUSTED") == 194
    request = PREPARE_V1.request()
    request.claims.add(namespace="n", name="c", uid="u")
    started = time.monotonic()
    assert dial(path).call(PREPARE_V1, request, timeout=20).claims["u"].devices
    assert time.monotonic() - started < 20
    for stream in flood:
        stream.cancel()


def test_a_client_that_goes_away_frees_its_place(serve, dial):
    feed = HealthFeed()
    path = serve(feed, max_streams=1)
    for _ in range(5):
        client = dial(path)
        deadline = time.monotonic() + 60
        while True:
            stream = client.call(WATCH_HEALTH_V1, timeout=20)
            try:
                next(stream)
                break
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert time.monotonic() < deadline, "the place was never freed"
        stream.cancel()
        client.close()
