"""The process dies at any step; a new one on the same disks finishes or cleans up."""

from __future__ import annotations

import pytest
from prepare_fakes import Killed, Node, result

from dra.errors import DraError, HostError
from dra.prepare import steps


def kill(node: Node, step: str, call, ref) -> None:
    node.kill_at = step
    with pytest.raises(Killed):
        call(ref)
    node.restart()
    node.steps.clear()


def test_the_listed_steps_are_those_that_happen(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    assert node.steps == steps.prepare_steps()
    node.steps.clear()
    node.unprepare(ref)
    assert node.steps == steps.unprepare_steps()
    node.steps.clear()
    node.cdi_root.rmdir()
    node.cdi_root.write_text("in the way")
    node.refused(ref)
    assert [s for s in node.steps if s.startswith("rollback")] == steps.rollback_steps()
    assert set(node.steps) <= set(steps.all_steps())


@pytest.mark.parametrize("step", steps.prepare_steps())
@pytest.mark.fault("F6")
def test_a_prepare_killed_anywhere_is_finished_by_the_next(node, step):
    ref, other = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    reference = node.prepared(other)
    kill(node, step, node.prepare, ref)
    node.janitor().sweep()

    devices = node.prepared(ref)
    assert [device.device for device in devices] == ["gpu-0"]
    assert node.prepared(ref) == devices
    assert node.prepared(other) == reference
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert node.unprepare(other) is None
    assert node.files() == []


@pytest.mark.parametrize("step", steps.prepare_steps())
def test_a_prepare_killed_anywhere_is_cleaned_up_by_unprepare_without_the_api(node, step):
    ref = node.claim(1, "gpu-0")
    kill(node, step, node.prepare, ref)
    node.api.hang()
    assert node.unprepare(ref) is None
    assert node.files() == []


@pytest.mark.parametrize("step", steps.prepare_steps())
def test_a_prepare_killed_anywhere_whose_claim_is_then_deleted_is_swept(node, step):
    ref = node.claim(1, "gpu-0")
    kill(node, step, node.prepare, ref)
    node.api.delete(ref)
    node.janitor().sweep()
    assert node.files() == []
    node.prepared(node.claim(2, "gpu-0"))


@pytest.mark.parametrize("step", steps.unprepare_steps())
@pytest.mark.fault("F7")
def test_an_unprepare_killed_anywhere_is_finished_by_the_next(node, step):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    kill(node, step, node.unprepare, ref)
    node.janitor().sweep()

    assert node.unprepare(ref) is None
    assert node.files() == []
    node.prepared(node.claim(2, "gpu-0"))


@pytest.mark.parametrize("step", steps.unprepare_steps())
def test_an_unprepare_killed_anywhere_does_not_keep_the_claim_from_being_prepared_again(node, step):
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    kill(node, step, node.unprepare, ref)
    assert node.prepared(ref) == first
    assert node.record(ref)["state"] == "prepared"
    node.check_invariants()


@pytest.mark.parametrize("step", steps.rollback_steps())
def test_a_rollback_killed_anywhere_leaves_what_unprepare_can_finish(node, step):
    ref = node.claim(1, "gpu-0")
    node.renderer.fail = HostError("DRA-HOST-NO-SPACE", "no space")
    kill(node, step, node.prepare, ref)
    node.renderer.fail = None
    assert node.unprepare(ref) is None
    assert node.files() == []


@pytest.mark.parametrize("step", ["prepare:effect-applying:0", "prepare:effect-applied:0"])
def test_a_repair_killed_on_the_way_is_finished_by_the_next(node, step):
    ref = node.claim(1, "gpu-0")
    first = node.prepared(ref)
    node.cdi_file(ref).unlink()
    kill(node, step, node.prepare, ref)
    assert node.prepared(ref) == first
    assert node.cdi_file(ref).exists()


@pytest.mark.parametrize("step", steps.prepare_steps())
def test_a_move_to_another_device_killed_anywhere_never_leaves_two_holders(node, step):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.claim(1, "gpu-1")
    kill(node, step, node.prepare, ref)
    rival = node.claim(2, "gpu-1")
    outcome = node.prepare(rival)
    node.check_invariants()
    again = node.prepare(ref)
    node.check_invariants()
    assert isinstance(outcome, DraError) != isinstance(again, DraError)


@pytest.mark.parametrize("step", steps.prepare_steps())
def test_a_reboot_after_a_kill_is_no_different(node, step):
    ref = node.claim(1, result("gpu-0"))
    kill(node, step, node.prepare, ref)
    node.reboot(keep_cdi=True)
    node.janitor().sweep()
    node.prepared(ref)
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert node.files() == []
