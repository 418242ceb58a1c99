"""What planning must know of functions beside the inventory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dra.prepare.passthrough.marks import PassthroughMarks
from dra.prepare.passthrough.model import Before, PassthroughNode, Patience


@dataclass(frozen=True, slots=True)
class PassthroughView:
    """How each of the claim's functions was before, by device name.

    Without `node` nothing can be bound. `patience`: how long processes that use a GPU are waited for.
    """

    node: PassthroughNode | None = None
    before: Mapping[str, Before] = field(default_factory=dict)
    marks: PassthroughMarks | None = None
    patience: Patience = field(default_factory=Patience)


NO_PASSTHROUGH = PassthroughView()
