"""Kubernetes name grammars that resource.k8s.io uses.

Source: k8s.io/apimachinery validation (DNS-1123), resource.k8s.io validation (C identifiers, qualified names).
"""

from __future__ import annotations

import functools
import re

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)

# Limits of resource.k8s.io: 63 characters of domain, 32 of identifier.
MAX_DOMAIN = 63
MAX_IDENTIFIER = 32


def is_dns_label(text: str) -> bool:
    """Whether `text` is a DNS-1123 label: at most 63 of [a-z0-9-], alphanumeric at both ends."""
    return len(text) <= 63 and _DNS_LABEL.fullmatch(text) is not None


def is_dns_subdomain(text: str, *, limit: int = 253) -> bool:
    """Whether `text` is a DNS-1123 subdomain of at most `limit` characters.

    As the API server checks it: the length of a single label is not limited.
    """
    return 0 < len(text) <= limit and all(_DNS_LABEL.fullmatch(part) for part in text.split("."))


@functools.lru_cache(maxsize=512)
def is_qualified_name(text: str) -> bool:
    """Whether `text` is an attribute or capacity name: `identifier` or `domain/identifier`."""
    domain, slash, identifier = text.rpartition("/")
    if slash and not is_dns_subdomain(domain, limit=MAX_DOMAIN):
        return False
    return len(identifier) <= MAX_IDENTIFIER and _C_IDENTIFIER.fullmatch(identifier) is not None


def split_qualified_name(text: str, *, default_domain: str) -> tuple[str, str]:
    """Split an attribute name into domain and identifier; an unqualified name belongs to `default_domain`."""
    domain, slash, identifier = text.partition("/")
    return (domain, identifier) if slash else (default_domain, text)


def qualify(text: str, *, domain: str) -> str:
    """Give the full form `domain/identifier` of an attribute name."""
    return text if "/" in text else f"{domain}/{text}"


def is_uid(text: str) -> bool:
    """Whether `text` is a lower-case UUID as the API server makes them (36 characters)."""
    return _UID.fullmatch(text) is not None
