"""Files that are whole after a crash, and errors that say what is wrong with the disk."""

import errno
import os
from pathlib import Path

import pytest

from dra.errors import HostError
from dra.host.files import (
    ensure_dir,
    host_error,
    is_leftover,
    read_bytes,
    remove_durable,
    temporary_name,
    write_durable,
)


def test_a_file_is_replaced_whole_and_with_exactly_the_mode_asked_for(tmp_path):
    path = tmp_path / "spec.yaml"
    old = os.umask(0o077)
    try:
        write_durable(path, b"one", mode=0o644)
        write_durable(path, b"two" * 100_000, mode=0o644, fsync=False)
    finally:
        os.umask(old)
    assert path.read_bytes() == b"two" * 100_000
    assert path.stat().st_mode & 0o7777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"old")
    real_write = os.write

    def full_disk(descriptor, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data[:5])

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(HostError) as caught:
        write_durable(path, b"new content", mode=0o644)
    monkeypatch.undo()
    assert caught.value.code == "DRA-HOST-NO-SPACE"
    assert str(path) in caught.value.message
    assert caught.value.retryable
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_write_into_a_directory_that_is_not_there_names_it(tmp_path):
    with pytest.raises(HostError, match="DRA-HOST-MISSING.*gone/spec.yaml.*No such file"):
        write_durable(tmp_path / "gone/spec.yaml", b"", mode=0o644)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EROFS, "DRA-HOST-READ-ONLY"),
        (errno.EACCES, "DRA-HOST-READ-ONLY"),
        (errno.EDQUOT, "DRA-HOST-NO-SPACE"),
        (errno.EMFILE, "DRA-HOST-TOO-MANY-FILES"),
        (errno.EIO, "DRA-HOST-IO"),
    ],
)
def test_every_cause_has_its_code_and_a_remedy(number, code):
    error = host_error(OSError(number, os.strerror(number)), "write", Path("/x"))
    assert error.code == code
    assert error.remedy
    assert os.strerror(number) in error.message


def test_the_temporary_name_is_no_spec_and_is_known_as_a_leftover(tmp_path):
    name = temporary_name(tmp_path / "k8s.gpu.nvidia.com-claim_1.yaml").name
    assert not name.endswith((".json", ".yaml"))
    assert is_leftover(name, prefix="k8s.gpu.nvidia.com-claim_")
    assert not is_leftover(name, prefix="other")
    assert not is_leftover("k8s.gpu.nvidia.com-claim_1.yaml", prefix="k8s.gpu.nvidia.com-claim_")


def test_removing_twice_is_fine_and_says_so(tmp_path):
    path = tmp_path / "x"
    path.touch()
    assert remove_durable(path)
    assert not remove_durable(path, fsync=False)


def test_something_that_cannot_be_removed_is_named(tmp_path):
    (tmp_path / "dir").mkdir()
    with pytest.raises(HostError, match="cannot remove .*dir"):
        remove_durable(tmp_path / "dir")


def test_a_directory_is_made_with_its_parents_and_a_file_in_the_way_is_an_error(tmp_path):
    ensure_dir(tmp_path / "a/b")
    ensure_dir(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="DRA-HOST-MISSING"):
        ensure_dir(tmp_path / "file/x")


def test_reading_tells_absent_from_unreadable(tmp_path):
    assert read_bytes(tmp_path / "absent") is None
    (tmp_path / "x").write_bytes(b"1")
    assert read_bytes(tmp_path / "x") == b"1"
    with pytest.raises(HostError, match="cannot read"):
        read_bytes(tmp_path)
