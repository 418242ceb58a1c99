"""Expressions outside selectors: any variables with declared types. What the API server evaluates as admission's match
conditions and as rules of custom resources.

Source: k8s.io/apiserver/pkg/cel: the base environment (the same libraries as for selectors), objects typed by their schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from dra.cel import types as t
from dra.cel.checker import Environment, check, every_node
from dra.cel.errors import CelCompileError, CelEvalError, CostExceeded, Failure, Issue
from dra.cel.estimate import estimate_cost
from dra.cel.functions.times import parse_duration, parse_timestamp
from dra.cel.interpreter import Interpreter
from dra.cel.known_sizes import Sizes
from dra.cel.parser import TOO_DEEP, parse, place
from dra.cel.planner import InstantiationError, Plan
from dra.cel.selector import COST_LIMIT
from dra.cel.tree import Ident, Node
from dra.cel.types import CelType, declared_name
from dra.cel.validators import validate

# Types of objects: the fields of each, by the name of its type.
Structs = Mapping[str, Mapping[str, CelType]]


class Expression:
    """A compiled expression. Immutable, may be shared by threads."""

    __slots__ = ("_plan", "kind", "names", "root", "source")

    def __init__(self, source: str, root: Node, kind: CelType, variables: Iterable[str]) -> None:
        self.source, self.root, self.kind = source, root, kind
        self._plan = Plan(variables)
        self._plan.build(root)
        self.names = frozenset(node.name for node in every_node(root) if isinstance(node, Ident))

    def evaluate(self, variables: Mapping[str, Any], *, cost_limit: int = COST_LIMIT) -> tuple[Any, int]:
        """Give the value, and what it cost.

        Args:
            variables: values as `native` makes them.
            cost_limit: what one evaluation may cost.

        Raises:
            CelEvalError: the expression fails on these values, or costs too much.
        """
        interpreter = Interpreter(self._plan, variables, limit=cost_limit, named=True)
        try:
            value = interpreter.evaluate(self.root)
        except CostExceeded as failure:
            raise self._error(failure) from None
        except RecursionError:
            raise CelEvalError("the expression nests too deeply", error_class="internal") from None
        if isinstance(value, Failure):
            raise self._error(value)
        return value, interpreter.cost

    def max_cost(self, sizes: Sizes) -> int:
        """Give the worst-case cost, with the size of what a path from a variable leads to."""
        return estimate_cost(self.root, sizes)

    def _error(self, failure: Failure) -> CelEvalError:
        return CelEvalError(failure.text, error_class=failure.error_class, source=self.source)


def compile_expression(
    source: str,
    variables: Mapping[str, CelType],
    *,
    structs: Structs | None = None,
    results: Iterable[CelType] | None = (t.BOOL,),
) -> Expression:
    """Compile an expression.

    Args:
        source: the text.
        variables: the type of each; `dyn` where nothing is known.
        structs: the fields of the struct types among them.
        results: the types that the whole may have, None for any; `dyn` fits always.

    Raises:
        CelCompileError: with line and column where there is a place.
    """
    try:
        root, issues = parse(source)
        if root is None:
            raise _failed(source, issues)
        checked = check(root, Environment(dict(variables), {}, structs=structs or {}))
        problems = checked.problems or validate(root)
        if problems:
            raise _failed(source, place(source, problems))
        wanted = [checked.kind] if results is None else list(results)
        if checked.kind not in {*wanted, t.DYN, t.ANY}:
            named = " or ".join(map(declared_name, wanted))
            raise CelCompileError(
                f"must evaluate to {named}, not {declared_name(checked.kind)}", source=source
            )
        return Expression(source, root, checked.kind, variables)
    except InstantiationError as error:
        raise CelCompileError(f"program instantiation failed: {error}", source=source) from None
    except RecursionError:
        raise _failed(source, (Issue(-1, 0, TOO_DEEP),)) from None


@lru_cache(maxsize=512)
def compile_untyped(source: str, names: tuple[str, ...]) -> Expression:
    """Compile a condition over variables of which no types are known; compiled once.

    Raises:
        CelCompileError: as `compile_expression`.
    """
    return compile_expression(source, dict.fromkeys(names, t.DYN))


def _failed(source: str, issues: tuple[Issue, ...]) -> CelCompileError:
    lines = [f"ERROR: <input>:{issue.line}:{issue.column}: {issue.message}" for issue in issues]
    return CelCompileError("compilation failed: " + "; ".join(lines), source=source, issues=issues)


def native(value: Any, kind: CelType = t.DYN, structs: Structs | None = None) -> Any:
    """Give the run-time value of a JSON value whose type is `kind`; what does not fit its type stays as it is.

    A number such as 2.0 where a whole one belongs is a Failure, which whoever reads it meets: so it is on a real server.
    """
    if kind.kind == "struct" and isinstance(value, dict):
        fields = (structs or {}).get(kind.name, {})
        return {
            escaped: native(item, fields[escaped], structs)
            for name, item in value.items()
            if (escaped := escape(name)) in fields
        }
    if isinstance(value, dict):
        inner = kind.params[1] if kind.kind == "map" else t.DYN
        return {name: native(item, inner, structs) for name, item in value.items()}
    if isinstance(value, list):
        inner = kind.params[0] if kind.kind == "list" else t.DYN
        return [native(item, inner, structs) for item in value]
    if kind.kind == "double" and type(value) is int:
        return float(value)
    if kind.kind == "int" and type(value) is float:
        return Failure("bad_data", "invalid data, expected int, got float64")
    if isinstance(value, str):
        return _text(value, kind)
    return value


def _text(value: str, kind: CelType) -> Any:
    from base64 import b64decode

    match kind.kind:
        case "timestamp":
            found: Any = parse_timestamp(value)
        case "duration":
            found = parse_duration(value)
        case "bytes":
            try:
                found = b64decode(value, validate=True)
            except ValueError:
                found = None
        case _:
            found = value
    return value if found is None else found


_WORDS = (
    "true false null in as break const continue else for function if import let loop package namespace return var"
    " void while"
)
_KEYWORDS = frozenset(_WORDS.split())
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))


def escape(name: str) -> str:
    """Give a field's name as expressions write it; empty where they cannot. Source: k8s.io/apiserver/pkg/cel, Escape."""
    if name in _KEYWORDS:
        return f"__{name}__"
    for plain, written in _ESCAPES:
        name = name.replace(plain, written)
    good = name.isascii() and name.replace("_", "a").isalnum() and not name[:1].isdigit()
    return name if good else ""
