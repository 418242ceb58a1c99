"""One instance, or two, seen from the kubelet over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time

import grpc
import pytest

from dra.errors import ConfigError, DeviceError, HostError
from dra.pb.registration_pb2 import RegistrationStatus
from dra.pb.services import (
    GET_INFO,
    NOTIFY_REGISTRATION_STATUS,
    PREPARE_V1,
    PREPARE_V1BETA1,
    UNPREPARE_V1,
    UNPREPARE_V1BETA1,
    WATCH_HEALTH_V1,
)
from dra.plugin.server import MAX_STREAMS_PER_CONNECTION

UID = "0a1b2c3d-0000-4000-8000-0123456789ab"
OTHER_UID = "0a1b2c3d-0000-4000-8000-0123456789ac"


def claims(method, *uids):
    request = method.request()
    for uid in uids:
        request.claims.add(namespace="default", name=f"claim-{uid}", uid=uid)
    return request


def test_get_info_answers_with_the_endpoint_and_the_newest_version_first(plugin, dial):
    endpoint = plugin()
    info = dial(endpoint.sockets.registration, registration=True).call(GET_INFO, timeout=15)
    assert (info.type, info.name) == ("DRAPlugin", "gpu.nvidia.com")
    assert info.endpoint == str(endpoint.sockets.service)
    assert list(info.supported_versions) == [
        "v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth",
    ]  # fmt: skip


def test_get_info_answers_within_a_second_while_all_prepare_threads_are_busy(plugin, dial, engine):
    endpoint = plugin()
    engine.gate = threading.Event()
    client = dial(endpoint.sockets.service)
    call = client.channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    busy = [call.future(claims(PREPARE_V1, f"u{n}"), timeout=30) for n in range(30)]
    assert engine.entered.wait(60)
    try:
        assert dial(endpoint.sockets.registration, registration=True).call(GET_INFO, timeout=15).name
    finally:
        engine.gate.set()
    assert all(future.result().claims for future in busy)


def test_the_kubelets_notice_is_passed_on(plugin, dial):
    told = []
    endpoint = plugin(on_status=lambda accepted, error: told.append((accepted, error)))
    client = dial(endpoint.sockets.registration)
    client.call(NOTIFY_REGISTRATION_STATUS, RegistrationStatus(plugin_registered=True))
    client.call(NOTIFY_REGISTRATION_STATUS, RegistrationStatus(plugin_registered=False, error="no"))
    assert told == [(True, ""), (False, "no")]


@pytest.mark.parametrize("method", [PREPARE_V1, PREPARE_V1BETA1, UNPREPARE_V1, UNPREPARE_V1BETA1])
def test_a_call_without_claims_succeeds_and_does_not_reach_the_engine(plugin, dial, engine, method):
    response = dial(plugin().sockets.service).call(method)
    assert not response.claims
    assert engine.calls == []


@pytest.mark.parametrize("method", [PREPARE_V1, PREPARE_V1BETA1], ids=["v1", "v1beta1"])
def test_each_claim_gets_its_own_entry_and_one_failure_spoils_no_other(plugin, dial, engine, method):
    engine.outcomes["bad"] = DeviceError(
        "DRA-DEVICE-HELD", "gpu-0 is held by claim a/b", remedy="Delete a/b."
    )
    engine.outcomes["none"] = ()
    response = dial(plugin().sockets.service).call(method, claims(method, "good", "bad", "none"))
    assert set(response.claims) == {"good", "bad", "none"}
    (device,) = response.claims["good"].devices
    assert (list(device.request_names), device.pool_name, device.device_name) == (["gpu"], "node-a", "gpu-0")
    assert list(device.cdi_device_ids) == ["k8s.gpu.nvidia.com/claim=u-gpu-0"]
    assert response.claims["good"].error == ""
    assert response.claims["bad"].error == "DRA-DEVICE-HELD: gpu-0 is held by claim a/b. Delete a/b."
    assert response.claims["none"].error == ""


def test_the_share_id_goes_out_in_v1_only_and_only_where_there_is_one(plugin, dial, engine, new_device):
    engine.outcomes["shared"] = (new_device(share_id="s-1"), new_device(device="gpu-1"))
    client = dial(plugin().sockets.service)
    shared, plain = client.call(PREPARE_V1, claims(PREPARE_V1, "shared")).claims["shared"].devices
    assert shared.share_id == "s-1"
    assert not plain.HasField("share_id")
    old = client.call(PREPARE_V1BETA1, claims(PREPARE_V1BETA1, "shared"))
    assert len(old.claims["shared"].devices) == 2


@pytest.mark.parametrize("method", [UNPREPARE_V1, UNPREPARE_V1BETA1], ids=["v1", "v1beta1"])
def test_unprepare_answers_each_claim(plugin, dial, engine, method):
    engine.outcomes["stuck"] = DeviceError("DRA-BUSY", "processes still use gpu-0")
    response = dial(plugin().sockets.service).call(method, claims(method, "gone", "stuck"))
    assert {uid: entry.error for uid, entry in response.claims.items()} == {
        "gone": "",
        "stuck": "DRA-BUSY: processes still use gpu-0",
    }


def test_an_engine_that_fails_unexpectedly_fails_the_claims_and_not_the_call(plugin, dial, engine):
    engine.failure = RuntimeError("surprise")
    client = dial(plugin().sockets.service)
    for method in (PREPARE_V1, UNPREPARE_V1):
        response = client.call(method, claims(method, "a", "b"))
        assert set(response.claims) == {"a", "b"}
        assert all(
            "DRA-BUG" in entry.error and "surprise" in entry.error for entry in response.claims.values()
        )


def test_a_claim_named_twice_is_prepared_once(plugin, dial, engine):
    response = dial(plugin().sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "a", "a"))
    assert engine.calls == [("prepare", ["a"])]
    assert set(response.claims) == {"a"}


def test_the_engine_hears_how_long_the_kubelet_still_waits(plugin, dial, engine):
    service = dial(plugin().sockets.service)
    service.call(PREPARE_V1, claims(PREPARE_V1, "u1"), timeout=45)
    assert 0 < engine.within_seconds < 60


def test_a_very_long_error_is_cut_for_the_event(plugin, dial, engine):
    engine.outcomes["a"] = ConfigError("DRA-LONG", "x" * 5000)
    error = dial(plugin().sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "a")).claims["a"].error
    assert len(error) == 800
    assert error.startswith("DRA-LONG: xxx")
    assert error.endswith("...")


def test_sockets_of_a_killed_run_are_replaced_and_those_of_other_pods_removed(plugin, dial, short_dir):
    registry = short_dir / "registry"
    (short_dir / "plugins/gpu.nvidia.com").mkdir(parents=True)
    left = [
        registry / "gpu.nvidia.com-reg.sock",
        registry / f"gpu.nvidia.com-{OTHER_UID}-reg.sock",
        short_dir / "plugins/gpu.nvidia.com/dra.sock",
        short_dir / f"plugins/gpu.nvidia.com/dra.{OTHER_UID}.sock",
    ]
    for path in left:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(str(path))
    endpoint = plugin()
    assert dial(endpoint.sockets.registration).call(GET_INFO, timeout=15).name == "gpu.nvidia.com"
    assert [path.exists() for path in left] == [True, False, True, False]


def test_the_sockets_are_private_and_leave_no_hidden_names(plugin):
    endpoint = plugin()
    for path in (endpoint.sockets.service, endpoint.sockets.registration):
        assert path.stat().st_mode & 0o777 == 0o600
        assert os.listdir(path.parent) == [path.name]


def test_stop_removes_the_sockets(plugin):
    endpoint = plugin()
    assert endpoint.stop(grace_seconds=1)
    assert not endpoint.sockets.service.exists()
    assert not endpoint.sockets.registration.exists()


def test_an_idle_instance_stops_at_once_although_a_health_stream_is_open(plugin, dial):
    endpoint = plugin()
    stream = dial(endpoint.sockets.service).call(WATCH_HEALTH_V1, timeout=60)
    next(stream)
    started = time.monotonic()
    assert endpoint.stop(grace_seconds=40)
    assert time.monotonic() - started < 15
    assert list(stream) == []


def test_stop_lets_a_running_prepare_call_finish(plugin, dial, engine):
    endpoint = plugin()
    engine.gate = threading.Event()
    client = dial(endpoint.sockets.service)
    call = client.channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    future = call.future(claims(PREPARE_V1, "a"), timeout=30)
    assert engine.entered.wait(60)
    stopping = threading.Thread(target=endpoint.stop, kwargs={"grace_seconds": 20})
    stopping.start()
    while endpoint.sockets.service.exists():
        time.sleep(0.005)
    engine.gate.set()
    assert set(future.result(timeout=5).claims) == {"a"}
    stopping.join(5)
    assert not stopping.is_alive()


def test_two_instances_with_pod_uids_serve_side_by_side_and_the_last_keeps_its_sockets(
    plugin, dial, new_engine
):
    first, second = plugin(pod_uid=UID), plugin(pod_uid=OTHER_UID, own_engine=new_engine())
    for endpoint in (first, second):
        info = dial(endpoint.sockets.registration).call(GET_INFO, timeout=15)
        assert info.endpoint == str(endpoint.sockets.service)
    first.stop(grace_seconds=1)
    assert not first.sockets.registration.exists()
    assert second.present
    assert dial(second.sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "a")).claims["a"].devices


def test_a_later_instance_without_a_pod_uid_keeps_its_sockets_when_the_earlier_stops(
    plugin, dial, new_engine
):
    first = plugin()
    second = plugin(own_engine=new_engine())
    assert not first.present
    first.stop(grace_seconds=1)
    assert second.present
    assert dial(second.sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "a")).claims["a"].devices


def test_an_instance_that_was_taken_over_does_not_fight_for_the_name(plugin, new_engine):
    first = plugin()
    second = plugin(own_engine=new_engine())
    assert first._guard.check() == []
    assert second.present


def test_sockets_that_vanish_are_served_again_and_open_connections_survive(plugin, dial, short_dir):
    endpoint = plugin()
    old = dial(endpoint.sockets.service)
    old.call(PREPARE_V1, claims(PREPARE_V1, "a"))
    for path in (endpoint.sockets.service, endpoint.sockets.registration):
        path.unlink()
    deadline = time.monotonic() + 60
    while not endpoint.present and time.monotonic() < deadline:
        time.sleep(0.02)
    assert dial(endpoint.sockets.registration).call(GET_INFO, timeout=15).name == "gpu.nvidia.com"
    assert dial(endpoint.sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "b")).claims["b"].devices
    assert old.call(PREPARE_V1, claims(PREPARE_V1, "c")).claims["c"].devices


def test_a_registry_directory_that_comes_late_is_served_when_it_comes(plugin, short_dir, dial):
    (short_dir / "registry").rmdir()
    endpoint = plugin()
    assert endpoint.sockets.service.exists()
    assert not endpoint.sockets.registration.exists()
    (short_dir / "registry").mkdir()
    deadline = time.monotonic() + 60
    while not endpoint.present and time.monotonic() < deadline:
        time.sleep(0.02)
    assert dial(endpoint.sockets.registration).call(GET_INFO, timeout=15).name == "gpu.nvidia.com"


@pytest.mark.parametrize("place", ["plugins", "plugins/gpu.nvidia.com"])
def test_a_file_in_place_of_our_directory_is_an_error_that_names_it(plugin, short_dir, place):
    path = short_dir / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    endpoint = plugin(start=False)
    with pytest.raises(HostError) as caught:
        endpoint.start()
    assert str(path) in caught.value.message
    assert "not a directory" in caught.value.remedy
    assert path.read_text() == "in the way"


def test_a_message_too_large_is_refused_and_the_next_call_served(plugin, dial, engine):
    client = dial(plugin().sockets.service)
    request = PREPARE_V1.request()
    request.claims.add(namespace="n", name="x" * (64 << 20), uid="u")
    with pytest.raises(grpc.RpcError) as caught:
        client.call(PREPARE_V1, request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert engine.calls == []
    assert client.call(PREPARE_V1, claims(PREPARE_V1, "a"), timeout=15).claims["a"].devices


def test_clients_that_connect_and_say_nothing_do_not_hinder_the_kubelet(plugin, dial):
    endpoint = plugin()
    silent = []
    for _ in range(100):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(endpoint.sockets.service))
        silent.append(connection)
    try:
        assert dial(endpoint.sockets.service).call(PREPARE_V1, claims(PREPARE_V1, "a"), timeout=15).claims
    finally:
        for connection in silent:
            connection.close()


def test_more_calls_at_once_than_a_connection_may_have_wait_and_none_is_reset(plugin, dial):
    client = dial(plugin().sockets.service)
    call = client.channel.unary_unary(
        PREPARE_V1.path,
        request_serializer=PREPARE_V1.request.SerializeToString,
        response_deserializer=PREPARE_V1.response.FromString,
    )
    for _ in range(3):
        calls = [
            call.future(claims(PREPARE_V1, f"u{n}"), timeout=20)
            for n in range(MAX_STREAMS_PER_CONNECTION + 100)
        ]
        assert all(answered.result().claims for answered in calls)
