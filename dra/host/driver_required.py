"""The two libraries without which a driver is not whole: libcuda for CUDA, libnvidia-ml for NVML.

Decides what to make of a root in which one of them does not stand with the driver's version in its name. On a real
node another version means that the driver was replaced under a loaded module; a rig with a stand-in for NVML has what
it has, and is given to containers as it is. Pure, but for the errors' texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dra.errors import StackError
from dra.host.driver_lists import COMPUTE, UTILITY
from dra.host.paths import HostPaths

CUDA, NVML = "cuda", "nvidia-ml"
_NEEDED_BY = {CUDA: COMPUTE, NVML: UTILITY}

INSTALL_REMEDY = (
    "Install the NVIDIA driver on the node, or set --nvidia-driver-root to where it is "
    "(/run/nvidia/driver with the GPU operator, /home/kubernetes/bin/nvidia on GKE)."
)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One of the two libraries as it was found: the real file inside the root, and the version in its name, if any."""

    stem: str
    path: str
    seen_in: str
    version: str


@dataclass(frozen=True, slots=True)
class StandIns:
    """What to take for libraries that do not stand with the driver's version.

    `taken` are given to containers as they are; `others` are versions that forbid it: the driver was replaced.
    """

    taken: tuple[OnDisk, ...] = ()
    others: tuple[str, ...] = ()


def required_stems(capabilities: Collection[str]) -> tuple[str, ...]:
    """Give the libraries that containers with these capabilities cannot do without."""
    return tuple(stem for stem, capability in _NEEDED_BY.items() if capability in capabilities)


def plan_stand_ins(
    version: str,
    kernel_version: str,
    *,
    lacking: Collection[str],
    refused: Collection[str],
    on_disk: Sequence[OnDisk],
) -> StandIns:
    """Decide about the libraries that are not there with `version` in their name (`lacking`).

    `version` is NVML's, or the loaded module's where NVML does not answer; `kernel_version` the loaded module's,
    empty if there is none. Another version on disk is a mismatch for those in `refused`, with two exceptions: a file
    without a version in its name tells nothing of the driver, and a libnvidia-ml of a version that no loaded module
    has cannot be NVIDIA's, which would not answer; so it is a stand-in. A libcuda of another version is always a
    mismatch: CUDA refuses to start with it.
    """
    taken: list[OnDisk] = []
    others: dict[str, None] = {}
    for stem in lacking:
        here = [one for one in on_disk if one.stem == stem]
        plain = [one for one in here if not one.version]
        foreign = [one for one in here if one.version and one.version != version]
        if not foreign:
            taken += plain[:1]
        elif stem == NVML and kernel_version != version:
            taken += (plain or foreign)[:1]
        elif stem in refused:
            others |= dict.fromkeys(one.version for one in foreign)
    return StandIns(() if others else tuple(taken), tuple(others))


def missing_names(lacking: Collection[str], version: str) -> tuple[str, ...]:
    """Give the file names under which libraries were looked for in vain."""
    return tuple(f"lib{stem}.so.{version or '1'}" for stem in lacking)


def mismatch_error(
    paths: HostPaths, version: str, others: Sequence[str], *, kernel_version: str
) -> StackError:
    """Give the error for libraries of other versions than the one that NVML or the loaded module says."""
    if kernel_version == version:
        says = f"the loaded driver is version {version}"
        remedy = (
            "The driver was replaced while its kernel modules stayed loaded: reload the nvidia modules, "
            "or reboot the node."
        )
    else:
        module = f"the loaded module is version {kernel_version}" if kernel_version else "no module is loaded"
        says = f"NVML reports driver version {version} ({module})"
        remedy = (
            "On a node with a GPU reload the nvidia modules, or reboot the node. With a stand-in for NVML, name the "
            f"libraries by the version it reports (libcuda.so.{version}), or let it report theirs."
        )
    return StackError(
        "DRA-DRIVER-VERSION-MISMATCH",
        f"{says}, but the libraries under the driver root {paths.driver_root_host} "
        f"are of version {', '.join(others)}",
        remedy=remedy,
        driver_version=version,
        found=list(others),
    )


def missing_error(paths: HostPaths, searched: Sequence[str], what: str, *, remedy: str = "") -> StackError:
    """Give the error for libraries that are not there, with all places that were looked at."""
    seen = "" if str(paths.driver_root) == paths.driver_root_host else f" (seen at {paths.driver_root})"
    return StackError(
        "DRA-DRIVER-LIBRARIES-MISSING",
        f"no {what} under the driver root {paths.driver_root_host}{seen}; searched {', '.join(searched)}",
        remedy=remedy or INSTALL_REMEDY,
        driver_root=paths.driver_root_host,
    )
