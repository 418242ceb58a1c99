"""What a watch tells of files and folders, and what it leaves behind."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from dra.errors import HostError
from dra.host import file_watch
from dra.host.file_watch import ATTRIBUTES, MODIFIED, MOVED_TO, NAMES_CHANGED, SELF_MOVED, FileWatch


@pytest.fixture
def watch():
    watch = FileWatch()
    yield watch
    watch.close()


def open_descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def is_told(watch, change=lambda: None) -> bool:
    """Whether a change ends a wait long before its time is over."""
    change()
    return watch.wait(60)


def silent(watch) -> bool:
    return not watch.wait(0.05)


def test_every_change_of_the_names_in_a_folder_is_told(tmp_path, watch):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert watch.follow(folder, NAMES_CHANGED)
    assert silent(watch)
    path = folder / "file"
    for change in (
        path.touch,
        lambda: path.rename(folder / "other"),
        lambda: (folder / "other").rename(tmp_path / "away"),
        lambda: (tmp_path / "away").rename(path),
        path.unlink,
        folder.rmdir,
    ):
        assert is_told(watch, change)


def test_a_folder_of_the_same_name_is_followed_in_place_of_the_one_that_was_moved_away(tmp_path, watch):
    folder, away = tmp_path / "folder", tmp_path / "away"
    folder.mkdir()
    watch.follow(folder, NAMES_CHANGED)
    assert is_told(watch, lambda: folder.rename(away))
    assert not watch.follow(folder, NAMES_CHANGED)
    folder.mkdir()
    assert watch.follow(folder, NAMES_CHANGED)
    watch.wait(0.01)
    (away / "file").touch()
    assert silent(watch)
    assert is_told(watch, (folder / "file").touch)
    # Again where nothing changed: no other watch, and what was told since is not lost.
    (folder / "second").touch()
    assert watch.follow(folder, NAMES_CHANGED)
    assert is_told(watch)
    assert silent(watch)


def test_a_file_tells_what_is_written_and_that_it_is_not_the_file_of_that_name_any_more(tmp_path, watch):
    path = tmp_path / "file"
    path.write_text("one")
    with path.open("a") as kept:
        assert watch.follow(path, MODIFIED | ATTRIBUTES | SELF_MOVED)
        assert is_told(watch, lambda: os.write(kept.fileno(), b"two"))
        assert is_told(watch, lambda: os.truncate(path, 0))
        other = tmp_path / "other"
        other.touch()
        assert is_told(watch, lambda: other.rename(path))


def test_a_wake_from_another_thread_ends_the_wait_or_the_next_one(watch):
    threading.Timer(0.01, watch.wake).start()
    assert is_told(watch)
    assert is_told(watch, watch.wake)
    assert silent(watch)


def test_another_descriptor_that_can_be_read_ends_the_wait(watch):
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x")
        assert watch.wait(60, also=reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_nothing_is_left_open_and_a_late_wake_does_no_harm(tmp_path):
    before = open_descriptors()
    for _ in range(20):
        watch = FileWatch()
        assert watch.follow(tmp_path, MOVED_TO)
        assert not watch.follow(tmp_path / "missing", MOVED_TO)
        watch.close()
        watch.close()
        watch.wake()
    assert open_descriptors() == before


def test_where_no_inotify_instance_is_left_it_is_said_and_tried_again(tmp_path, watch, monkeypatch):
    class Exhausted:
        def inotify_init1(self, _flags):
            return -1

    with monkeypatch.context() as patched:
        patched.setattr(file_watch, "_libc", Exhausted)
        assert not watch.follow(tmp_path, MOVED_TO)
        # It can still be waited and woken.
        assert silent(watch)
        assert is_told(watch, watch.wake)
    assert watch.follow(tmp_path, MOVED_TO)


def test_without_a_descriptor_there_is_no_watch_and_the_error_says_what_to_do(monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", refuse)
    with pytest.raises(HostError) as caught:
        FileWatch()
    assert caught.value.code == "DRA-HOST-TOO-MANY-FILES"
    assert "ulimit" in caught.value.remedy
