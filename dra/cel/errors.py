"""What can go wrong with an expression: it does not compile, or it fails on a device.

Source: cel-go's error texts as the recorded cases show them; a user who knows the scheduler's message must
recognise ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from dra.errors import DraError


@dataclass(frozen=True, slots=True)
class Issue:
    """One compile problem. `line` and `column` count from 1, in code points; -1 and 0 where there is no place."""

    line: int
    column: int
    message: str


class CelCompileError(DraError):
    """The expression is not valid in the environment of device selectors.

    `issues` holds every problem with a place; empty for a wrong result type and for a constant part that fails.
    """

    def __init__(self, message: str, *, source: str, issues: tuple[Issue, ...] = ()) -> None:
        super().__init__(
            "DRA-CEL-COMPILE",
            message,
            remedy="Correct the CEL expression; dra validate shows the place with a caret.",
            expression=source,
        )
        self.source = source
        self.issues = issues

    @property
    def line(self) -> int:
        """Line of the first problem, from 1; 0 where no place is known."""
        return max(self.issues[0].line, 0) if self.issues else 0

    @property
    def column(self) -> int:
        """Column of the first problem in code points, from 1; 0 where no place is known."""
        return self.issues[0].column if self.issues else 0

    def caret(self) -> str:
        """The line of the first problem with a caret under it; empty where no place is known."""
        if self.line < 1 or self.column < 1:
            return ""
        lines = self.source.split("\n")
        return f"{lines[self.line - 1]}\n{' ' * (self.column - 1)}^" if self.line <= len(lines) else ""

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_compile, (self.message, self.source, self.issues))


class CelEvalError(DraError):
    """The expression failed on this device. In the scheduler this fails the pod, it is not a "no match".

    `error_class` groups the reasons: `no_such_key`, `no_such_overload`, `cost_limit`, ...
    """

    def __init__(self, message: str, *, error_class: str, source: str = "") -> None:
        super().__init__(
            "DRA-CEL-EVAL",
            message,
            remedy=_REMEDIES.get(error_class, "Correct the selector, or guard the term that fails."),
            expression=source,
        )
        self.error_class = error_class
        self.source = source

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_eval, (self.message, self.error_class, self.source))


_REMEDIES = {
    "no_such_key": "Test the driver first, or guard the attribute: "
    'device.driver == "…" && …, has(…), or .?name.orValue(…).',
    "attribute_version": "Correct the version in the driver's ResourceSlice.",
    "unsupported_attribute": "This cluster has not enabled DRAListTypeAttributes, or the driver is newer than it.",
    "cost_limit": "Simplify the selector; it exceeds the run-time cost limit.",
    "result_not_bool": "Compare the attribute, so that the selector is true or false.",
}


def _rebuild_compile(message: str, source: str, issues: tuple[Issue, ...]) -> CelCompileError:
    return CelCompileError(message, source=source, issues=issues)


def _rebuild_eval(message: str, error_class: str, source: str) -> CelEvalError:
    return CelEvalError(message, error_class=error_class, source=source)


class Failure(Exception):  # noqa: N818 - a value of the language, not an error of this program
    """An error value inside an evaluation; `&&` and `||` may absorb it."""

    __slots__ = ("error_class", "text")

    def __init__(self, error_class: str, text: str) -> None:
        super().__init__(text)
        self.error_class = error_class
        self.text = text


class CostExceeded(Failure):
    """The run-time cost limit was reached; nothing absorbs this one."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("cost_limit", "operation cancelled: actual cost limit exceeded")


def no_overload(names: str = "") -> Failure:
    """Give the failure of an operation that has no form for its operands; `names`: the call, where it has a name."""
    return Failure("no_such_overload", f"no such overload: {names}" if names else "no such overload")
