"""Names in resource.k8s.io: labels, drivers, pools, qualified attribute names, UIDs, label values.

Source: pkg/apis/resource/validation of Kubernetes 1.36.
"""

from __future__ import annotations

import re

from dra.api.limits import MAX_DRIVER, MAX_IDENTIFIER, MAX_POOL
from dra.api.rules.cause import Cause
from dra.api.rules.dns import LABEL_TEXT, dns_label_error, dns_subdomain_error
from dra.api.rules.fields import bad, required, too_long

_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SHORT_IDENTIFIER = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_IDENTIFIER - 1}}}", re.ASCII)
_C_IDENTIFIER_TEXT = (
    "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric "
    "characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is "
    "'[A-Za-z_][A-Za-z0-9_]*')"
)


def label(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a DNS label."""
    why = dns_label_error(text)
    return [bad(field, text, why)] if why else []


def subdomain(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a DNS subdomain."""
    why = dns_subdomain_error(text)
    return [bad(field, text, why)] if why else []


def driver(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a driver's name."""
    if not text:
        return [required(field)]
    found = [too_long(field, MAX_DRIVER)] if len(text.encode()) > MAX_DRIVER else []
    return [*found, *(bad(field, text, c) for c in _subdomain_texts(text.lower()))]


def _subdomain_texts(text: str) -> list[str]:
    why = dns_subdomain_error(text)
    return [why] if why else []


def pool(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a pool's name: subdomains joined by slashes."""
    if not text:
        return [required(field)]
    if len(text.encode()) > MAX_POOL:
        return [too_long(field, MAX_POOL)]
    return [cause for part in text.split("/") for cause in subdomain(part, field)]


def identifier(text: str, field: str) -> list[Cause]:
    """Find what is wrong with the last part of an attribute's name."""
    found = [too_long(field, MAX_IDENTIFIER)] if len(text.encode()) > MAX_IDENTIFIER else []
    if not _C_IDENTIFIER.fullmatch(text):
        found.append(bad(field, text, _C_IDENTIFIER_TEXT))
    return found


def qualified(text: str, field: str) -> list[Cause]:
    """Find what is wrong with an attribute's or capacity's name.

    More than one slash is accepted: the real server checks only names with none or one.
    """
    if _SHORT_IDENTIFIER.fullmatch(text):
        # Almost all of the many that a large pool has.
        return []
    parts = text.split("/")
    if len(parts) == 1:
        return identifier(text, field)
    if len(parts) > 2:
        return []
    domain, name = parts
    found: list[Cause] = []
    if not domain:
        found.append(bad(field, "", "the domain must not be empty"))
    elif len(domain.encode()) > MAX_DRIVER:
        found.append(too_long(field, MAX_DRIVER))
    else:
        found += [bad(field, domain, why) for why in _subdomain_texts(domain.lower())]
    if not name:
        return [*found, bad(field, "", "the name must not be empty")]
    return [*found, *identifier(name, field)]


def fully_qualified(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a name that must have a domain."""
    found = qualified(text, field)
    if "/" not in text and not found:
        found.append(
            bad(field, text, "a fully qualified name must be a domain and a name separated by a slash")
        )
    return found


def uid(text: str, field: str) -> list[Cause]:
    """Find what is wrong with a UUID."""
    if len(text) != 36:
        return [bad(field, text, f"error validating uid: invalid UUID length: {len(text)}")]
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        return [bad(field, text, "error validating uid: invalid UUID format")]
    if text != text.lower():
        return [
            bad(
                field, text, "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`"
            )
        ]
    return []


__all__ = [
    "LABEL_TEXT",
    "driver",
    "fully_qualified",
    "identifier",
    "label",
    "pool",
    "qualified",
    "subdomain",
    "uid",
]
