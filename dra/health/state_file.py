"""`health.json`: what is held against the GPUs, so that a restart of the driver forgets nothing.

A file that cannot be read is set aside and the driver starts with an empty book: checks find again what is still
wrong, and the loss is logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra.errors import HostError
from dra.health.model import Condition, Scope
from dra.health.policy import Grade
from dra.host.files import read_bytes, write_durable
from dra.telemetry.log import error_fields, get_logger

VERSION = 1
# A node has some dozens of conditions at most; more than this was not written by us.
_LARGEST_BYTES = 4 << 20
_KNOWN = frozenset(
    {"gpu", "gi", "ci", "key", "grade", "value", "message", "remedy", "since", "seen", "times", "energy_mj",
     "action", "since_up", "seen_up"}
)  # fmt: skip

log = get_logger()


@dataclass(frozen=True, slots=True)
class HealthState:
    """What the file holds.

    `heard_at`: until when XIDs have been listened to, in seconds since 1970; `heard_up`: the same in seconds since boot.
    """

    boot_id: str = ""
    conditions: tuple[Condition, ...] = ()
    heard_at: float = 0.0
    heard_up: float | None = None


def load_state(path: Path) -> HealthState:
    """Read the file; an empty state where there is none, or none that can be read."""
    try:
        data = read_bytes(path)
    except HostError as error:
        log.warning("health_state_unreadable", **error_fields(error))
        return HealthState()
    if not data:
        return HealthState()
    try:
        return decode_state(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        aside = path.with_suffix(".json.corrupt")
        log.warning("health_state_corrupt", path=str(path), moved_to=str(aside), error=repr(error)[:300])
        try:
            path.replace(aside)
        except OSError as problem:
            log.warning("health_state_not_set_aside", path=str(path), error=str(problem))
        return HealthState()


def save_state(path: Path, state: HealthState) -> None:
    """Write the file. Raises HostError."""
    write_durable(path, encode_state(state), mode=0o600)


def encode_state(state: HealthState) -> bytes:
    """Give the file's bytes."""
    content = {
        "version": VERSION,
        "boot_id": state.boot_id,
        "heard_at": state.heard_at,
        "heard_up": state.heard_up,
        "conditions": [_condition(each) for each in state.conditions],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_state(data: bytes) -> HealthState:
    """Read the file's bytes. Raises ValueError, KeyError, TypeError or AttributeError for what is no such file."""
    if len(data) > _LARGEST_BYTES:
        raise ValueError(f"{len(data)} bytes")
    content = json.loads(data)
    return HealthState(
        str(content["boot_id"]),
        tuple(_decoded(each) for each in content["conditions"]),
        _time(content.get("heard_at") or 0.0),
        _up(content.get("heard_up")),
    )


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        **condition.data,
        "gpu": condition.scope.gpu,
        "gi": condition.scope.gi,
        "ci": condition.scope.ci,
        "key": condition.key,
        "grade": int(condition.grade),
        "value": condition.value,
        "message": condition.message,
        "remedy": condition.remedy,
        "since": condition.since,
        "seen": condition.seen,
        "times": condition.times,
        "energy_mj": condition.energy_mj,
        "action": condition.action,
        "since_up": condition.since_up,
        "seen_up": condition.seen_up,
    }


def _decoded(item: Mapping[str, Any]) -> Condition:
    return Condition(
        Scope(str(item["gpu"]), _number(item.get("gi")), _number(item.get("ci"))),
        str(item["key"]),
        Grade(item["grade"]),
        str(item["value"]),
        str(item["message"]),
        str(item.get("remedy") or ""),
        since=_time(item["since"]),
        seen=_time(item["seen"]),
        times=int(item.get("times") or 0),
        energy_mj=_number(item.get("energy_mj")),
        action=_number(item.get("action")),
        data={key: value for key, value in item.items() if key not in _KNOWN},
        since_up=_up(item.get("since_up")),
        seen_up=_up(item.get("seen_up")),
    )


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _up(value: Any) -> float | None:
    if value is None:
        return None
    seconds = float(value)
    # Before the boot for what was written down before it.
    if not -1e11 < seconds < 1e11:
        raise ValueError(f"{seconds} is no time")
    return seconds


def _time(value: Any) -> float:
    seconds = float(value)
    # What a calendar can show; neither infinite nor not a number.
    if not 0 <= seconds < 1e11:
        raise ValueError(f"{seconds} is no time")
    return seconds
