"""Something that is no readable file at a record's name: one claim's damage, nobody else's."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from dra.prepare import record_files


def as_directory(path):
    path.mkdir()


def as_full_directory(path):
    path.mkdir()
    (path / "precious").write_text("not ours")


def as_pipe(path):
    os.mkfifo(path)


def as_socket(path):
    # A socket's path is short.
    before = os.getcwd()  # noqa: PTH109
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def as_link(path):
    path.symlink_to("/etc/hostname")


def as_dangling_link(path):
    path.symlink_to("nowhere")


def as_huge_file(path):
    path.touch()
    os.truncate(path, 1 << 40)


KINDS = {
    as_directory: "is a directory",
    as_full_directory: "is a directory",
    as_pipe: "is a pipe",
    as_socket: "is a socket",
    as_link: "is a symbolic link",
    as_dangling_link: "is a symbolic link",
    as_huge_file: "is larger than any record",
}


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("restarted", [True, False])
def test_what_is_no_file_is_one_claims_damage_and_is_set_aside_reported_and_rebuilt(node, make, restarted):
    ref, other, rival = node.claim(1, "gpu-0"), node.claim(2, "gpu-1"), node.claim(3, "gpu-0")
    first, second = node.prepared(ref), node.prepared(other)
    path = node.record_file(ref)
    path.unlink()
    make(path)
    if restarted:
        node.restart()

    assert node.prepared(other) == second
    node.prepared(node.claim(4, "gpu-4"))
    error = node.refused(rival)
    assert error.code == "DRA-DEVICE-HELD"
    assert ref.uid in error.message
    (notice,) = node.notices
    assert notice.reason == "ClaimRecordLost"
    assert f"{path} {KINDS[make]}" in notice.message
    assert not os.path.lexists(path)
    # A process that finds only what was set aside.
    node.restart()
    assert node.refused(rival).code == "DRA-DEVICE-HELD"

    assert node.prepared(ref) == first
    assert node.record(ref)["state"] == "prepared"
    for each in (ref, other, node.claim(4, "gpu-4")):
        assert node.unprepare(each) is None
    node.restart()
    node.prepared(rival)
    assert node.unprepare(rival) is None
    left = [name for name in node.files() if ".kept-" not in name]
    assert left == []


def test_what_somebody_keeps_in_a_directory_at_a_records_name_is_not_deleted(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.record_file(ref).unlink()
    as_full_directory(node.record_file(ref))
    node.prepared(ref)
    assert node.unprepare(ref) is None
    (kept,) = (node.state_dir / "claims").glob("*.kept-*")
    assert (kept / "precious").read_text() == "not ours"


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_record_that_the_disk_does_not_give_is_one_claims_damage(node, monkeypatch, at, number):
    ref, other, rival = node.claim(1, "gpu-0"), node.claim(2, "gpu-1"), node.claim(3, "gpu-0")
    node.prepared(ref)
    second = node.prepared(other)
    inode = node.record_file(ref).stat().st_ino
    real_open, real_read = os.open, os.read

    def bad_open(path, *args, **more):
        if at == "open" and str(path) == str(node.record_file(ref)) and os.stat(path).st_ino == inode:  # noqa: PTH116
            raise OSError(number, os.strerror(number), path)
        return real_open(path, *args, **more)

    def bad_read(descriptor, count):
        if at == "read" and os.fstat(descriptor).st_ino == inode:
            raise OSError(number, os.strerror(number))
        return real_read(descriptor, count)

    monkeypatch.setattr(record_files.os, "open", bad_open)
    monkeypatch.setattr(record_files.os, "read", bad_read)
    node.restart()
    assert node.prepared(other) == second
    assert node.refused(rival).code == "DRA-DEVICE-HELD"
    (notice,) = node.notices
    assert f"{node.record_file(ref)} cannot be read: {os.strerror(number)}" in notice.message
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.unprepare(other) is None
    assert node.files() == []


def test_a_process_without_descriptors_takes_no_record_for_damaged(node, monkeypatch):
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    real_open = os.open

    def no_descriptors(path, *args, **more):
        if str(path).endswith(".json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return real_open(path, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(record_files.os, "open", no_descriptors)
        error = node.refused(ref)
        assert error.code == "DRA-HOST-TOO-MANY-FILES"
        assert str(node.record_file(ref)) in error.message
    assert node.notices == []
    assert node.prepared(ref) == first


def test_no_descriptor_stays_open_for_what_is_no_file(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.prepared(ref)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for make in (as_directory, as_pipe, as_link, as_huge_file):
        node.record_file(ref).unlink()
        make(node.record_file(ref))
        node.prepared(ref)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_pipe_in_place_of_a_cdi_spec_is_replaced_and_never_waited_for(node):
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    content = node.cdi_file(ref).read_bytes()
    node.cdi_file(ref).unlink()
    os.mkfifo(node.cdi_file(ref))
    node.cdi_file(ref).chmod(0o644)
    assert node.prepared(ref) == first
    assert node.cdi_file(ref).read_bytes() == content


@pytest.mark.parametrize("make", [as_directory, as_full_directory, as_link, as_pipe, as_socket])
@pytest.mark.parametrize("first", ["prepare", "unprepare"])
def test_what_is_no_file_in_place_of_a_cdi_spec_gives_way(node, make, first):
    ref = node.claim(1, "gpu-0")
    devices = node.prepared(ref)
    content = node.cdi_file(ref).read_bytes()
    node.cdi_file(ref).unlink()
    make(node.cdi_file(ref))
    if first == "prepare":
        assert node.prepared(ref) == devices
        assert node.cdi_file(ref).read_bytes() == content
        assert not node.cdi_file(ref).is_symlink()
    assert node.unprepare(ref) is None
    assert [name for name in node.files() if ".kept-" not in name] == []
    # What is kept has no name that CDI readers take for a spec's.
    assert all(path.suffix not in (".yaml", ".json") for path in node.cdi_root.iterdir())
