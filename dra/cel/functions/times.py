"""Durations and timestamps.

Source: Go's time.ParseDuration and RFC 3339; getters use UTC unless a zone is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

from dra.cel import types as t
from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, implement
from dra.cel.functions.standard import check_timestamp, conversion
from dra.cel.values import MAX_INT, MIN_INT, Duration, Timestamp

declare(
    """
    duration_to_duration: duration(duration) -> duration
    string_to_duration: duration(string) -> duration
    int64_to_duration: duration(int) -> duration
    timestamp_to_timestamp: timestamp(timestamp) -> timestamp
    int64_to_timestamp: timestamp(int) -> timestamp
    string_to_timestamp: timestamp(string) -> timestamp
    duration_to_hours: duration~getHours() -> int
    duration_to_minutes: duration~getMinutes() -> int
    duration_to_seconds: duration~getSeconds() -> int
    duration_to_milliseconds: duration~getMilliseconds() -> int
    """
)
_UNITS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(?:Z|([+-])(\d\d):(\d\d))", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_duration(text: str) -> Duration | None:
    """Read a duration (`1h30m`, `1.5s`, `-2ms`, `0`); None if it is none or does not fit."""
    sign = -1 if text.startswith("-") else 1
    rest = text[1:] if text[:1] in {"-", "+"} else text
    if rest == "0":
        return Duration(0)
    total, at = 0, 0
    while at < len(rest):
        match = _PART.match(rest, at)
        if match is None or not (match[1] or match[2]) or len(match[1]) > 25:
            return None
        unit = _UNITS[match[3]]
        fraction = (match[2] or "")[:20]
        total += int(match[1] or "0") * unit + (
            int(fraction) * unit // 10 ** len(fraction) if fraction else 0
        )
        at = match.end()
    value = sign * total
    return Duration(value) if rest and MIN_INT <= value <= MAX_INT else None


def parse_timestamp(text: str) -> Timestamp | None:
    """Read an RFC 3339 time; None if it is none."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    try:
        moment = datetime(*[int(match[part]) for part in range(1, 7)], tzinfo=UTC)  # type: ignore[arg-type,misc]
    except ValueError:
        return None
    fraction = int((match[7] or "0")[:9].ljust(9, "0"))
    offset = 0
    if match[8]:
        hours, minutes = int(match[9]), int(match[10])
        if hours > 24 or minutes > 60:
            return None
        offset = (hours * 3600 + minutes * 60) * (1 if match[8] == "+" else -1)
    seconds = (moment - _EPOCH) // timedelta(seconds=1) - offset
    try:
        return check_timestamp(seconds * 10**9 + fraction)
    except Failure:
        return None


def format_duration(nanos: int) -> str:
    """Write a duration in seconds: `5400s`, `1.5s`."""
    sign = "-" if nanos < 0 else ""
    whole, fraction = divmod(abs(nanos), 10**9)
    tail = f".{fraction:09d}".rstrip("0") if fraction else ""
    return f"{sign}{whole}{tail}s"


def format_timestamp(nanos: int) -> str:
    """Write a time as RFC 3339 with the fraction it has."""
    seconds, fraction = divmod(nanos, 10**9)
    moment = _EPOCH + timedelta(seconds=seconds)
    tail = f".{fraction:09d}".rstrip("0") if fraction else ""
    return f"{moment.year:04d}-{moment:%m-%dT%H:%M:%S}{tail}Z"


def _same(value: Any) -> Any:
    return value


implement("duration", Duration)(_same)
implement("timestamp", Timestamp)(_same)


@implement("duration", str)
def _duration(text: str) -> Duration:
    value = parse_duration(text)
    if value is None:
        raise conversion(t.STRING, t.DURATION)
    return value


@implement("duration", int)
def _duration_int(_value: int) -> Duration:
    # Declared upstream, but without a conversion behind it.
    raise conversion(t.INT, t.DURATION)


@implement("timestamp", int)
def _timestamp_int(seconds: int) -> Timestamp:
    return check_timestamp(seconds * 10**9)


@implement("timestamp", str)
def _timestamp(text: str) -> Timestamp:
    value = parse_timestamp(text)
    if value is None:
        raise conversion(t.STRING, t.TIMESTAMP)
    return value


@implement("string", Duration)
def _string_duration(value: Duration) -> str:
    return format_duration(int(value))


@implement("string", Timestamp)
def _string_timestamp(value: Timestamp) -> str:
    return format_timestamp(int(value))


for _name, _unit in (
    ("Hours", 3600 * 10**9),
    ("Minutes", 60 * 10**9),
    ("Seconds", 10**9),
    ("Milliseconds", 10**6),
):

    def _part_of(value: Duration, unit: int = _unit) -> int:
        whole = abs(int(value)) // unit
        return -whole if value < 0 else whole

    implement(f"get{_name}", Duration)(_part_of)

_GETTERS: dict[str, tuple[str, Callable[[datetime], int]]] = {
    "getFullYear": ("year", lambda at: at.year),
    "getMonth": ("month", lambda at: at.month - 1),
    "getDayOfYear": ("day_of_year", lambda at: at.timetuple().tm_yday - 1),
    "getDayOfMonth": ("day_of_month", lambda at: at.day - 1),
    "getDate": ("day_of_month_1_based", lambda at: at.day),
    "getDayOfWeek": ("day_of_week", lambda at: at.isoweekday() % 7),
    "getHours": ("hours", lambda at: at.hour),
    "getMinutes": ("minutes", lambda at: at.minute),
    "getSeconds": ("seconds", lambda at: at.second),
    "getMilliseconds": ("milliseconds", lambda at: at.microsecond // 1000),
}


def _bind_getter(name: str, part: str, getter: Callable[[datetime], int]) -> None:
    declare(
        f"""
        timestamp_to_{part}: timestamp~{name}() -> int
        timestamp_to_{part}_with_tz: timestamp~{name}(string) -> int
        """
    )

    def local(value: Timestamp, zone: tzinfo) -> int:
        try:
            moment = _EPOCH + timedelta(microseconds=int(value) // 1000)
            return getter(moment.astimezone(zone))
        except OverflowError:
            raise Failure("out_of_range", "timestamp out of range in this zone") from None

    implement(name, Timestamp)(lambda value: local(value, UTC))
    implement(name, Timestamp, str)(lambda value, zone: local(value, _zone(zone)))


for _name, (_part, _getter) in _GETTERS.items():
    _bind_getter(_name, _part, _getter)

_OFFSET = re.compile(r"([+-]?)(\d\d):(\d\d)", re.ASCII)


def _zone(name: str) -> tzinfo:
    match = _OFFSET.fullmatch(name)
    if match is not None:
        delta = timedelta(hours=int(match[2]), minutes=int(match[3]))
        try:
            return timezone(-delta if match[1] == "-" else delta)
        except ValueError:
            raise Failure("conversion", f"unknown time zone {name}") from None
    if name in {"", "UTC"}:
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise Failure("conversion", f"unknown time zone {name}") from None
