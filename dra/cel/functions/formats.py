"""Named formats: `format.dns1123Label().validate("…")`.

Source: k8s.io/apiserver cel/library format: apimachinery's name checks and the OpenAPI string formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dra.cel import types as t
from dra.cel.functions.registry import declare, function, implement
from dra.cel.functions.times import parse_timestamp
from dra.cel.functions.urls import parse_request_uri
from dra.cel.values import NONE, Opaque, Optional, some

declare(
    """
    format-validate: Format~validate(string) -> optional_type(list(string))
    format-named: format.named(string) -> optional_type(Format)
    """
)

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    f"'{_LABEL}')"
)
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    f"and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{_SUBDOMAIN}')"
)
_LABEL_1035 = "[a-z]([-a-z0-9]*[a-z0-9])?"
_LABEL_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
    "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation "
    f"is '{_LABEL_1035}')"
)
_NAME = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_NAME_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    f"'{_NAME}')"
)
_VALUE = f"({_NAME})?"
_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation "
    f"is '{_VALUE}')"
)
_UUID = re.compile(
    r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", re.ASCII | re.IGNORECASE
)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_DATETIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?:[zZ]|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Shape:
    pattern: str
    text: str
    limit: int


_DNS_LABEL = _Shape(_LABEL, _LABEL_TEXT, 63)
_DNS_SUBDOMAIN = _Shape(_SUBDOMAIN, _SUBDOMAIN_TEXT, 253)
_DNS_1035 = _Shape(_LABEL_1035, _LABEL_1035_TEXT, 63)


def _by_shape(shape: _Shape, *, prefix: bool = False) -> Callable[[str], list[str]]:
    def check(text: str) -> list[str]:
        if prefix and len(text) > 1 and text.endswith("-"):
            # A generated name gets characters behind it, so that a dash may end the prefix.
            text = text[:-2] + "a"
        problems = []
        if len(text.encode()) > shape.limit:
            problems.append(f"must be no more than {shape.limit} bytes")
        if re.fullmatch(shape.pattern, text, re.ASCII) is None:
            problems.append(shape.text)
        return problems

    return check


def _qualified_name(text: str) -> list[str]:
    problems: list[str] = []
    parts = text.split("/")
    if len(parts) > 2:
        return [
            "a qualified name " + _NAME_TEXT.removeprefix("name part ")
            + " with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
        ]  # fmt: skip
    name = parts[-1]
    if len(parts) == 2:
        if not parts[0]:
            problems.append("prefix part must be non-empty")
        else:
            problems += [f"prefix part {problem}" for problem in _by_shape(_DNS_SUBDOMAIN)(parts[0])]
    if not name:
        problems.append("name part must be non-empty")
    elif len(name.encode()) > 63:
        problems.append("name part must be no more than 63 bytes")
    if re.fullmatch(_NAME, name, re.ASCII) is None:
        problems.append(_NAME_TEXT)
    return problems


def _uri(text: str) -> list[str]:
    url, why = parse_request_uri(text)
    return [why] if url is None else []


def _byte(text: str) -> list[str]:
    return [] if text and _BASE64.fullmatch(text) else ["invalid base64"]


def _date(text: str) -> list[str]:
    good = _DATE.fullmatch(text) is not None and parse_timestamp(f"{text}T00:00:00Z") is not None
    return [] if good else ["invalid date"]


def _datetime(text: str) -> list[str]:
    shaped = _DATETIME.fullmatch(text) is not None
    good = shaped and parse_timestamp(f"{text[:10]}T{text[11:].upper()}") is not None
    return [] if good else ["invalid datetime"]


def _uuid(text: str) -> list[str]:
    return [] if _UUID.fullmatch(text) else ["does not match the UUID format"]


class CelFormat(Opaque):
    """A named format; `size` stands for the length of its pattern in costs."""

    __slots__ = ("check", "name", "size")
    cel_type = t.FORMAT

    def __init__(self, name: str, size: int, check: Callable[[str], list[str]]) -> None:
        self.name = name
        self.size = size
        self.check = check

    def same(self, other: CelFormat) -> bool:
        """Whether both are the same format."""
        return self.name == other.name


_DATETIME_SIZE = 72
FORMATS = {
    "dns1123Label": CelFormat("DNS1123Label", 30, _by_shape(_DNS_LABEL)),
    "dns1123Subdomain": CelFormat("DNS1123Subdomain", 60, _by_shape(_DNS_SUBDOMAIN)),
    "dns1035Label": CelFormat("DNS1035Label", 30, _by_shape(_DNS_1035)),
    "qualifiedName": CelFormat("QualifiedName", 60, _qualified_name),
    "dns1123LabelPrefix": CelFormat("DNS1123LabelPrefix", 30, _by_shape(_DNS_LABEL, prefix=True)),
    "dns1123SubdomainPrefix": CelFormat("DNS1123SubdomainPrefix", 60, _by_shape(_DNS_SUBDOMAIN, prefix=True)),
    "dns1035LabelPrefix": CelFormat("DNS1035LabelPrefix", 30, _by_shape(_DNS_1035, prefix=True)),
    "labelValue": CelFormat("LabelValue", 40, _by_shape(_Shape(_VALUE, _VALUE_TEXT, 63))),
    "uri": CelFormat("URI", 1103, _uri),
    "uuid": CelFormat("uuid", 72, _uuid),
    "byte": CelFormat("byte", 84, _byte),
    "date": CelFormat("date", _DATETIME_SIZE, _date),
    "datetime": CelFormat("datetime", _DATETIME_SIZE, _datetime),
}


def _constant(name: str, value: CelFormat) -> None:
    declare(f"format.{name}: format.{name}() -> Format")
    function(f"format.{name}").bind((), lambda: value)


for _name, _value in FORMATS.items():
    _constant(_name, _value)


@implement("format.named", str)
def _named(name: str) -> Optional:
    found = FORMATS.get(name)
    return NONE if found is None else some(found)


@implement("validate", CelFormat, str)
def _validate(form: CelFormat, text: str) -> Optional:
    problems: list[Any] = list(form.check(text))
    return some(problems) if problems else NONE
