"""CEL selectors of claims and classes: whether the API server takes them, with a caret under the place where not.

Source: validation of new expressions in pkg/apis/resource/validation of Kubernetes 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dra.api.rules.parts import MAX_EXPRESSION
from dra.cel import CelCompileError, Issue, Selector, compile_selector
from dra.cel.functions.registry import FUNCTIONS
from dra.cel.selector import COST_LIMIT
from dra.diagnose.validate_model import Json, guess
from dra.diagnose.validate_object import Subject

_WIDTH = 100


def requests_of(spec: Json, path: str) -> Iterator[tuple[str, str, Json]]:
    """Give every request and alternative that selects devices: its name, its path, its content."""
    for i, request in enumerate((spec.get("devices") or {}).get("requests") or []):
        at, name = f"{path}.devices.requests[{i}]", str(request.get("name"))
        if request.get("exactly") is not None:
            yield name, f"{at}.exactly", request["exactly"]
        for k, one in enumerate(request.get("firstAvailable") or []):
            yield f"{name}/{one.get('name')}", f"{at}.firstAvailable[{k}]", one


def check_selectors(subject: Subject) -> dict[str, list[Selector] | None]:
    """Report bad expressions; give the compiled selectors by the path of what has them (None: one is bad)."""
    found: dict[str, list[Selector] | None] = {}
    if subject.kind == "DeviceClass":
        found["spec"] = _list(subject, "spec", (subject.obj.get("spec") or {}).get("selectors"))
    elif claim := subject.claim_spec():
        for _, path, request in requests_of(claim[1], claim[0]):
            found[path] = _list(subject, path, request.get("selectors"))
    return found


def _list(subject: Subject, path: str, items: Any) -> list[Selector] | None:
    compiled: list[Selector] = []
    bad = False
    for i, item in enumerate(items or []):
        text = (item.get("cel") or {}).get("expression") or ""
        selector = _check(subject, f"{path}.selectors[{i}].cel.expression", text)
        if selector is None:
            bad = True
        else:
            compiled.append(selector)
    return None if bad else compiled


def _check(subject: Subject, path: str, text: str) -> Selector | None:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_EXPRESSION:
        return None  # the rules said so
    if not subject.written(path):
        return None  # likewise: there is no expression
    try:
        selector = compile_selector(text, new_expression=True)
    except CelCompileError as error:
        for issue in error.issues or (Issue(0, 0, error.message),):
            _report(subject, path, text, issue)
        return None
    if selector.max_cost > COST_LIMIT:
        subject.report(
            "error", "DRA-CEL-COST", path,
            f"the expression may cost {selector.max_cost}, the API server allows {COST_LIMIT}",
            remedy="Simplify it: loops in loops and comparisons of long texts cost most.",
        )  # fmt: skip
        return None
    return selector


def _report(subject: Subject, path: str, text: str, issue: Issue) -> None:
    lines = text.split("\n")
    spot, _ = subject.manifest.spot.find(path)
    placed = 1 <= issue.line <= len(lines) and issue.column >= 1
    line = spot.text_line + issue.line - 1 if placed and spot.text_line else spot.line
    excerpt = caret(lines[issue.line - 1], issue.column) if placed else ()
    subject.report(
        "error",
        "DRA-CEL-COMPILE",
        path,
        issue.message,
        line=line,
        excerpt=excerpt,
        remedy=_remedy(issue.message),
    )


def _remedy(message: str) -> str:
    if "no matching overload" in message and any(f"_{sign}_" in message for sign in _SIGNS):
        for kind in ("Quantity", "Semver"):
            if f"kubernetes.{kind}" in message:
                return f"A {kind.lower()} is compared with .isGreaterThan(…), .isLessThan(…) or .compareTo(…) >= 0."
    if match := re.search(r"undefined field '(.*?)'", message):
        return guess(match[1], _FIELDS).strip() or f"A device has {', '.join(_FIELDS)}."
    if match := re.search(r"undeclared reference to '(.*?)'", message):
        return guess(match[1], ["device", *(name for name in FUNCTIONS if name.isidentifier())]).strip()
    if "must evaluate to bool" in message:
        return "Compare it with something, so that the expression is true or false for each device."
    return ""


_SIGNS = (">", "<", ">=", "<=")
_FIELDS = ("driver", "attributes", "capacity", "allowMultipleAllocations")


def caret(line: str, column: int) -> tuple[str, str]:
    """Give a line (the part of it around a column that counts from 1) and a caret under the column."""
    start = max(column - 1 - _WIDTH // 2, 0) if len(line) > _WIDTH else 0
    shown = line[start : start + _WIDTH]
    before = "…" if start else ""
    after = "…" if start + _WIDTH < len(line) else ""
    return f"{before}{shown}{after}".replace("\t", " "), " " * (len(before) + column - 1 - start) + "^"
