"""The keeper's socket, its client, and what holds where one of them is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_rig import GPU, spec, until

from dra.errors import DraError
from dra.host.processes import start_ticks
from dra.mps import server
from dra.mps.server import KeeperServer
from dra.prepare.sharing.keeper_client import ABSENT, KeeperClient
from dra.prepare.sharing.mps_model import DaemonSpec, daemon_folders


def error_of(call, *args):
    with pytest.raises(DraError) as caught:
        call(*args)
    return caught.value


def say(rig, line: bytes) -> dict:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(rig.state_dir / "mps/keeper.sock"))
        connection.sendall(line + b"\n")
        return json.loads(connection.makefile("rb").readline())


def test_lines_that_are_no_requests_are_answered_and_do_no_harm(rig):
    rig.keeper()
    for line in (b"", b"{", b"[]", b"1", b'{"v": 1}', b'{"v": 1, "op": "dance"}', b'{"v": 1, "op": "status"}',
                 b'{"v": 1, "op": "stop", "id": "../x"}', b'{"v": 1, "op": "ensure", "daemon": {"id": "a"}}',
                 b'{"v": 1, "op": "events", "after": "x"}', b"\xff"):  # fmt: skip
        answer = say(rig, line)
        assert answer["ok"] is False, line
        assert answer["error"]["code"] in ("DRA-MPS-KEEPER-REQUEST", "DRA-MPS-KEEPER-VERSION"), line
    assert say(rig, b'{"v": 2, "op": "hello"}')["error"]["code"] == "DRA-MPS-KEEPER-VERSION"
    assert say(rig, b'{"v": 1, "op": "hello"}') == {"v": 1, "ok": True, "pid": os.getpid()}


class _NoKeeper:
    """Everything that is asked of it is a bug."""

    def __getattr__(self, name):
        def call(*args):
            if name == "status":
                return {"known": False}
            raise AssertionError(name)

        return call


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    request_body=st.dictionaries(st.sampled_from(["op", "daemon", "id", "after", "x"]), JSON),
    v=st.sampled_from([1, 2]),
)
def test_any_request_has_an_answer(request_body, v):
    answer = KeeperServer(_NoKeeper(), None).answer(json.dumps({"v": v, **request_body}).encode())
    assert answer["ok"] or answer["error"]["code"].startswith("DRA-MPS-KEEPER-")


@settings(max_examples=150, deadline=None)
@given(
    data=JSON
    | st.fixed_dictionaries(
        {"id": JSON, "devices": JSON}, optional={"pinned_memory_mib": JSON, "active_thread_percentage": JSON}
    )
)
def test_any_json_is_a_daemon_or_a_value_error(data):
    try:
        found = DaemonSpec.from_json(data)
    except ValueError:
        return
    assert DaemonSpec.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_only_root_and_its_own_user_may_ask(monkeypatch):
    class Connection:
        def __init__(self, uid):
            self.uid = uid

        def getsockopt(self, *_):
            return struct.pack("3i", 4711, self.uid, self.uid)

    monkeypatch.setattr(server.os, "geteuid", lambda: 1000)
    assert server.may_ask(Connection(0))
    assert server.may_ask(Connection(1000))
    assert not server.may_ask(Connection(1001))


def test_nobody_else_can_open_the_socket(rig):
    rig.keeper()
    assert (rig.state_dir / "mps/keeper.sock").stat().st_mode & 0o777 == 0o600


def test_a_state_directory_may_lie_deeper_than_an_address_is_long(rig, monkeypatch):
    from dra.mps.service import KeeperService, KeeperSettings

    settings = KeeperSettings("a" * 60 + "." + "b" * 60, rig.paths, isolate=False)
    service = KeeperService(settings)
    service.start()
    rig.services.append(service)
    client = KeeperClient(settings.state_dir)
    client.hello()
    client.ensure(spec())
    client.stop("claim-1")


# -- without a keeper ---------------------------------------------------------------------------------------


def test_without_a_keeper_there_is_a_clear_error(rig):
    error = error_of(rig.client.ensure, spec())
    assert error.code == ABSENT
    assert error.retryable
    assert "keeper.sock" in error.message
    assert "mps-keeper.yaml" in error.remedy


def test_a_keeper_that_does_not_answer_is_named(rig, monkeypatch):
    from dra.prepare.sharing import keeper_client

    monkeypatch.setattr(keeper_client, "ASK_SECONDS", 0.2)
    folder = rig.state_dir / "mps"
    folder.mkdir(parents=True)
    listener = server.listen(folder / "keeper.sock")
    try:
        assert error_of(rig.client.status, "claim-1").code == "DRA-MPS-KEEPER-HUNG"
    finally:
        listener.close()


def test_a_keeper_of_another_version_is_named(rig, monkeypatch):
    from dra.prepare.sharing import keeper_client

    rig.keeper()
    monkeypatch.setattr(keeper_client, "PROTOCOL", 2)
    error = error_of(rig.client.hello)
    assert error.code == "DRA-MPS-KEEPER-VERSION"
    assert "speaks version 1" in error.message


def test_what_a_keeper_left_that_is_gone_with_its_daemons_can_be_removed_without_it(rig):
    service = rig.keeper()
    rig.client.ensure(spec())
    pid = rig.client.status("claim-1").pid
    service.stop()
    # As long as the daemon lives, nobody but the keeper may end it.
    assert error_of(rig.client.stop, "claim-1").code == ABSENT
    assert rig.folders() == ["claim-1"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: start_ticks(pid) is None, "it is dead")
    rig.client.stop("claim-1")
    assert rig.folders() == []
    rig.client.stop("claim-1")


def test_what_was_prepared_in_no_keepers_time_is_removed_without_one(rig):
    daemon_folders(rig.state_dir, "claim-9").pipe.mkdir(parents=True)
    rig.client.stop("claim-9")
    assert rig.folders() == []


def test_the_command_asks_whether_the_keeper_is_well(rig, capsys):
    from dra.cli.main import main

    words = ["mps-keeper", "--check", "--kubelet-plugins-directory-path", str(rig.state_dir.parent)]
    assert main(words) == 1
    assert ABSENT in capsys.readouterr().err
    rig.keeper()
    assert main(words) == 0


def test_events_are_waited_for(rig):
    rig.keeper()
    assert rig.client.events(None, wait_seconds=0) == ([], 0)
    rig.client.ensure(spec(pinned_memory_mib={GPU: 5}))
    os.kill(rig.client.status("claim-1").pid, signal.SIGKILL)
    (event,), last = rig.client.events(0, wait_seconds=60)
    assert (event.number, last) == (1, 1)
