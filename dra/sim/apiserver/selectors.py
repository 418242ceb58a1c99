"""Label and field selectors: parsing with the server's errors, and matching.

Source: k8s.io/apimachinery/pkg/labels and pkg/fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dra.sim.apiserver.status import bad_request

Json = dict[str, Any]
Matcher = Callable[[Json], bool]

_TOKEN = re.compile(r"\s*(?:(?P<sym>==|!=|=|!|,|\(|\)|<|>)|(?P<word>[^\s=!,()<>]+))")


@dataclass(frozen=True, slots=True)
class LabelTerm:
    """One requirement of a label selector."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels satisfy the requirement."""
        present = self.key in labels
        value = labels.get(self.key, "")
        if self.operator in {"=", "in"}:
            return present and value in self.values
        if self.operator in {"!=", "notin"}:
            return not present or value not in self.values
        if self.operator == "exists":
            return present
        if self.operator == "!":
            return not present
        if not present or not re.fullmatch(r"-?\d+", value):
            return False
        return int(value) > int(self.values[0]) if self.operator == "gt" else int(value) < int(self.values[0])


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:  # pragma: no cover - the pattern takes any character
            raise bad_request(f"unable to parse requirement: found {text[at:]!r}")
        tokens.append(match["sym"] or match["word"])
        at = match.end()
    return tokens


class _LabelParser:
    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def parse(self) -> list[LabelTerm]:
        terms: list[LabelTerm] = []
        while self.peek():
            terms.append(self.term())
            following = self.take()
            if following == "":
                break
            if following != ",":
                raise bad_request(f"found '{following}', expected: ',' or 'end of string'")
            if self.peek() == "":
                raise bad_request("found '', expected: identifier after ','")
        return terms

    def term(self) -> LabelTerm:
        key = self.take()
        if key == "!":
            name = self.take()
            if not re.match(r"[A-Za-z0-9_./-]", name):
                raise bad_request(f"unable to parse requirement: found '{name}', expected: identifier")
            return LabelTerm(name, "!")
        if not re.match(r"[A-Za-z0-9_./-]", key):
            raise bad_request(
                f"unable to parse requirement: found '{key}', expected: !, identifier, or 'end of string'"
            )
        if self.peek() in {"", ","}:
            return LabelTerm(key, "exists")
        operator = self.take()
        if operator in {"=", "=="}:
            return LabelTerm(key, "=", (self.value(),))
        if operator == "!=":
            return LabelTerm(key, "!=", (self.value(),))
        if operator in {"<", ">"}:
            return LabelTerm(key, "gt" if operator == ">" else "lt", (self.value(),))
        if operator in {"gt", "lt"}:
            return LabelTerm(key, operator, (self.value(),))
        if operator in {"in", "notin"}:
            return LabelTerm(key, operator, self.values())
        raise bad_request(
            f"unable to parse requirement: found '{operator}', expected: in, notin, =, ==, !=, gt, lt"
        )

    def value(self) -> str:
        return "" if self.peek() in {"", ","} else self.take()

    def values(self) -> tuple[str, ...]:
        opening = self.take()
        if opening != "(":
            raise bad_request(f"unable to parse requirement: found '{opening}' expected: '('")
        values: list[str] = []
        while True:
            token = self.take()
            if token == ")":  # noqa: S105 - syntax
                return tuple(values) or ("",)
            if not token:
                raise bad_request("unable to parse requirement: found '', expected: ',', ')' or identifier")
            if token != ",":  # noqa: S105 - syntax
                values.append(token)


def parse_labels(text: str) -> list[LabelTerm]:
    """Read a label selector.

    Raises:
        ApiFailure: 400, worded as the server does.
    """
    return _LabelParser(text).parse()


@dataclass(frozen=True, slots=True)
class FieldTerm:
    """One requirement of a field selector: `field` equals (or not) `value`."""

    field: str
    equal: bool
    value: str


def parse_fields(text: str) -> list[FieldTerm]:
    """Read a field selector.

    Raises:
        ApiFailure: 400, worded as the server does.
    """
    terms: list[FieldTerm] = []
    for part in _split_fields(text):
        if part == "":
            continue
        match = re.match(r"(?P<key>(?:[^=!\\]|\\.)*?)(?P<op>!=|==|=)(?P<value>.*)", part, re.DOTALL)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        value = re.sub(r"\\([\\,=])", r"\1", match["value"])
        terms.append(FieldTerm(match["key"], match["op"] != "!=", value))
    return terms


def _split_fields(text: str) -> list[str]:
    return [part.replace("\0", "\\,") for part in text.replace("\\,", "\0").split(",")]


def lookup(obj: Json, path: str) -> str:
    """Give the value at a dotted path as a field selector sees it; '' where it is missing."""
    value: Any = obj
    for part in path.split("."):
        if not isinstance(value, dict):
            return ""
        value = value.get(part)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_META = ("metadata.name", "metadata.namespace")

# Fields that may be selected, beyond name and namespace. A value that is not a path of its own is computed.
SELECTABLE: dict[str, tuple[str, ...]] = {
    "/pods": (
        "metadata.name", "metadata.namespace", "spec.nodeName", "spec.restartPolicy", "spec.schedulerName",
        "spec.serviceAccountName", "spec.hostNetwork", "status.phase", "status.podIP", "status.podIPs",
        "status.nominatedNodeName",
    ),
    "/nodes": ("metadata.name", "spec.unschedulable"),
    "/namespaces": ("metadata.name", "status.phase", "name"),
    "/events": (
        "involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
        "involvedObject.apiVersion", "involvedObject.resourceVersion", "involvedObject.fieldPath", "reason",
        "reportingComponent", "source", "type", *_META,
    ),
    "/secrets": (*_META, "type"),
    "/replicationcontrollers": (*_META, "status.replicas"),
    "/services": (*_META, "spec.clusterIP", "spec.type"),
    "apps/replicasets": (*_META, "status.replicas"),
    "batch/jobs": (*_META, "status.successful"),
    "resource.k8s.io/resourceslices": ("metadata.name", "spec.nodeName", "spec.driver"),
}  # fmt: skip

# Kinds whose server words an unknown label in its own way: with the group version kind, or plainly.
_OWN_CONVERSION = {
    "/pods": "field label not supported: {field}",
    "/nodes": "field label not supported: {field}",
    "/namespaces": "field label not supported: {field}",
    "/events": "field label not supported: {field}",
    "/secrets": "field label not supported: {field}",
    "/services": "field label not supported: {field}",
    "/replicationcontrollers": "field label not supported: {field}",
    "batch/jobs": 'field label "{field}" not supported for Job',
    "apps/replicasets": 'field label "{field}" not supported for appsv1.ReplicaSet',
    "resource.k8s.io/resourceslices": "field label not supported for {gv}, Kind=ResourceSlice: {field}",
}


def _field_value(resource: str, obj: Json, field: str) -> str:
    if resource == "/events" and field == "source":
        return lookup(obj, "source.component") or lookup(obj, "reportingComponent")
    if field == "spec.unschedulable":
        return lookup(obj, field) or "false"
    if field == "spec.hostNetwork":
        return lookup(obj, field) or "false"
    if field == "status.successful":
        return lookup(obj, "status.succeeded") or "0"
    if field == "name":
        return lookup(obj, "metadata.name")
    return lookup(obj, field)


def field_matcher(
    resource: str, group_version: str, text: str, *, extra: tuple[str, ...] = ()
) -> Matcher | None:
    """Give a test for a field selector over stored objects, None where it selects everything.

    Raises:
        ApiFailure: 400 for an unknown field or bad syntax.
    """
    terms = parse_fields(text)
    if not terms:
        return None
    known = (*SELECTABLE.get(resource, _META), *extra)
    rename = _EVENTS_V1 if group_version.startswith("events.k8s.io/") else {}
    terms = [FieldTerm(rename.get(t.field, t.field), t.equal, t.value) for t in terms]
    for term in terms:
        if term.field not in known:
            template = _OWN_CONVERSION.get(resource)
            if extra:
                template = "field label not supported: {field}"
            if template is None:
                listed = ", ".join(f'"{name}"' for name in (*_META, *extra))
                raise bad_request(f'"{term.field}" is not a known field selector: only {listed}')
            raise bad_request(template.format(field=term.field, gv=group_version))

    def matches(obj: Json) -> bool:
        return all((_field_value(resource, obj, t.field) == t.value) == t.equal for t in terms)

    return matches


# The field over which a server keeps an index, one a resource.
INDEXED = {"/pods": "spec.nodeName", "resource.k8s.io/resourceslices": "spec.nodeName"}


def indexed_value(resource: str, text: str) -> str | None:
    """Give what a field selector wants the indexed field to be, None where it selects by other fields only."""
    field = INDEXED.get(resource)
    if field is None or field not in text:
        return None
    return next((term.value for term in parse_fields(text) if term.equal and term.field == field), None)


_EVENTS_V1 = {
    "regarding.kind": "involvedObject.kind", "regarding.namespace": "involvedObject.namespace",
    "regarding.name": "involvedObject.name", "regarding.uid": "involvedObject.uid",
    "regarding.apiVersion": "involvedObject.apiVersion", "reportingController": "reportingComponent",
    "regarding.resourceVersion": "involvedObject.resourceVersion", "regarding.fieldPath": "involvedObject.fieldPath",
}  # fmt: skip


def label_matcher(text: str) -> Matcher | None:
    """Give a test for a label selector over objects, None where it selects everything.

    Raises:
        ApiFailure: 400 for bad syntax.
    """
    terms = parse_labels(text)
    if not terms:
        return None

    def matches(obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(term.matches(labels) for term in terms)

    return matches
