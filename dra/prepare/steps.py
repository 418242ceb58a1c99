"""Names of the journal's steps: the instructions between which a crash must do no harm.

A `step` callable is called at each of them. In production it does nothing; the tests end the process there, all
of them in turn.
"""

from __future__ import annotations

PLANNED = "prepare:planned"
RECORD_WRITTEN = "prepare:record-written"
EFFECT_APPLYING = "prepare:effect-applying"
EFFECT_APPLIED = "prepare:effect-applied"
RECORD_COMPLETED = "prepare:record-completed"

UNPREPARE_PLANNED = "unprepare:planned"
RECORD_MARKED = "unprepare:record-marked"
UNDO = "unprepare"
RECORD_REMOVED = "unprepare:record-removed"

ROLLBACK = "rollback"


def prepare_steps(*, effects: int = 1) -> list[str]:
    """Give the steps of a first prepare with so many effects, in order."""
    applied = [f"{name}:{n}" for n in range(effects) for name in (EFFECT_APPLYING, EFFECT_APPLIED)]
    return [PLANNED, RECORD_WRITTEN, *applied, RECORD_COMPLETED]


def unprepare_steps(*, effects: int = 1) -> list[str]:
    """Give the steps of an unprepare with so many effects, in order: the last effect is undone first."""
    return [UNPREPARE_PLANNED, RECORD_MARKED, *undo_steps(UNDO, effects=effects), RECORD_REMOVED]


def rollback_steps(*, effects: int = 1) -> list[str]:
    """Give the steps that follow a first prepare that failed."""
    return undo_steps(ROLLBACK, effects=effects)


def undo_steps(prefix: str, *, effects: int) -> list[str]:
    """Give the steps of undoing so many effects."""
    return [f"{prefix}:effect-{verb}:{n}" for n in reversed(range(effects)) for verb in ("undoing", "undone")]


def all_steps(*, effects: int = 1) -> list[str]:
    """Give every step there is."""
    return [
        *prepare_steps(effects=effects),
        *rollback_steps(effects=effects),
        *unprepare_steps(effects=effects),
    ]
