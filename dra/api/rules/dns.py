"""Names that become parts of DNS names or of paths. Source: k8s.io/apimachinery/pkg/util/validation."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)

SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)


def dns_subdomain_error(text: str, *, limit: int = 253) -> str | None:
    """Give what is wrong with a DNS-1123 subdomain."""
    if len(text) > limit:
        return f"must be no more than {limit} characters"
    return None if _SUBDOMAIN.fullmatch(text) else SUBDOMAIN_TEXT


def dns_label_error(text: str) -> str | None:
    """Give what is wrong with a DNS-1123 label."""
    if "." in text:
        return "must not contain dots"
    if len(text) > 63:
        return "must be no more than 63 characters"
    return None if _LABEL.fullmatch(text) else LABEL_TEXT


def path_segment_error(text: str) -> str | None:
    """Give what is wrong with a name that is only a path segment."""
    if text in {".", ".."}:
        return f"may not be '{text}'"
    for bad in ("/", "%"):
        if bad in text:
            return f"may not contain '{bad}'"
    return None


_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end "
    "with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)


def label_1035_error(text: str) -> str | None:
    """Give why a text is no label that starts with a letter, None if it is one."""
    if len(text) > 63:
        return "must be no more than 63 bytes"
    return None if _LABEL_1035.fullmatch(text) else _LABEL_1035_TEXT
