"""Kubernetes quantities, exactly.

Source: k8s.io/apimachinery/pkg/api/resource. A quantity is a decimal number with a binary (Ki..Ei), decimal
(n, u, m, k..E) or exponent (e3) suffix; it is kept at a resolution of 1e-9, finer digits round away from zero.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from functools import total_ordering
from typing import Literal

from dra.errors import ValueFormatError

Format = Literal["binary", "decimal", "exponent"]

_NANO = 10**9
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SUFFIX_OF_EXPONENT = {power: suffix for suffix, power in _DECIMAL.items()}
_FORM = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?"
    r"(?P<suffix>Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?[0-9]+)?",
    re.ASCII,
)
# Longer text is no amount of anything; Python refuses to read numbers of more than 4300 digits.
_MAX_LENGTH = 1024
# What is kept once it was read.
_SHORT = 32
# Values above this are capped by the API server (2^63-1 of the unit).
_MAX_NANO = ((1 << 63) - 1) * _NANO


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """An exact amount: `nano` billionths; `format` only decides how it is written."""

    nano: int
    format: Format = "decimal"

    @classmethod
    def parse(cls, text: str) -> Quantity:
        """Read a quantity as the API server does.

        Raises:
            ValueFormatError: DRA-QUANTITY.
        """
        return _parse_known(text) if len(text) <= _SHORT else _parse(text)

    @classmethod
    def of(cls, value: int | str | Quantity, *, binary: bool = False) -> Quantity:
        """Give a quantity of a whole number of units, a text, or the quantity itself."""
        if isinstance(value, Quantity):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        return cls(value * _NANO, "binary" if binary else "decimal")

    @property
    def value(self) -> int:
        """The amount in whole units, rounded away from zero (Go: `Quantity.Value()`)."""
        return -(-self.nano // _NANO) if self.nano >= 0 else self.nano // _NANO

    @property
    def is_integer(self) -> bool:
        """Whether the amount is a whole number of units."""
        return self.nano % _NANO == 0

    def __str__(self) -> str:
        """Give the canonical form: no loss, the largest suffix, no fraction."""
        if self.nano == 0:
            return "0"
        sign, amount = ("-", -self.nano) if self.nano < 0 else ("", self.nano)
        if self.format == "binary" and amount % _NANO == 0 and amount >= 1024 * _NANO:
            units = amount // _NANO
            suffix = ""
            for name in ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"):
                if units % 1024:
                    break
                units, suffix = units // 1024, name
            return f"{sign}{units}{suffix}"
        power = -9
        while power < 18 and amount % 1000 == 0:
            amount, power = amount // 1000, power + 3
        if self.format == "exponent":
            return f"{sign}{amount}" if power == 0 else f"{sign}{amount}e{power}"
        return f"{sign}{amount}{_SUFFIX_OF_EXPONENT[power]}"

    def __eq__(self, other: object) -> bool:
        """Compare amounts; the way of writing does not count."""
        return isinstance(other, Quantity) and self.nano == other.nano

    def __lt__(self, other: Quantity) -> bool:
        """Order by amount."""
        return self.nano < other.nano

    def __hash__(self) -> int:
        """Hash the amount."""
        return hash(self.nano)

    def __add__(self, other: Quantity) -> Quantity:
        """Add exactly; the left operand's way of writing stays, unless it is zero (as in Go)."""
        return Quantity(self.nano + other.nano, self.format if self.nano else other.format)

    def __sub__(self, other: Quantity) -> Quantity:
        """Subtract exactly; the left operand's way of writing stays, unless it is zero (as in Go)."""
        return Quantity(self.nano - other.nano, self.format if self.nano else other.format)


def _parse(text: str) -> Quantity:
    match = _FORM.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not (match["whole"] or match["fraction"]):
        raise ValueFormatError(
            "DRA-QUANTITY",
            f"{text[:64]!r} is not a quantity",
            remedy="Write a number with an optional suffix, for example 8Gi, 500M or 2.",
        )
    fraction = match["fraction"] or ""
    digits = int((match["whole"] or "0") + fraction)
    suffix = match["suffix"] or ""
    kind: Format
    if suffix in _BINARY:
        kind, numerator, exponent = "binary", _BINARY[suffix], 0
    elif suffix in _DECIMAL:
        kind, numerator, exponent = "decimal", 1, _DECIMAL[suffix]
    else:
        kind, numerator, exponent = "exponent", 1, int(suffix[1:])
        if abs(exponent) > 400:
            # The server keeps such numbers as arbitrary decimals; nobody means them.
            raise ValueFormatError(
                "DRA-QUANTITY", f"{text!r} is not a quantity", remedy="Use a smaller exponent."
            )
    power = 9 + exponent - len(fraction)
    scaled = digits * numerator
    nano = scaled * 10**power if power >= 0 else -(-scaled // 10**-power)
    nano = min(nano, _MAX_NANO)
    return Quantity(-nano if match["sign"] == "-" else nano, kind)


# A pool of partitions says the same few amounts tens of thousands of times.
_parse_known = functools.lru_cache(maxsize=1024)(_parse)
