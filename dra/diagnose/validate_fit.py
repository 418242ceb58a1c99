"""Requests that no known GPU can meet: selectors evaluated on the devices that known machines publish.

Only a warning: there are more GPUs than we know. Attributes that depend on the installation (driver version, UUID,
place on the bus) are never the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.classes import DRIVER, TYPE_OF_CLASS, class_expression
from dra.cel import CelCompileError, CelEvalError, Selector, SubTerm, compile_selector
from dra.diagnose.names_near import names_near
from dra.diagnose.validate_cel import requests_of
from dra.diagnose.validate_model import Json, guess
from dra.diagnose.validate_object import Subject
from dra.errors import ValueFormatError
from dra.values import Quantity

# Machines are looked at for a bare number of GPUs only from this one on: every larger machine has so many.
_ALWAYS_THERE = 8
_LOCAL = frozenset({
    "driverVersion", "cudaDriverVersion", "uuid", "parentUUID", "pciBusID", "pcieRoot", "numaNode", "addressingMode",
    # How a GPU is shared is its administrator's choice.
    "gpudra.dev",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """A device as v1 JSON, and the kind of machine that publishes it."""

    machine: str
    device: Mapping[str, Any]

    @property
    def product(self) -> str:
        """Give what people call it."""
        attributes = self.device.get("attributes") or {}
        names = [str((attributes.get(key) or {}).get("string") or "") for key in ("productName", "profile")]
        return " ".join(name for name in names if name)

    @property
    def partition(self) -> bool:
        """Tell whether it is a part of a GPU: known ones overlap, so that their number says nothing."""
        return "profile" in (self.device.get("attributes") or {})


@dataclass(slots=True)
class _Outcome:
    """What the selectors of a request make of the known devices."""

    matching: list[KnownDevice] = field(default_factory=list)
    failing: list[tuple[KnownDevice, str]] = field(default_factory=list)
    misses: list[tuple[int, KnownDevice, list[SubTerm]]] = field(default_factory=list)
    # Devices that only their installation keeps from matching.
    maybe: bool = False


class Fit:
    """Checks requests against known devices, which are asked for when the first request needs them."""

    def __init__(
        self,
        known: Callable[[], Iterable[KnownDevice]],
        classes: Mapping[str, Sequence[Selector] | None],
    ) -> None:
        """`classes`: the selectors of the DeviceClasses in the files; None where they do not compile."""
        self._ask = known
        self._known: list[KnownDevice] | None = None
        self._classes = classes

    def check(self, subject: Subject, selectors: Mapping[str, Sequence[Selector] | None]) -> None:
        """Report what cannot be met in one claim, template or class."""
        if subject.kind == "DeviceClass":
            self._check_class(subject, selectors.get("spec"))
            return
        claim = subject.claim_spec()
        if claim is None:
            return
        for _, path, request in requests_of(claim[1], claim[0]):
            own = selectors.get(path)
            if own is not None:
                self._check_request(subject, path, request, own)
        self._check_constraints(subject, claim)

    def _devices(self) -> list[KnownDevice]:
        if self._known is None:
            self._known = list(self._ask())
        return self._known

    def _class(self, name: str) -> Sequence[Selector] | None:
        if name in self._classes:
            return self._classes[name]
        return [compile_selector(class_expression(name))] if name in TYPE_OF_CLASS else None

    def _check_class(self, subject: Subject, selectors: Sequence[Selector] | None) -> None:
        if not selectors or not _is_ours(selectors):
            return
        outcome = _evaluate(self._devices(), [], selectors)
        if outcome.misses and not outcome.matching and not outcome.maybe:
            _report_miss(subject, "spec.selectors", "DRA-CLASS-NO-DEVICE", outcome, "warning")

    def _check_request(self, subject: Subject, path: str, request: Json, own: Sequence[Selector]) -> None:
        of_class = self._class(str(request.get("deviceClassName")))
        count = int(request.get("count") or 1)
        wanted = (request.get("capacity") or {}).get("requests") or {}
        plain = not own and not wanted and count <= _ALWAYS_THERE
        if of_class is None or (plain and str(request.get("deviceClassName")) not in self._classes):
            return
        devices = self._devices()
        if not _evaluate(devices, [], of_class).matching:
            return  # the class is reported, or not ours
        outcome = _evaluate(devices, of_class, own)
        if outcome.maybe:
            return
        if not outcome.matching:
            # Another alternative may be there for exactly this.
            severity = "info" if ".firstAvailable[" in path else "warning"
            _report_miss(subject, f"{path}.selectors", "DRA-REQUEST-NO-DEVICE", outcome, severity)
            return
        if outcome.failing:
            device, why = outcome.failing[0]
            subject.report(
                "info", "DRA-REQUEST-SELECTOR-FAILS", f"{path}.selectors",
                f"on a node with {device.product} the selector fails ({why}), and with it the scheduling of the pod",
                remedy="Guard the term with has(…), or test something first that tells such devices apart.",
            )  # fmt: skip
        large = _large_enough(outcome.matching, wanted)
        if not large:
            subject.report(
                "warning", "DRA-REQUEST-NO-DEVICE", f"{path}.capacity.requests",
                "no known GPU that the selectors take has so much", remedy="Ask for less.",
            )  # fmt: skip
        else:
            self._check_count(subject, path, count, large)

    def _check_count(self, subject: Subject, path: str, count: int, matching: Sequence[KnownDevice]) -> None:
        if any(one.partition for one in matching):
            return
        machine, most = Counter(one.machine for one in matching).most_common(1)[0]
        if count > most:
            subject.report(
                "warning", "DRA-REQUEST-TOO-MANY", f"{path}.count",
                f"asks for {count} devices on one node; the largest known machine ({machine}) has {most} that match",
                remedy="A claim is allocated on one node: spread the work over several pods with a claim each.",
            )  # fmt: skip

    def _check_constraints(self, subject: Subject, claim: tuple[str, Json]) -> None:
        path, spec = claim
        counts = _counts(spec)
        for i, constraint in enumerate((spec.get("devices") or {}).get("constraints") or []):
            at = f"{path}.devices.constraints[{i}]"
            names = constraint.get("requests") or list(counts)
            if all(name in counts for name in names) and sum(counts[name] for name in names) == 1:
                subject.report(
                    "warning", "DRA-CONSTRAINT-IDLE", at, "the constraint compares one device with nothing",
                    remedy="List the requests whose devices belong together, or remove it.",
                )  # fmt: skip
            for key in ("matchAttribute", "distinctAttribute"):
                attribute = constraint.get(key)
                if attribute and attribute.startswith(f"{DRIVER}/"):
                    self._check_attribute(subject, f"{at}.{key}", attribute, names)

    def _check_attribute(self, subject: Subject, path: str, attribute: str, names: Sequence[str]) -> None:
        known = {key for one in self._devices() for key in one.device.get("attributes") or {}}
        name = attribute.partition("/")[2]
        if known and name not in known:
            subject.report(
                "warning", "DRA-CONSTRAINT-ATTRIBUTE", path,
                f"no known device of {DRIVER} has the attribute {name}, so that {', '.join(names)} can never be allocated."
                f"{guess(name, _full(known))}",
                remedy=f"Attributes are {', '.join(sorted(key for key in known if '/' not in key))}.",
            )  # fmt: skip


def _counts(spec: Json) -> dict[str, int]:
    """Give how many devices each request takes; a large number where it is not fixed."""
    counts = {}
    for request in (spec.get("devices") or {}).get("requests") or []:
        forms = [request["exactly"]] if request.get("exactly") else request.get("firstAvailable") or []
        counts[str(request.get("name"))] = max(
            (999 if form.get("allocationMode") == "All" else int(form.get("count") or 1) for form in forms),
            default=1,
        )
    return counts


def _is_ours(selectors: Sequence[Selector]) -> bool:
    texts = " ".join(selector.expression for selector in selectors)
    # No known machine has functions that are passed through.
    return DRIVER in texts and "vfio" not in texts


def _evaluate(
    devices: Sequence[KnownDevice], first: Sequence[Selector], then: Sequence[Selector]
) -> _Outcome:
    """Evaluate the selectors of `then` on the devices that those of `first` take."""
    outcome = _Outcome()
    looked: set[tuple[str, str]] = set()
    for known in devices:
        if not _passes(known, first):
            continue
        try:
            if all(one.evaluate(known.device, driver=DRIVER) for one in then):
                outcome.matching.append(known)
                continue
        except CelEvalError as error:
            outcome.failing.append((known, error.message))
        key = (known.machine, known.product)
        if key not in looked:
            looked.add(key)
            terms = [term for one in then for term in _terms(one, known)]
            false = [term for term in terms if term.value is not True]
            outcome.maybe = outcome.maybe or (bool(false) and all(_local(term) for term in false))
            failed = sum(term.failure != "" for term in false)
            outcome.misses.append((len(false) - len(terms) + failed, known, false))
    return outcome


def _passes(known: KnownDevice, selectors: Sequence[Selector]) -> bool:
    try:
        return all(one.evaluate(known.device, driver=DRIVER) for one in selectors)
    except CelEvalError:
        return False


def _terms(selector: Selector, known: KnownDevice) -> list[SubTerm]:
    """Give the innermost terms of a selector that have a say, each evaluated."""
    found = selector.explain(known.device, driver=DRIVER)
    leaves = [
        term
        for place, term in enumerate(found)
        if place + 1 == len(found) or found[place + 1].depth <= term.depth
    ]
    return [_alone(term, known) for term in leaves if term.decided or not term.reached or term.value is True]


def _alone(term: SubTerm, known: KnownDevice) -> SubTerm:
    if term.reached:
        return term
    try:
        found = compile_selector(term.text).explain(known.device, driver=DRIVER)
    except CelCompileError:
        return term
    return found[0] if len(found) == 1 else term


def _local(term: SubTerm) -> bool:
    return not term.failure and any(name in term.text for name in _LOCAL)


def _full(names: Iterable[str]) -> dict[str, str]:
    """Give names by what people take them for: without their domain."""
    return {name.rpartition("/")[2]: name for name in names}


def _large_enough(devices: Sequence[KnownDevice], wanted: Mapping[str, Any]) -> list[KnownDevice]:
    # A capacity that no known device has may come with a node's settings, as shares do.
    known = {name for one in devices for name in one.device.get("capacity") or {}}
    amounts = {name.removeprefix(f"{DRIVER}/"): amount for name, amount in wanted.items()}
    return [
        one
        for one in devices
        if all(_has(one, name, amount) for name, amount in amounts.items() if name in known)
    ]


def _has(known: KnownDevice, name: str, amount: Any) -> bool:
    capacity = (known.device.get("capacity") or {}).get(name)
    if capacity is None:
        return False
    try:
        return Quantity.parse(str(amount)) <= Quantity.parse(str(capacity.get("value")))
    except ValueFormatError:
        return True  # the rules said so


def _report_miss(subject: Subject, path: str, code: str, outcome: _Outcome, severity: Any) -> None:
    _, device, false = min(outcome.misses, key=lambda miss: miss[0])
    term = false[0] if false else None
    message = f"no known GPU can meet this; the nearest is {device.product} ({device.machine})"
    remedy = "Correct the selector, or ignore this if you have a GPU that is not among the known ones."
    if term is not None:
        saw = ", ".join(f"{what} = {value}" for what, value in term.saw)
        message += f", where `{' '.join(term.text.split())}` "
        message += f"fails: {term.failure}" if term.failure else f"is false{f' ({saw})' if saw else ''}"
        missing = term.failure.rpartition(": ")[2] if "no such key" in term.failure else ""
        if missing:
            near = names_near(device.device, missing, driver=DRIVER)
            remedy = f"Correct the name.{f' Did you mean {near[0]}?' if near else ''}"
    subject.report(
        severity, code, path if subject.written(path) else path.rpartition(".")[0], message, remedy=remedy
    )
