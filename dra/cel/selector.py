"""Selectors: compile once, evaluate on devices.

Source: k8s.io/dynamic-resource-allocation/cel of Kubernetes 1.36: environments for stored and for new expressions,
limits, conversion of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dra.cel import types as t
from dra.cel.checker import Environment, check
from dra.cel.device import DeviceView
from dra.cel.errors import CelCompileError, CelEvalError, CostExceeded, Failure, Issue
from dra.cel.estimate import estimate_cost
from dra.cel.interpreter import Interpreter
from dra.cel.parser import TOO_DEEP, parse, place
from dra.cel.planner import InstantiationError, Plan
from dra.cel.trace import SubTerm, explain_terms
from dra.cel.tree import Node
from dra.cel.types import CelType, declared_name
from dra.cel.validators import validate
from dra.cel.values import Duration, Timestamp, Uint, type_of

COST_LIMIT = 1_000_000
# The estimate is no strict bound. Where it stays this far below the limit, the cost is not counted at all.
COST_MARGIN = 16


@dataclass(frozen=True, slots=True)
class CelFeatures:
    """Feature gates of the evaluating cluster; the defaults are those of Kubernetes 1.36."""

    consumable_capacity: bool = True
    list_type_attributes: bool = False


DEFAULT = CelFeatures()


class Selector:
    """A compiled selector. Immutable, may be shared by threads."""

    __slots__ = ("_plan", "_run", "_slots", "expression", "features", "kind", "max_cost", "root")

    def __init__(self, expression: str, root: Node, kind: CelType, features: CelFeatures) -> None:
        self.expression = expression
        self.root = root
        self.kind = kind
        self.features = features
        self.max_cost = estimate_cost(root)
        self._plan = Plan()
        self._run = self._plan.build(root)
        self._slots = self._plan.slots

    def evaluate(
        self, device: Mapping[str, Any] | DeviceView, *, driver: str = "", cost_limit: int = COST_LIMIT
    ) -> bool:
        """Whether the device matches.

        Args:
            device: v1 device JSON (`attributes`, `capacity`, `allowMultipleAllocations`), not changed afterwards by
                the caller, or a view made by `view_of`.
            driver: the pool's driver, for a device given as JSON.
            cost_limit: run-time cost at which the evaluation fails, as in the scheduler.

        Raises:
            CelEvalError: the expression fails on this device.
        """
        if type(device) is not DeviceView:
            device = view_of(device, driver=driver, features=self.features)  # type: ignore[arg-type]
        if device.failure is not None:
            raise self._error(device.failure)
        try:
            if self.max_cost * COST_MARGIN > cost_limit:
                value = self.run_costed(device, cost_limit=cost_limit)[0]
                if isinstance(value, Failure):
                    raise self._error(value)
            else:
                value = self._run([device.fields, *[None] * (self._slots - 1)])
            return value if value is True or value is False else _to_bool(value)
        except Failure as failure:
            raise self._error(failure) from None
        except RecursionError:
            raise CelEvalError("the expression nests too deeply", error_class="internal") from None

    def run_costed(self, device: DeviceView, *, cost_limit: int = COST_LIMIT) -> tuple[Any, int]:
        """Give the value or Failure and what it cost, counted as the scheduler counts (slow)."""
        interpreter = Interpreter(self._plan, device.fields, limit=cost_limit)
        try:
            return interpreter.evaluate(self.root), interpreter.cost
        except CostExceeded as failure:
            return failure, interpreter.cost

    def explain(self, device: Mapping[str, Any] | DeviceView, *, driver: str = "") -> list[SubTerm]:
        """Give the terms of the selector with what each saw on this device and which decided; empty where the
        device itself cannot be read (`evaluate` says why).
        """
        return self.explain_costed(device, driver=driver)[0]

    def explain_costed(
        self, device: Mapping[str, Any] | DeviceView, *, driver: str = ""
    ) -> tuple[list[SubTerm], int]:
        """Give the terms as `explain` does, and what it cost to find them, counted as the scheduler counts."""
        if type(device) is not DeviceView:
            device = view_of(device, driver=driver, features=self.features)  # type: ignore[arg-type]
        if device.failure is not None:
            return [], 0
        interpreter = Interpreter(self._plan, device.fields, limit=COST_LIMIT, record=True)
        # What was reached before a limit is still worth showing.
        with suppress(CostExceeded, RecursionError):
            interpreter.evaluate(self.root)
        return explain_terms(self.expression, self.root, interpreter.values or {}), interpreter.cost

    def _error(self, failure: Failure) -> CelEvalError:
        return CelEvalError(failure.text, error_class=failure.error_class, source=self.expression)


_VIEWS: dict[tuple[int, str, bool], tuple[Mapping[str, Any], DeviceView]] = {}
_MAX_VIEWS = 16_384


def view_of(device: Mapping[str, Any], *, driver: str, features: CelFeatures = DEFAULT) -> DeviceView:
    """Give the view of a device, made once for each device object (remembered by identity, bounded)."""
    key = (id(device), driver, features.list_type_attributes)
    known = _VIEWS.get(key)
    if known is not None and known[0] is device:
        return known[1]
    view = DeviceView(device, driver=driver, list_types=features.list_type_attributes)
    if len(_VIEWS) >= _MAX_VIEWS:
        _VIEWS.clear()
    _VIEWS[key] = (device, view)
    return view


def _to_bool(value: Any) -> bool:
    """Convert a result that is no bool, which always fails.

    Raises:
        Failure: result_not_bool.
    """
    kind = type_of(value).name
    if isinstance(value, str):
        why = "unsupported native conversion from string to 'bool'"
    elif isinstance(value, (int, float)) and not isinstance(value, (Duration, Timestamp, Uint)):
        why = f"unsupported type conversion from '{kind}' to bool"
    else:
        why = f"type conversion error from '{kind.removeprefix('kubernetes.')}' to 'bool'"
    raise Failure("result_not_bool", f"CEL result of type {kind} could not be converted to bool: {why}")


@lru_cache(maxsize=2048)
def _compile(expression: str, features: CelFeatures, new: bool) -> Selector | CelCompileError:
    try:
        return _build(expression, features, new=new)
    except CelCompileError as error:
        return error
    except RecursionError:
        return _too_deep(expression)


def compile_selector(
    expression: str, *, features: CelFeatures = DEFAULT, new_expression: bool = False
) -> Selector:
    """Compile a selector as the scheduler does (`new_expression`: as the API server does on create).

    Raises:
        CelCompileError: with the message of the scheduler, `.line` and `.column`.
    """
    result = _compile(expression, features, new_expression)
    if isinstance(result, CelCompileError):
        raise CelCompileError(result.message, source=result.source, issues=result.issues)
    return result


def _too_deep(expression: str) -> CelCompileError:
    return _failed(expression, (Issue(-1, 0, TOO_DEEP),))


def _failed(expression: str, issues: tuple[Issue, ...]) -> CelCompileError:
    lines = [f"ERROR: <input>:{issue.line}:{issue.column}: {issue.message}" for issue in issues]
    return CelCompileError("compilation failed: " + "; ".join(lines), source=expression, issues=issues)


def _build(expression: str, features: CelFeatures, *, new: bool) -> Selector:
    root, issues = parse(expression)
    if root is None:
        raise _failed(expression, issues)
    checked = check(root, environment(features, new=new))
    problems = checked.problems or validate(root)
    if problems:
        raise _failed(expression, place(expression, problems))
    unknown = t.DYN if features.list_type_attributes else t.ANY
    if checked.kind not in {t.BOOL, unknown}:
        raise CelCompileError(
            f"must evaluate to bool or the unknown type, not {declared_name(checked.kind)}", source=expression
        )
    try:
        return Selector(expression, root, checked.kind, features)
    except InstantiationError as error:
        raise CelCompileError(f"program instantiation failed: {error}", source=expression) from None


def environment(features: CelFeatures, *, new: bool) -> Environment:
    """Give what an expression may name; new expressions see gated things only with their gate."""
    value = t.DYN if features.list_type_attributes else t.ANY
    fields = {
        "driver": t.STRING,
        "attributes": t.map_of(t.STRING, t.map_of(t.STRING, value)),
        "capacity": t.map_of(t.STRING, t.map_of(t.STRING, t.QUANTITY)),
        "allowMultipleAllocations": t.BOOL,
    }
    hidden: frozenset[str] = frozenset()
    if new:
        if not features.consumable_capacity:
            del fields["allowMultipleAllocations"]
        if not features.list_type_attributes:
            hidden = frozenset({"includes"})
    return Environment({"device": t.DEVICE}, fields, hidden)
