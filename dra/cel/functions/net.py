"""IP addresses and CIDRs.

Source: k8s.io/apiserver cel/library ip and cidr on Go's net/netip: no zones, no IPv4 in IPv6, no leading zeros; a
CIDR keeps its host bits.
"""

from __future__ import annotations

import ipaddress
import re

from dra.cel import types as t
from dra.cel.errors import Failure, no_overload
from dra.cel.functions.registry import declare, implement
from dra.cel.values import Opaque

declare(
    """
    string_to_ip: ip(string) -> IP
    cidr_ip: CIDR~ip() -> IP
    is_ip: isIP(string) -> bool
    ip_is_canonical: ip.isCanonical(string) -> bool
    ip_family: IP~family() -> int
    ip_is_unspecified: IP~isUnspecified() -> bool
    ip_is_loopback: IP~isLoopback() -> bool
    ip_is_link_local_multicast: IP~isLinkLocalMulticast() -> bool
    ip_is_link_local_unicast: IP~isLinkLocalUnicast() -> bool
    ip_is_global_unicast: IP~isGlobalUnicast() -> bool
    ip_to_string: string(IP) -> string
    string_to_cidr: cidr(string) -> CIDR
    is_cidr: isCIDR(string) -> bool
    cidr_contains_ip_string: CIDR~containsIP(string) -> bool
    cidr_contains_ip_ip: CIDR~containsIP(IP) -> bool
    cidr_contains_cidr_string: CIDR~containsCIDR(string) -> bool
    cidr_contains_cidr: CIDR~containsCIDR(CIDR) -> bool
    cidr_prefix_length: CIDR~prefixLength() -> int
    cidr_masked: CIDR~masked() -> CIDR
    cidr_to_string: string(CIDR) -> string
    """
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PREFIX = re.compile(r"0|[1-9][0-9]{0,2}", re.ASCII)


class CelIP(Opaque):
    """An address."""

    __slots__ = ("address",)
    cel_type = t.IP

    def __init__(self, address: Address) -> None:
        self.address = address

    def same(self, other: CelIP) -> bool:
        """Whether the addresses are equal."""
        return self.address == other.address

    def size(self) -> int:
        """Bytes of the address, for the cost."""
        return self.address.max_prefixlen // 8

    def __repr__(self) -> str:
        return str(self.address)


class CelCIDR(Opaque):
    """An address with a prefix length; the host bits stay as written."""

    __slots__ = ("address", "bits")
    cel_type = t.CIDR

    def __init__(self, address: Address, bits: int) -> None:
        self.address = address
        self.bits = bits

    def same(self, other: CelCIDR) -> bool:
        """Whether address and length are equal."""
        return self.address == other.address and self.bits == other.bits

    def size(self) -> int:
        """Bytes of the prefix, for the cost."""
        return -(-self.bits // 8)

    def prefix(self, bits: int | None = None) -> int:
        """The first bits of the address as a number."""
        length = self.bits if bits is None else bits
        return int(self.address) >> (self.address.max_prefixlen - length)

    def __repr__(self) -> str:
        return f"{self.address}/{self.bits}"


def _parse_address(text: str) -> Address | None:
    if "%" in text or len(text) > 64:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _mapped(address: Address) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None


def parse_ip(text: str) -> CelIP:
    """Read an address.

    Raises:
        Failure: net_parse.
    """
    address = _parse_address(text)
    if address is None:
        raise Failure(
            "net_parse",
            f'IP Address "{text}" parse error during conversion from string: ParseAddr("{text}"): unable to parse IP',
        )
    if _mapped(address):
        raise Failure("net_parse", f'IPv4-mapped IPv6 address "{text}" is not allowed')
    return CelIP(address)


def parse_cidr(text: str) -> CelCIDR:
    """Read a CIDR.

    Raises:
        Failure: net_parse.
    """
    head, slash, bits = text.rpartition("/")
    address = _parse_address(head) if slash else None
    if (
        address is None
        or not _PREFIX.fullmatch(bits)
        or int(bits) > address.max_prefixlen
        or _mapped(address)
    ):
        raise Failure(
            "net_parse",
            "network address parse error during conversion from string: network address parse error during "
            f'conversion from string: netip.ParsePrefix("{text}"): no valid prefix',
        )
    return CelCIDR(address, int(bits))


implement("ip", str)(parse_ip)
implement("cidr", str)(parse_cidr)


@implement("ip", CelCIDR)
def _cidr_ip(cidr: CelCIDR) -> CelIP:
    return CelIP(cidr.address)


@implement("isIP", str)
def _is_ip(text: str) -> bool:
    address = _parse_address(text)
    return address is not None and not _mapped(address)


@implement("isCIDR", str)
def _is_cidr(text: str) -> bool:
    try:
        parse_cidr(text)
    except Failure:
        return False
    return True


@implement("ip.isCanonical", str)
def _is_canonical(text: str) -> bool:
    return str(parse_ip(text).address) == text


@implement("family", CelIP)
def _family(value: CelIP) -> int:
    return value.address.version


@implement("isUnspecified", CelIP)
def _is_unspecified(value: CelIP) -> bool:
    return value.address.is_unspecified


@implement("isLoopback", CelIP)
def _is_loopback(value: CelIP) -> bool:
    return value.address.is_loopback


@implement("isLinkLocalMulticast", CelIP)
def _is_link_local_multicast(value: CelIP) -> bool:
    address = value.address
    if isinstance(address, ipaddress.IPv4Address):
        return int(address) >> 8 == 0xE00000
    return (int(address) >> 112) & 0xFF0F == 0xFF02


@implement("isLinkLocalUnicast", CelIP)
def _is_link_local_unicast(value: CelIP) -> bool:
    address = value.address
    if isinstance(address, ipaddress.IPv4Address):
        return int(address) >> 16 == 0xA9FE
    return (int(address) >> 112) & 0xFFC0 == 0xFE80


@implement("isGlobalUnicast", CelIP)
def _is_global_unicast(value: CelIP) -> bool:
    address = value.address
    if isinstance(address, ipaddress.IPv4Address) and int(address) == 0xFFFFFFFF:
        return False
    return not (
        address.is_unspecified or address.is_loopback or address.is_multicast or _is_link_local_unicast(value)
    )


@implement("string", CelIP)
def _ip_text(value: CelIP) -> str:
    return str(value.address)


@implement("string", CelCIDR)
def _cidr_text(value: CelCIDR) -> str:
    return str(value)


@implement("containsIP", CelCIDR, CelIP)
def _contains_ip(cidr: CelCIDR, ip: CelIP) -> bool:
    if cidr.address.version != ip.address.version:
        return False
    return CelCIDR(ip.address, cidr.bits).prefix() == cidr.prefix()


@implement("containsIP", CelCIDR, str)
def _contains_ip_text(cidr: CelCIDR, text: str) -> bool:
    try:
        return _contains_ip(cidr, parse_ip(text))
    except Failure:
        # Upstream hands the parse error on as a value of the wrong type.
        raise no_overload() from None


@implement("containsCIDR", CelCIDR, CelCIDR)
def _contains_cidr(cidr: CelCIDR, other: CelCIDR) -> bool:
    if cidr.address.version != other.address.version or cidr.bits > other.bits:
        return False
    return other.prefix(cidr.bits) == cidr.prefix()


@implement("containsCIDR", CelCIDR, str)
def _contains_cidr_text(cidr: CelCIDR, text: str) -> bool:
    # Here the parse error itself comes back, as the argument that was refused.
    return _contains_cidr(cidr, parse_cidr(text))


@implement("prefixLength", CelCIDR)
def _prefix_length(cidr: CelCIDR) -> int:
    return cidr.bits


@implement("masked", CelCIDR)
def _masked(cidr: CelCIDR) -> CelCIDR:
    kind = type(cidr.address)
    shift = cidr.address.max_prefixlen - cidr.bits
    return CelCIDR(kind(int(cidr.address) >> shift << shift), cidr.bits)
