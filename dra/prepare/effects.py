"""Effects: everything that changes the node, each with `apply`, `verify` and `undo`.

An effect stands in its claim's record, as a kind and its arguments, before it is applied. All three methods may
be called again at any time: applying what is applied and undoing what is undone does nothing. What an effect
needs for `undo` is in its arguments, so that it can be undone by another process, without API server.

`WriteCdi` is here, MIG partitions are in `dra.prepare.mig_effects`. Time-slices, compute modes and MPS daemons are
further kinds: a class beside, an entry in the catalogue, and a planner that asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dra.cdi.checked import CheckedSpec, as_checked
from dra.errors import RecordError
from dra.prepare.cdi_files import CdiFiles
from dra.prepare.record import JournalEntry


class Effect(Protocol):
    """One change of the node.

    Class attributes:
        kind: name in the journal.
        ends_with_boot: a reboot undoes it (hardware state); it is struck without `undo` in another boot.

    The entry outlives the process, not a power failure. What does not end with the boot must be found without it: a CDI
    spec and metadata by their names, an MPS daemon's folder by the keeper.

    `shared_resource` names what several claims have in common (`time-slice gpu-0`): only the last claim whose
    journal has an effect of the same kind on it undoes it. None for what belongs to one claim.

    An effect may also have `outcome`: what came of `apply` and `undo` must know (see `outcome_of`); with
    `knows_outcome` it is known before, is written down with the effect, and applying it again does not change it.
    """

    kind: ClassVar[str]
    ends_with_boot: ClassVar[bool]

    @property
    def shared_resource(self) -> str | None:
        """What is counted by claim; None if it is this claim's alone."""
        ...

    def args(self) -> Mapping[str, Any]:
        """Give the arguments for the journal: JSON, the same each time the same thing is planned."""
        ...

    def apply(self) -> None:
        """Make it so. Raises DraError; what was done by then is undone by `undo`."""
        ...

    def verify(self) -> bool:
        """Whether it is so, by a look at the node."""
        ...

    def undo(self) -> None:
        """Make it not so. Raises DraError; may be called again."""
        ...


Revive = Callable[[Mapping[str, Any]], Effect]


class EffectCatalog:
    """Makes effects from journal entries, to undo them."""

    def __init__(self, kinds: Mapping[str, Revive]) -> None:
        self._kinds = dict(kinds)

    def knows(self, kind: str) -> bool:
        """Whether effects of a kind can be undone here."""
        return kind in self._kinds

    def revive(self, entry: JournalEntry) -> Effect:
        """Give the effect of an entry.

        Raises:
            RecordError: DRA-EFFECT-UNKNOWN for a kind of a newer version; DRA-RECORD-CORRUPT for bad arguments.
        """
        make = self._kinds.get(entry.kind)
        if make is None:
            raise RecordError(
                "DRA-EFFECT-UNKNOWN",
                f"this version of the driver cannot undo the effect {entry.kind}, which a newer one made",
                remedy="Upgrade the driver on this node again; the claim is then unprepared by itself.",
                retryable=True,
                effect=entry.kind,
            )
        try:
            return make({**entry.args, "outcome": entry.outcome} if entry.outcome else entry.args)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(
                "DRA-RECORD-CORRUPT",
                f"the arguments of the effect {entry.kind} cannot be used: {error!r}",
                remedy="Report this with the claim's record.",
                effect=entry.kind,
            ) from error


def journal_entry(effect: Effect) -> JournalEntry:
    """Give the entry with which an effect begins."""
    outcome = outcome_of(effect) if knows_outcome(effect) else {}
    return JournalEntry(effect.kind, dict(effect.args()), outcome=dict(outcome))


def knows_outcome(effect: Effect) -> bool:
    """Whether an effect knows its outcome before it is applied."""
    return bool(getattr(effect, "knows_outcome", False))


def outcome_of(effect: Effect) -> Mapping[str, Any]:
    """Give what came of applying an effect, for the journal; empty if it has nothing to tell.

    `EffectCatalog` gives it back under the key `outcome` of the arguments.
    """
    outcome: Mapping[str, Any] = getattr(effect, "outcome", {})
    return outcome


class WriteCdi:
    """A claim's CDI spec.

    `content` is called when the spec is first needed, after the effects before it: a spec may name a device that
    one of them makes.
    """

    kind: ClassVar[str] = "cdi-file"
    # A CDI directory may outlive a reboot, and its files then have stale device numbers.
    ends_with_boot: ClassVar[bool] = False
    shared_resource: str | None = None

    def __init__(
        self,
        path: Path,
        *,
        files: CdiFiles,
        uid: str = "",
        content: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._path = path
        self._files = files
        self._uid = uid
        self._content = content
        self._spec: CheckedSpec | None = None

    @classmethod
    def revive(cls, args: Mapping[str, Any], *, files: CdiFiles) -> WriteCdi:
        """Make the effect that removes a spec."""
        path = Path(args["file"])
        if not files.is_ours(path):
            raise ValueError(f"{path} is no file of ours")
        return cls(path, files=files)

    @property
    def sha256(self) -> str:
        """The digest of the content that is wanted."""
        return hashlib.sha256(self._wanted().data).hexdigest()

    def args(self) -> Mapping[str, Any]:
        """Give the path."""
        return {"file": str(self._path)}

    def apply(self) -> None:
        """Write the file."""
        self._files.write(self._uid, self._wanted())

    def verify(self) -> bool:
        """Whether the file has the content that it should have now, not only the one it had."""
        return self._files.is_as(self._uid, self._wanted())

    def undo(self) -> None:
        """Remove the file."""
        self._files.remove(self._path)

    def _wanted(self) -> CheckedSpec:
        if self._spec is None:
            if self._content is None:
                raise RecordError("DRA-RECORD-CORRUPT", f"nothing says what {self._path} should contain")
            self._spec = as_checked(self._content())
        return self._spec
