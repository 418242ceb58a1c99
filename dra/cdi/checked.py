"""Specs that were checked, with their bytes: each is checked and encoded once, and what many have in common only once.

A claim's spec is thirty kilobytes, of which its own devices make one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dra.cdi.model import SpecDict
from dra.cdi.spec import VERSIONS, Json, check, encode, inner_json, version_for


class CheckedSpec(Mapping[str, Any]):
    """A spec that was checked, with the bytes of its file. Its content must not be changed any more."""

    __slots__ = ("_content", "data")

    def __init__(self, content: SpecDict, data: bytes) -> None:
        self._content = content
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __repr__(self) -> str:
        return f"CheckedSpec({self._content!r})"


class RootPart:
    """Mounts and hooks that many specs have in common, checked once, with their JSON. Not to be changed.

    They are nine tenths of a spec; with them a claim's spec costs what its own devices cost.
    """

    __slots__ = ("content", "text", "version")

    def __init__(self, content: SpecDict, *, kind: str) -> None:
        alone = {
            "cdiVersion": VERSIONS[-1],
            "kind": kind,
            "devices": [{"name": "none", "containerEdits": {"env": ["NONE="]}}],
            "containerEdits": content,
        }
        check(alone)
        self.content = content
        self.version = version_for(alone)
        self.text = inner_json(content)

    def complete(self, spec: SpecDict) -> CheckedSpec:
        """Give the spec with these edits behind its own root edits, which must have other keys.

        Raises:
            BugError: DRA-CDI-INVALID: as `check`, of what is not checked yet.
        """
        own = spec["containerEdits"]
        head = {key: value for key, value in spec.items() if key != "containerEdits"}
        head["cdiVersion"] = max(version_for(spec), self.version, key=VERSIONS.index)
        check({**head, "containerEdits": own})
        edits = ",".join(part for part in (inner_json(own), self.text) if part)
        text = f'{{{inner_json(head)},"containerEdits": {{{edits}}}}}\n'
        return CheckedSpec({**head, "containerEdits": {**own, **self.content}}, text.encode())


def as_checked(spec: Json) -> CheckedSpec:
    """Give the spec checked and encoded; one that is already is given back.

    Raises:
        BugError: DRA-CDI-INVALID.
    """
    if isinstance(spec, CheckedSpec):
        return spec
    check(spec)
    return CheckedSpec(dict(spec), encode(spec))
