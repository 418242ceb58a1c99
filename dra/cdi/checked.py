"""Specs that were checked, with their bytes: each is checked and encoded once, and what many have in common only once.

A claim's spec is thirty kilobytes, of which its own devices make one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from dra.cdi.model import SpecDict
from dra.cdi.spec import VERSIONS, Json, check, encode, inner_json, version_for

# Stands for the UID of a claim in parts that several claims have in turn. Nothing of a node contains it.
ANY_CLAIM = secrets.token_hex(16)


class CheckedSpec(Mapping[str, Any]):
    """A spec that was checked: the bytes of its file, and as a mapping what they say. Neither may be changed any more."""

    __slots__ = ("_content", "data")

    def __init__(self, data: bytes, content: SpecDict | None = None) -> None:
        self.data = data
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return f"CheckedSpec({self._values()!r})"

    def _values(self) -> SpecDict:
        if self._content is None:
            content: SpecDict = json.loads(self.data)
            self._content = content
        return self._content


class SpecParts:
    """The text of a spec that was checked: what is its own, and behind that what many have in common."""

    __slots__ = ("_common", "_own")

    def __init__(self, own: bytes, common: bytes) -> None:
        self._own, self._common = own, common

    def for_claim(self, claim_uid: str) -> CheckedSpec:
        """Give the spec; one that was made for `ANY_CLAIM` as it is for a claim with this UID."""
        return CheckedSpec(self._own.replace(ANY_CLAIM.encode(), claim_uid.encode()) + self._common)


class RootPart:
    """Mounts and hooks that many specs have in common, checked once, with their JSON. Not to be changed.

    They are nine tenths of a spec; with them a claim's spec costs what its own devices cost.
    """

    __slots__ = ("_is_empty", "_text", "_version")

    def __init__(self, content: SpecDict, *, kind: str) -> None:
        alone = {
            "cdiVersion": VERSIONS[-1],
            "kind": kind,
            "devices": [{"name": "none", "containerEdits": {"env": ["NONE="]}}],
            "containerEdits": content,
        }
        check(alone)
        self._version = version_for(alone)
        self._text = f"{inner_json(content)}}}}}\n".encode()
        self._is_empty = not content

    def complete(self, spec: SpecDict) -> SpecParts:
        """Give the spec with these edits behind its own root edits, which must have other keys.

        Raises:
            BugError: DRA-CDI-INVALID: as `check`, of what is not checked yet.
        """
        own = spec["containerEdits"]
        head = {key: value for key, value in spec.items() if key != "containerEdits"}
        head["cdiVersion"] = max(version_for(spec), self._version, key=VERSIONS.index)
        check({**head, "containerEdits": own})
        comma = "," if own and not self._is_empty else ""
        text = f'{{{inner_json(head)},"containerEdits": {{{inner_json(own)}{comma}'
        return SpecParts(text.encode(), self._text)


def as_checked(spec: Json) -> CheckedSpec:
    """Give the spec checked and encoded; one that is already is given back.

    Raises:
        BugError: DRA-CDI-INVALID.
    """
    if isinstance(spec, CheckedSpec):
        return spec
    check(spec)
    return CheckedSpec(encode(spec), dict(spec))
