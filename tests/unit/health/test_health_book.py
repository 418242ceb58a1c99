"""How conditions come, stay and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.gpu_settings import HealthSettings
from dra.health.book import CLEAR_CHECKS, LONGEST_CLEAR_SECONDS
from dra.health.model import Reading
from dra.health.policy import Grade
from tests.unit.health.health_world import GPU, World

LOST = {"error": "DRA-NVML-GPU-LOST", "message": "fallen off the bus"}


def test_an_application_error_is_a_note_counted_and_gone_after_a_while():
    world = World()
    for xid in (13, 31, 43, 45, 68, 109):
        world.xid(xid)
        assert world.held == {(None, "xid"): ("NOTE", str(xid))}
    assert sum(world.book.xid_counts.values()) == 6
    assert not world.book.unsettled
    world.look(times=59, every=10)
    assert world.held
    world.look(times=2, every=10)
    assert world.held == {}


def test_an_xid_after_which_nvml_wants_a_reset_is_an_illness_until_three_checks_find_it_well():
    world = World()
    world.xid(95, action=1)
    assert world.held == {(None, "xid"): ("ILL", "95")}
    (condition,) = world.book.conditions
    assert condition.since == world.now
    assert "reset" in condition.message
    world.look(times=5, recovery_action=1)
    assert world.held
    world.look(times=CLEAR_CHECKS - 1)
    assert world.held
    world.look()
    assert world.held == {}
    assert world.changes() == [("xid", "ILL"), ("xid", None)]


def test_a_check_that_finds_it_ill_again_starts_the_count_anew():
    world = World()
    world.xid(95, action=1)
    world.look(times=2)
    world.look(recovery_action=1)
    world.look(times=2)
    assert world.held
    world.look()
    assert world.held == {}


def test_quick_checks_do_not_clear_sooner_than_four_seconds():
    world = World()
    world.xid(95, action=1)
    world.look(times=10, every=0.1)
    assert world.held
    world.look(every=4)
    assert world.held == {}


@pytest.mark.fault("F35")
def test_a_gpu_that_flaps_stays_ill_longer_each_time():
    world = World()
    for _ in range(3):
        world.xid(95, action=1)
        world.look(times=20, every=2)
        assert world.held == {}
    # Ten times in a minute: three seconds ill, three well.
    world.changes()
    for _ in range(10):
        world.look(times=2, every=1.5, recovery_action=1)
        world.look(times=2, every=1.5)
        assert world.held
    assert world.changes() == [("xid", "ILL")]
    world.look(times=8, every=2)
    assert world.held  # had it been the first time it would be well
    world.look(times=100, every=2)
    assert world.held == {}
    assert LONGEST_CLEAR_SECONDS <= 600
    # Long after, it is as new.
    world.look(times=1, every=700)
    world.xid(95, action=1)
    world.look(times=3)
    assert world.held == {}


def test_a_lost_gpu_is_lost_and_comes_back():
    world = World()
    world.book.take_reading(GPU, Reading(**LOST))
    world.xid(79, read=False)
    assert world.held == {(None, "gpu-lost"): ("LOST", ""), (None, "xid"): ("LOST", "79")}
    since = {c.key: c.since for c in world.book.conditions}
    world.look(times=50, **LOST)
    assert {c.key: c.since for c in world.book.conditions} == since
    world.look(times=3)
    assert world.held == {}


@pytest.mark.parametrize(
    "code", ["DRA-NVML-RELEASED", "DRA-NVML-SESSION-LOST", "DRA-NVML-TIMEOUT", "DRA-BUG"]
)
def test_a_driver_that_does_not_answer_says_nothing_about_a_gpu(code):
    world = World()
    world.look(times=5, error=code)
    assert world.held == {}
    world.xid(95, action=1)
    world.look(times=2)
    world.look(times=20, error=code)
    assert world.held
    world.look()
    assert world.held == {}


@pytest.mark.parametrize(
    ("reading", "key", "grade", "value"),
    [
        ({"ecc_uncorrected": 3, "recovery_action": 4}, "ecc", "ILL", "uncorrected"),
        ({"ecc_uncorrected": 3, "recovery_action": None}, "ecc", "ILL", "uncorrected"),
        ({"ecc_uncorrected": 3, "recovery_action": 0}, "ecc", "NOTE", "uncorrected"),
        ({"remap_pending": True}, "row-remap", "ILL", "pending"),
        ({"remap_failed": True, "remap_pending": True}, "row-remap", "ILL", "failed"),
        ({"retire_pending": True}, "row-remap", "ILL", "pending"),
        ({"fabric_state": 1}, "fabric", "ILL", "not-started"),
        ({"fabric_state": 2}, "fabric", "ILL", "in-progress"),
        ({"fabric_state": 3, "fabric_status": 5}, "fabric", "ILL", "failed"),
        ({"fabric_state": 3, "fabric_health": 2}, "fabric", "ILL", "unhealthy"),
        ({"fabric_state": 3, "fabric_health": 3}, "fabric", "NOTE", "limited"),
        ({"temperature": 95, "slowdown_temperature": 89}, "thermal", "ILL", "slowdown"),
        ({"hardware_slowdown": True}, "thermal", "ILL", "slowdown"),
        ({"pcie_width": 8, "pcie_width_max": 16}, "pcie", "NOTE", "x8"),
        ({"error": "DRA-NVML-HUNG"}, "gpu-lost", "LOST", "hung"),
        ({"error": "DRA-GPU-GONE"}, "gpu-lost", "LOST", "gone"),
        ({"error": "DRA-NVML-RESET-REQUIRED"}, "gpu-lost", "LOST", "reset-required"),
    ],
)
def test_what_a_check_finds_is_held_against_the_gpu_and_goes_with_it(reading, key, grade, value):
    world = World()
    world.look(times=2, **reading)
    assert world.held[None, key] == (grade, value)
    world.look(times=CLEAR_CHECKS)
    assert (None, key) not in world.held


@pytest.mark.parametrize(
    "reading",
    [
        {"fabric_state": 3, "fabric_status": 0, "fabric_health": 1}, {"temperature": 88, "slowdown_temperature": 89},
        {"temperature": 95}, {"pcie_width": 16, "pcie_width_max": 16}, {"ecc_uncorrected": 0},
        {"remap_pending": False, "remap_failed": False},
    ],
)  # fmt: skip
def test_a_gpu_that_is_well_has_nothing_held_against_it(reading):
    world = World()
    world.look(times=5, **reading)
    assert world.held == {}


def test_one_hot_look_is_none_and_it_must_become_cooler_than_it_was_allowed_to_be():
    world = World()
    hot, at_the_limit, cool = (
        {"temperature": degrees, "slowdown_temperature": 89} for degrees in (90, 86, 80)
    )
    world.look(**hot)
    assert world.held == {}
    assert world.book.unsettled
    world.look(**at_the_limit)
    assert not world.book.unsettled
    world.look(times=2, **hot)
    assert world.held
    world.look(times=20, **at_the_limit)
    assert world.held
    world.look(times=3, **cool)
    assert world.held == {}


# MIG


def test_an_xid_of_a_mig_device_is_held_against_it_alone():
    world = World()
    world.xid(95, action=1, gi=3, ci=0)
    world.look(times=5, recovery_action=1)
    assert world.held == {(3, "xid"): ("ILL", "95")}
    world.look(times=3)
    assert world.held == {}


def test_a_reboot_that_nvml_asks_for_concerns_the_whole_gpu():
    world = World()
    world.xid(95, action=2, gi=3, ci=0)
    assert world.held == {(3, "xid"): ("ILL", "95"), (None, "xid"): ("ILL", "95")}


def test_what_is_held_against_a_mig_device_goes_with_it():
    world = World()
    world.xid(95, action=1, gi=3, ci=0)
    world.book.take_instances(GPU, [(3, 0), (4, 0)])
    assert world.held
    world.book.take_instances(GPU, [(4, 0)])
    assert world.held == {}


def test_an_action_that_shows_late_is_put_down_to_the_xid_before_it():
    world = World()
    world.xid(94, action=0, gi=3, ci=0)
    assert world.held == {(3, "xid"): ("NOTE", "94")}
    world.look(times=3, every=10, recovery_action=4)
    assert world.held == {(3, "xid"): ("ILL", "94")}


def test_an_action_without_an_xid_is_held_against_the_gpu_by_its_name():
    world = World()
    world.look(recovery_action=4)
    # The XID may be on its way.
    assert world.held == {}
    assert world.book.unsettled
    world.look(recovery_action=4)
    assert world.held == {(None, "xid"): ("ILL", "drain-and-reset")}
    world.look(times=3)
    assert world.held == {}


def test_an_action_is_put_down_to_the_mig_device_whose_xid_comes_after_it():
    for looks in (1, 2):
        world = World()
        world.look(times=looks, recovery_action=1)
        world.xid(95, action=1, gi=3, ci=0)
        assert world.held == {(3, "xid"): ("ILL", "95")}


@pytest.mark.parametrize("before", [31, None])
def test_the_xid_that_explains_an_action_may_come_after_it(before):
    world = World()
    if before:
        world.xid(before)
    world.look(times=2, recovery_action=1)
    assert world.held == {(None, "xid"): ("ILL", str(before) if before else "gpu-reset")}
    world.xid(119, action=1)
    assert world.held == {(None, "xid"): ("ILL", "119")}
    # Known is known.
    world.xid(48, action=1)
    assert world.held == {(None, "xid"): ("ILL", "119")}


def test_an_ignored_xid_is_not_blamed_for_an_action():
    world = World(ignored_xids=frozenset({94}))
    world.xid(94, action=1)
    world.look(recovery_action=1)
    assert world.held == {(None, "xid"): ("ILL", "gpu-reset")}


def test_the_first_illness_is_the_cause_and_keeps_its_time():
    world = World()
    world.xid(95, action=1)
    since = world.now
    world.now += 100
    world.xid(31, action=1)
    world.xid(48, action=1)
    (condition,) = world.book.conditions
    assert (condition.value, condition.since) == ("95", since)
    assert world.changes() == [("xid", "ILL")]


# Drivers before 570


def test_without_a_recovery_action_only_a_reset_a_reload_or_a_reboot_heals():
    quiet = {"recovery_action": None}
    world = World()
    world.xid(95, action=None, energy_mj=5000)
    world.look(times=300, **quiet, energy_mj=6000)
    assert world.held == {(None, "xid"): ("ILL", "95")}
    world.look(times=3, **quiet, energy_mj=10)  # the counter began anew
    assert world.held == {}

    world = World()
    world.xid(95, action=None)
    world.book.take_driver_gone([GPU])
    world.look(times=3, **quiet)
    assert world.held == {}

    world = World()
    world.xid(95, action=None)
    world.look(times=2, **LOST)
    world.look(times=3, **quiet)
    assert world.held == {}

    world = World()
    world.xid(95, action=None)
    kept = world.book.conditions
    after = World()
    after.book.restore(kept, same_boot=True)
    after.look(times=300, **quiet)
    assert after.held
    after = World()
    after.book.restore(kept, same_boot=False)
    after.look(times=3, **quiet)
    assert after.held == {}


# Restart


def ruled(**xids):
    """A world whose rules for XIDs a test can change."""
    rules = {"now": HealthSettings({int(xid[1:]): effect for xid, effect in xids.items()})}
    return World(of_gpu=lambda _gpu: rules["now"]), rules


def test_what_only_a_policy_makes_an_illness_lasts_until_a_reset():
    world, _ = ruled(x13="NoSchedule")
    world.xid(13, energy_mj=5000)
    assert world.held == {(None, "xid"): ("ILL", "13")}
    (condition,) = world.book.conditions
    assert "GpuNodePolicy" in condition.message
    assert "--gpu-reset" in condition.remedy
    world.look(100, energy_mj=6000)
    assert world.held == {(None, "xid"): ("ILL", "13")}
    world.look(1, energy_mj=10)
    world.look(3, energy_mj=7000)
    assert world.held == {}


def test_an_xid_after_the_reset_needs_another_one():
    world, _ = ruled(x13="NoSchedule")
    world.xid(13, energy_mj=5000)
    world.look(1, energy_mj=10)
    world.xid(13, energy_mj=20)
    world.look(50, energy_mj=30)
    assert world.held == {(None, "xid"): ("ILL", "13")}
    world.look(4, energy_mj=5)
    assert world.held == {}


def test_where_nvml_asked_for_a_reset_too_its_word_ends_what_the_policy_said():
    world, _ = ruled(x48="NoExecute")
    world.xid(48, action=1)
    world.look(20, recovery_action=1)
    assert world.held == {(None, "xid"): ("ILL", "48")}
    world.look(4)
    assert world.held == {}


@pytest.mark.parametrize("action", [0, None])
@pytest.mark.parametrize("left", [{}, {13: "Ignore"}, {13: "None"}])
def test_a_rule_that_is_taken_away_lets_its_gpus_go(action, left):
    world, rules = ruled(x13="NoSchedule")
    world.xid(13, action=action)
    world.look(20, recovery_action=action)
    assert world.held == {(None, "xid"): ("ILL", "13")}
    rules["now"] = HealthSettings(left)
    world.look(4, recovery_action=action)
    assert world.held == {}


def test_an_illness_survives_a_restart_with_its_time_and_is_cleared_by_checks():
    world = World()
    world.xid(95, action=1)
    since = world.now
    after = World()
    after.now += 1000
    after.book.restore(world.book.conditions, same_boot=True)
    assert after.held == {(None, "xid"): ("ILL", "95")}
    after.look(times=2, recovery_action=1)
    assert after.book.conditions[0].since == since
    assert after.changes() == []
    after.look(times=3)
    assert after.held == {}


def test_a_note_is_over_after_a_reboot_and_nobody_is_unmonitored_before_anybody_tried():
    world = World()
    world.xid(31)
    world.book.take_unmonitored("GPU-1", "no log")
    for same_boot, left in ((True, {(None, "xid"): ("NOTE", "31")}), (False, {})):
        after = World()
        after.book.restore(world.book.conditions, same_boot=same_boot)
        assert after.held == left


def test_unmonitored_comes_and_goes():
    world = World()
    world.book.take_unmonitored(GPU, "no log")
    assert world.held == {(None, "unmonitored"): ("NOTE", "")}
    world.look(times=10)
    assert world.held
    world.book.take_unmonitored(GPU, "")
    assert world.held == {}


def test_a_board_that_was_replaced_is_forgotten_after_a_week():
    world = World()
    world.xid(95, action=1)
    world.book.forget_absent(["GPU-9"])
    assert world.held
    world.now += 8 * 86_400
    world.book.forget_absent([GPU])
    assert world.held
    world.book.forget_absent(["GPU-9"])
    assert world.held == {}


READINGS = st.builds(
    Reading,
    error=st.sampled_from(["", "", "", "DRA-NVML-GPU-LOST", "DRA-NVML-RELEASED", "DRA-NVML-HUNG"]),
    recovery_action=st.sampled_from([None, 0, 0, 1, 2, 4, 9]),
    energy_mj=st.sampled_from([None, 1, 100]),
    ecc_uncorrected=st.sampled_from([None, 0, 4]),
    remap_pending=st.sampled_from([None, False, True]),
    temperature=st.sampled_from([None, 30, 200]),
    slowdown_temperature=st.sampled_from([None, 89]),
    fabric_state=st.sampled_from([None, 1, 3]),
)
XIDS = st.tuples(st.sampled_from([13, 48, 79, 95]), st.sampled_from([None, 1, 2]), st.none() | READINGS)


@given(st.lists(READINGS | XIDS, max_size=40), st.booleans())
def test_whatever_happened_a_gpu_that_is_well_has_nothing_held_against_it_in_the_end(history, restart):
    world = World()
    for event in history:
        if isinstance(event, Reading):
            world.now += 2
            world.book.take_reading(GPU, event)
        else:
            xid, gi, reading = event
            world.xid(xid, gi=gi, ci=None if gi is None else 0, read=False)
            if reading is not None:
                world.book.take_reading(GPU, reading)
        assert len(world.book.conditions) <= 12
        assert all(c.since <= world.now for c in world.book.conditions)
    if restart:
        kept, now = world.book.conditions, world.now
        world = World()
        world.now = now
        world.book.restore(kept, same_boot=True)
    world.look(times=700, every=2)
    assert world.held == {}
    assert all(c.after is None or c.after.grade in Grade for c in world.book.take_changes())
