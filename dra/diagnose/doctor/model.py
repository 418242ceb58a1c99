"""What `doctor` found, as data: ladders of rungs, each with its findings.

A ladder is climbed from below and ends at the first broken rung: what stands above it cannot work, and what is wrong
there would only follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dra.errors import BugError, DraError
from dra.host.files import host_error

Severity = Literal["error", "warning", "note"]
State = Literal["ok", "warning", "broken", "unknown", "not-reached"]

OK, WARNINGS = 0, 3
# One exit code for each rung that can break; 1 is an error of the command itself, 2 a wrong command line.
EXIT_CODES = {
    "driver": 10, "nvml": 11, "device-nodes": 12, "cdi": 13, "runtime": 14, "kubelet": 15, "slices": 16,
    "claims": 17, "mps": 18, "passthrough": 19,
    "api": 20, "classes": 21, "plugin-pods": 22, "nodes": 23, "node": 24,
    "claim": 30, "allocation": 31, "reservation": 32, "placement": 33, "record": 34, "cdi-file": 35,
    "device-files": 36, "driver-files": 37,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth saying. An `error` breaks its rung; `code` is stable, `message` names the object."""

    severity: Severity
    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a ladder. `text` is what was seen, also where all is well."""

    name: str
    state: State
    text: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A ladder that was climbed. `subject` is as the user names it (`node/NAME`, `claim/NS/NAME`, `cluster`)."""

    subject: str
    rungs: tuple[Rung, ...]

    @property
    def broken(self) -> Rung | None:
        """The rung at which the ladder ended; None if it has none."""
        return next((rung for rung in self.rungs if rung.state == "broken"), None)

    @property
    def exit_code(self) -> int:
        """The exit code: 0, 3 with warnings only, else that of the broken rung."""
        broken = self.broken
        if broken is not None:
            return EXIT_CODES[broken.name]
        return WARNINGS if any(rung.state == "warning" for rung in self.rungs) else OK


@dataclass(frozen=True, slots=True)
class Looked:
    """What a rung's look gave: what was seen in a few words, and what is to be said about it.

    `unknown` says why nothing could be seen; empty otherwise.
    """

    text: str
    findings: tuple[Finding, ...] = ()
    unknown: str = ""


Step = tuple[str, Callable[[], Looked]]


def climb(subject: str, steps: Sequence[Step]) -> Report:
    """Climb a ladder: call each step until one is broken. A step's `DraError` is its finding."""
    rungs: list[Rung] = []
    for name, look in steps:
        if any(rung.state == "broken" for rung in rungs):
            rungs.append(Rung(name, "not-reached"))
            continue
        rungs.append(_rung(name, look))
    return Report(subject, tuple(rungs))


def _rung(name: str, look: Callable[[], Looked]) -> Rung:
    try:
        looked = look()
    except DraError as error:
        return Rung(name, "broken", "", (error_of(error),))
    except OSError as error:
        from pathlib import Path

        return Rung(
            name, "broken", "", (error_of(host_error(error, "read", Path(str(error.filename or "?")))),)
        )
    except Exception as error:  # marked border: a doctor that dies of an odd node helps nobody
        bug = BugError(
            "DRA-BUG", f"the look at {name} met a bug: {type(error).__name__}: {error}", remedy="Report it."
        )
        return Rung(name, "broken", "", (error_of(bug),))
    if looked.unknown:
        return Rung(name, "unknown", looked.unknown, looked.findings)
    return Rung(name, state_of(looked.findings), looked.text, looked.findings)


def state_of(findings: Iterable[Finding]) -> State:
    """Give the state of a rung with these findings."""
    severities = {finding.severity for finding in findings}
    if "error" in severities:
        return "broken"
    return "warning" if "warning" in severities else "ok"


def error_of(error: DraError) -> Finding:
    """Give an error as a finding that breaks its rung."""
    return Finding("error", error.code, error.message, error.remedy)


def error(code: str, message: str, remedy: str) -> Finding:
    """Give a finding that breaks its rung."""
    return Finding("error", code, message, remedy)


def warning(code: str, message: str, remedy: str) -> Finding:
    """Give a finding that a person should look at, and that does not keep the rung from working."""
    return Finding("warning", code, message, remedy)


def note(code: str, message: str, remedy: str = "") -> Finding:
    """Give a finding that is good to know."""
    return Finding("note", code, message, remedy)


def as_json(report: Report) -> dict[str, Any]:
    """Give a report as plain JSON. Keys stay; new ones may be added."""
    broken = report.broken
    return {
        "subject": report.subject,
        "exitCode": report.exit_code,
        "brokenRung": None if broken is None else broken.name,
        "rungs": [
            {
                "name": rung.name,
                "state": rung.state,
                "text": rung.text,
                "findings": [
                    {
                        "severity": each.severity,
                        "code": each.code,
                        "message": each.message,
                        "remedy": each.remedy,
                    }
                    for each in rung.findings
                ],
            }
            for rung in report.rungs
        ],
    }


_MARKS = {"ok": "ok", "warning": "warn", "broken": "FAIL", "unknown": "?", "not-reached": "-"}


def as_text(report: Report) -> str:
    """Give a report for people: one line a rung, its findings below."""
    width = max((len(rung.name) for rung in report.rungs), default=0)
    lines = [report.subject]
    for rung in report.rungs:
        lines.append(f"  [{_MARKS[rung.state]:^4}] {rung.name:<{width}}  {rung.text}".rstrip())
        for finding in rung.findings:
            lines.append(f"         {finding.severity}: {finding.code}: {finding.message}")
            if finding.remedy:
                lines.append(f"           to do: {finding.remedy}")
    return "\n".join(lines)
