"""What of a GPU can stand side by side, and how good a layout is. Pure.

The rule is the counters': no memory slice twice, and of processors, engines and memory no more than the GPU has.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dra.diagnose.mig_plan.model import GpuState, Layout, Piece, Profile

# Of one GPU and one mix. Real GPUs have at most some hundred.
MOST_LAYOUTS = 2000


class Bench:
    """One GPU's slices and counters while pieces are put on it and taken off."""

    def __init__(self, gpu: GpuState, pieces: Iterable[Piece]) -> None:
        self.gpu = gpu
        self.pieces: list[Piece] = []
        self._taken: set[int] = set()
        self._used: Counter[str] = Counter()
        for piece in pieces:
            self.put(piece)

    def put(self, piece: Piece) -> None:
        """Put a piece on, whether it fits or not."""
        self.pieces.append(piece)
        self._taken.update(piece.slices)
        self._used.update(self._amounts(piece))

    def take(self) -> None:
        """Take the last piece off."""
        piece = self.pieces.pop()
        self._taken.difference_update(piece.slices)
        self._used.subtract(self._amounts(piece))

    def fits(self, profile: Profile, start: int, size: int) -> bool:
        """Whether an instance can be made here now."""
        if any(number in self._taken for number in range(start, start + size)):
            return False
        limits = self.gpu.limits
        return all(self._used[name] + amount <= limits[name] for name, amount in profile.amounts.items())

    @property
    def free(self) -> tuple[int, ...]:
        """The slices that nothing takes."""
        return tuple(number for number in range(self.gpu.slices) if number not in self._taken)

    def usable(self) -> set[int]:
        """Give the free slices that some profile could still use."""
        return {
            number
            for profile in self.gpu.profiles
            for start, size in profile.places
            if self.fits(profile, start, size)
            for number in range(start, start + size)
        }

    def room(self, profile: Profile) -> int:
        """Give how many instances of a profile still fit, of this one alone."""
        # Places of one profile have one size and overlap only where they are the same slices: first fit is best.
        before = len(self.pieces)
        for start, size in sorted(profile.places):
            if self.fits(profile, start, size):
                self.put(Piece(profile.name, start, size))
        count = len(self.pieces) - before
        for _ in range(count):
            self.take()
        return count

    def layout(self) -> Layout:
        """Give what stands now, judged."""
        usable = self.usable()
        return Layout(
            self.gpu,
            tuple(sorted(self.pieces, key=lambda piece: piece.start)),
            free=self.free,
            stranded=tuple(number for number in self.free if number not in usable),
            room={profile.name: count for profile in self.gpu.profiles if (count := self.room(profile))},
        )

    def _amounts(self, piece: Piece) -> Mapping[str, int]:
        profile = self.gpu.by_name.get(piece.profile)
        return {} if profile is None else profile.amounts


def layouts(gpu: GpuState, kept: Sequence[Piece], mix: Mapping[str, int]) -> Iterator[Layout]:
    """Give every layout that holds the kept pieces and the mix, each once. Free pieces that exist are used first."""
    kept = list(kept)
    wanted = Counter({name: count for name, count in mix.items() if count})
    for index, piece in enumerate(kept):
        # A partition that an administrator made and nobody has serves as it is.
        if piece.fixed and not piece.holder and wanted[piece.profile] > 0:
            wanted[piece.profile] -= 1
            kept[index] = Piece(
                piece.profile, piece.start, piece.size, "(this plan)", fixed=True, exists=True
            )
    names = list(wanted.elements())
    if not gpu.recut:
        if not names:
            yield Bench(gpu, kept).layout()
        return
    if any(name not in gpu.by_name for name in names):
        return
    items = sorted(names, key=lambda name: (-gpu.by_name[name].size, name))
    yield from _fill(Bench(gpu, kept), items, 0, -1)


def _fill(bench: Bench, items: Sequence[str], at: int, after: int) -> Iterator[Layout]:
    if at == len(items):
        yield bench.layout()
        return
    profile = bench.gpu.by_name[items[at]]
    for start, size in sorted(profile.places):
        # Like pieces stand in one order only.
        if start > after and bench.fits(profile, start, size):
            bench.put(Piece(profile.name, start, size))
            more = at + 1 < len(items) and items[at + 1] == items[at]
            yield from _fill(bench, items, at + 1, start if more else -1)
            bench.take()


def rank(layout: Layout) -> tuple[object, ...]:
    """Order layouts, the best first: nothing stranded, then the largest profiles that still fit."""
    sizes = {profile.name: profile.size for profile in layout.gpu.profiles}
    left = sorted(((sizes[name], count) for name, count in layout.room.items()), reverse=True)
    return len(layout.stranded), tuple((-size, -count) for size, count in left), _places(layout)


def _places(layout: Layout) -> tuple[tuple[int, str], ...]:
    # Among equals from the end, as partitions are given out.
    return tuple((-piece.start, piece.profile) for piece in layout.pieces if not piece.exists)


def best(gpu: GpuState, kept: Sequence[Piece], mix: Mapping[str, int]) -> Layout | None:
    """Give the best layout; None if there is none."""
    return _best(gpu, tuple(kept), tuple(sorted((name, count) for name, count in mix.items() if count)))


@functools.lru_cache(maxsize=4096)
def _best(gpu: GpuState, kept: tuple[Piece, ...], mix: tuple[tuple[str, int], ...]) -> Layout | None:
    found = (layout for layout, _ in zip(layouts(gpu, kept, dict(mix)), range(MOST_LAYOUTS), strict=False))
    return min(found, key=rank, default=None)
