"""How two looks at a node differ. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dra.inventory.model import Gpu, Inventory, ScanProblem


@dataclass(frozen=True, slots=True)
class GpuChange:
    """The same GPU (by UUID) before and after; `changed` names the fields of `Gpu` that differ."""

    before: Gpu
    after: Gpu
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InventoryDiff:
    """What changed. True if anything did.

    `versions` says that the driver's or CUDA's version differs, `vfio` that other GPUs can be passed through, or that one
    was or is back. Problems are compared by subject and code: a
    text that only tells how long something lasts is no news.
    """

    added: tuple[Gpu, ...] = ()
    removed: tuple[Gpu, ...] = ()
    changed: tuple[GpuChange, ...] = ()
    versions: bool = False
    vfio: bool = False
    new_problems: tuple[ScanProblem, ...] = ()
    gone_problems: tuple[ScanProblem, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return self.publishes or bool(self.new_problems or self.gone_problems)

    @property
    def publishes(self) -> bool:
        """Whether what is published may change."""
        return bool(self.added or self.removed or self.changed or self.versions or self.vfio)


def diff(before: Inventory, after: Inventory) -> InventoryDiff:
    """Give what changed from `before` to `after`. GPUs are the same if their UUIDs are."""
    old = {gpu.uuid: gpu for gpu in before.gpus}
    new = {gpu.uuid: gpu for gpu in after.gpus}
    old_problems = {(problem.subject, problem.code): problem for problem in before.problems}
    new_problems = {(problem.subject, problem.code): problem for problem in after.problems}
    return InventoryDiff(
        added=tuple(gpu for uuid, gpu in new.items() if uuid not in old),
        removed=tuple(gpu for uuid, gpu in old.items() if uuid not in new),
        changed=tuple(
            GpuChange(old[uuid], gpu, _changed_fields(old[uuid], gpu))
            for uuid, gpu in new.items()
            if uuid in old and old[uuid] != gpu
        ),
        versions=(before.driver_version, before.cuda_version) != (after.driver_version, after.cuda_version),
        vfio=before.vfio != after.vfio,
        new_problems=tuple(problem for key, problem in new_problems.items() if key not in old_problems),
        gone_problems=tuple(problem for key, problem in old_problems.items() if key not in new_problems),
    )


def _changed_fields(before: Gpu, after: Gpu) -> tuple[str, ...]:
    return tuple(
        field.name for field in fields(Gpu) if getattr(before, field.name) != getattr(after, field.name)
    )
