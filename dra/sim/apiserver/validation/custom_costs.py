"""What the rules of a custom resource may cost at worst, as the API server estimates it when a definition is created.

Sizes come from maxLength, maxItems and maxProperties; without them, from what fits into a request.
Source: k8s.io/apiserver/pkg/cel/common (sizes), k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation (limits).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.fields import forbidden
from dra.cel.expression import Expression, escape
from dra.cel.known_sizes import MAX, Path, Range

Json = dict[str, Any]
_REQUEST = 3 * 1024 * 1024
EXPRESSION_LIMIT, SCHEMA_LIMIT = 10_000_000, 100_000_000
_HINT = "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
# So many of the most expensive expressions are named, if they cost something to speak of.
_MOST_NAMED, _NAMED_FROM = 4, 1_000_000


@dataclass(slots=True)
class Sized:
    """How large a value may be: `most` characters or entries, at least `least` bytes of JSON."""

    most: int = 0
    least: int = 2
    fields: dict[str, Sized] = field(default_factory=dict)
    key: Sized | None = None
    elem: Sized | None = None

    def at(self, path: Path) -> Range | None:
        """Give the size of what a path from here leads to, None where nothing is known."""
        here: Sized | None = self
        for step in path[1:]:
            if here is None:
                return None
            match step:
                case "@items" | "@values":
                    here = here.elem
                case "@keys":
                    here = here.key
                case _:
                    here = here.fields.get(step)
        return None if here is None else Range(0, here.most)


def sized(schema: Json, *, root: bool = False) -> Sized | None:
    """Give the sizes of a schema's values; None where expressions cannot see them."""
    longest = schema.get("maxLength")
    if schema.get("x-kubernetes-int-or-string"):
        return Sized(_REQUEST - 2 if longest is None else max(0, int(longest)) * 4, 1)
    match schema.get("type"):
        case "array":
            elem = sized(schema.get("items") or {})
            if elem is None:
                return None
            return Sized(_limit(schema, "maxItems", (_REQUEST - 2) // (elem.least + 1)), elem=elem)
        case "object":
            return _object(schema, root=root or bool(schema.get("x-kubernetes-embedded-resource")))
        case "string":
            return _string(schema)
        case "boolean":
            return Sized(least=4)
        case "integer" | "number":
            return Sized(least=1)
    return None


def _limit(schema: Json, key: str, default: int) -> int:
    return default if schema.get(key) is None else max(0, int(schema[key]))


def _string(schema: Json) -> Sized:
    longest, least = schema.get("maxLength"), 2
    match schema.get("format"):
        case "byte":
            return Sized(_limit(schema, "maxLength", _REQUEST - 2), least)
        case "duration":
            return Sized(32, 3)
        case "date":
            return Sized(12, 12)
        case "date-time":
            return Sized(32, 21)
    if longest is not None:
        return Sized(max(0, int(longest)) * 4, least)
    if schema.get("enum"):
        texts = [value for value in schema["enum"] if isinstance(value, str)]
        return Sized(max((len(text.encode()) for text in texts), default=0), least)
    return Sized(_REQUEST - 2, least)


def _object(schema: Json, *, root: bool) -> Sized | None:
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        elem = sized(extra)
        if elem is None:
            return None
        most = _limit(schema, "maxProperties", (_REQUEST - 2) // (elem.least + 6))
        return Sized(most, key=Sized(), elem=elem)
    made = Sized()
    needed = schema.get("required") or []
    for name, known in (schema.get("properties") or {}).items():
        inner = sized(known)
        if inner is None:
            continue
        if escape(name):
            made.fields[escape(name)] = inner
        if name in needed and "default" not in known:
            made.least += len(name) + inner.least + 4
    if root:
        text = Sized(_REQUEST - 2)
        about = Sized(fields={"name": text, "generateName": text})
        made.fields |= {"apiVersion": text, "kind": text, "metadata": about}
    return made


def children_factor(schema: Json) -> int | None:
    """Give how many values below a schema there can be for each of its own; None: any number."""
    match schema.get("type"):
        case "object" if schema.get("additionalProperties") is not None:
            return None if schema.get("maxProperties") is None else max(0, int(schema["maxProperties"]))
        case "array":
            return None if schema.get("maxItems") is None else max(0, int(schema["maxItems"]))
    return 1


class Costs:
    """Adds up the estimates of all rules of a schema."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def add(
        self, expression: Expression, sizes: Sized, path: str, *, times: int | None, word: str
    ) -> Iterator[Cause]:
        """Take an expression into account; gives a finding if it alone costs too much.

        Args:
            expression: the rule or its message.
            sizes: of the value that it sees as `self`.
            path: where it stands.
            times: how often it may be evaluated for one object; None: as often as its value fits into a request.
            word: what the message calls it.
        """
        count = _REQUEST // (sizes.least + 1) if times is None else times
        cost = min(MAX, expression.max_cost(sizes.at) * count)
        self._found.append((cost, path))
        if cost > EXPRESSION_LIMIT:
            yield forbidden(
                path, f"estimated {word} cost exceeds budget by {_factor(cost, EXPRESSION_LIMIT)} {_HINT}"
            )

    def total(self, path: str) -> Iterator[Cause]:
        """Give the findings about all of them together."""
        total = min(MAX, sum(cost for cost, _ in self._found))
        if total <= SCHEMA_LIMIT:
            return
        # The most expensive ones, among equals those that came first.
        costly = [pair for pair in self._found if pair[0] >= _NAMED_FROM]
        worst = sorted(costly, key=lambda pair: -pair[0])[:_MOST_NAMED]
        why = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema"
        for _, at in worst:
            yield forbidden(at, why)
        what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema exceeds budget"
        yield forbidden(path, f"{what} by {_factor(total, SCHEMA_LIMIT)} {_HINT}")


def _factor(cost: int, limit: int) -> str:
    factor = cost / limit
    if factor > 100:
        return "factor of more than 100x"
    return f"factor of {factor:f}x" if factor < 1.5 else f"factor of {factor:.1f}x"
