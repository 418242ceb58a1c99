"""A partition stays ours though its claim's record is lost, and goes when nobody wants it any more."""

from __future__ import annotations

import json

import pytest
from mig_node import MigNode
from prepare_fakes import result

from dra.prepare.mig_marks import MarkDirectory
from dra.prepare.partitions import Partition


@pytest.fixture
def node(tmp_path):
    made = MigNode(tmp_path, profile="h100-nvl-x2")
    yield made
    made.close()


@pytest.fixture
def device(node):
    return node.name(0, "1g.12gb", 2)


def marks_on_disk(node) -> list[str]:
    return sorted(path.name for path in (node.state_dir / "mig").glob("*"))


def is_clean(node) -> bool:
    return (node.partitions(), node.mode(0), node.files(), marks_on_disk(node)) == ([], 0, [], [])


def removed(node, ref):
    node.record_file(ref).unlink()


def torn(node, ref):
    node.record_file(ref).write_bytes(node.record_file(ref).read_bytes()[:100])


def removed_with_its_spec(node, ref):
    node.record_file(ref).unlink()
    node.cdi_file(ref).unlink()


LOSSES = pytest.mark.parametrize("lose", [removed, torn, removed_with_its_spec])


def test_a_partition_has_a_mark_while_it_exists(node, device):
    one, two = node.claim(1, device), node.claim(2, node.name(0, "1g.12gb", 3))
    node.prepared(one)
    node.prepared(two)
    gpu = node.inventory.gpus[0].uuid
    marks = node.the_engine.marks.read()
    assert set(marks.partitions) == {device, node.name(0, "1g.12gb", 3)}
    assert marks.modes == {gpu}
    assert marks.partitions[device].partition.uuid in {mig.uuid for mig in node.look().gpus[0].mig_devices}
    node.unprepare(one)
    assert set(node.the_engine.marks.read().partitions) == {node.name(0, "1g.12gb", 3)}
    node.unprepare(two)
    assert is_clean(node)


@LOSSES
def test_a_lost_record_is_rebuilt_with_its_partition_which_then_goes_with_the_claim(node, device, lose):
    ref = node.claim(1, device)
    node.prepared(ref)
    kinds = [effect["kind"] for effect in node.effects(ref)]
    lose(node, ref)
    node.restart()
    assert node.the_engine.marks.read().owned.devices == {device}
    node.janitor().sweep()
    assert node.partitions() == [device]
    # Where nothing tells of the claim it is the kubelet that prepares it again.
    node.prepared(ref)
    assert [effect["kind"] for effect in node.effects(ref)] == kinds
    assert node.unprepare(ref) is None
    assert is_clean(node)


@LOSSES
def test_the_partition_of_a_lost_record_whose_claim_is_gone_is_destroyed_on_the_second_look(
    node, device, lose
):
    ref = node.claim(1, device)
    node.prepared(ref)
    lose(node, ref)
    node.restart()
    node.api.delete(ref)
    janitor = node.janitor(confirm_seconds=5.0)
    janitor.sweep()
    assert node.partitions() == [device]
    for _ in range(3):
        node.now += 6
        janitor.sweep()
    assert is_clean(node)
    assert node.changes > 1


@LOSSES
def test_unprepare_of_a_lost_record_leaves_a_partition_that_the_next_sweeps_destroy(node, device, lose):
    ref = node.claim(1, device)
    node.prepared(ref)
    lose(node, ref)
    node.restart()
    assert node.unprepare(ref) is None
    assert node.partitions() == [device]
    node.api.delete(ref)
    node.janitor().sweep()
    assert is_clean(node)


def test_the_partition_of_a_claim_that_is_still_allocated_is_left(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    removed_with_its_spec(node, ref)
    node.restart()
    janitor = node.janitor()
    for _ in range(3):
        janitor.sweep()
        node.now += 60
    assert node.partitions() == [device]


def test_without_the_api_nothing_is_destroyed(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    removed_with_its_spec(node, ref)
    node.restart()
    node.api.delete(ref)
    node.api.down = True
    assert node.janitor().sweep().api_answered is False
    assert node.partitions() == [device]


def test_one_in_use_is_destroyed_later(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    outcome = node.effects(ref)[1]["outcome"]
    removed_with_its_spec(node, ref)
    node.restart()
    node.api.delete(ref)
    node.sim.add_process(0, 4711, gi=outcome["gi"], ci=outcome["ci"])
    janitor = node.janitor()
    janitor.sweep()
    assert node.partitions() == [device]
    node.sim.remove_process(4711)
    janitor.sweep()
    assert is_clean(node)


def test_partitions_and_modes_by_hand_are_no_orphans(node, device):
    node.sim.set_mig_layout(0, [("3g.47gb", 0)])
    node.look()
    by_hand = node.partitions()
    ref = node.claim(1, node.name(0, "1g.12gb", 6))
    node.prepared(ref)
    removed_with_its_spec(node, ref)
    node.restart()
    node.api.delete(ref)
    node.janitor().sweep()
    assert node.partitions() == by_hand
    assert node.mode(0) == 1
    assert marks_on_disk(node) == []


def test_what_was_made_by_hand_where_ours_was_is_not_ours(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    removed_with_its_spec(node, ref)
    node.restart()
    node.api.delete(ref)
    # Another instance took the ids, and with them the UUID; the profile tells.
    node.sim.set_mig_layout(0, [("2g.24gb", 2)])
    node.janitor().sweep()
    assert node.partitions() == [node.name(0, "2g.24gb", 2)]


def test_a_claim_that_shares_a_partition_keeps_it_though_the_other_record_is_lost(node, device):
    one = node.claim(1, result(device, shareID="11111111-0000-4000-8000-000000000000"))
    two = node.claim(2, result(device, shareID="22222222-0000-4000-8000-000000000000"))
    node.prepared(one)
    node.prepared(two)
    removed_with_its_spec(node, one)
    node.restart()
    node.api.delete(one)
    node.janitor().sweep()
    assert node.partitions() == [device]
    assert node.unprepare(two) is None
    assert is_clean(node)


def test_after_a_reboot_marks_mean_nothing_and_go(node, device):
    ref = node.claim(1, device)
    node.prepared(ref)
    removed_with_its_spec(node, ref)
    node.reboot()
    node.api.delete(ref)
    node.sim.set_mig_layout(0, [("1g.12gb", 2)])
    assert node.the_engine.marks.read().partitions == {}
    node.janitor().sweep()
    assert node.partitions() == [device]
    assert marks_on_disk(node) == []


def test_a_disk_that_takes_no_mark_costs_no_claim(node, device):
    (node.state_dir / "mig").write_text("a file in its place")
    ref = node.claim(1, device)
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.partitions() == []


def test_damaged_and_foreign_files_say_nothing(tmp_path):
    marks = MarkDirectory(tmp_path, boot_id="b")
    marks.partition_made("gpu-0-mig-1g10gb-19-0", "GPU-a", Partition(9, 0, "MIG-a"))
    marks.partition_made("../../etc/passwd", "GPU-a", Partition(9, 0, "MIG-a"))
    folder = tmp_path / "mig"
    (folder / "gpu-0-mig-1g10gb-19-1.json").write_text("{")
    (folder / "gpu-0-mig-1g10gb-19-2.json").write_text(json.dumps({"boot_id": "b", "device": 7}))
    (folder / "mode-GPU-x.json").write_text(json.dumps([]))
    (folder / "old.json").write_text(json.dumps({"boot_id": "a", "device": "old", "gpu": "GPU-a"}))
    (folder / "notes.txt").write_text("")
    found = marks.read()
    assert (set(found.partitions), found.modes) == ({"gpu-0-mig-1g10gb-19-0"}, frozenset())
    marks.clear_old()
    assert sorted(path.name for path in folder.iterdir()) == [
        "gpu-0-mig-1g10gb-19-0.json",
        "gpu-0-mig-1g10gb-19-2.json",
        "notes.txt",
    ]
