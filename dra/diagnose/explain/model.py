"""What an explanation is made of. Everything here is data; `render` turns it into text and JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dra.allocator.model import DeviceId
from dra.allocator.pod_filters import PodObstacle

_CONSTRUCTOR = re.compile(r'(?:quantity|semver)\("([^"]*)"\)')
# How far a device got, in this order: what stopped it, or `free`.
STAGES = ("pool", "class", "selector", "error", "unjudged", "capacity", "held", "short", "taint", "free")


@dataclass(frozen=True, slots=True)
class Miss:
    """A term of a selector that a device does not meet.

    Attributes:
        origin: `class NAME` or `request`.
        index: number of the selector there.
        term: the term as written.
        saw: the parts of the device that it reads, with their values.
        failure: why it failed, where it neither is true nor false.
    """

    origin: str
    index: int
    term: str
    saw: tuple[tuple[str, str], ...]
    failure: str = ""

    def __str__(self) -> str:
        """Give `TERM is false: attribute is VALUE`."""
        if self.failure:
            return f"{self.term} fails: {self.failure}"
        seen = ", ".join(f"{_short(path)} is {plain(value)}" for path, value in self.saw if path != self.term)
        return f"{self.term} is false" + (f": {seen}" if seen else "")


def plain(value: str) -> str:
    """Write a value of the language for people: a quantity or a version without its constructor."""
    return _CONSTRUCTOR.sub(r"\1", value)


def _short(path: str) -> str:
    """Give the last name of `device.attributes["gpu.nvidia.com"].productName`, or the path if it is no such chain."""
    for prefix in ("device.attributes", "device.capacity"):
        if path.startswith(prefix):
            name = (
                path.rpartition(".")[2] if path[-1] not in "\"']" else path.rpartition("[")[2].strip("\"'[]")
            )
            return name or path
    return path


@dataclass(frozen=True, slots=True)
class Trace:
    """What a request's selectors say to a device; the same for all devices that are alike to them.

    Attributes:
        stage: `` (all true), `class`, `selector`, `error` or `unjudged` (not evaluated).
        misses: every term that is false or fails.
        error: the error that ends the scheduling attempt, with the selector it is in.
        passed: how many terms are true.
        remedy: what can be done about the error.
    """

    stage: str
    misses: tuple[Miss, ...] = ()
    error: str = ""
    passed: int = 0
    remedy: str = ""


class DeviceOutcome(NamedTuple):
    """How far one device got with one request."""

    device: DeviceId
    stage: str
    detail: str
    trace: Trace | None


@dataclass(slots=True)
class RequestOutcome:
    """One request (or sub-request) on one node."""

    claim: str
    request: str
    needed: int
    mode: str
    devices: list[DeviceOutcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def matching(self) -> int:
        """Devices in usable pools that the selectors take and that are large enough."""
        return sum(self.counts[stage] for stage in ("held", "short", "taint", "free"))


@dataclass(frozen=True, slots=True)
class NodeReason:
    """Why a node cannot give a request its devices; `remedy` where it is another than is usual for the code."""

    code: str
    claim: str
    request: str
    text: str
    remedy: str = ""


@dataclass(slots=True)
class NodeOutcome:
    """One node: why the pod cannot go there, and how far each request's devices got.

    `fits` tells whether the devices alone could be had there now; None where that was not found out.
    """

    name: str
    obstacles: list[PodObstacle] = field(default_factory=list)
    requests: list[RequestOutcome] = field(default_factory=list)
    reasons: list[NodeReason] = field(default_factory=list)
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause, for a reader.

    Attributes:
        code: stable; see `docs/explain.md`.
        message: what is the case.
        remedy: what can be done; empty if nothing can.
        details: further lines, such as who holds what.
        claim: the claim it is about; empty for the pod as a whole.
        request: the request it is about.
        nodes: the nodes where it is so; empty if it does not depend on a node.
    """

    code: str
    message: str
    remedy: str = ""
    details: tuple[str, ...] = ()
    claim: str = ""
    request: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class Explanation:
    """The answer. `state` is one of `allocated`, `running`, `ended`, `pending`; `reasons` come most telling first."""

    kind: str
    namespace: str
    name: str
    state: str
    verdict: str
    reasons: list[Reason] = field(default_factory=list)
    claims: list[Mapping[str, Any]] = field(default_factory=list)
    nodes: list[NodeOutcome] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unread: Mapping[str, str] = field(default_factory=dict)
    scheduler_message: str = ""

    @property
    def exit_code(self) -> int:
        """0: not pending. 1: pending, or allocated and not prepared."""
        return 1 if self.state == "pending" else 0
