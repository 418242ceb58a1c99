"""Why one node cannot meet one request, told from how far its devices got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dra.allocator.model import Pool
from dra.diagnose.explain.devices import Funnel, pool_fault
from dra.diagnose.explain.model import NodeReason
from dra.diagnose.explain.plugin_state import DriverState
from dra.diagnose.explain.requests import Asked
from dra.diagnose.explain.shortage import is_fragmented, pieces


def reasons_of(
    asked: Asked, funnel: Funnel, pools: Sequence[Pool], node: Mapping[str, Any], drivers: DriverState
) -> list[NodeReason]:
    """Give what keeps a node from meeting a request alone; nothing if there are enough free devices."""
    counts, needed = funnel.outcome.counts, funnel.outcome.needed
    if asked.mode == "All":
        if counts["free"] == needed:
            return []
    elif counts["free"] >= needed or funnel.multi_free:
        return []

    def reason(code: str, text: str, remedy: str = "") -> NodeReason:
        return NodeReason(code, asked.claim, asked.name, text, remedy)

    present = _present(asked, pools)
    if not present:
        return [reason(*_no_slice(asked, node, drivers))]
    if not any(pool.devices for pool in present):
        fault = next((why for pool in present if (why := pool_fault(pool))), "")
        if fault:
            return [reason(*_pool_reason(fault, present))]
        return [reason("pool-empty", f"its driver has published no devices ({present[0]})")]
    found = _blockers(funnel, reason)
    matching = funnel.outcome.matching
    if counts["unjudged"]:
        text = f"{counts['unjudged']} of its {sum(counts.values())} devices were not looked at: the selectors cost too much"
        return [*found, reason("too-costly", text)]
    if matching >= needed:
        return found
    if funnel.blocked:
        pool, why = funnel.blocked[0]
        return [reason(*_pool_reason(why, [pool])), *found]
    if not matching and counts["capacity"]:
        details = [item.detail for item in funnel.outcome.devices if item.stage == "capacity"]
        return [reason("capacity", Counter(details).most_common(1)[0][0])]
    if not matching:
        total = sum(counts.values())
        return [reason("no-match", f"none of its {total} devices matches")]
    return [reason("too-many", f"needs {needed}, has {matching} that match")]


def _blockers(funnel: Funnel, reason: Any) -> list[NodeReason]:
    counts, matching = funnel.outcome.counts, funnel.outcome.matching
    found = []
    if counts["held"]:
        found.append(reason("held", f"{counts['held']} of {matching} matching devices are held"))
    if counts["short"]:
        shortages = [item for _, _, item in funnel.shortages]
        free = pieces(shortages)
        if is_fragmented(shortages):
            text = f"enough is free in total, but not on one GPU; left: {free}"
            if any(item.enough_here for item in shortages):
                text = f"enough is free, but not in one piece; left: {free}"
            found.append(reason("fragmented", text))
        else:
            found.append(reason("short", f"not enough is left; left: {free}"))
    if counts["taint"]:
        taints = Counter(item.detail for item in funnel.outcome.devices if item.stage == "taint")
        shown = ", ".join(text for text, _ in taints.most_common(2))
        found.append(
            reason("taint", f"{counts['taint']} of {matching} matching devices are tainted: {shown}")
        )
    return found


def _present(asked: Asked, pools: Sequence[Pool]) -> list[Pool]:
    drivers = asked.selectors.drivers()
    return [pool for pool in pools if not drivers or pool.driver in drivers]


def _pool_reason(why: str, pools: Sequence[Pool]) -> tuple[str, str]:
    return ("pool-invalid" if any(pool.invalid for pool in pools) else "pool-incomplete"), why


def _no_slice(asked: Asked, node: Mapping[str, Any], drivers: DriverState) -> tuple[str, str, str]:
    driver = ", ".join(sorted(asked.selectors.drivers()))
    why, remedy = drivers.no_slice(node, driver)
    if why:
        return "slice-missing", why, remedy
    return "no-devices", f"no devices{f' of {driver}' if driver else ''}", ""
