"""The nearest miss: of the devices that a request's selectors refuse, those that lack the least."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dra.allocator.model import Device
from dra.diagnose.explain.model import DeviceOutcome, Trace, plain
from dra.diagnose.explain.requests import Asked
from dra.diagnose.names_near import names_near

_NO_KEY = re.compile(r"no such key: (\S+)")


@dataclass(frozen=True, slots=True)
class NearestMiss:
    """A device that lacks least, and how many are like it."""

    node: str
    outcome: DeviceOutcome
    trace: Trace
    alike: int


def nearest(found: Iterable[tuple[str, DeviceOutcome]]) -> NearestMiss | None:
    """Find it: class before request, then the fewest false terms, then the most true ones, then order."""
    best: tuple[tuple[int, int, int], str, DeviceOutcome, Trace] | None = None
    alike: dict[int, int] = {}
    for node, outcome in found:
        trace = outcome.trace
        if trace is None or outcome.stage not in {"class", "selector", "error"}:
            continue
        alike[id(trace)] = alike.get(id(trace), 0) + 1
        if best is not None and trace is best[3]:
            continue
        rank = (0 if outcome.stage != "class" else 1, len(trace.misses) or 99, -trace.passed)
        if best is None or rank < best[0]:
            best = (rank, node, outcome, trace)
    return NearestMiss(best[1], best[2], best[3], alike[id(best[3])]) if best else None


def lines_of(miss: NearestMiss, asked: Asked, device: Device | None) -> list[str]:
    """Write a miss: the device, each term with what it saw, and what there is instead."""
    others = f" (and {miss.alike - 1} like it)" if miss.alike > 1 else ""
    lines = [f"nearest miss: {miss.outcome.device.device} on {miss.node}{others}"]
    for item in miss.trace.misses[:4]:
        lines.append(f"  {item.origin}: {item}")
        lines += [f"  {hint}" for hint in _hints(item.failure, device)]
        for path, _ in item.saw:
            values = asked.selectors.seen.get(path)
            if values and len(values) > 1 and not item.failure:
                shown = ", ".join(plain(item) for item in sorted(values)[:6])
                lines.append(f"  values in the cluster: {shown}{' …' if len(values) > 6 else ''}")
                break
    if miss.trace.error and not miss.trace.misses:
        lines.append(f"  {miss.trace.error}")
    return lines


def _hints(failure: str, device: Device | None) -> list[str]:
    match = _NO_KEY.search(failure)
    if match is None or device is None:
        return []
    near = names_near(device.raw, match[1], driver=device.id.driver)
    if near:
        return [f"the device has {' and '.join(near)}"]
    domains = {name.partition("/")[0] for name in device.raw.get("attributes") or {} if "/" in name}
    return [f"its attributes are in {', '.join(sorted({device.id.driver, *domains}))}"]
