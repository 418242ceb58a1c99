"""Coming from NVIDIA's driver, and going back: its checkpoint read and written.

What is here is all that the engine sees; the rest is loaded only where there is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.prepare.imports.names import CHECKPOINT, ORIGIN

if TYPE_CHECKING:
    from dra.prepare.cdi_files import CdiFiles
    from dra.prepare.effects import Effect
    from dra.prepare.record import Record
    from dra.prepare.setup import EngineSettings
    from dra.prepare.store import RecordStore
    from dra.values import PciAddress


def take_over(
    settings: EngineSettings,
    store: RecordStore,
    cdi: CdiFiles,
    *,
    knows: Callable[[str], bool],
    step: Callable[[str], None],
    gpus: Callable[[], Sequence[PciAddress]] = tuple,
) -> int:
    """Import NVIDIA's checkpoint if there is one; give how many claims were taken over.

    Raises:
        HostError: the disk refuses, or NVIDIA's plugin is at work: nothing is lost, call again.
    """
    if not (settings.state_dir / CHECKPOINT).exists():
        return 0
    from dra.prepare.imports.takeover import Takeover

    return Takeover(settings, store, cdi, knows, step, gpus).run()


def stands_as_imported(record: Record, path: Path) -> bool:
    """Whether an imported claim must stay as NVIDIA's driver prepared it while it is in use: it has MPS."""
    if ORIGIN not in record.extra:
        return False
    from dra.prepare.imports.takeover import stands

    return stands(record, path)


def revive_foreign_mps(
    args: Mapping[str, Any], state_dir: Path, delete: Callable[[str], None] | None
) -> Effect:
    """Make the effect that clears up after an MPS daemon of NVIDIA's driver."""
    from dra.prepare.imports.foreign_mps import ForeignMps

    return ForeignMps.revive(args, state_dir=state_dir, delete=delete)
