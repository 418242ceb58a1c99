"""GPUs, partitions and plans as frozen values. A slice is a memory slice, numbered from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# A wanted whole GPU, among the names of profiles.
WHOLE = "gpu"


@dataclass(frozen=True, slots=True)
class Profile:
    """A way to cut a GPU: its name, what an instance takes of each counter, and the places (start, size)."""

    name: str
    profile_id: int
    amounts: Mapping[str, int] = field(hash=False)
    places: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Memory slices of an instance."""
        return max((size for _, size in self.places), default=0)


@dataclass(frozen=True, slots=True)
class Piece:
    """A partition at its place. `holder`: whose it is, empty if nobody's; `fixed`: made by hand, it is not destroyed."""

    profile: str
    start: int
    size: int
    holder: str = ""
    fixed: bool = False
    exists: bool = False

    @property
    def slices(self) -> range:
        """The memory slices that it takes."""
        return range(self.start, self.start + self.size)


@dataclass(frozen=True)
class GpuState:
    """A GPU: what it can be cut into, and what it is cut into.

    `recut`: the driver makes partitions on it. `whole_holder`: who has it as a whole. `devices`: a device of the pool for
    each profile, and for the whole under the name `gpu`, to test selectors on.
    """

    node: str
    name: str
    product: str
    profiles: tuple[Profile, ...]
    pieces: tuple[Piece, ...] = ()
    recut: bool = True
    whole_holder: str = ""
    devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False, compare=False)

    @cached_property
    def by_name(self) -> dict[str, Profile]:
        """The profiles by name."""
        return {profile.name: profile for profile in self.profiles}

    @cached_property
    def limits(self) -> dict[str, int]:
        """What the GPU has of each counter: the most that one instance takes."""
        names = {name for profile in self.profiles for name in profile.amounts}
        return {name: max(p.amounts.get(name, 0) for p in self.profiles) for name in names}

    @cached_property
    def slices(self) -> int:
        """How many memory slices it has."""
        ends = [start + size for profile in self.profiles for start, size in profile.places]
        return max([*ends, *(piece.start + piece.size for piece in self.pieces)], default=0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be placed: counts by profile (`gpu` for whole GPUs); `same_gpu`: all of it on one GPU."""

    what: str
    mix: Mapping[str, int]
    same_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """One GPU as it would be.

    `stranded`: free slices that no profile can use any more beside these pieces. `room`: how many instances of each
    profile would still fit, of each profile alone. `whole`: it is taken as a whole.
    """

    gpu: GpuState
    pieces: tuple[Piece, ...]
    free: tuple[int, ...] = ()
    stranded: tuple[int, ...] = ()
    room: Mapping[str, int] = field(default_factory=dict)
    whole: str = ""

    @property
    def new(self) -> Counter[str]:
        """The partitions that are to be made, by profile."""
        return Counter(piece.profile for piece in self.pieces if not piece.exists)


@dataclass(frozen=True, slots=True)
class Move:
    """A partition that would have to give up its place: its holder has to end, or to start again elsewhere."""

    node: str
    gpu: str
    piece: Piece
    to_gpu: str
    to_start: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `layouts`: of every GPU that the best plan touches; `others`: further layouts of a single GPU.

    `missing`: what fits nowhere, also if everything that may move is moved.
    """

    fits: bool
    layouts: tuple[Layout, ...]
    others: tuple[Layout, ...] = ()
    moves: tuple[Move, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)
    complete: bool = True
