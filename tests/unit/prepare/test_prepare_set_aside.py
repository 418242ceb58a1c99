"""What could not be read is kept for whoever looks, and never without end."""

from __future__ import annotations

import os

import pytest

from dra.mps import table
from dra.prepare import set_aside

ODD = (
    "notes.corrupt",
    "a b.json.corrupt-1",
    "[x].json.corrupt-1",
    "00000000-0000-4000-8000-000000000001.json.corrupt",
    "00000000-0000-4000-8000-000000000001.json.corrupt-1.bak",
    ".json.corrupt-1",
)


@pytest.fixture
def later(monkeypatch):
    """Let so many seconds pass for who asks how old a file is."""
    real = set_aside.time.time

    def pass_(seconds):
        monkeypatch.setattr(set_aside.time, "time", lambda: real() + seconds)

    return pass_


def names(node):
    return sorted(path.name for path in (node.state_dir / "claims").iterdir())


def test_of_a_claim_that_is_damaged_again_and_again_the_newest_few_are_kept_and_none_after_its_end(node):
    ref = node.claim(1, "gpu-0")
    for number in range(12):
        node.prepared(ref)
        node.record_file(ref).write_bytes(b"garbage %d" % number)
        node.the_engine.store.refresh(fully=True)
    node.prepared(ref)
    kept = [f"{ref.uid}.json.corrupt-{number}" for number in (10, 11, 12)]
    assert names(node) == sorted([f"{ref.uid}.json", *kept])
    assert (node.state_dir / "claims" / kept[-1]).read_bytes() == b"garbage 11"
    node.unprepare(ref)
    assert node.files() == []


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_is_no_claims_holds_nothing_and_goes_after_a_week(node, later, name):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    stray = node.state_dir / "claims" / name
    stray.write_text('{"device": "gpu-1", "namespace": "default", "name": "claim-2"}')
    # As old as the record that it was; what counts is since when it has this name.
    os.utime(stray, (0, 0))
    node.restart()
    janitor = node.janitor()
    janitor.sweep()
    assert stray.exists()
    assert node.the_engine.store.damaged() == {}
    node.prepared(node.claim(2, "gpu-1"))
    later(set_aside.STRAY_SECONDS)
    janitor.sweep()
    assert not stray.exists()
    assert node.record_file(ref).exists()


def test_too_many_of_them_go_before_that_the_oldest_first(node, later):
    node.prepared(node.claim(1, "gpu-0"))
    folder = node.state_dir / "claims"
    strays = [folder / f"{number:02d}.corrupt" for number in range(set_aside.STRAYS_KEPT + 5)]
    for stray in strays:
        stray.touch()
        before = stray.lstat().st_ctime_ns
        while stray.lstat().st_ctime_ns == before:  # the kernel's clock has ticks
            os.utime(stray)
    (folder / "directory.corrupt").mkdir()
    node.janitor().sweep()
    assert [stray.name for stray in strays if stray.exists()] == [stray.name for stray in strays[5:]]
    assert (folder / "directory.corrupt").is_dir()


def test_of_the_keepers_table_the_newest_damage_is_kept(tmp_path):
    path = tmp_path / "keeper.json"
    for number in range(3):
        path.write_text(f"garbage {number}")
        assert table.load(path, "boot").rows == {}
    assert [each.name for each in tmp_path.iterdir()] == ["keeper.json.corrupt"]
    assert (tmp_path / "keeper.json.corrupt").read_text() == "garbage 2"
