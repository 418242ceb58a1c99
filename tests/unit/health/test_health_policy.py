"""What an XID means, by NVML's recovery action and, without one, by the list."""

from __future__ import annotations

import pytest

from dra.api.gpu_settings import HealthSettings
from dra.errors import ConfigError
from dra.health.policy import KEYS, XID, Grade, HealthPolicy, describe_xid, parse_effects
from dra.slices.rules import check_device

APPLICATION = (13, 31, 43, 45, 68, 109)


@pytest.mark.parametrize(
    ("xid", "action", "grade"),
    [
        # NVML decides, whatever the list says.
        (31, 1, Grade.ILL), (48, 0, Grade.NOTE), (79, 0, Grade.NOTE), (79, 2, Grade.ILL), (999, 4, Grade.ILL),
        (999, 0, Grade.NOTE), (13, 0, Grade.NOTE), (95, 77, Grade.ILL),
        # A driver before 570 says nothing.
        (48, None, Grade.ILL), (79, None, Grade.LOST), (999, None, Grade.ILL), (63, None, Grade.NOTE),
        (154, None, Grade.NOTE), *((xid, None, Grade.NOTE) for xid in APPLICATION),
    ],
)  # fmt: skip
def test_nvml_decides_and_the_list_is_for_older_drivers(xid, action, grade):
    assert HealthPolicy().grade_xid(xid, action=action) is grade


@pytest.mark.parametrize("action", [None, 0, 1, 2])
def test_an_xid_that_is_to_be_ignored_is_a_note_whatever_nvml_says(action):
    policy = HealthPolicy(frozenset({48}))
    assert policy.grade_xid(48, action=action) is Grade.NOTE
    assert policy.grade_xid(62, action=None) is Grade.ILL


def test_a_note_keeps_nobody_away_and_an_option_evicts_where_wanted():
    usual, strict = HealthPolicy(), HealthPolicy(effects=parse_effects("gpu-lost=NoExecute"))
    assert usual.effect("gpu-lost", Grade.LOST) == "NoSchedule"
    assert strict.effect("gpu-lost", Grade.LOST) == "NoExecute"
    assert strict.effect("xid", Grade.ILL) == "NoSchedule"
    assert {strict.effect(key, Grade.NOTE) for key in KEYS} == {"None"}


def test_effects_are_read_as_people_write_them():
    assert parse_effects(" gpu.nvidia.com/thermal=none, ecc=noexecute ,") == {
        "thermal": "None",
        "ecc": "NoExecute",
    }
    assert parse_effects("") == {}
    for wrong in ("thermal", "warmth=None", "ecc=Evict", "=None"):
        with pytest.raises(ConfigError, match="KEY=EFFECT"):
            parse_effects(wrong)


def test_known_xids_have_a_text():
    assert describe_xid(79) == "XID 79 (the GPU has fallen off the bus)"
    assert describe_xid(998) == "XID 998"


def test_all_keys_are_valid_taint_keys():
    for key in KEYS:
        device = {"name": "d", "taints": [{"key": f"gpu.nvidia.com/{key}", "effect": "NoSchedule"}]}
        assert not list(check_device(device, "d"))


def test_a_rule_for_a_gpu_decides_before_the_lists_and_the_recovery_action():
    rules = {"a": HealthSettings({48: "Ignore", 13: "NoExecute", 31: "None"}), "b": HealthSettings()}
    policy = HealthPolicy(of_gpu=rules.__getitem__)
    assert policy.grade_xid(48, action=2, gpu="a") is Grade.NOTE
    assert policy.grade_xid(48, action=2, gpu="b") is Grade.ILL
    assert policy.grade_xid(13, action=0, gpu="a") is Grade.ILL
    assert policy.effect(XID, Grade.ILL, gpu="a", value="13") == "NoExecute"
    assert policy.effect(XID, Grade.ILL, gpu="b", value="13") == "NoSchedule"
    assert policy.effect(XID, Grade.NOTE, gpu="a", value="13") == "None"
    assert policy.ignores(31, "a")
    assert not policy.ignores(13, "a")
