"""Locks between threads and processes, with real files and real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_fakes import wait_until

from dra.errors import HostError
from dra.prepare.locks import LockDirectory, hold_shared


@pytest.fixture
def locks(tmp_path):
    return LockDirectory(tmp_path / "locks")


def test_a_second_holder_waits_for_the_first(locks):
    order = []
    with locks.hold(["a"], what="one"):
        thread = threading.Thread(target=lambda: _enter(locks, order))
        thread.start()
        order.append("first leaves")
    thread.join()
    assert order == ["first leaves", "second"]


def _enter(locks, order, name="a", label="second"):
    with locks.hold([name], what=label):
        order.append(label)


def test_waiters_get_their_turn_in_order_of_arrival(locks):
    order, threads = [], []
    with locks.hold(["a"], what="first"):
        for number in range(8):
            thread = threading.Thread(target=_enter, args=(locks, order, "a", number))
            thread.start()
            threads.append(thread)
            wait_until(lambda n=number: len(locks._turns["a"].waiting) == n + 2)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_wait_that_is_too_long_names_the_lock_and_who_wanted_it(locks):
    with locks.hold(["gpu-3"], what="one"):
        with pytest.raises(HostError) as caught, locks.hold(["gpu-3"], what="the prepare", wait_seconds=0.01):
            pass
    assert caught.value.code == "DRA-LOCK-TIMEOUT"
    assert caught.value.retryable
    assert "gpu-3" in str(caught.value)
    assert "the prepare" in str(caught.value)
    with locks.hold(["gpu-3"], what="another", wait_seconds=0.01):
        pass
    assert locks._turns == {}


def test_locks_taken_in_any_order_never_end_in_a_deadlock(locks):
    def work(names):
        for _ in range(50):
            with locks.hold(names, what="work"):
                pass

    threads = [
        threading.Thread(target=work, args=(n,)) for n in (["a", "b", "c"], ["c", "b", "a"], ["b", "a"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX if sys.argv[2] == "alone" else fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def holder(path, how):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_waited_for_and_a_dead_one_holds_nothing(locks, tmp_path):
    locks.make()
    process = holder(tmp_path / "locks" / "a.lock", "alone")
    try:
        with (
            pytest.raises(HostError, match="another process"),
            locks.hold(["a"], what="x", wait_seconds=0.02),
        ):
            pass
        process.kill()
        process.wait()
        with locks.hold(["a"], what="x", wait_seconds=5):
            pass
    finally:
        process.kill()
        process.communicate()


def test_nvidias_plugin_at_work_keeps_ours_out_and_two_of_ours_go_together(tmp_path):
    path = tmp_path / "pu.lock"
    with hold_shared(path, what="one"), hold_shared(path, what="two", wait_seconds=0.01):
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    process = holder(path, "alone")
    try:
        with pytest.raises(HostError, match=r"pu\.lock"), hold_shared(path, what="x", wait_seconds=0.02):
            pass
    finally:
        process.communicate()


def test_a_waiter_whose_lock_file_was_removed_waits_for_the_one_that_has_the_name(locks, tmp_path):
    """Else it would be in at the same time as who locked the new file."""
    locks.make()
    path = tmp_path / "locks" / "a.lock"
    first = _lock(path)
    entered = threading.Event()
    thread = threading.Thread(target=lambda: _enter(locks, [], "a") or entered.set())
    thread.start()
    # The waiter has the old file open.
    wait_until(lambda: sum("a.lock" in _target(fd) for fd in os.listdir("/proc/self/fd")) == 2)
    path.unlink()
    second = _lock(path)
    os.close(first)
    assert not entered.wait(0.1)
    os.close(second)
    assert entered.wait(60)
    thread.join()


def _lock(path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


CLAIM_HOLDER = """
import sys
from pathlib import Path
from dra.prepare.locks import LockDirectory
with LockDirectory(Path(sys.argv[1])).hold(["claim-a"], what="another"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_claims_exclude_their_own_kind_alone_between_processes_too_and_leave_no_file_behind(locks, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM_HOLDER, str(tmp_path / "locks")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        with locks.hold(["claim-b", "gpu-a"], what="x", wait_seconds=0):
            pass
        with pytest.raises(HostError) as caught, locks.hold(["claim-a"], what="x", wait_seconds=0.02):
            pass
        assert "claim-a" in str(caught.value)
        assert "another process" in str(caught.value)
        process.kill()
        process.wait()
        with locks.hold(["claim-a"], what="x", wait_seconds=5):
            pass
    finally:
        process.kill()
        process.communicate()
    assert sorted(path.name for path in (tmp_path / "locks").iterdir()) == ["claims.lock", "gpu-a.lock"]


def test_a_claim_s_lock_excludes_who_opened_the_file_anew(locks, tmp_path):
    """As between two processes: the turns in memory are not what keeps the second one out."""
    other = LockDirectory(tmp_path / "locks")
    with locks.hold(["claim-a"], what="one"):
        with pytest.raises(HostError), other.hold(["claim-a"], what="two", wait_seconds=0):
            pass
        (tmp_path / "locks" / "claims.lock").unlink()
    with other.hold(["claim-a"], what="two", wait_seconds=0):
        pass


@given(st.sets(st.uuids(), min_size=2, max_size=50))
def test_no_two_claims_have_a_lock_in_common(uids):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        for uid in uids:
            other = LockDirectory(Path(folder))
            held.enter_context(other.hold([f"claim-{uid}"], what="x", wait_seconds=0))


def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path):
    (tmp_path / "locks").write_text("")
    with pytest.raises(HostError) as caught, LockDirectory(tmp_path / "locks").hold(["a"], what="x"):
        pass
    assert "locks" in str(caught.value)


def test_no_descriptor_is_left_open(locks, tmp_path):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(20):
        with locks.hold(["a", "b"], what="x"), hold_shared(tmp_path / "pu.lock", what="x"):
            with pytest.raises(HostError), locks.hold(["a"], what="y", wait_seconds=0):
                pass
    assert count() == before


@pytest.mark.parametrize("name", ["claim-a", "gpu-0"])
def test_a_link_in_the_place_of_a_lock_is_not_followed_and_the_error_says_what_to_remove(
    locks, tmp_path, name
):
    locks.make()
    elsewhere = tmp_path / "elsewhere"
    for each in ("claims.lock", "gpu-0.lock"):
        (tmp_path / "locks" / each).symlink_to(elsewhere)
    with pytest.raises(HostError, match="symbolic link.*remove it"), locks.hold([name], what="x"):
        pass
    assert not elsewhere.exists()
