"""Quantities and versions as Kubernetes' CEL libraries have them.

`CelQuantity` keeps the written form: whether a quantity counts as an integer, and what its double is, depend on how it
was written and computed, not only on its amount. Source: k8s.io/apimachinery resource.Quantity (a 64-bit number with a
decimal scale where that fits, an arbitrary decimal otherwise), k8s.io/apiserver cel/library quantity and semver.
"""

from __future__ import annotations

import math
import re

from dra.cel import types as t
from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, implement
from dra.cel.values import MAX_INT, MAX_UINT, MIN_INT, Opaque
from dra.errors import ValueFormatError
from dra.values import Semver

declare(
    """
    string_to_quantity: quantity(string) -> Quantity
    is_quantity_string: isQuantity(string) -> bool
    quantity_sign: sign(Quantity) -> int
    quantity_is_greater_than: Quantity~isGreaterThan(Quantity) -> bool
    quantity_is_less_than: Quantity~isLessThan(Quantity) -> bool
    quantity_compare_to: Quantity~compareTo(Quantity) -> int
    quantity_get_float: Quantity~asApproximateFloat() -> double
    quantity_get_int: Quantity~asInteger() -> int
    quantity_is_integer: Quantity~isInteger() -> bool
    quantity_add: Quantity~add(Quantity) -> Quantity
    quantity_add_int: Quantity~add(int) -> Quantity
    quantity_sub: Quantity~sub(Quantity) -> Quantity
    quantity_sub_int: Quantity~sub(int) -> Quantity
    string_to_semver: semver(string) -> Semver
    string_bool_to_semver: semver(string, bool) -> Semver
    is_semver_string: isSemver(string) -> bool
    is_semver_string_bool: isSemver(string, bool) -> bool
    semver_is_greater_than: Semver~isGreaterThan(Semver) -> bool
    semver_is_less_than: Semver~isLessThan(Semver) -> bool
    semver_compare_to: Semver~compareTo(Semver) -> int
    semver_major: Semver~major() -> int
    semver_minor: Semver~minor() -> int
    semver_patch: Semver~patch() -> int
    """
)

_FORM = re.compile(
    r"(?P<sign>[+-]?)0*(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?(?P<suffix>[eEinumkKMGTP]*[-+]?[0-9]*)",
    re.ASCII,
)
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_EXPONENT = re.compile(r"[eE]([+-]?[0-9]+)", re.ASCII)
_LONG_NUMBER = re.compile(r"(?:^|[.-])[0-9]{30}", re.ASCII)
_MAX_EXPONENT = 200_000


class CelQuantity(Opaque):
    """`unscaled * 10**-scale`; `fast` while it is held as a 64-bit number, as Go holds it."""

    __slots__ = ("fast", "scale", "unscaled")
    cel_type = t.QUANTITY

    def __init__(self, unscaled: int, scale: int, *, fast: bool) -> None:
        self.unscaled = unscaled
        self.scale = scale
        self.fast = fast

    @property
    def sign(self) -> int:
        """-1, 0 or 1."""
        return (self.unscaled > 0) - (self.unscaled < 0)

    @property
    def magnitude(self) -> float:
        """The decimal logarithm of the amount, to about one."""
        return self.unscaled.bit_length() * 0.30103 - self.scale

    def same(self, other: CelQuantity) -> bool:
        """Whether the amounts are equal."""
        return compare_quantities(self, other) == 0

    def integer(self) -> int | None:
        """The amount as Go's AsInt64 gives it, or None where that form has no integer."""
        if not self.fast or self.scale > 0 or (self.unscaled and self.scale < -18):
            return None
        value = int(self.unscaled * 10**-self.scale)
        return value if MIN_INT <= value <= MAX_INT else None

    def __repr__(self) -> str:
        return f"quantity({self.unscaled}e{-self.scale})"


def parse_quantity(text: str) -> CelQuantity:
    """Read a quantity.

    Raises:
        Failure: quantity_parse.
    """
    match = _FORM.fullmatch(text)
    if not text or match is None:
        raise _bad_form()
    whole, fraction, suffix = match["whole"], match["fraction"] or "", match["suffix"]
    digits = (whole or "0") + fraction
    negative = match["sign"] == "-"
    if suffix in _BINARY:
        return _parse_binary(digits, len(fraction), bits=_BINARY[suffix], negative=negative)
    if suffix in _DECIMAL:
        exponent = _DECIMAL[suffix]
    else:
        written = _EXPONENT.fullmatch(suffix)
        if written is None:
            raise _bad_form()
        exponent = int(written[1][:12])
        if abs(exponent) > _MAX_EXPONENT:
            # The server would keep such a number, or never finish; nobody means it.
            raise _bad_form()
    scale = len(fraction) - exponent
    if len(digits) <= 18 and scale <= 9:
        value = int(digits)
        return CelQuantity(-value if negative else value, scale, fast=True)
    return _exact(_big(digits), scale, negative=negative)


def _bad_form() -> Failure:
    return Failure(
        "quantity_parse",
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
    )


def _parse_binary(digits: str, fraction: int, *, bits: int, negative: bool) -> CelQuantity:
    # Go takes the fast form only where the digits leave room: 15 - digits - bits * 3/10.
    if not fraction and 15 - len(digits) - bits * 3 // 10 - 1 >= 0:
        value = int(digits) << bits
        return CelQuantity(-value if negative else value, 0, fast=True)
    return _exact(_big(digits) << bits, fraction, negative=negative, cap=True)


def _exact(unscaled: int, scale: int, *, negative: bool, cap: bool = False) -> CelQuantity:
    """Round away from zero to nanos, cap binary quantities at 2^63-1."""
    if unscaled:
        if scale > 9:
            drop = scale - 9
            unscaled = -(-unscaled // 10**drop) if drop < 5000 + len(str(MAX_INT)) else 1
        else:
            unscaled *= 10 ** (9 - scale)
        scale = 9
    if cap and unscaled > MAX_INT * 10**scale:
        unscaled, scale = MAX_INT, 0
    return CelQuantity(-unscaled if negative else unscaled, scale, fast=False)


def _big(digits: str) -> int:
    """Read many digits; Python refuses to read more than 4300 at once."""
    value = 0
    for start in range(0, len(digits), 4000):
        part = digits[start : start + 4000]
        value = value * 10 ** len(part) + int(part)
    return value


def compare_quantities(left: CelQuantity, right: CelQuantity) -> int:
    """Give -1, 0 or 1, exactly."""
    if left.sign != right.sign:
        return -1 if left.sign < right.sign else 1
    # Far apart in size: no need to write out the powers of ten between them.
    distance = left.magnitude - right.magnitude
    if abs(distance) > 2:
        return left.sign if distance > 0 else -left.sign
    if left.scale == right.scale:
        first, second = left.unscaled, right.unscaled
    elif left.scale < right.scale:
        first, second = left.unscaled * 10 ** (right.scale - left.scale), right.unscaled
    else:
        first, second = left.unscaled, right.unscaled * 10 ** (left.scale - right.scale)
    return (first > second) - (first < second)


def add_quantities(left: CelQuantity, right: CelQuantity) -> CelQuantity:
    """Add; the 64-bit form stays while it can hold the sum."""
    scale = max(left.scale, right.scale)
    if left.fast and right.fast:
        if right.unscaled == 0:
            return left
        if left.unscaled == 0:
            return right
    total = left.unscaled * 10 ** (scale - left.scale) + right.unscaled * 10 ** (scale - right.scale)
    scaled = (left.unscaled * 10 ** (scale - left.scale), right.unscaled * 10 ** (scale - right.scale))
    fits = all(MIN_INT <= part <= MAX_INT for part in (*scaled, total))
    return CelQuantity(total, scale, fast=left.fast and right.fast and fits)


def _negated(value: CelQuantity) -> CelQuantity:
    unscaled = -value.unscaled
    if value.fast and unscaled > MAX_INT:
        unscaled = MIN_INT  # Go's negation wraps
    return CelQuantity(unscaled, value.scale, fast=value.fast)


@implement("quantity", str)
def _quantity(text: str) -> CelQuantity:
    return parse_quantity(text)


@implement("isQuantity", str)
def _is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except Failure:
        return False
    return True


@implement("sign", CelQuantity)
def _sign(value: CelQuantity) -> int:
    return value.sign


@implement("isGreaterThan", CelQuantity, CelQuantity)
def _greater(left: CelQuantity, right: CelQuantity) -> bool:
    return compare_quantities(left, right) > 0


@implement("isLessThan", CelQuantity, CelQuantity)
def _less(left: CelQuantity, right: CelQuantity) -> bool:
    return compare_quantities(left, right) < 0


implement("compareTo", CelQuantity, CelQuantity)(compare_quantities)
implement("add", CelQuantity, CelQuantity)(add_quantities)


@implement("asApproximateFloat", CelQuantity)
def _float(value: CelQuantity) -> float:
    try:
        base = float(value.unscaled)
    except OverflowError:
        base = math.copysign(math.inf, value.unscaled)
    return base if value.scale == 0 else base * _power_of_ten(-value.scale)


def _power_of_ten(exponent: int) -> float:
    # Go's math.Pow10, from two tables.
    if 0 <= exponent <= 308:
        return float(f"1e{exponent // 32 * 32}") * float(f"1e{exponent % 32}")
    if -323 <= exponent < 0:
        return float(f"1e-{-exponent // 32 * 32}") / float(f"1e{-exponent % 32}")
    return math.inf if exponent > 0 else 0.0


@implement("asInteger", CelQuantity)
def _integer(value: CelQuantity) -> int:
    number = value.integer()
    if number is None:
        raise Failure("quantity_not_integer", "cannot convert value to integer")
    return number


@implement("isInteger", CelQuantity)
def _is_integer(value: CelQuantity) -> bool:
    return value.integer() is not None


@implement("add", CelQuantity, int)
def _add_int(left: CelQuantity, right: int) -> CelQuantity:
    return add_quantities(left, CelQuantity(right, 0, fast=True))


@implement("sub", CelQuantity, CelQuantity)
def _subtract(left: CelQuantity, right: CelQuantity) -> CelQuantity:
    return add_quantities(left, _negated(right))


@implement("sub", CelQuantity, int)
def _subtract_int(left: CelQuantity, right: int) -> CelQuantity:
    return add_quantities(left, _negated(CelQuantity(right, 0, fast=True)))


class CelSemver(Opaque):
    """A version; equality and order ignore build metadata."""

    __slots__ = ("version",)
    cel_type = t.SEMVER

    def __init__(self, version: Semver) -> None:
        self.version = version

    def same(self, other: CelSemver) -> bool:
        """Whether the versions have the same precedence."""
        return self.version == other.version

    def __repr__(self) -> str:
        return str(self.version)


def parse_semver(text: str) -> CelSemver:
    """Read a strict version.

    Raises:
        Failure: semver_parse, with the wording of the Go library.
    """
    try:
        if _LONG_NUMBER.search(text):
            # Far beyond 64 bits; Python would not even read it.
            raise Failure("semver_parse", f"strconv.ParseUint: parsing {text[:40]!r}…: value out of range")
        version = Semver.parse(text)
    except ValueFormatError:
        raise Failure("semver_parse", _semver_problem(text)) from None
    if max(version.major, version.minor, version.patch) > MAX_UINT:
        raise Failure("semver_parse", f"strconv.ParseUint: parsing {text!r}: value out of range")
    numbers = [part for part in version.prerelease if part.isdigit()]
    if any(len(part) > 20 or int(part) > MAX_UINT for part in numbers):
        raise Failure("semver_parse", f"strconv.ParseUint: parsing {text!r}: value out of range")
    return CelSemver(version)


def _semver_problem(text: str) -> str:
    if not text:
        return "Version string empty"
    parts = text.split(".", 2)
    if len(parts) != 3:
        return "No Major.Minor.Patch elements found"
    patch = re.split(r"[-+]", parts[2], maxsplit=1)[0]
    for word, number in (("Major", parts[0]), ("Minor", parts[1]), ("Patch", patch)):
        if not re.fullmatch(r"[0-9]+", number, re.ASCII):
            return f"Invalid character(s) found in {word.lower()} number {_go_quote(number)}"
        if len(number) > 1 and number[0] == "0":
            return f"{word} number must not contain leading zeroes {_go_quote(number)}"
    pre = re.match(r"[0-9]+-([^+]*)", parts[2])
    for part in pre[1].split(".") if pre else ():
        if not part:
            return "Prerelease is empty"
        if re.fullmatch(r"0[0-9]+", part, re.ASCII):
            return f"Numeric PreRelease version must not contain leading zeroes {_go_quote(part)}"
        if not re.fullmatch(r"[0-9A-Za-z-]+", part, re.ASCII):
            return f"Invalid character(s) found in prerelease {_go_quote(part)}"
    return f"Invalid character(s) found in build meta data {_go_quote(text)}"


def _go_quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def normalise_semver(text: str) -> CelSemver:
    """Read a version leniently: a `v` in front, missing parts and leading zeros are fine.

    Raises:
        Failure: semver_parse.
    """
    parts = text.removeprefix("v").split(".", 2)
    for index, part in enumerate(parts):
        if len(part) > 1:
            rest = part.lstrip("0")
            parts[index] = rest if rest[:1].isascii() and rest[:1].isdigit() else f"0{rest}"
    if len(parts) < 3:
        if re.search(r"[+-]", parts[-1]):
            raise Failure("semver_parse", "short version cannot contain PreRelease/Build meta data")
        parts += ["0"] * (3 - len(parts))
    return parse_semver(".".join(parts))


implement("semver", str)(parse_semver)


@implement("semver", str, bool)
def _semver(text: str, normalise: bool) -> CelSemver:
    return normalise_semver(text) if normalise else parse_semver(text)


@implement("isSemver", str)
def _is_semver(text: str) -> bool:
    return _is_semver_normalised(text, False)


@implement("isSemver", str, bool)
def _is_semver_normalised(text: str, normalise: bool) -> bool:
    try:
        _semver(text, normalise)
    except Failure:
        return False
    return True


@implement("isGreaterThan", CelSemver, CelSemver)
def _newer(left: CelSemver, right: CelSemver) -> bool:
    return left.version > right.version


@implement("isLessThan", CelSemver, CelSemver)
def _older(left: CelSemver, right: CelSemver) -> bool:
    return left.version < right.version


@implement("compareTo", CelSemver, CelSemver)
def _compare_semvers(left: CelSemver, right: CelSemver) -> int:
    return (left.version > right.version) - (left.version < right.version)


def _wrap(number: int) -> int:
    # The library keeps the parts unsigned and gives them as signed.
    return number - (1 << 64) if number > MAX_INT else number


for _name in ("major", "minor", "patch"):

    def _part(value: CelSemver, name: str = _name) -> int:
        return _wrap(getattr(value.version, name))

    implement(_name, CelSemver)(_part)
