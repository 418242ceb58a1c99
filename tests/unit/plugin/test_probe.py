"""The probe: alive means that the own sockets answer, ready means that nothing is missing."""

from __future__ import annotations

import socket
import threading

import grpc
import pytest

from dra.errors import HostError
from dra.pb.grpc_health_pb2 import HealthCheckRequest, HealthCheckResponse
from dra.pb.services import HEALTH_CHECK
from dra.plugin.probe import Probe
from dra.plugin.readiness import Readiness


@pytest.fixture
def probe(plugin):
    endpoint = plugin()
    readiness = Readiness()
    made = Probe(
        registration=endpoint.sockets.registration, service=endpoint.sockets.service, readiness=readiness
    )
    made.start(0, address="127.0.0.1")
    made.endpoint, made.readiness = endpoint, readiness
    yield made
    made.stop()


def check(probe, service):
    with grpc.insecure_channel(f"127.0.0.1:{probe.port}") as channel:
        stub = channel.unary_unary(
            HEALTH_CHECK.path,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        response, call = stub.with_call(HealthCheckRequest(service=service), timeout=5)
        return response.status, dict(call.trailing_metadata()).get("dra-missing", "")


@pytest.mark.parametrize("service", ["", "liveness"])
def test_it_serves_while_both_sockets_answer(probe, service):
    assert check(probe, service) == (HealthCheckResponse.SERVING, "")


def test_a_socket_that_is_gone_is_named(probe):
    probe.endpoint._guard.stop()
    probe.endpoint.sockets.registration.unlink()
    status, missing = check(probe, "liveness")
    assert status == HealthCheckResponse.NOT_SERVING
    assert "/pluginregistration.Registration/GetInfo" in missing
    assert "NodePrepareResources" not in missing


def test_alive_does_not_need_an_api_server_and_ready_says_that_it_is_missing(probe):
    probe.readiness.set("api", "the API server cannot be reached")
    assert check(probe, "liveness")[0] == HealthCheckResponse.SERVING
    assert check(probe, "readiness") == (
        HealthCheckResponse.NOT_SERVING,
        "api: the API server cannot be reached",
    )
    probe.readiness.set("api", "")
    assert check(probe, "readiness") == (HealthCheckResponse.SERVING, "")


@pytest.mark.fault("F30")
def test_busy_prepare_threads_do_not_make_the_driver_look_dead(probe, dial, engine):
    from dra.pb.services import PREPARE_V1

    engine.gate = threading.Event()
    call = dial(probe.endpoint.sockets.service).channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    request = PREPARE_V1.request()
    request.claims.add(namespace="n", name="c", uid="u")
    busy = [call.future(request, timeout=30) for _ in range(8)]
    assert engine.entered.wait(60)
    try:
        assert check(probe, "liveness")[0] == HealthCheckResponse.SERVING
    finally:
        engine.gate.set()
    for future in busy:
        future.result()


def test_an_unknown_service_is_not_found(probe):
    with pytest.raises(grpc.RpcError) as caught:
        check(probe, "nonsense")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_port_in_use_is_an_error_that_names_the_flag(probe):
    other = Probe(
        registration=probe.endpoint.sockets.registration,
        service=probe.endpoint.sockets.service,
        readiness=Readiness(),
    )
    with pytest.raises(HostError, match="--healthcheck-port") as caught:
        other.start(probe.port, address="127.0.0.1")
    assert caught.value.code == "DRA-PROBE-PORT"
    other.stop()


def test_a_question_is_asked_each_time():
    readiness, answers = Readiness(), iter(["no slices", ""])
    readiness.ask("pool", lambda: next(answers))
    assert readiness.missing() == {"pool": "no slices"}
    assert readiness.missing() == {}


@pytest.mark.fault("F43")
def test_a_connection_that_asks_nothing_and_a_call_that_never_comes_whole_have_their_time(
    plugin, monkeypatch
):
    monkeypatch.setattr("dra.plugin.probe.CONNECTION_SECONDS", 1)
    monkeypatch.setattr("dra.plugin.probe.CONNECTION_GRACE_SECONDS", 1)
    endpoint = plugin()
    made = Probe(
        registration=endpoint.sockets.registration, service=endpoint.sockets.service, readiness=Readiness()
    )
    made.start(0, address="127.0.0.1")
    try:
        settings = b"\0\0\0\x04\0\0\0\0\0"
        # HEADERS of stream 1 in plain HPACK, without the end of the stream: a message would have to follow.
        fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/grpc.health.v1.Health/Check"),
                  (b":authority", b"x"), (b"te", b"trailers"), (b"content-type", b"application/grpc"))  # fmt: skip
        block = b"".join(b"\0" + bytes([len(n)]) + n + bytes([len(v)]) + v for n, v in fields)
        call = len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block
        clients = []
        for more in (b"", call):
            client = socket.create_connection(("127.0.0.1", made.port), timeout=60)
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + more)
            clients.append(client)
        for client in clients:
            with client:
                said = b""
                while part := client.recv(1 << 16):
                    said += part
                # GOAWAY came before the end.
                assert b"max_age" in said
    finally:
        made.stop()
