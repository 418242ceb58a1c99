"""The check of selectors at creation, with this project's own CEL.

Source: validation of CEL expressions in pkg/apis/resource/validation (new expressions).
"""

from __future__ import annotations

from collections.abc import Mapping

from dra.api.rules.cause import CelCheck
from dra.api.rules.parts import TOO_COMPLEX
from dra.cel import CelCompileError, CelFeatures, compile_selector
from dra.cel.selector import COST_LIMIT


def dra_cel_check(gates: Mapping[str, bool]) -> CelCheck:
    """Give a check that says what the API server would say about an expression, None if nothing."""
    features = CelFeatures(
        consumable_capacity=bool(gates.get("DRAConsumableCapacity")),
        list_type_attributes=bool(gates.get("DRAListTypeAttributes")),
    )

    def check(expression: str) -> str | None:
        try:
            selector = compile_selector(expression, features=features, new_expression=True)
        except CelCompileError as error:
            return explain(error)
        return TOO_COMPLEX if selector.max_cost > COST_LIMIT else None

    return check


def explain(error: CelCompileError) -> str:
    """Give a compile error as the server words it: each problem with its line and a caret below the place."""
    if not error.issues:
        return error.message
    lines = error.source.split("\n")
    parts = []
    for issue in error.issues:
        column = issue.column if error.source else 0
        text = f"ERROR: <input>:{issue.line}:{column}: {issue.message}"
        if 1 <= issue.line <= len(lines) and lines[issue.line - 1]:
            text += f"\n | {lines[issue.line - 1]}\n | {'.' * max(issue.column - 1, 0)}^"
        parts.append(text)
    return "compilation failed: " + "\n".join(parts)
