"""Worst-case cost of single calls.

Source: cel-go's estimator, ext.Lists v3, ext.Sets, and k8s.io/apiserver cel/library cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from dra.cel import types as t
from dra.cel.known_sizes import MAX, ONE, UNKNOWN, ZERO, KnownSizes, Range
from dra.cel.tree import Call, Literal, Node

SCAN = 0.1  # a character passed over
PATTERN = 0.25  # a character of a regular expression
Estimate = tuple[Range, Range | None]

_TRAVERSAL = frozenset({"isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"})
_SCANS_ARGUMENT = frozenset({"cidr", "isIP", "isCIDR", "quantity", "isQuantity", "semver", "isSemver"})
_FIXED = frozenset(
    {
        "masked", "prefixLength", "family", "isUnspecified", "isLoopback", "isLinkLocalMulticast",
        "isLinkLocalUnicast", "isGlobalUnicast", "sign", "asInteger", "isInteger", "asApproximateFloat",
        "isGreaterThan", "isLessThan", "compareTo", "add", "sub", "major", "minor", "patch", "getScheme",
        "getHostname", "getHost", "getPort", "getEscapedPath", "getQuery",
    }
)  # fmt: skip
_COMPARISONS = frozenset(
    {"equals", "not_equals"}
    | {
        f"{word}_{kind}"
        for word in ("less", "less_equals", "greater", "greater_equals")
        for kind in ("string", "bytes")
    }
)
_UNIT_EQUALITY = (t.QUANTITY, t.SEMVER, t.IP, t.CIDR)


class CallEstimator:
    """Costs of calls inside one walk."""

    def __init__(self, known: KnownSizes) -> None:
        self.known = known

    def call(self, node: Call, overload: str, costs: Sequence[Range], arguments: Range) -> Estimate:
        """Give the cost of one overload, arguments included, and the size of its result."""
        own = self._list_call(node, overload) or self._kubernetes(node, overload)
        if own is not None:
            return own[0].plus(arguments), own[1]
        return self._standard(node, overload, costs, arguments)

    def size(self, node: Node) -> Range:
        return self.known.size_or_unknown(node)

    # -- lists and sets

    def _list_call(self, node: Call, overload: str) -> Estimate | None:
        target = node.target
        if overload == "lists_range":
            return self._allocates(1.0, _fixed(_literal(node.args[0], MAX)))
        if overload.startswith("list_sets_"):
            factor = 2.0 if overload == "list_sets_equivalent_list" else 1.0
            size = self.size(node.args[0]).times(self.size(node.args[1]))
            return size.scaled(factor).plus(Range(1, 1)), None
        if target is None:
            return None
        if overload == "list_slice":
            size = self.size(target)
            count = (_literal(node.args[1], size.high) - _literal(node.args[0], 0)) % (1 << 64)
            return self._allocates(1.0, _fixed(count))
        if overload == "list_reverse":
            return self._allocates(1.0, self.size(target))
        if overload in {"list_flatten", "list_flatten_int"}:
            depth = _literal(node.args[0], MAX) if node.args else 1
            return self._allocates(float(depth), self.size(target))
        if overload == "list_distinct":
            return self._allocates(2.0, self.size(target).times(self.size(target)))
        if overload.endswith(("_sort", "_sortByAssociatedKeys")):
            keys = node.args[0] if node.args else target
            factor = 2.0 + (SCAN if overload.split("_")[1] in {"string", "bytes"} else 0.0)
            return self._allocates(factor, self.size(keys).times(self.size(keys)))
        return None

    def _allocates(self, factor: float, size: Range) -> Estimate:
        return size.scaled(factor).plus(Range(11, 11)), size

    # -- Kubernetes' libraries

    def _kubernetes(self, node: Call, overload: str) -> Estimate | None:
        name, target, args = node.name, node.target, node.args
        if name == "includes":
            return Range(48, 48), None
        if name in _TRAVERSAL:
            return self._traversal(target) if target is not None else None
        if name == "url" and len(args) == 1:
            return self.size(args[0]).scaled(SCAN), self.size(args[0])
        if name in {"lowerAscii", "upperAscii", "substring", "trim"} and target is not None:
            return self.size(target).scaled(SCAN), self.size(target)
        if name == "replace" and target is not None:
            return self.size(target).scaled(2 * SCAN), self._replaced(target, args)
        if name == "split" and target is not None:
            most = self.size(target).high
            limit = args[1] if len(args) > 1 else None
            if isinstance(limit, Literal) and type(limit.value) is int:
                most = limit.value % (1 << 64)  # a negative limit means none
            return self.size(target).scaled(2 * SCAN), Range(0, most)
        if name == "join" and target is not None:
            return self._join(target, args)
        if name in {"find", "findAll"} and target is not None:
            text = self.size(target)
            cost = text.plus(ONE).scaled(SCAN).times(self.size(args[0]).scaled(PATTERN))
            return cost, Range(0, text.high)
        if name in _SCANS_ARGUMENT or (name == "ip" and overload != "cidr_ip"):
            return self.size(args[0]).scaled(SCAN), None
        if name == "ip.isCanonical":
            return self.size(args[0]).scaled(2 * SCAN), None
        if name in {"containsIP", "containsCIDR"}:
            return self._contains(overload, args[0]), None
        if name == "validate":
            return self.size(args[0]).scaled(SCAN).scaled(128 * PATTERN), None
        if name in _FIXED or name in {"format.named", "ip"}:
            return ONE, None
        if name == "_==_":
            return self._equality(args[0], args[1])
        return None

    def _traversal(self, target: Node) -> Estimate:
        params = (target.kind or t.DYN).params
        if not params:
            return self.size(target).scaled(SCAN), None
        each = ONE
        if params[0].kind in {"string", "bytes"}:
            each = each.plus(self._element_size(target).scaled(SCAN))
        return self.size(target).times(each), None

    def _element_size(self, target: Node) -> Range:
        path = self.known.path(target)
        return (self.known.sizes_at((*path, "@items")) if path else None) or UNKNOWN

    def _replaced(self, target: Node, args: list[Node]) -> Range:
        text, old, new = self.size(target), self.size(args[0]), self.size(args[1])
        if old.low == 0:
            most, kept_most = min(text.high + 1, MAX), text.high
        elif new.high <= old.low:
            most, kept_most = 0, text.high
        else:
            most, kept_most = -(-text.high // old.low), 0
        if old.high == 0:
            least, kept_least = text.low + 1, text.low
        elif old.high <= new.low:
            least, kept_least = 0, text.low
        else:
            least, kept_least = -(-text.low // old.high), 0
        return Range(least, most).times(new).plus(Range(kept_least, kept_most))

    def _join(self, target: Node, args: list[Node]) -> Estimate:
        count = self.size(target)
        size = count.times(self._element_size(target)) if (target.kind or t.DYN).params else ZERO
        if args:
            gaps = Range(max(count.low - 1, 0), max(count.high - 1, 0))
            size = size.plus(self.size(args[0]).times(gaps))
        return size.scaled(SCAN), size

    def _contains(self, overload: str, arg: Node) -> Range:
        address = Range(4, 16)
        cost = address.plus(address).scaled(SCAN)
        if overload.startswith("cidr_contains_cidr"):
            cost = cost.plus(address.scaled(SCAN)).plus(Range(1, 1))
        if overload.endswith("_string"):
            cost = cost.plus(self.size(arg).scaled(SCAN))
        return cost

    def _equality(self, left: Node, right: Node) -> Estimate | None:
        kind = left.kind or t.DYN
        if kind != right.kind:
            return None
        if kind in _UNIT_EQUALITY:
            return ONE, None
        if kind == t.FORMAT:
            return Range(1, 64).scaled(SCAN), None
        if kind == t.URL:
            size = self.known.size(right)
            return Range(1, size.high if size else 1).scaled(SCAN), None
        return None

    # -- the standard library

    def _standard(self, node: Call, overload: str, costs: Sequence[Range], arguments: Range) -> Estimate:
        target, args = node.target, node.args
        match overload:
            case "string_format" if target is not None:
                return self.size(target).scaled(SCAN).plus(arguments), None
            case "string_to_bytes":
                size = self.size(args[0])
                return size.scaled(SCAN).plus(arguments), Range(size.low, min(size.high * 4, (1 << 64) - 1))
            case "bytes_to_string":
                size = self.size(args[0])
                return size.scaled(SCAN).plus(arguments), Range(size.low // 4, size.high)
            case "strings_quote":
                size = self.size(args[0])
                return size.scaled(SCAN).plus(arguments), Range(size.low + 2, (size.high * 2 + 2) % (1 << 64))
            case "starts_with_string" | "ends_with_string":
                return self.size(args[0]).scaled(SCAN).plus(arguments), None
            case "in_list":
                return self.size(args[1]).scaled(1.0).plus(arguments), None
            case "matches_string" if target is not None:
                text = self.size(target).plus(ONE).scaled(SCAN)
                return text.times(self.size(args[0]).scaled(PATTERN)).plus(arguments), None
            case "contains_string" if target is not None:
                return self.size(target).scaled(SCAN).times(self.size(args[0]).scaled(SCAN)).plus(
                    arguments
                ), None
            case "logical_and" | "logical_or":
                return Range(costs[0].low, arguments.high), None
            case "conditional":
                size = self.size(args[1]).union(self.size(args[2]))
                entry = self.known.entry(args[1])
                self.known.set_entry(node, entry.union(self.known.entry(args[2])) if entry else None)
                return costs[0].plus(costs[1].union(costs[2])), size
            case "add_string" | "add_bytes" | "add_list":
                size = self.size(args[0]).plus(self.size(args[1]))
                entry = self.known.entry(args[0])
                self.known.set_entry(node, entry.union(self.known.entry(args[1])) if entry else None)
                own = ONE if overload == "add_list" else size.scaled(SCAN)
                return own.plus(arguments), size
        if overload in _COMPARISONS:
            smallest = min(self.size(args[0]).high, self.size(args[1]).high)
            return Range(1 if smallest else 0, smallest).scaled(SCAN).plus(arguments), None
        return ONE.plus(arguments), None


def _literal(node: Node, default: int) -> int:
    if isinstance(node, Literal) and type(node.value) is int:
        return max(node.value, 0)
    return default


def _fixed(value: int) -> Range:
    return Range(value, value)
