"""XIDs in the kernel log: how they are written, and a reader that hears each once."""

from __future__ import annotations

import os
import threading

import pytest

from dra.host import kernel_log
from dra.host.file_watch import FileWatch
from dra.host.kernel_log import KernelLog, KernelXid, parse_record
from dra.values import PciAddress

ADDRESS = PciAddress.parse("0000:3b:00.0")


def line(xid=79, *, where="", at=5.5):
    return f"4,1234,{int(at * 1e6)},-;NVRM: Xid (PCI:0000:3b:00{where}): {xid}, pid='<unknown>', GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (line(), KernelXid(ADDRESS, 79, at=5.5)),
        (line(where=" GPU-I:05"), KernelXid(ADDRESS, 79, 5, None, 5.5)),
        (line(where=" GPU-I:05 GPU-CI:00"), KernelXid(ADDRESS, 79, 5, 0, 5.5)),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", KernelXid(ADDRESS, 13)),
        ("[12.3] NVRM: Xid (PCI:0000:3B:00.0): 13, x", KernelXid(ADDRESS, 13)),
        ("4,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module", None),
        ("4,1,2,-;NVRM: Xid (PCI:zz): 13", None),
        ("4,1,2,-;NVRM: Xid (PCI:0000:3b:00): pid", None),
        ("Xid", None),
        ("", None),
    ],
)
def test_a_line_of_the_kernel_module_is_understood(text, found):
    assert parse_record(text) == found


class Listener:
    def __init__(self):
        self.heard, self.changed = [], threading.Condition()

    def __call__(self, xid):
        with self.changed:
            self.heard.append(xid.xid)
            self.changed.notify_all()

    def wait(self, *wanted):
        with self.changed:
            assert self.changed.wait_for(lambda: self.heard == list(wanted), 60), self.heard


@pytest.fixture
def listen():
    logs = []

    def make(path, **options):
        told = Listener()
        opened = threading.Event()
        log = KernelLog(path, told, changed=opened.set, retry_seconds=0.05, **options)
        logs.append(log)
        log.start()
        assert opened.wait(60)
        return log, told

    yield make
    for log in logs:
        log.stop()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_what_comes_after_the_start_is_heard_once_also_in_pieces(tmp_path, listen):
    path = tmp_path / "kmsg"
    path.write_text(line(1))
    log, told = listen(path)
    assert log.why == ""
    # The reader may still be on its way to the end of the file.
    append(path, line(2))
    told.wait(2)
    append(path, "6,1,2,-;usb 1-1: new device\n" + line(3)[:30])
    append(path, line(3)[30:] + line(4))
    told.wait(2, 3, 4)


def test_what_an_earlier_process_did_not_hear_is_heard_later(tmp_path, listen):
    path = tmp_path / "kmsg"
    path.write_text(line(1, at=5) + line(2, at=15) + line(3, at=25))
    _, told = listen(path, after=10.0)
    told.wait(2, 3)


def test_a_log_that_is_not_there_is_waited_for_and_one_that_was_replaced_is_read(tmp_path, listen):
    path = tmp_path / "kmsg"
    log, told = listen(path, after=0.0)
    assert "cannot be opened" in log.why
    path.write_text(line(1))
    told.wait(1)
    assert log.why == ""
    path.unlink()
    # A new log of the machine is read from its end on: what it has may be old.
    path.write_text("")
    while True:
        append(path, line(2))
        with told.changed:
            if told.changed.wait_for(lambda: 2 in told.heard, 0.5):
                break


@pytest.mark.parametrize("instances", ["some left", "none left"])
def test_a_plain_file_is_heard_at_once_without_being_polled_where_the_system_can_tell(
    tmp_path, listen, monkeypatch, instances
):
    monkeypatch.setattr(kernel_log, "POLL_SECONDS", 0.01)
    if instances == "some left":
        # Only the news of the file system end a wait.
        monkeypatch.setattr(kernel_log, "FALLBACK_SECONDS", 3600.0)
    else:
        monkeypatch.setattr(FileWatch, "follow", lambda *_: False)
    path = tmp_path / "kmsg"
    path.write_text("")
    log, told = listen(path, after=0.0)
    append(path, line(1))
    told.wait(1)
    # Cut off, written anew under the same name, gone: what follows is another log.
    heard = 1
    for replace in (
        lambda: path.write_text(""),
        lambda: (tmp_path / "new").write_text("") or (tmp_path / "new").rename(path),
        lambda: path.unlink() or path.write_text(""),
    ):
        replace()
        heard += 1
        while True:
            append(path, line(heard))
            with told.changed:
                if told.changed.wait_for(lambda: heard in told.heard, 0.1):  # noqa: B023
                    break
    assert log.why == ""


def test_a_reader_that_was_stopped_leaves_nothing_open(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text("")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        opened = threading.Event()
        log = KernelLog(path, lambda _xid: None, changed=opened.set)
        log.start()
        assert opened.wait(60)
        log.stop(timeout_seconds=60)
        log.stop()
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_pipe_is_read_too(tmp_path, listen):
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    _, told = listen(path)
    for xid in (1, 2):
        with path.open("w") as pipe:
            pipe.write(line(xid))
        told.wait(*range(1, xid + 1))
