"""The quick reader and the one that explains give the same for every object, well-formed or not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dra.api.rules import decode as module
from dra.api.rules.decode import DecodeError, Findings, decode, parse_json, prune
from dra.api.rules.quick import OddError, reader_of
from dra.api.rules.schema import Field, Type, load_struct

KINDS = st.sampled_from(
    ["resource_v1.ResourceSlice", "resource_v1.ResourceClaim", "resource_v1.DeviceClass", "core_v1.Pod", "core_v1.Node"]
)  # fmt: skip
GOOD = {
    "string": st.sampled_from(["", "a", "gpu-0", "1.2.3"]),
    "int32": st.integers(-3, 3),
    "int64": st.integers(-3, 3),
    "bool": st.booleans(),
    "float": st.sampled_from([0.0, 1.5]),
    "quantity": st.sampled_from(["0", "1Gi", "1024Mi", 3]),
    "time": st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00"]),
    "microtime": st.just("2026-01-01T00:00:00.000000Z"),
    "bytes": st.sampled_from(["", "YQ=="]),
    "intstr": st.sampled_from([0, 8080, "http"]),
    "any": st.sampled_from([{"a": None}, [], "x"]),
}
ODD = st.sampled_from(
    [None, None, "", 0, 1 << 40, True, 1.5, [], {}, [None], {"a": None}, {"nobody": 1}, "x y"]
)
# So deep, and so many fields of a struct, are filled.
DEPTH, FIELDS = 5, 4


@st.composite
def values(draw: st.DrawFn, shape: Type, depth: int, oddness: int) -> Any:
    """Values of a type; with `oddness` one of so many is something else."""
    if oddness and draw(st.integers(1, oddness)) == 1:
        return draw(ODD)
    if shape.kind == "struct":
        return draw(structs(shape.ref, depth, oddness))
    if shape.elem is None:
        return draw(GOOD[shape.kind])
    if depth <= 0:
        return [] if shape.kind == "list" else {}
    inner = values(shape.elem, depth - 1, oddness)
    if shape.kind == "list":
        return draw(st.lists(inner, max_size=2))
    return draw(st.dictionaries(st.sampled_from(["a", "b/c", "gpu.nvidia.com/x"]), inner, max_size=2))


@st.composite
def structs(draw: st.DrawFn, ref: str, depth: int, oddness: int) -> Any:
    known: dict[str, Field] = load_struct(ref).fields
    if depth <= 0:
        return {}
    chosen = draw(st.lists(st.sampled_from(sorted(known)), max_size=FIELDS, unique=True))
    made = {name: draw(values(known[name].type, depth - 1, oddness)) for name in chosen}
    if oddness and draw(st.integers(1, 2 * oddness)) == 1:
        made["unheardOf"] = 1
    return made


def outcome(read: Any, value: Any, ref: str) -> tuple[Any, str, list[str]]:
    findings = Findings()
    try:
        return read(value, ref, findings), "", findings.problems
    except DecodeError as error:
        return None, str(error), findings.problems


def said(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves that say something, by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in said(item, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for at, item in enumerate(value) for k, v in said(item, f"{path}[{at}]").items()}
    return {path: value} if value else {}


def explaining(value: Any, ref: str, findings: Findings) -> Any:
    return module._struct(value, load_struct(ref), ref.partition(".")[0], ("", ""), "", findings)


@given(KINDS.flatmap(lambda ref: st.tuples(st.just(ref), structs(ref, DEPTH, 8))), st.booleans())
@settings(max_examples=150)
def test_both_ways_say_the_same(drawn, twice):
    ref, value = drawn
    text = json.dumps(value)
    if twice and text != "{}":
        text = f'{{"metadata":{{"name":"first"}},{text[1:]}'
    body = parse_json(text)
    told = outcome(decode, body, ref)
    assert told == outcome(explaining, body, ref)
    if told[0] is not None:
        # The fields stand in the same order too: answers are compared with the recorded ones as text.
        assert json.dumps(told[0]) == json.dumps(explaining(body, ref, Findings()))


@given(KINDS.flatmap(lambda ref: st.tuples(st.just(ref), structs(ref, DEPTH, 0))))
@settings(max_examples=60)
def test_what_is_well_formed_is_read_the_quick_way_and_written_without_what_is_empty(drawn):
    ref, value = drawn
    try:
        read = reader_of(ref)(parse_json(json.dumps(value)))
    except OddError:
        raise AssertionError(f"{ref} is well-formed: {value}") from None
    written = prune(read, ref)
    assert prune(written, ref) == written
    assert said(written) == said(read)
