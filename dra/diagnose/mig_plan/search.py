"""From GPUs and what is wanted to a plan: where everything goes, or what would have to move first. Pure.

Several GPUs: the largest first, on GPUs that are cut already before whole ones. It is a search with a limit on its
steps; a plan that it finds is right, and `complete` says whether it looked at everything where it found none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dra.diagnose.mig_plan.layouts import MOST_LAYOUTS, best, layouts, rank
from dra.diagnose.mig_plan.model import WHOLE, GpuState, Layout, Move, Piece, Plan, Wanted

MOST_STEPS = 20_000
# Partitions that are moved at once, at most.
MOST_MOVES = 4
_OTHERS = 4

# Indivisible units: what goes on one GPU together.
_Unit = tuple[tuple[str, int], ...]


class _Stop(Exception):  # noqa: N818 - ends a search, no error
    pass


def make_plan(gpus: Sequence[GpuState], wanted: Sequence[Wanted], *, most_moves: int = MOST_MOVES) -> Plan:
    """Plan everything that is wanted.

    Args:
        gpus: what there is. A GPU that somebody has as a whole takes nothing.
        wanted: what is to be placed.
        most_moves: how many partitions may move at once; 0: none.
    """
    units = _units(wanted)
    steps = [MOST_STEPS]
    try:
        found = _assign(gpus, units, steps)
        if found is not None:
            return Plan(True, found, others=_others(units, found))
        for count in range(1, most_moves + 1):
            for moved in itertools.combinations(_movable(gpus), count):
                plan = _with_moves(gpus, units, moved, steps)
                if plan is not None:
                    return plan
        complete = most_moves >= len(_movable(gpus))
    except _Stop:
        complete = False
    missing, placed = _as_much_as_fits(gpus, units)
    return Plan(False, placed, missing=missing, complete=complete)


def _units(wanted: Iterable[Wanted]) -> list[_Unit]:
    units: list[_Unit] = []
    for each in wanted:
        if each.same_gpu:
            units.append(tuple(sorted(each.mix.items())))
        else:
            units += [((name, 1),) for name, count in each.mix.items() for _ in range(count)]
    return units


def _size(unit: _Unit, gpus: Sequence[GpuState]) -> int:
    def of(name: str) -> int:
        return next((gpu.by_name[name].size for gpu in gpus if name in gpu.by_name), 0)

    return 99 if unit[0][0] == WHOLE else sum(of(name) * count for name, count in unit)


def _assign(gpus: Sequence[GpuState], units: Sequence[_Unit], steps: list[int]) -> tuple[Layout, ...] | None:
    """Find a GPU for each unit; None if there is none."""
    ordered = sorted(units, key=lambda unit: (-_size(unit, gpus), unit))
    order = sorted(range(len(gpus)), key=lambda index: (not gpus[index].pieces, index))
    mixes: list[Counter[str]] = [Counter() for _ in gpus]

    def place(number: int) -> bool:
        steps[0] -= 1
        if steps[0] < 0:
            raise _Stop
        if number == len(ordered):
            return True
        tried: set[tuple[object, ...]] = set()
        for index in order:
            gpu, mix = gpus[index], mixes[index]
            state = (gpu.profiles, gpu.pieces, gpu.recut, bool(gpu.whole_holder), tuple(sorted(mix.items())))
            if state in tried:
                continue  # such a GPU was tried
            tried.add(state)
            more = mix + Counter(dict(ordered[number]))
            if _fits(gpu, more):
                mixes[index] = more
                if place(number + 1):
                    return True
                mixes[index] = mix
        return False

    if not place(0):
        return None
    return tuple(_layout(gpu, mix) for gpu, mix in zip(gpus, mixes, strict=True) if mix)


def _fits(gpu: GpuState, mix: Counter[str]) -> bool:
    if gpu.whole_holder:
        return False
    if mix[WHOLE]:
        return sum(mix.values()) == 1 and not gpu.pieces and WHOLE in gpu.devices
    return best(gpu, gpu.pieces, mix) is not None


def _layout(gpu: GpuState, mix: Counter[str]) -> Layout:
    if mix[WHOLE]:
        return Layout(gpu, (), whole="(this plan)")
    found = best(gpu, gpu.pieces, mix)
    if found is None:
        raise AssertionError("it was found before")
    return found


def _others(units: Sequence[_Unit], found: Sequence[Layout]) -> tuple[Layout, ...]:
    """Give further layouts, where all goes on one GPU."""
    if len(found) != 1 or found[0].whole:
        return ()
    gpu = found[0].gpu
    mix: Counter[str] = Counter()
    for unit in units:
        mix.update(dict(unit))
    every = itertools.islice(layouts(gpu, gpu.pieces, mix), MOST_LAYOUTS)
    ranked = sorted((layout for layout in every if layout.pieces != found[0].pieces), key=rank)
    return tuple(ranked[:_OTHERS])


def _movable(gpus: Sequence[GpuState]) -> list[tuple[int, Piece]]:
    return [
        (index, piece)
        for index, gpu in enumerate(gpus)
        if gpu.recut and not gpu.whole_holder
        for piece in gpu.pieces
        if not piece.fixed
    ]


def _with_moves(
    gpus: Sequence[GpuState], units: Sequence[_Unit], moved: Sequence[tuple[int, Piece]], steps: list[int]
) -> Plan | None:
    without = [
        replace(gpu, pieces=tuple(piece for piece in gpu.pieces if (index, piece) not in moved))
        for index, gpu in enumerate(gpus)
    ]
    again: list[_Unit] = [((piece.profile, 1),) for _, piece in moved]
    found = _assign(without, [*units, *again], steps)
    if found is None:
        return None
    return Plan(True, found, moves=tuple(_moves(gpus, moved, found)))


def _moves(
    gpus: Sequence[GpuState], moved: Sequence[tuple[int, Piece]], found: Sequence[Layout]
) -> Iterator[Move]:
    """Say where each goes: to the last of the new places of its profile, at home if there is one."""
    places: dict[str, list[tuple[str, str, int]]] = {}
    for layout in found:
        for piece in layout.pieces:
            if not piece.exists:
                places.setdefault(piece.profile, []).append((layout.gpu.node, layout.gpu.name, piece.start))
    for index, piece in moved:
        home = (gpus[index].node, gpus[index].name)
        open_places = places[piece.profile]
        here = [place for place in open_places if place[:2] == home]
        goal = (here or open_places)[-1]
        open_places.remove(goal)
        if goal != (*home, piece.start):
            yield Move(*home, piece, goal[1] if goal[0] == home[0] else f"{goal[0]}/{goal[1]}", goal[2])


def _as_much_as_fits(
    gpus: Sequence[GpuState], units: Sequence[_Unit]
) -> tuple[Mapping[str, int], tuple[Layout, ...]]:
    mixes: list[Counter[str]] = [Counter() for _ in gpus]
    missing: Counter[str] = Counter()
    for unit in sorted(units, key=lambda each: (-_size(each, gpus), each)):
        for index, gpu in enumerate(gpus):
            more = mixes[index] + Counter(dict(unit))
            if _fits(gpu, more):
                mixes[index] = more
                break
        else:
            missing.update(dict(unit))
    return dict(missing), tuple(_layout(gpu, mix) for gpu, mix in zip(gpus, mixes, strict=True) if mix)
