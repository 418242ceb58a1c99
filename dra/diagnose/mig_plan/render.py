"""A plan as JSON, as a table, and as a picture of the memory slices. Pure; nothing here prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dra.diagnose.mig_plan.model import Layout, Move, Piece, Plan, Wanted

COLUMNS = ("GPU", "PARTITION", "SLICES", "STATE", "HOLDER")
_FREE, _STRANDED = ".", "x"


def as_json(plan: Plan, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """Give the whole answer. Keys stay; new ones may be added."""
    return {
        "wanted": [{"for": each.what, "mix": dict(each.mix), "sameGpu": each.same_gpu} for each in wanted],
        "fits": plan.fits,
        "complete": plan.complete,
        "missing": dict(plan.missing),
        "layouts": [_layout_json(layout) for layout in plan.layouts],
        "otherLayouts": [_layout_json(layout) for layout in plan.others],
        "moves": [_move_json(move) for move in plan.moves],
        "strandedSlices": sum(len(layout.stranded) for layout in plan.layouts),
    }


def _layout_json(layout: Layout) -> dict[str, Any]:
    return {
        "node": layout.gpu.node,
        "gpu": layout.gpu.name,
        "product": layout.gpu.product,
        "memorySlices": layout.gpu.slices,
        "whole": bool(layout.whole),
        "partitions": [
            {
                "profile": piece.profile,
                "placement": {"start": piece.start, "size": piece.size},
                "exists": piece.exists,
                "madeByHand": piece.fixed,
                "holder": piece.holder or None,
            }
            for piece in layout.pieces
        ],
        "freeSlices": list(layout.free),
        "strandedSlices": list(layout.stranded),
        "room": dict(layout.room),
    }


def _move_json(move: Move) -> dict[str, Any]:
    return {
        "node": move.node,
        "gpu": move.gpu,
        "profile": move.piece.profile,
        "start": move.piece.start,
        "holder": move.piece.holder or None,
        "toGpu": move.to_gpu,
        "toStart": move.to_start,
    }


def summary(plan: Plan) -> str:
    """Give the answer in a line or two."""
    if plan.fits and not plan.moves:
        gpus = len(plan.layouts)
        return f"It fits on {gpus} GPU{'s' if gpus != 1 else ''}."
    if plan.fits:
        lines = [
            f"It fits once {len(plan.moves)} partition{'s have' if len(plan.moves) != 1 else ' has'} moved:"
        ]
        for move in plan.moves:
            holder = f" of {move.piece.holder}" if move.piece.holder else ""
            lines.append(
                f"  {move.node}/{move.gpu}: {move.piece.profile} at slice {move.piece.start}{holder} "
                f"-> {move.to_gpu} at slice {move.to_start}"
            )
        return "\n".join(lines)
    missing = ", ".join(f"{count} x {name}" for name, count in plan.missing.items())
    more = "" if plan.complete else " (not every way of moving partitions was tried)"
    return f"It does not fit: no place for {missing or 'all of it together'}{more}."


def rows(layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """Give the table's rows under `COLUMNS`."""
    found: list[tuple[str, ...]] = []
    for layout in layouts:
        gpu = f"{layout.gpu.node}/{layout.gpu.name}"
        if layout.whole:
            found.append((gpu, "whole GPU", "all", "new", layout.whole))
        found += [(gpu, p.profile, _span(p), _state(p), p.holder or "-") for p in layout.pieces]
        if layout.free:
            found.append((gpu, "free", ",".join(map(str, layout.free)), _free_state(layout), _room(layout)))
    return found


def picture(layouts: Sequence[Layout]) -> list[str]:
    """Draw the memory slices of each GPU: what lies on which; `.` is free, `x` free and of no use any more."""
    lines: list[str] = []
    for layout in layouts:
        lines += [f"{layout.gpu.node}/{layout.gpu.name}  {layout.gpu.product}", *_drawing(layout)]
    return lines


def _drawing(layout: Layout) -> list[str]:
    width = max([6, *(-(-(len(piece.profile) + 3) // piece.size) for piece in layout.pieces)])
    head = "  slice " + "".join(f"{number:^{width}}" for number in range(layout.gpu.slices))
    if layout.whole:
        return [head, "        " + _box("whole GPU", layout.gpu.slices, width)]
    starts = {piece.start: piece for piece in layout.pieces}
    parts, number = [], 0
    while number < layout.gpu.slices:
        piece = starts.get(number)
        if piece is None:
            parts.append(f"{_STRANDED if number in layout.stranded else _FREE:^{width}}")
            number += 1
        else:
            parts.append(_box(piece.profile + ("" if piece.exists else "*"), piece.size, width))
            number += piece.size
    return [head.rstrip(), "        " + "".join(parts).rstrip()]


def _box(text: str, size: int, width: int) -> str:
    return f"[{text[: size * width - 2]:^{size * width - 2}}]"


def _span(piece: Piece) -> str:
    return str(piece.start) if piece.size == 1 else f"{piece.start}-{piece.start + piece.size - 1}"


def _state(piece: Piece) -> str:
    if not piece.exists:
        return "new"
    return "by hand" if piece.fixed else "in use" if piece.holder else "free"


def _free_state(layout: Layout) -> str:
    count = len(layout.stranded)
    return f"{count} stranded" if count else "usable"


def _room(layout: Layout) -> str:
    return ", ".join(f"{count} x {name}" for name, count in layout.room.items()) or "-"
