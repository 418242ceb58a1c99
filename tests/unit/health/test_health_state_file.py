"""health.json: what was written is read again, and what cannot be read is set aside."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.health.state_file import HealthState, decode_state, encode_state, load_state, save_state
from tests.unit.health.health_world import World


def conditions():
    world = World()
    world.xid(95, action=1, gi=3, ci=0, energy_mj=7)
    world.xid(31, gpu="GPU-1")
    world.look(gpu="GPU-2", error="DRA-NVML-GPU-LOST", message="gone")
    return world.book.conditions


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "health.json"
    assert load_state(path) == HealthState()
    state = HealthState("boot", conditions(), 1234.5)
    save_state(path, state)
    assert load_state(path) == state
    assert path.stat().st_mode & 0o777 == 0o600


def test_fields_of_a_newer_version_are_kept():
    content = json.loads(encode_state(HealthState("boot", conditions(), 1.0)))
    content["conditions"][0]["later"] = {"x": 1}
    state = decode_state(json.dumps(content).encode())
    assert json.loads(encode_state(state))["conditions"][0]["later"] == {"x": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"[]", b"null", b'{"boot_id": "b"}', b'{"boot_id": "b", "conditions": [{}]}', b"\xff\xfe", b"[" * 100_000,
        b'{"boot_id":"b","conditions":[],"heard_at":NaN}', b'{"boot_id":"b","conditions":[],"heard_at":1e400}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_the_driver_goes_on(tmp_path, data):
    path = tmp_path / "health.json"
    path.write_bytes(data)
    assert load_state(path) == HealthState()
    assert path.with_suffix(".json.corrupt").read_bytes() == data
    assert not path.exists()
    save_state(path, HealthState("boot", conditions()))
    assert load_state(path).conditions == conditions()


def test_an_empty_file_and_a_directory_in_its_place_are_no_state(tmp_path):
    path = tmp_path / "health.json"
    path.write_bytes(b"")
    assert load_state(path) == HealthState()
    path.unlink()
    path.mkdir()
    assert load_state(path) == HealthState()


@given(st.data())
def test_any_change_of_one_byte_is_read_or_refused(data):
    good = bytearray(encode_state(HealthState("boot", conditions(), 1.0)))
    place = data.draw(st.integers(0, len(good) - 1))
    good[place] = data.draw(st.integers(0, 255))
    try:
        state = decode_state(bytes(good))
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    World().book.restore(state.conditions, same_boot=True)
