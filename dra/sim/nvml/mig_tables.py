"""MIG placement tables by GPU model, and the arithmetic of instances.

Confirmed against captures of real nodes: a100-40gb, h100-80gb, b200-180gb (published slices of the reference
driver), and by `nvidia-smi mig -lgip` h100-94gb, a30-24gb, h200-141gb but for 7g, of gb200-186gb 1g and 2g, of
rtx-pro-6000-96gb 1g with all ids and limits. Where a line says "not confirmed" the shape is NVIDIA's and the number
an estimate.
Source: NVIDIA MIG user guide, supported profiles; public issues of mig-parted (H200), gpu-operator (B200, GB200) and
container-engine-accelerators (RTX PRO 6000) with such listings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# NVML_GPU_INSTANCE_PROFILE_* and NVML_COMPUTE_INSTANCE_PROFILE_*: the numbers profiles are enumerated with.
KIND_1, KIND_2, KIND_3, KIND_4, KIND_7, KIND_1_REV1, KIND_2_REV1, KIND_1_REV2 = 0, 1, 2, 3, 4, 7, 8, 9
KIND_1_GFX, KIND_2_GFX, KIND_4_GFX, KIND_1_NO_ME, KIND_2_NO_ME, KIND_1_ALL_ME, KIND_2_ALL_ME = range(
    0xA, 0x11
)
COMPUTE_KINDS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
COMPUTE_1_REV1, COMPUTE_7_NVL = 7, 8


@dataclass(frozen=True, slots=True)
class GpuInstanceProfile:
    """One way to cut a GPU.

    `kind` is the enumeration number, `profile_id` the id that NVML reports and takes. `slices` are compute
    slices, `size` memory slices, `starts` the first memory slices it may begin at. `limit` is how many may
    exist at once.
    """

    kind: int
    profile_id: int
    name: str
    slices: int
    memory_mib: int
    multiprocessors: int
    copy_engines: int
    decoders: int
    jpeg_engines: int
    ofa_engines: int
    starts: tuple[int, ...]
    size: int
    limit: int


@dataclass(frozen=True, slots=True)
class ComputeInstanceProfile:
    """One way to cut a GPU instance. `creatable` is false for what is listed but refused on creation."""

    kind: int
    profile_id: int
    slices: int
    multiprocessors: int
    starts: tuple[int, ...]
    limit: int
    creatable: bool = True


@dataclass(frozen=True, slots=True)
class MigTable:
    """All profiles of a model; `slices` compute slices and `memory_slices` memory slices in all."""

    profiles: tuple[GpuInstanceProfile, ...]
    slices: int
    memory_slices: int

    def by_kind(self, kind: int) -> GpuInstanceProfile | None:
        """Give the profile that is enumerated with this number."""
        return next((profile for profile in self.profiles if profile.kind == kind), None)

    def by_id(self, profile_id: int) -> GpuInstanceProfile | None:
        """Give the profile with this id."""
        return next((profile for profile in self.profiles if profile.profile_id == profile_id), None)

    def by_name(self, name: str) -> GpuInstanceProfile | None:
        """Give the profile with this name (`1g.5gb`)."""
        return next((profile for profile in self.profiles if profile.name == name), None)

    def instance_ids(self, profile: GpuInstanceProfile) -> range:
        """Give the GPU instance ids a profile may get.

        Ids go by the share of the memory: 0 for the whole, 1–2 for halves, 3–6 for quarters, 7–14 for eighths.
        """
        parts = self.memory_slices // profile.size
        return range(parts - 1, 2 * parts - 1)


def compute_profiles(table: MigTable, profile: GpuInstanceProfile) -> tuple[ComputeInstanceProfile, ...]:
    """Give the compute instance profiles of a GPU instance, the one over all of it last but for the specials.

    Source: nvmlGpuInstanceGetComputeInstanceProfileInfo. The whole of a 7-slice instance is listed a second
    time (NVL) and cannot be created on these boards.
    """
    each = profile.multiprocessors // profile.slices
    found: list[ComputeInstanceProfile] = []
    for slices, kind in COMPUTE_KINDS.items():
        if slices > profile.slices:
            continue
        whole = slices == profile.slices
        starts = tuple(start for start in _compute_starts(slices) if start + slices <= profile.slices)
        found.append(
            ComputeInstanceProfile(
                kind, kind, slices, profile.multiprocessors if whole else each * slices, starts, len(starts)
            )
        )
    if profile.kind == KIND_1_REV1:
        found.append(
            ComputeInstanceProfile(COMPUTE_1_REV1, COMPUTE_1_REV1, 1, profile.multiprocessors, (0,), 1)
        )
    if profile.slices == 7:
        found.append(
            ComputeInstanceProfile(
                COMPUTE_7_NVL, COMPUTE_7_NVL, 7, profile.multiprocessors, (0,), 1, creatable=False
            )
        )
    return tuple(found)


def overlaps(start: int, size: int, others: Iterable[tuple[int, int]]) -> bool:
    """Say whether a placement shares a slice with one of the others."""
    return any(start < other + length and other < start + size for other, length in others)


def _compute_starts(slices: int) -> tuple[int, ...]:
    return {1: tuple(range(8)), 2: (0, 2, 4), 3: (0, 4), 4: (0,), 7: (0,)}[slices]


_ENUMERATION = (
    (KIND_1, 19, 1), (KIND_1_REV1, 20, 1), (KIND_1_REV2, 15, 1), (KIND_2, 14, 2), (KIND_3, 9, 3), (KIND_4, 5, 4),
    (KIND_7, 0, 7),
)  # fmt: skip
_PLACES = (
    (tuple(range(7)), 1, 7), (tuple(range(7)), 1, 1), ((0, 2, 4, 6), 2, 4), ((0, 2, 4), 2, 3), ((0, 4), 4, 2),
    ((0,), 4, 1), ((0,), 8, 1),
)  # fmt: skip

# gib of the five sizes 1g, 2g and big 1g, 3g and 4g, 7g -> names; then per profile: MiB, SM, CE, DEC, JPEG, OFA
_Engines = tuple[int, int, int, int, int, int]


def _eighths(gib: tuple[int, int, int, int], rows: tuple[_Engines, ...]) -> MigTable:
    """Make the table of a GPU with 7 compute and 8 memory slices."""
    names = (f"1g.{gib[0]}gb", f"1g.{gib[0]}gb+me", f"1g.{gib[1]}gb", f"2g.{gib[1]}gb", f"3g.{gib[2]}gb",
             f"4g.{gib[2]}gb", f"7g.{gib[3]}gb")  # fmt: skip
    profiles = tuple(
        GpuInstanceProfile(kind, profile_id, name, slices, *row, starts, size, limit)
        for (kind, profile_id, slices), (starts, size, limit), name, row in zip(
            _ENUMERATION, _PLACES, names, rows, strict=True
        )
    )
    return MigTable(profiles, 7, 8)


def _ampere(one: int, quarter: int, half: int, whole: int) -> tuple[_Engines, ...]:
    return (
        (one, 14, 1, 0, 0, 0), (one, 14, 1, 1, 1, 1), (quarter, 14, 1, 1, 0, 0), (quarter, 28, 2, 1, 0, 0),
        (half, 42, 3, 2, 0, 0), (half, 56, 4, 2, 0, 0), (whole, 98, 7, 5, 1, 1),
    )  # fmt: skip


def _hopper(one: int, quarter: int, half: int, whole: int) -> tuple[_Engines, ...]:
    return (
        (one, 16, 1, 1, 1, 0), (one, 16, 1, 1, 1, 1), (quarter, 26, 1, 1, 1, 0), (quarter, 32, 2, 2, 2, 0),
        (half, 60, 3, 3, 3, 0), (half, 64, 4, 4, 4, 0), (whole, 132, 8, 7, 7, 1),
    )  # fmt: skip


def _blackwell(one: int, quarter: int, half: int, whole: int, multiprocessors: int) -> tuple[_Engines, ...]:
    return (
        (one, 18, 2, 1, 1, 0), (one, 18, 2, 1, 1, 1), (quarter, 30, 2, 1, 1, 0), (quarter, 36, 4, 2, 2, 0),
        (half, 70, 6, 3, 3, 0), (half, 72, 8, 4, 4, 0), (whole, multiprocessors, 16, 7, 7, 1),
    )  # fmt: skip


_GB200: tuple[_Engines, ...] = (
    (20480, 18, 2, 1, 1, 0), (20480, 18, 2, 1, 1, 1), (46592, 32, 2, 1, 1, 0), (46592, 38, 4, 2, 2, 0),
    # Not confirmed from here on.
    (94208, 70, 6, 3, 3, 0), (94208, 76, 8, 4, 4, 0), (188928, 152, 16, 7, 7, 1),
)  # fmt: skip


def _rtx_pro_6000() -> MigTable:
    """Make the table of a GPU with four slices of each kind: with and without graphics, and media engines three ways.

    Memory and engines of 2g and 4g are not confirmed. Encoders are not counted.
    """
    one, two, four = (24192, 46, 1), (48512, 94, 2), (97280, 188, 4)  # MiB, multiprocessors, copy engines
    rows = (
        (KIND_1, 14, "1g.24gb", one, (1, 1, 0), 4), (KIND_1_REV1, 21, "1g.24gb+me", one, (1, 1, 1), 1),
        (KIND_1_GFX, 47, "1g.24gb+gfx", one, (1, 1, 0), 4), (KIND_1_ALL_ME, 65, "1g.24gb+me.all", one, (4, 4, 1), 1),
        (KIND_1_NO_ME, 67, "1g.24gb-me", one, (0, 0, 0), 4), (KIND_2, 5, "2g.48gb", two, (2, 2, 0), 2),
        (KIND_2_GFX, 35, "2g.48gb+gfx", two, (2, 2, 0), 2), (KIND_2_ALL_ME, 64, "2g.48gb+me.all", two, (4, 4, 1), 1),
        (KIND_2_NO_ME, 66, "2g.48gb-me", two, (0, 0, 0), 2), (KIND_4, 0, "4g.96gb", four, (4, 4, 1), 1),
        (KIND_4_GFX, 32, "4g.96gb+gfx", four, (4, 4, 1), 1),
    )  # fmt: skip
    profiles = tuple(
        GpuInstanceProfile(
            kind,
            profile_id,
            name,
            size[2],
            *size,
            *media,
            starts=tuple(range(0, 4, size[2])),
            size=size[2],
            limit=limit,
        )
        for kind, profile_id, name, size, media, limit in rows
    )
    return MigTable(profiles, 4, 4)


_RTX_PRO_6000 = _rtx_pro_6000()

_A30 = MigTable(
    (
        GpuInstanceProfile(KIND_1, 14, "1g.6gb", 1, 5952, 14, 1, 0, 0, 0, (0, 1, 2, 3), 1, 4),
        GpuInstanceProfile(KIND_1_REV1, 21, "1g.6gb+me", 1, 5952, 14, 1, 1, 1, 1, (0, 1, 2, 3), 1, 1),
        GpuInstanceProfile(KIND_2, 5, "2g.12gb", 2, 11968, 28, 2, 2, 0, 0, (0, 2), 2, 2),
        GpuInstanceProfile(KIND_2_REV1, 6, "2g.12gb+me", 2, 11968, 28, 2, 2, 1, 1, (0, 2), 2, 1),
        GpuInstanceProfile(KIND_4, 0, "4g.24gb", 4, 24000, 56, 4, 4, 1, 1, (0,), 4, 1),
    ),
    4,
    4,
)

MIG_TABLES: dict[str, MigTable] = {
    "a100-40gb": _eighths((5, 10, 20, 40), _ampere(4864, 9984, 20096, 40320)),
    # What drivers before 580 said of the same board (the MIG guide's table).
    "a100-40gb-before-580": _eighths((5, 10, 20, 40), _ampere(4864, 9856, 19968, 40192)),
    "a100-80gb": _eighths((10, 20, 40, 80), _ampere(9728, 19968, 40448, 81152)),  # the last two not confirmed
    "a30-24gb": _A30,
    "h100-80gb": _eighths((10, 20, 40, 80), _hopper(9984, 20096, 40448, 81152)),
    "h100-94gb": _eighths((12, 24, 47, 94), _hopper(10880, 22016, 47232, 94848)),
    "h100-96gb": _eighths((12, 24, 48, 96), _hopper(11264, 23552, 47616, 95232)),  # memory not confirmed
    # The memory of 7g is not confirmed.
    "h200-141gb": _eighths((18, 35, 71, 141), _hopper(16384, 33024, 71168, 142848)),
    "b200-180gb": _eighths((23, 45, 90, 180), _blackwell(20992, 45312, 91136, 182784, 148)),
    "gb200-186gb": _eighths((24, 47, 95, 189), _GB200),
    "rtx-pro-6000-96gb": _RTX_PRO_6000,
}


def mig_table(name: str | None, driver_version: str) -> MigTable | None:
    """Give a model's table under a driver version; None without MIG."""
    if name is None:
        return None
    branch = int(driver_version.split(".", 1)[0] or 0)
    if name == "a100-40gb" and branch < 580:  # where exactly the numbers changed is not confirmed
        name = "a100-40gb-before-580"
    return MIG_TABLES[name]
