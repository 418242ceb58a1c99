"""Disks that are full or read-only: real file systems where they can be mounted."""

from __future__ import annotations

import os
import subprocess

import pytest
from prepare_fakes import Node

from dra.errors import HostError


@pytest.fixture
def mount(tmp_path):
    """Mount a tmpfs of 64 KiB; gives a function that changes its options."""
    mounted = []

    def make(path):
        path.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=200", "tmpfs", str(path)],
            check=False,
            capture_output=True,
        )
        if made.returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(path)
        return lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)

    yield make
    for path in reversed(mounted):
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path) -> None:
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


@pytest.fixture
def disk_node(tmp_path, mount):
    """A node whose state directory or CDI directory is a small file system of its own."""

    def make(what: str):
        root = tmp_path / "node"
        where = root / "plugins" if what == "state" else root / "cdi"
        change = mount(where)
        return Node(root), where, change

    return make


@pytest.mark.parametrize("what", ["state", "cdi"])
@pytest.mark.fault("F10")
def test_a_full_disk_is_a_retryable_error_that_names_the_path_and_goes_with_the_space(disk_node, what):
    node, where, _ = disk_node(what)
    ref = node.claim(1, "gpu-0")
    kept = node.claim(2, "gpu-1")
    node.prepared(kept)
    fill(where)

    error = node.refused(ref)
    assert isinstance(error, HostError)
    assert error.code == "DRA-HOST-NO-SPACE"
    assert error.retryable
    assert str(where) in str(error)
    assert not node.record_file(ref).exists()
    assert not node.cdi_file(ref).exists()
    assert not [name for name in os.listdir(where) if name.endswith(".dra-tmp")]
    node.check_invariants()

    # A full disk does not keep devices from being freed.
    assert node.unprepare(kept) is None
    assert not node.record_file(kept).exists()
    (where / "filler").unlink()
    node.prepared(ref)
    assert node.unprepare(ref) is None


@pytest.mark.parametrize("what", ["state", "cdi"])
@pytest.mark.fault("F10")
def test_a_read_only_disk_is_a_retryable_error_and_unknown_claims_are_still_unprepared(disk_node, what):
    node, where, change = disk_node(what)
    known, ref = node.claim(1, "gpu-1"), node.claim(2, "gpu-0")
    first = node.prepared(known)
    change("ro")

    error = node.refused(ref)
    assert error.code == "DRA-HOST-READ-ONLY"
    assert error.retryable
    assert str(where) in str(error)
    assert node.unprepare(ref) is None
    refused = node.unprepare(known)
    assert isinstance(refused, HostError)
    assert str(where) in str(refused)
    # Not even a restart is stopped by it.
    node.restart()

    change("rw")
    node.prepared(ref)
    assert node.prepared(known) == first
    assert node.unprepare(known) is None
    assert node.unprepare(ref) is None
    assert [name for name in node.files() if name != "filler"] == []


def test_a_damaged_record_on_a_read_only_disk_costs_its_claim_only_and_is_told_once(disk_node):
    node, _, change = disk_node("state")
    broken, rival = node.claim(1, "gpu-0"), node.claim(2, "gpu-0")
    node.prepared(broken)
    node.record_file(broken).write_bytes(b"garbage")
    change("ro")
    node.restart()
    for _ in range(3):
        node.refused(rival)
    assert len(node.notices) == 1
    change("rw")
    assert node.refused(rival).code == "DRA-DEVICE-HELD"
    node.prepared(broken)
    assert node.unprepare(broken) is None
    assert node.files() == []


def test_a_state_directory_that_cannot_be_made_does_not_stop_the_driver_and_heals(tmp_path):
    (tmp_path / "plugins").write_text("in the way")
    node = Node(tmp_path)
    ref = node.claim(1, "gpu-0")
    error = node.refused(ref)
    assert isinstance(error, HostError)
    assert "plugins" in str(error)
    assert node.unprepare(ref) is None
    (tmp_path / "plugins").unlink()
    node.prepared(ref)


def test_a_state_directory_removed_under_a_running_driver_is_made_again(node):
    ref, other = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    node.prepared(ref)
    subprocess.run(["rm", "-r", str(node.state_dir)], check=True)
    node.prepared(other)
    assert node.record_file(other).exists()
    assert node.refused(node.claim(3, "gpu-0")).code == "DRA-DEVICE-HELD"
    assert node.janitor().sweep().rebuilt == [ref.uid]
    node.check_invariants()


def test_a_cdi_directory_that_is_a_file_is_an_error_that_names_it(node):
    node.cdi_root.rmdir() if node.cdi_root.exists() else None
    node.cdi_root.write_text("in the way")
    ref = node.claim(1, "gpu-0")
    error = node.refused(ref)
    assert isinstance(error, HostError)
    assert str(node.cdi_root) in str(error)
    node.cdi_root.unlink()
    node.prepared(ref)
