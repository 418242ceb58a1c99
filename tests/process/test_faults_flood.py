"""Clients that ask for too much, or say nothing: what they take is bounded and given back, and others are served."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request

import grpc
import pytest

from dra.pb.grpc_health_pb2 import HealthCheckResponse
from dra.pb.health_v1_pb2 import NodeWatchResourcesRequest
from dra.pb.services import PREPARE_V1, WATCH_HEALTH_V1
from tests.process.conftest import call
from tests.process.harness import DRIVER, wait_until
from tests.process.invariants import Vitals, check_invariants

MIB = 1 << 20
HUGE = 64 * MIB
CLIENTS = 100
# More than the driver keeps for them; the kubelet opens one.
STREAMS = 200


def half_open(stack, address):
    """Give connections on which nothing is said, or not enough."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    made = []
    for number in range(CLIENTS):
        client = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        client.settimeout(60)
        with contextlib.suppress(OSError):
            client.connect(address)
            if number % 2:
                client.sendall(
                    b"PRI * HTTP/2.0\r\n" if isinstance(address, str) else b"GET /metrics HTTP/1.1\r\nX"
                )
            made.append(client)
    return made


def is_closed(client):
    client.setblocking(False)
    try:
        return client.recv(MIB) == b"" or is_closed(client)
    except BlockingIOError:
        return False
    except OSError:
        return True


def channel_to(stack, path):
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 2 * HUGE))
    return stack.enter_context(grpc.insecure_channel(f"unix:{path}", options=options))


def send_too_much(channel):
    """Give the status of a call whose message is 64 MiB."""
    method = channel.unary_unary(PREPARE_V1.path, request_serializer=lambda data: data)
    try:
        method(bytes(HUGE), timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def open_streams(channel):
    """Open many health streams at once; gives them."""
    watch = channel.unary_stream(
        WATCH_HEALTH_V1.path,
        request_serializer=NodeWatchResourcesRequest.SerializeToString,
        response_deserializer=WATCH_HEALTH_V1.response.FromString,
    )
    return [watch(NodeWatchResourcesRequest(), timeout=120) for _ in range(STREAMS)]


@pytest.mark.fault("F43")
def test_floods_are_bounded_the_kubelet_is_served_and_all_is_given_back(node):
    daemon = node.daemon("--http-endpoint=127.0.0.1:0", "--healthcheck-port=0", "--mig-mode=static")
    kubelet = node.kubelet()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    kubelet.wait_health(DRIVER, lambda each: each.health_messages > 0)
    node.wait_published()
    pid = daemon.process.pid
    metrics = wait_until(lambda: daemon.logged("http_endpoint_bound"))[0]["port"]
    health = wait_until(lambda: daemon.logged("plugin_started"))[0]["probe_port"]
    claims = [node.claim(f"c{number}", f"gpu-{number}") for number in range(4)]

    def served():
        """All that others want of the driver."""
        began = time.monotonic()
        assert [entry.error for entry in call(connection.prepare, claims)] == [""] * 4
        assert [entry.error for entry in call(connection.unprepare, claims)] == [""] * 4
        assert time.monotonic() - began < 30  # some ten milliseconds where nobody else is busy
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=60) as answer:
            assert b"dra_node_info" in answer.read()
        assert daemon.probe("liveness") == (HealthCheckResponse.SERVING, "")

    served()
    before = Vitals.of(pid)
    sockets = [str(path) for path in (*node.state_dir.glob("*.sock"), *node.registry.iterdir())]
    assert len(sockets) == 2
    with contextlib.ExitStack() as stack:
        clients = [
            half_open(stack, address) for address in (*sockets, ("127.0.0.1", health), ("127.0.0.1", metrics))
        ]
        assert [len(each) for each in clients] == [CLIENTS] * 4
        served()
        # Of a message that is too large no more than a window is taken in.
        channel = channel_to(stack, next(path for path in sockets if path.startswith(str(node.state_dir))))
        for _ in range(2):
            assert send_too_much(channel) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert Vitals.of(pid).resident_bytes < before.resident_bytes + HUGE / 2
        streams = open_streams(channel)
        wait_until(
            lambda: sum(each.code() is not None for each in streams if not each.is_active()) >= STREAMS - 8,
            what="streams too many are refused",
        )
        served()
        assert kubelet.connection(DRIVER) is connection
        # Who has said nothing for five seconds is sent away, whether it goes or not.
        for each in clients:
            wait_until(lambda each=each: all(map(is_closed, each)), what="half-open connections are closed")
        for each in streams:
            each.cancel()
    # gRPC opens a few of its own when it is busy first; four hundred connections and two hundred streams are gone.
    wait_until(
        lambda: Vitals.of(pid).descriptors <= before.descriptors + 6,
        what=f"about {before.descriptors} descriptors are left",
    )
    served()
    check_invariants(node, daemon)
