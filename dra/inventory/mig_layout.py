"""Where the partitions of a wanted mix lie on a GPU. Pure.

place_layout(gpu, (("1g.10gb", 4), ("3g.40gb", 1)))  ->  ((3g profile, 0, 4), (1g profile, 4, 1), ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dra.errors import ConfigError
from dra.inventory.model import Gpu, MigProfile
from dra.inventory.names import GpuName, profile_slug

Place = tuple[MigProfile, int, int]
# More steps than the fullest table takes; a table that needs more is none of a GPU.
_MAX_STEPS = 100_000


def place_layout(
    gpu: Gpu, wanted: Iterable[tuple[str, int]], *, keep: Sequence[Place] = ()
) -> tuple[Place, ...]:
    """Give (profile, start, size in memory slices) of each wanted partition, ordered by start.

    Args:
        gpu: with its profiles and their placements, as NVML gives them.
        wanted: (profile, number); `1g.10gb`, whatever the case.
        keep: places that are tried first: what stands there need not be made anew.

    Raises:
        ConfigError: DRA-MIG-PROFILE: the GPU has no such profile; DRA-MIG-LAYOUT: they do not fit beside each other.
    """
    profiles = {profile_slug(each.name): each for each in gpu.mig_profiles}
    pieces: list[MigProfile] = []
    for name, number in wanted:
        profile = profiles.get(profile_slug(name))
        if profile is None:
            known = ", ".join(each.name for each in gpu.mig_profiles) or "none"
            raise ConfigError(
                "DRA-MIG-PROFILE",
                f"{GpuName(gpu.minor)} ({gpu.product_name}) has no MIG profile {name}",
                remedy=f"It has {known}.",
            )
        pieces += [profile] * number
    # What is large has the fewest places.
    pieces.sort(key=lambda each: (-_size(each), len(each.placements), each.profile_id))
    kept = {(profile.profile_id, start) for profile, start, _ in keep}
    found = _search(pieces, kept)
    if found is None:
        raise ConfigError(
            "DRA-MIG-LAYOUT",
            f"{' + '.join(f'{number} x {name}' for name, number in wanted)} do not fit on "
            f"{GpuName(gpu.minor)} ({gpu.product_name})",
            remedy="`dra mig plan` shows the layouts that do.",
        )
    return tuple(sorted(found, key=lambda place: place[1]))


def _size(profile: MigProfile) -> int:
    return max((size for _, size in profile.placements), default=0)


def _search(pieces: Sequence[MigProfile], kept: set[tuple[int, int]]) -> list[Place] | None:
    """Find places that do not overlap, by trying; equal pieces in order of their places, so that none is tried twice."""
    chosen: list[Place] = []
    steps = 0

    def free(start: int, size: int) -> bool:
        return all(start >= other + length or other >= start + size for _, other, length in chosen)

    def rank(profile: MigProfile, place: tuple[int, int]) -> tuple[bool, int]:
        # From the end, where the odd slice is that only the smallest can use.
        return (profile.profile_id, place[0]) not in kept, -place[0]

    def fill(at: int, after: int) -> bool:
        nonlocal steps
        steps += 1
        if at == len(pieces):
            return True
        if steps > _MAX_STEPS:
            return False
        profile = pieces[at]
        places = sorted(profile.placements, key=lambda place: rank(profile, place))
        for index in range(after, len(places)):
            start, size = places[index]
            if not free(start, size):
                continue
            chosen.append((profile, start, size))
            same = at + 1 < len(pieces) and pieces[at + 1] is profile
            if fill(at + 1, index + 1 if same else 0):
                return True
            chosen.pop()
        return False

    return chosen if fill(0, 0) else None
