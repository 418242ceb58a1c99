"""Semantic versions as Kubernetes uses them: strict 2.0.0, ordered, and made from looser driver versions.

Source: attribute type `version` of resource.k8s.io (semver 2.0.0, no leading `v`, no leading zeros).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from functools import total_ordering

from dra.errors import ValueFormatError

_NUMBER = r"(0|[1-9][0-9]*)"
_STRICT = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}"
    r"(?:-(?P<pre>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?(?:\+(?P<build>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?",
    re.ASCII,
)


# semver sets no limit, attributes have one of 64 bytes.
_MAX_LENGTH = 1024
_UINT64 = 2**64


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Semver:
    """A strict semantic version. Build metadata is kept but neither compared nor hashed (semver 10, 11)."""

    major: int
    minor: int
    patch: int
    prerelease: tuple[str, ...] = ()
    build: tuple[str, ...] = field(default=())

    @classmethod
    def parse(cls, text: str) -> Semver:
        """Read a strict version.

        Raises:
            ValueFormatError: DRA-SEMVER.
        """
        # Longer numbers than any version has; Python refuses to read very long ones.
        match = _STRICT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
        pre = tuple(match["pre"].split(".")) if match and match["pre"] else ()
        if match is None or any(part.isdigit() and len(part) > 1 and part[0] == "0" for part in pre):
            raise ValueFormatError(
                "DRA-SEMVER",
                f"{text!r} is not a semantic version",
                remedy="Write major.minor.patch without leading zeros, for example 580.65.6.",
            )
        build = tuple(match["build"].split(".")) if match["build"] else ()
        return cls(int(match[1]), int(match[2]), int(match[3]), pre, build)

    def __str__(self) -> str:
        """Give the canonical text."""
        text = f"{self.major}.{self.minor}.{self.patch}"
        if self.prerelease:
            text += "-" + ".".join(self.prerelease)
        if self.build:
            text += "+" + ".".join(self.build)
        return text

    def _key(self) -> tuple[object, ...]:
        # A release sorts after its pre-releases; numeric identifiers sort before alphanumeric ones.
        pre: tuple[tuple[int, int, str], ...] = tuple(
            (0, int(part), "") if part.isdigit() else (1, 0, part) for part in self.prerelease
        )
        return (self.major, self.minor, self.patch, not self.prerelease, pre)

    def __eq__(self, other: object) -> bool:
        """Compare by precedence: build metadata is ignored."""
        return isinstance(other, Semver) and self._key() == other._key()

    def __lt__(self, other: Semver) -> bool:
        """Order by precedence (semver 11)."""
        return self._key() < other._key()

    def __hash__(self) -> int:
        """Hash what `==` compares."""
        return hash(self._key())


def normalise_version(text: str) -> Semver | None:
    """Make a strict version of a driver's (`535.104.05` -> 535.104.5, `13.0` -> 13.0.0).

    Extra parts become nothing (`1.2.3.4` -> 1.2.3); text that starts with no number gives None.
    """
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", text[:_MAX_LENGTH], re.ASCII)
    if match is None:
        return None
    parts = [int(part) for part in match[1].split(".")][:3]
    parts += [0] * (3 - len(parts))
    return Semver(parts[0], parts[1], parts[2])


@functools.lru_cache(maxsize=1024)
def is_api_version(text: str) -> bool:
    """Whether the API server takes a text as an attribute's version: numbers are kept in 64 bits there.

    Source: blang/semver, which pkg/apis/resource/validation parses with. Remembered: all devices of a cluster have the
    same few.
    """
    try:
        version = Semver.parse(text)
    except ValueFormatError:
        return False
    parts = map(int, filter(str.isdecimal, version.prerelease))
    return all(number < _UINT64 for number in (version.major, version.minor, version.patch, *parts))
