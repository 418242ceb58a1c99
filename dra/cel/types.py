"""Static types of the language, and how they are written.

Source: cel-go's type system: `any` and `dyn` accept everything at compile time; type parameters are bound by
unification; parameters are erased at run time.
"""

from __future__ import annotations

import re


class CelType:
    """A type: kind, name and parameters. Also the run-time value of `type(x)`, compared by name."""

    __slots__ = ("kind", "name", "params")

    def __init__(self, kind: str, name: str = "", params: tuple[CelType, ...] = ()) -> None:
        self.kind = kind
        self.name = name or kind
        self.params = params

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, CelType):
            return NotImplemented
        return self.kind == other.kind and self.name == other.name and self.params == other.params

    def __hash__(self) -> int:
        return hash((self.kind, self.name, len(self.params)))

    def __str__(self) -> str:
        """Give the run-time name, as messages of the evaluator have it."""
        return self.name

    __repr__ = __str__


def _primitive(kind: str, name: str = "") -> CelType:
    return CelType(kind, name or kind)


BOOL = _primitive("bool")
INT = _primitive("int")
UINT = _primitive("uint")
DOUBLE = _primitive("double")
STRING = _primitive("string")
BYTES = _primitive("bytes")
NULL = CelType("null", "null_type")
DYN = _primitive("dyn")
ANY = CelType("any", "google.protobuf.Any")
ERROR = CelType("error", "!error!")
DURATION = CelType("duration", "google.protobuf.Duration")
TIMESTAMP = CelType("timestamp", "google.protobuf.Timestamp")
TYPE = CelType("type", "type")
LIST = CelType("list", "list", (DYN,))
MAP = CelType("map", "map", (DYN, DYN))
OPTIONAL = CelType("opaque", "optional_type", (DYN,))
# Struct kinds: opaque values of Kubernetes' libraries that the checker treats as messages without fields.
QUANTITY = CelType("struct", "kubernetes.Quantity")
SEMVER = CelType("struct", "kubernetes.Semver")
URL = CelType("struct", "kubernetes.URL")
FORMAT = CelType("struct", "kubernetes.NamedFormat")
DEVICE = CelType("struct", "kubernetes.DRADevice")
IP = CelType("opaque", "net.IP")
CIDR = CelType("opaque", "net.CIDR")

_WRAPPED = {
    "google.protobuf.BoolValue": BOOL,
    "google.protobuf.BytesValue": BYTES,
    "google.protobuf.DoubleValue": DOUBLE,
    "google.protobuf.FloatValue": DOUBLE,
    "google.protobuf.Int32Value": INT,
    "google.protobuf.Int64Value": INT,
    "google.protobuf.StringValue": STRING,
    "google.protobuf.UInt32Value": UINT,
    "google.protobuf.UInt64Value": UINT,
}
WRAPPERS = {name: CelType("wrapper", inner.name, (inner,)) for name, inner in _WRAPPED.items()}


def list_of(element: CelType) -> CelType:
    """Give `list(element)`."""
    return CelType("list", "list", (element,))


def map_of(key: CelType, value: CelType) -> CelType:
    """Give `map(key, value)`."""
    return CelType("map", "map", (key, value))


def optional_of(inner: CelType) -> CelType:
    """Give `optional_type(inner)`."""
    return CelType("opaque", "optional_type", (inner,))


def type_of_type(inner: CelType) -> CelType:
    """Give `type(inner)`, the type of a type."""
    return CelType("type", "type", (inner,))


def is_optional(kind: CelType) -> bool:
    """Whether this is `optional_type(…)`."""
    return kind.kind == "opaque" and kind.name == "optional_type"


def show(kind: CelType) -> str:
    """Give a type as compile messages write it: `any`, `null`, `map(string, int)`."""
    match kind.kind:
        case "any" | "duration" | "null" | "timestamp":
            return kind.kind
        case "wrapper":
            return f"wrapper({kind.name})"
    if not kind.params:
        return kind.name
    return f"{kind.name}({', '.join([show(param) for param in kind.params])})"


def declared_name(kind: CelType) -> str:
    """Give a type as the message about the result type writes it: `google.protobuf.Any`, `null_type`."""
    if kind.kind == "wrapper":
        return f"wrapper({kind.name})"
    if not kind.params:
        return kind.name
    return f"{kind.name}({', '.join([declared_name(param) for param in kind.params])})"


_NAMED = {
    kind.name: kind
    for kind in (
        BOOL, INT, UINT, DOUBLE, STRING, BYTES, NULL, DYN, ANY, DURATION, TIMESTAMP, TYPE,
        QUANTITY, SEMVER, URL, FORMAT, DEVICE, IP, CIDR,
    )
}  # fmt: skip
_NAMED.update(
    null=NULL, any=ANY, duration=DURATION, timestamp=TIMESTAMP, Quantity=QUANTITY, Semver=SEMVER, URL=URL,
    Format=FORMAT, IP=IP, CIDR=CIDR,
)  # fmt: skip
_TOKEN = re.compile(r"\s*([A-Za-z_.]+|[(),])")


def parse_type(text: str) -> CelType:
    """Read a type from a declaration: `list(A)`, `optional_type(V)`; one capital letter is a parameter."""
    tokens = _TOKEN.findall(text)
    kind, rest = _read_type(tokens, 0)
    assert rest == len(tokens), text
    return kind


def _read_type(tokens: list[str], at: int) -> tuple[CelType, int]:
    name, at = tokens[at], at + 1
    params: list[CelType] = []
    if at < len(tokens) and tokens[at] == "(":
        at += 1
        while tokens[at] != ")":
            if tokens[at] == ",":
                at += 1
            param, at = _read_type(tokens, at)
            params.append(param)
        at += 1
    if len(name) == 1 and name.isupper():
        return CelType("param", name), at
    if not params:
        return _NAMED[name], at
    if name == "optional_type":
        return optional_of(params[0]), at
    return CelType(name, name, tuple(params)), at


# Identifiers that name types, and the types they are.
TYPE_IDENTS: dict[str, CelType] = {
    kind.name: kind
    for kind in (BOOL, INT, UINT, DOUBLE, STRING, BYTES, NULL, DURATION, TIMESTAMP, TYPE, IP, CIDR)
}
TYPE_IDENTS["list"] = LIST
TYPE_IDENTS["map"] = MAP
TYPE_IDENTS["optional_type"] = OPTIONAL
