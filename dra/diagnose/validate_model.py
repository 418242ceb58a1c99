"""What validation finds, and what it is found in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: where, how bad, in which object and field, why, and what to do.

    `excerpt` are lines to show below, such as an expression with a caret.
    """

    file: str
    line: int
    severity: Severity
    code: str
    message: str
    subject: str = ""
    path: str = ""
    remedy: str = ""
    excerpt: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Give the line that people and editors read."""
        where = " ".join(part for part in (self.subject, self.path) if part)
        return f"{self.file}:{self.line}: {self.severity} {self.code}: {where + ': ' if where else ''}{self.message}"

    def told(self) -> str:
        """Give the place and what is wrong, for an error that has a code of its own."""
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"

    def to_json(self) -> Json:
        """Give it for programs."""
        return {
            "file": self.file, "line": self.line, "severity": self.severity, "code": self.code,
            "object": self.subject, "field": self.path, "message": self.message, "remedy": self.remedy,
            "excerpt": list(self.excerpt),
        }  # fmt: skip


@dataclass(slots=True)
class Report:
    """Everything that was found. `unreadable`: a file, or part of one, could not be read."""

    findings: list[Finding] = field(default_factory=list)
    objects: int = 0
    skipped: int = 0
    unreadable: bool = False

    def count(self, severity: Severity) -> int:
        """Give how many findings are that bad."""
        return sum(finding.severity == severity for finding in self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """Give 0: clean, 1: errors (`strict`: or warnings), 2: something could not be read."""
        if self.unreadable:
            return 2
        return int(self.count("error") > 0 or (strict and self.count("warning") > 0))

    def to_json(self) -> Json:
        """Give it for programs."""
        return {
            "objects": self.objects,
            "skipped": self.skipped,
            **{f"{severity}s": self.count(severity) for severity in SEVERITIES},
            "findings": [finding.to_json() for finding in self.findings],
        }


def in_order(findings: Sequence[Finding], files: Sequence[str]) -> list[Finding]:
    """Sort by file (as they were given) and line; the worst first where that is the same. Nothing stands twice."""
    place = {file: index for index, file in enumerate(dict.fromkeys(files))}
    return sorted(
        dict.fromkeys(findings),
        key=lambda one: (place.get(one.file, len(place)), one.file, one.line, SEVERITIES.index(one.severity)),
    )


def guess(word: str, known: Sequence[str] | Mapping[str, str]) -> str:
    """Give ` Did you mean X?` where something known looks like a word, else nothing.

    A mapping gives the name to show for each name that looks like it.
    """
    import difflib

    shown = known if isinstance(known, Mapping) else {name: name for name in known}
    lower = {name.lower(): text for name, text in shown.items()}
    near = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.7)
    return f" Did you mean {lower[near[0]]}?" if near else ""
