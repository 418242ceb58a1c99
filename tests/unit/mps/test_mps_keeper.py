"""The keeper: daemons with exactly the limits that were asked for, that come back, and of which nothing is left."""

from __future__ import annotations

import json
import os
import signal

import pytest
from keeper_rig import GPU, spec, until

from dra.errors import DraError
from dra.host.processes import start_ticks
from dra.mps.launcher import Launcher

LIMITS = {"active_thread_percentage": 25, "pinned_memory_mib": {GPU: 10240}}


def refused(call, *args):
    with pytest.raises(DraError) as caught:
        call(*args)
    return caught.value


def test_a_daemon_has_exactly_the_limits_that_were_asked_for(rig):
    rig.keeper()
    rig.client.ensure(spec(**LIMITS, multi_user=True))
    asked = ("get_default_active_thread_percentage", f"get_default_device_pinned_mem_limit {GPU}")
    assert rig.ask("claim-1", *asked) == ["25.0", "10240M"]
    assert rig.commands() == [
        "set_default_active_thread_percentage 25",
        f"set_default_device_pinned_mem_limit {GPU} 10240M",
    ]
    (start,) = [entry for entry in rig.log() if entry["what"] == "start"]
    assert start["devices"] == [GPU]
    assert start["multi_user"] is True
    found = rig.client.status("claim-1")
    assert (found.ready, found.pid, found.spec) == (True, start["pid"], spec(**LIMITS, multi_user=True))
    # A session of its own: whatever ends the keeper does not end it.
    assert os.getsid(found.pid) == found.pid


def test_a_daemon_is_asked_and_told_in_one_talk(rig, monkeypatch):
    """Each talk is a process of the driver's front-end."""
    talks = []
    real = Launcher.ask

    def ask(self, folders, commands, **more):
        end = real(self, folders, commands, **more)
        if end.status == 0:  # else it does not listen yet
            talks.append([each.partition(" ")[0] for each in commands])
        return end

    monkeypatch.setattr(Launcher, "ask", ask)
    rig.keeper()
    rig.client.ensure(spec(**LIMITS))
    assert talks == [
        [
            "get_default_active_thread_percentage",
            "set_default_active_thread_percentage",
            "set_default_device_pinned_mem_limit",
        ]
    ]
    rig.client.ensure(spec(**LIMITS))
    assert len(talks) == 1


def test_a_daemon_without_limits_is_told_nothing(rig):
    rig.keeper()
    rig.client.ensure(spec())
    assert rig.commands() == []
    assert rig.ask("claim-1", "get_default_active_thread_percentage") == ["100.0"]


def test_asked_again_it_is_the_same_daemon_and_other_limits_are_set_while_it_runs(rig):
    rig.keeper()
    rig.client.ensure(spec(**LIMITS))
    pid = rig.client.status("claim-1").pid
    rig.client.ensure(spec(**LIMITS))
    assert len(rig.commands()) == 2
    rig.client.ensure(spec(active_thread_percentage=50, pinned_memory_mib={GPU: 512}))
    assert rig.client.status("claim-1").pid == pid
    assert rig.ask("claim-1", f"get_default_device_pinned_mem_limit {GPU}") == ["512M"]


def test_other_devices_need_another_daemon(rig):
    rig.keeper()
    rig.client.ensure(spec())
    pid = rig.client.status("claim-1").pid
    rig.client.ensure(spec(devices=("MIG-00000000-0000-0000-0000-00000000000b",)))
    assert rig.client.status("claim-1").pid != pid
    assert start_ticks(pid) is None


def test_a_daemon_that_is_killed_is_restarted_with_its_limits_and_that_is_told(rig):
    rig.keeper()
    rig.client.ensure(spec(**LIMITS, claim="team/one"))
    pid = rig.client.status("claim-1").pid
    os.kill(pid, signal.SIGKILL)
    events, last = rig.client.events(None, wait_seconds=60)
    assert [(event.daemon, event.reason) for event in events] == [("claim-1", "MpsDaemonRestarted")]
    assert "restart containers" in events[0].message
    found = rig.client.status("claim-1")
    assert (found.ready, found.restarts) == (True, 1)
    assert found.pid not in (0, pid)
    assert rig.ask("claim-1", f"get_default_device_pinned_mem_limit {GPU}") == ["10240M"]
    # What was told is not told again, to a plugin after this one either.
    assert rig.client.events(last, wait_seconds=0)[0] == []
    assert rig.client.events(None, wait_seconds=0)[0] == []


def test_a_daemon_that_cannot_come_back_is_told_once_and_tried_again(rig):
    rig.keeper(first_back_off=0.05, longest_back_off=0.05)
    rig.client.ensure(spec())
    rig.fail(exit=True)
    os.kill(rig.client.status("claim-1").pid, signal.SIGKILL)
    events, last = rig.client.events(None, wait_seconds=60)
    assert [event.reason for event in events] == ["MpsDaemonFailed"]
    assert "DRA-MPS-DAEMON-FAILED" in events[0].message
    assert not rig.client.status("claim-1").ready
    rig.fail()
    events, _ = rig.client.events(last, wait_seconds=60)
    assert [event.reason for event in events] == ["MpsDaemonRestarted"]
    assert rig.client.status("claim-1").ready


def test_a_keeper_that_is_restarted_finds_its_daemons_and_they_notice_nothing(rig):
    rig.keeper()
    rig.client.ensure(spec(**LIMITS))
    before = rig.client.status("claim-1")
    rig.keeper()
    assert rig.client.status("claim-1") == before
    assert [entry["what"] for entry in rig.log()].count("start") == 1
    # It is watched as before, and can be ended.
    os.kill(before.pid, signal.SIGKILL)
    assert [e.reason for e in rig.client.events(None, wait_seconds=60)[0]] == ["MpsDaemonRestarted"]
    rig.client.stop("claim-1")
    assert rig.pids() == []


def test_a_daemon_that_died_while_no_keeper_was_there_is_restarted_by_the_next(rig):
    service = rig.keeper()
    rig.client.ensure(spec())
    pid = rig.client.status("claim-1").pid
    service.stop()
    os.kill(pid, signal.SIGKILL)
    until(lambda: start_ticks(pid) is None, "it is dead")
    rig.keeper()
    assert [e.reason for e in rig.client.events(None, wait_seconds=60)[0]] == ["MpsDaemonRestarted"]


def test_stopping_leaves_nothing_and_may_be_done_twice(rig):
    rig.keeper()
    rig.client.ensure(spec())
    rig.client.ensure(spec("claim-2"))
    pid = rig.client.status("claim-1").pid
    rig.client.stop("claim-1")
    assert start_ticks(pid) is None
    assert rig.folders() == ["claim-2"]
    assert list(rig.rows()) == ["claim-2"]
    assert rig.client.status("claim-1") is None
    rig.client.stop("claim-1")
    # The last words were polite.
    assert "quit" in rig.commands()


def test_a_daemon_that_hears_nothing_is_ended_all_the_same(rig):
    rig.keeper(quit=0.3)
    rig.client.ensure(spec())
    pid = rig.client.status("claim-1").pid
    rig.fail(hang=True)
    rig.client.stop("claim-1")
    assert start_ticks(pid) is None
    assert rig.folders() == []


def test_one_that_does_not_start_is_an_error_and_leaves_nothing(rig):
    rig.keeper()
    rig.fail(exit=True)
    error = refused(rig.client.ensure, spec())
    assert error.code == "DRA-MPS-DAEMON-FAILED"
    assert "Failed to initialize MPS" in error.message
    assert error.retryable
    assert (rig.folders(), rig.rows(), rig.pids()) == ([], {}, [])


def test_one_that_never_answers_is_an_error_and_leaves_nothing(rig):
    rig.keeper(ready=0.5, command=0.5)
    rig.fail(start_seconds=60)
    error = refused(rig.client.ensure, spec())
    assert error.code == "DRA-MPS-DAEMON-SLOW"
    assert error.retryable
    assert (rig.folders(), rig.rows(), rig.pids()) == ([], {}, [])


def test_limits_that_it_does_not_take_are_an_error_and_nothing_runs_without_them(rig):
    rig.keeper()
    stranger = "GPU-00000000-0000-0000-0000-00000000dead"
    error = refused(rig.client.ensure, spec(pinned_memory_mib={stranger: 10}))
    assert error.code == "DRA-MPS-LIMITS"
    assert stranger in error.message
    assert (rig.folders(), rig.rows(), rig.pids()) == ([], {}, [])


def test_a_driver_without_the_program_is_named(rig):
    rig.keeper()
    (rig.root / "usr/bin/nvidia-cuda-mps-control").unlink()
    error = refused(rig.client.ensure, spec())
    assert error.code == "DRA-MPS-PROGRAM"
    assert rig.folders() == []


def test_a_keeper_that_dies_before_the_process_is_written_down_leaves_no_daemon(rig):
    """The process waits until the table names it; a keeper that is gone cannot let it go."""
    service = rig.keeper()
    launcher, folders = service.keeper._control.launcher, service.keeper._folders("claim-1")
    for path in (folders.pipe, folders.shm, folders.log):
        path.mkdir(parents=True)
    child = launcher.start(spec(), folders)
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(60) == 126
    assert rig.log() == []


def test_after_a_reboot_nothing_is_taken_for_a_daemon(rig):
    service = rig.keeper()
    rig.client.ensure(spec())
    service.stop()
    rig.machine.control.reboot()
    rig.keeper()
    assert rig.client.list() == []
    rig.client.ensure(spec())
    assert rig.client.status("claim-1").ready


@pytest.mark.parametrize("content", ["", "{", "[]", '{"daemons": [{"spec": 1}], "boot_id": ""}'])
def test_a_damaged_table_is_set_aside_and_the_keeper_goes_on(rig, content):
    rig.table.parent.mkdir(parents=True, exist_ok=True)
    rig.table.write_text(content)
    rig.keeper()
    assert rig.client.list() == []
    rig.client.ensure(spec())
    assert rig.client.status("claim-1").ready


def test_many_at_once_are_each_one_daemon(rig):
    import threading

    rig.keeper()
    ids = [f"claim-{n % 3}" for n in range(9)]
    threads = [threading.Thread(target=rig.client.ensure, args=(spec(each),)) for each in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry["what"] for entry in rig.log()].count("start") == 3
    assert sorted(status.spec.id for status in rig.client.list()) == ["claim-0", "claim-1", "claim-2"]


def test_a_second_keeper_waits_for_the_first_to_end(rig):
    import threading

    from dra.mps.service import KeeperService

    first = rig.keeper()
    second = KeeperService(first._settings)
    rig.services.append(second)
    waiting = threading.Thread(target=second.start, name="second-keeper")
    waiting.start()
    rig.client.hello()
    assert waiting.is_alive()
    first.stop()
    waiting.join(60)
    rig.client.hello()


def test_the_table_tells_which_process_it_is(rig):
    rig.keeper()
    rig.client.ensure(spec())
    row = json.loads(rig.table.read_text())["daemons"][0]
    assert row["started"] == start_ticks(row["pid"])
    assert rig.table.stat().st_mode & 0o777 == 0o600
