"""A system that gives no thread for the watch, and a process that ends while its publisher hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dra.controller.lock import PublisherLock
from dra.controller.publisher import Publisher
from tests.unit.controller.pools import pool
from tests.unit.kube.tiny_api import TinyApi


def test_it_publishes_once_there_is_a_thread_for_its_watch(
    api: TinyApi, publishing: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("watch-") and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("dra.controller.publisher.LOCK_SECONDS", 0.05)
    publisher = publishing(pool("gpu-0"))
    api.until(lambda: publisher.ready, seconds=5)
    assert refused.is_set()


def test_a_process_that_ends_lets_the_next_one_publish_although_its_thread_hangs(
    publishing: Callable[..., Publisher], api: TinyApi, tmp_path: Path
) -> None:
    path = tmp_path / "publisher.lock"
    publisher = publishing(pool("gpu-0"), lock_path=path)
    api.until(lambda: publisher.ready, seconds=5)
    other = PublisherLock(path)
    assert not other.try_acquire()
    publisher.let_go()
    assert other.try_acquire()
    other.release()
    publisher.let_go()


@pytest.mark.fault("F44")
def test_a_lock_file_that_was_removed_keeps_nobody_out_and_so_its_holder_waits_for_the_new_one(
    publishing: Callable[..., Publisher], api: TinyApi, tmp_path: Path
) -> None:
    path = tmp_path / "publisher.lock"
    publisher = publishing(pool("gpu-0"), lock_path=path)
    api.until(lambda: publisher.ready, seconds=30)
    path.unlink()
    other = PublisherLock(path)
    assert other.try_acquire()
    publisher.set_desired(pool("gpu-0", "gpu-1"))
    api.until(lambda: publisher.status().state == "waiting", seconds=30)
    devices = [[each["name"] for each in obj["spec"]["devices"]] for obj in api.all("resourceslices")]
    assert devices == [["gpu-0"]]
    other.release()
    api.until(lambda: publisher.ready and publisher.status().state == "publishing", seconds=30)
    devices = [[each["name"] for each in obj["spec"]["devices"]] for obj in api.all("resourceslices")]
    assert devices == [["gpu-0", "gpu-1"]]
