"""Cron schedules: five fields, names, steps, `@hourly` and its like, a time zone.

Source: robfig/cron's standard parser, which Kubernetes uses: minute, hour, day of month, month, day of week; where both
days are restricted, one of them is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_MONTH_NAMES, _DAY_NAMES = "jan feb mar apr may jun jul aug sep oct nov dec", "sun mon tue wed thu fri sat"
_MONTHS = {name: i for i, name in enumerate(_MONTH_NAMES.split(), 1)}
_DAYS = {name: i for i, name in enumerate(_DAY_NAMES.split())}
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_NAMED = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip
# A day that no month of the next years has never comes.
_HORIZON = timedelta(days=366 * 5)


class ScheduleError(ValueError):
    """The text is no schedule."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times of a schedule. `every` is set for `@every 1h`, the others are the values of each field."""

    minutes: frozenset[int] = frozenset()
    hours: frozenset[int] = frozenset()
    days: frozenset[int] = frozenset()
    months: frozenset[int] = frozenset()
    weekdays: frozenset[int] = frozenset()
    any_day: bool = True
    any_weekday: bool = True
    zone: tzinfo = UTC
    every: float = 0.0

    def after(self, moment: float) -> float | None:
        """Give the first time after `moment` (seconds since 1970), None if there is none in the next years."""
        if self.every:
            return moment - moment % 1 + self.every
        at = datetime.fromtimestamp(moment, self.zone).replace(second=0, microsecond=0) + timedelta(minutes=1)
        end = at + _HORIZON
        while at < end:
            if at.month not in self.months:
                at = (at.replace(day=1, hour=0, minute=0) + timedelta(days=32)).replace(day=1)
            elif not self._day_fits(at):
                at = at.replace(hour=0, minute=0) + timedelta(days=1)
            elif at.hour not in self.hours:
                at = at.replace(minute=0) + timedelta(hours=1)
            elif at.minute not in self.minutes:
                at += timedelta(minutes=1)
            else:
                return at.timestamp()
        return None

    def _day_fits(self, at: datetime) -> bool:
        by_day, by_weekday = at.day in self.days, at.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return by_day and by_weekday
        return by_day or by_weekday

    def between(self, start: float, end: float) -> Iterator[float]:
        """Give the times after `start` up to `end`."""
        at = self.after(start)
        while at is not None and at <= end:
            yield at
            at = self.after(at)


def parse_schedule(text: str, zone: str | None = None) -> Schedule:
    """Read a schedule.

    Raises:
        ScheduleError: what is wrong with it.
    """
    text = text.strip()
    where = _zone(zone)
    if text.startswith("@every "):
        span = text.removeprefix("@every ").strip()
        parts = _PART.findall(span)
        if not parts or "".join(number + unit for number, unit in parts) != span:
            raise ScheduleError(f"failed to parse duration {text}")
        return Schedule(
            every=max(1.0, sum(float(number) * _UNITS[unit] for number, unit in parts)), zone=where
        )
    text = _NAMED.get(text, text)
    if text.startswith("@"):
        raise ScheduleError(f"unrecognized descriptor: {text}")
    fields = text.split()
    if len(fields) != 5:
        raise ScheduleError(f"expected exactly 5 fields, found {len(fields)}: {fields}")
    days, weekdays = fields[2], fields[4]
    return Schedule(
        minutes=_field(fields[0], 0, 59),
        hours=_field(fields[1], 0, 23),
        days=_field(days, 1, 31),
        months=_field(fields[3], 1, 12, _MONTHS),
        weekdays=frozenset(day % 7 for day in _field(weekdays, 0, 6, _DAYS)),
        any_day=days.startswith(("*", "?")),
        any_weekday=weekdays.startswith(("*", "?")),
        zone=where,
    )


def _zone(name: str | None) -> tzinfo:
    if not name:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ScheduleError(f"unknown time zone {name}") from error


def _field(text: str, low: int, high: int, names: Mapping[str, int] | None = None) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _number(step_text, {}) if slash else 1
        if step < 1:
            raise ScheduleError(f"step of range should be a positive number: {part}")
        if span in {"*", "?"}:
            begin, end = low, high
        else:
            first, dash, last = span.partition("-")
            begin = _number(first, names or {})
            end = _number(last, names or {}) if dash else high if slash else begin
        if begin < low:
            raise ScheduleError(f"beginning of range ({begin}) below minimum ({low}): {part}")
        if end > high:
            raise ScheduleError(f"end of range ({end}) above maximum ({high}): {part}")
        if begin > end:
            raise ScheduleError(f"beginning of range ({begin}) beyond end of range ({end}): {part}")
        found.update(range(begin, end + 1, step))
    return frozenset(found)


def _number(text: str, names: Mapping[str, int]) -> int:
    if text.lower() in names:
        return names[text.lower()]
    if not (text.isascii() and text.isdigit()) or len(text) > 4:
        raise ScheduleError(f"failed to parse int from {text}")
    return int(text)
