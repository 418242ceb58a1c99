"""Device names: what a ResourceSlice lists, a claim's allocation holds and a CDI id ends in.

The scheme is NVIDIA's: `gpu-<minor>` and `gpu-<minor>-mig-<profile>-<profile id>-<start>`, where the profile is
lower-cased, loses its dots and has `-` for every other character that a DNS label does not allow; and
`gpu-vfio-<index>` for a GPU that is passed through, by its place on the bus: its minor is the NVIDIA driver's to give.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GPU = re.compile(r"gpu-(\d+)", re.ASCII)
_MIG = re.compile(r"gpu-(\d+)-mig-(.+)-(\d+)-(\d+)", re.ASCII)
_VFIO = re.compile(r"gpu-vfio-(\d+)", re.ASCII)
# Up to v25.8 NVIDIA's driver wrote profile id, start and size; a profile's own name has letters.
_OLD_MIG = re.compile(r"gpu-(\d+)-mig-(\d+)-(\d+)-\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class GpuName:
    """A whole GPU by its minor number."""

    minor: int

    def __str__(self) -> str:
        """Give the device name."""
        return f"gpu-{self.minor}"


@dataclass(frozen=True, slots=True)
class MigName:
    """A MIG placement: the GPU's minor, the profile as it stands in names, its id and the first memory slice.

    `profile` is empty in names of old claims, which have its id only.
    """

    minor: int
    profile: str
    profile_id: int
    start: int

    def __str__(self) -> str:
        """Give the device name."""
        return f"gpu-{self.minor}-mig-{self.profile}-{self.profile_id}-{self.start}"


@dataclass(frozen=True, slots=True)
class VfioName:
    """A GPU that is passed through, by its position among the GPUs on the bus."""

    index: int

    def __str__(self) -> str:
        """Give the device name."""
        return f"gpu-vfio-{self.index}"


def profile_slug(profile: str) -> str:
    """Give a profile as it stands in device names: `1g.12gb+me` -> `1g12gb-me`."""
    return re.sub(r"[^a-z0-9]", "-", profile.lower().replace(".", ""))


def is_profile(name: MigName, profile: str) -> bool:
    """Whether a name may stand for a profile (`1g.5gb`) as far as the profile's own name goes."""
    return name.profile in ("", profile_slug(profile))


def parse_vfio_name(name: str) -> VfioName | None:
    """Read the name of a GPU that is passed through; None if it is not one."""
    match = _VFIO.fullmatch(name)
    return VfioName(int(match[1])) if match else None


def parse_device_name(name: str) -> GpuName | MigName | None:
    """Read the name of a GPU or a partition; None if it is neither."""
    if match := _GPU.fullmatch(name):
        return GpuName(int(match[1]))
    if match := _OLD_MIG.fullmatch(name):
        return MigName(int(match[1]), "", int(match[2]), int(match[3]))
    if match := _MIG.fullmatch(name):
        return MigName(int(match[1]), match[2], int(match[3]), int(match[4]))
    return None
