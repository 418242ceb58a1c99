"""Shapes of the API's kinds, read from the compact tables in `schemas/`.

A table lists structs; each field has a name, a mark (`!`: written even when zero, `*`: required, `?`: a zero that was
given is kept) and a type:
a scalar, a struct (`module.Name` when it stands elsewhere), `[tag]elem` for a list (`set`, `map key,key`, atomic
when empty; `;key` names the strategic merge key, `;*` merges scalars) and `{}elem` for a map.
Source: the field names, types and list types of the published Kubernetes API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import resources

SCALARS = frozenset(
    {"string", "int32", "int64", "bool", "float", "quantity", "time", "microtime", "bytes", "intstr", "any"}
)


@dataclass(frozen=True, slots=True)
class Type:
    """A type of the tables. `kind` is a scalar's name, `struct`, `list` or `map`."""

    kind: str
    ref: str = ""
    elem: Type | None = None
    list_type: str = "atomic"
    keys: tuple[str, ...] = ()
    merge_key: str = ""
    atomic: bool = False
    inline: Struct | None = None

    def struct(self) -> Struct:
        """The struct this refers to."""
        if self.inline is not None:
            return self.inline
        return load_struct(self.ref)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a struct."""

    name: str
    type: Type
    always: bool
    required: bool
    keeps_zero: bool
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Struct:
    """A named set of fields."""

    name: str
    atomic: bool
    fields: dict[str, Field] = field(default_factory=dict)


def parse_type(text: str, module: str) -> Type:
    """Read a type; a bare struct name belongs to `module`."""
    if text.startswith("["):
        tag, _, elem = text[1:].partition("]")
        tag, _, merge_key = tag.partition(";")
        list_type, _, keys = tag.partition(" ")
        return Type(
            "list",
            elem=parse_type(elem, module),
            list_type=list_type or "atomic",
            keys=tuple(keys.split(",")) if keys else (),
            merge_key=merge_key,
        )
    if text.startswith("{"):
        tag, _, elem = text[1:].partition("}")
        return Type("map", elem=parse_type(elem, module), atomic=tag == "atomic")
    if text in SCALARS:
        return Type(text)
    return Type("struct", ref=text if "." in text else f"{module}.{text}")


@cache
def _module(name: str) -> dict[str, Struct]:
    text = (resources.files("dra.api.rules") / "schemas" / f"{name}.schema").read_text(encoding="utf-8")
    structs: dict[str, Struct] = {}
    current: dict[str, Field] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            head, _, flag = line.partition(" ")
            current = {}
            structs[head] = Struct(head, flag == "atomic", current)
            continue
        marked, _, rest = line.strip().partition(" ")
        shape, _, default = rest.partition(" =")
        bare = marked.rstrip("!*?")
        mark = marked[len(bare) :]
        # Outside resource.k8s.io most optional numbers and booleans are pointers: a given zero means something.
        keeps = mark == "?" or (
            not name.startswith("resource_") and shape in {"bool", "int32", "int64", "float"}
        )
        current[bare] = Field(bare, parse_type(shape, name), mark == "!", mark == "*", keeps, default or None)
    return structs


@cache
def load_struct(ref: str) -> Struct:
    """Give the struct `module.Name`.

    Raises:
        KeyError: no such table or struct.
    """
    module, _, name = ref.rpartition(".")
    return _module(module)[name]


ANY = Type("any")
