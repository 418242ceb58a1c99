"""Sockets that are taken away are served again: by news of the file system, and by looking where there are none."""

from __future__ import annotations

import os
import shutil
import socket
import time

import pytest

from dra.host.file_watch import FileWatch
from dra.pb.services import GET_INFO
from dra.plugin.registration import Registration
from dra.plugin.socket_guard import SocketGuard

HOUR = 3600.0


class Guarded:
    """A registration server under a guard that looks by itself only as often as it is told."""

    def __init__(self, folder, **intervals):
        self.folder = folder
        self.path = folder / "gpu.nvidia.com-reg.sock"
        self.registration = Registration(
            "gpu.nvidia.com", endpoint=folder / "dra.sock", on_status=lambda *_: None
        )
        self.server = self.registration.server(self.path)
        self.guard = SocketGuard([self.server], **intervals)
        self.guard.open_all()
        self.guard.start()

    def wait_present(self):
        end = time.monotonic() + 60
        while not self.server.present:
            assert time.monotonic() < end, "it was not served again"
            time.sleep(0.01)

    def close(self):
        self.guard.stop()
        self.server.close(grace_seconds=0).wait(60)
        self.registration.shut()


@pytest.fixture
def guarded(short_dir):
    made = []

    def make(**intervals):
        folder = short_dir / f"registry{len(made)}"
        folder.mkdir()
        made.append(Guarded(folder, **intervals))
        return made[-1]

    yield make
    for each in made:
        each.close()


def remove(each):
    each.path.unlink()


def empty_the_folder(each):
    for name in os.listdir(each.folder):
        (each.folder / name).unlink()


def move_the_socket_away(each):
    each.path.rename(each.folder.parent / "away.sock")


def put_a_dead_socket_in_its_place(each):
    # So that the inode is not used again.
    each.path.rename(each.folder.parent / "kept")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(each.path))


def make_the_folder_anew(each):
    shutil.rmtree(each.folder)
    each.folder.mkdir()


def put_another_folder_in_its_place(each):
    other = each.folder.parent / "other"
    other.mkdir()
    each.folder.rename(each.folder.parent / "moved")
    other.rename(each.folder)


AWAY = (
    remove,
    empty_the_folder,
    move_the_socket_away,
    put_a_dead_socket_in_its_place,
    make_the_folder_anew,
    put_another_folder_in_its_place,
)


@pytest.mark.parametrize("take_away", AWAY)
def test_what_is_taken_away_is_served_again_without_being_looked_for_while_all_is_well(
    guarded, dial, take_away
):
    each = guarded(interval_seconds=0.05, fallback_seconds=HOUR)
    # Twice: what was made anew is watched as well. In between the news of the first time come to their end, else those
    # would have the guard look the second time.
    for again in (False, True):
        if again:
            time.sleep(0.4)
        take_away(each)
        shutil.rmtree(each.folder.parent / "moved", ignore_errors=True)
        (each.folder.parent / "kept").unlink(missing_ok=True)
        each.wait_present()
    assert dial(each.path).call(GET_INFO, timeout=60).name == "gpu.nvidia.com"


@pytest.mark.parametrize("take_away", [remove, make_the_folder_anew])
def test_where_nothing_is_told_it_is_looked_every_second(guarded, dial, monkeypatch, take_away):
    monkeypatch.setattr(FileWatch, "follow", lambda *_: False)
    each = guarded(interval_seconds=0.05, fallback_seconds=HOUR)
    take_away(each)
    each.wait_present()
    assert dial(each.path).call(GET_INFO, timeout=60).name == "gpu.nvidia.com"


def test_a_change_that_is_not_told_is_found_by_the_regular_look(guarded, monkeypatch):
    # As on a file system without inotify: it is promised, and nothing comes.
    monkeypatch.setattr(FileWatch, "follow", lambda *_: True)
    each = guarded(interval_seconds=HOUR, fallback_seconds=0.05)
    remove(each)
    each.wait_present()


def test_a_name_that_another_took_over_is_served_again_once_nobody_answers_there(guarded, short_dir):
    each = guarded(interval_seconds=0.05, fallback_seconds=HOUR)
    other = Registration("gpu.nvidia.com", endpoint=short_dir / "x.sock", on_status=lambda *_: None)
    server = other.server(each.path)
    server.open()
    assert not each.server.present
    kept = each.folder / "kept.sock"
    os.link(each.path, kept)
    # It ends as a killed one does: the file stays, and no news tells of it.
    server.close(grace_seconds=0).wait(60)
    kept.rename(each.path)
    each.wait_present()
    other.shut()


def test_a_guard_that_ended_leaves_nothing_open_and_makes_nothing(guarded):
    each = guarded(interval_seconds=0.05, fallback_seconds=HOUR)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        guard = SocketGuard([each.server])
        guard.start()
        guard.stop()
        guard.stop()
    assert len(os.listdir("/proc/self/fd")) < before + 10
    each.guard.stop()
    each.path.unlink()
    assert not each.server.present
