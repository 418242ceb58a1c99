"""Find and load `libnvidia-ml.so.1` under a driver root.

The driver root may be `/`, a directory the driver container mounts later, or a layout without `usr/` (GKE). A
link never leads out of the root. What kind of root it is decides what the error says.

Source: search list of NVIDIA's container toolkit; ld.so.cache(8).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dra.errors import StackError, ValueFormatError
from dra.host.ldcache import parse_ld_cache
from dra.host.rooted import resolve
from dra.nvml.errors import LIBRARY_NOT_FOUND

LIBRARY = "libnvidia-ml.so.1"

_TRIPLES = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_BASES = ("lib64", *(f"lib/{triple}" for triple in _TRIPLES))
SEARCH_DIRS = (
    *(f"/usr/{base}" for base in _BASES),
    *(f"/usr/{base}/nvidia/current" for base in _BASES),
    *(f"/{base}" for base in _BASES),  # GKE: <root>/lib64 with no usr/
    *(f"/{base}/nvidia/current" for base in _BASES),
    "/usr/lib",
    "/lib",
    "/",
)
_WSL_DIR = "/usr/lib/wsl/lib"
# e_machine of ELF. Source: elf(5).
_MACHINES = {"x86_64": 62, "aarch64": 183}
_THIS_MACHINE = platform.machine()


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A library on disk. Two that compare equal are the same file, unchanged.

    `inside` is the path in the driver root, `real` the resolved file as this process sees it.
    """

    inside: str
    real: Path
    device: int
    inode: int
    changed_ns: int
    size: int


class LibrarySource(Protocol):
    """Where the NVML library object comes from."""

    def fingerprint(self) -> object:
        """Give a value that changes when `load` would give another library. Cheap.

        Raises:
            StackError: there is none.
        """
        ...

    def load(self) -> object:
        """Give the library: attributes are the `nvml*` functions.

        Raises:
            StackError: there is none, or it cannot be loaded.
        """
        ...


class RootedLibrary:
    """The library of the first driver root that has one; looked for anew at each call.

    Args:
        roots: driver roots as this process sees them.
        machine: the processor a library must be for; None: any.
        load: how to get the library object of the file.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        machine: str | None = _THIS_MACHINE,
        load: Callable[[LibraryFile], object] | None = None,
    ) -> None:
        self._roots = tuple(dict.fromkeys(roots))
        self._machine = machine
        self._load = load or load_library

    def fingerprint(self) -> LibraryFile:
        """Give the file that `load` would load."""
        return find_library(self._roots, machine=self._machine)

    def load(self) -> object:
        """Load the library."""
        return self._load(self.fingerprint())


class InjectedLibrary:
    """A library object that a callable gives: the simulated NVML."""

    def __init__(self, give: Callable[[], object]) -> None:
        self._give = give

    def fingerprint(self) -> object:
        """Give the object's identity."""
        return id(self.load())

    def load(self) -> object:
        """Ask for the object. An OSError means what it means from dlopen."""
        try:
            return self._give()
        except OSError as error:
            raise StackError(
                LIBRARY_NOT_FOUND,
                f"{LIBRARY} was not found: {error}",
                remedy="Install the NVIDIA driver's libraries.",
            ) from error


def find_library(roots: Sequence[Path], *, machine: str | None = _THIS_MACHINE) -> LibraryFile:
    """Give the library of the first root that has one for this machine.

    Raises:
        StackError: DRA-NVML-LIBRARY-NOT-FOUND, -ROOT-MISSING, -LIBRARY-BAD, -WSL, -TEGRA.
    """
    errors: list[StackError] = []
    for root in roots:
        try:
            return _find_in(root, machine)
        except StackError as error:
            errors.append(error)
    # With several roots the most telling: one that exists says more than one that does not.
    errors.sort(key=lambda error: error.code == "DRA-NVML-ROOT-MISSING")
    raise errors[0] if errors else StackError(LIBRARY_NOT_FOUND, "no driver root was given")


def _find_in(root: Path, machine: str | None) -> LibraryFile:
    if not root.is_dir():
        raise StackError(
            "DRA-NVML-ROOT-MISSING",
            f"the driver root {root} does not exist",
            remedy="Check --nvidia-driver-root and the mount of it in the pod; a driver container makes it when it is up.",
        )
    unfit: list[str] = []
    for inside in _candidates(root):
        real = resolve(root, inside)
        if real is None:
            continue
        why = _unfit(real, machine)
        if why is None:
            return _describe(inside, real)
        unfit.append(f"{inside} {why}")
    raise _not_found(root, unfit)


def _candidates(root: Path) -> list[str]:
    found = [f"{folder.rstrip('/')}/{LIBRARY}" for folder in SEARCH_DIRS]
    cache = resolve(root, "/etc/ld.so.cache")
    if cache is not None:
        with contextlib.suppress(OSError, ValueFormatError):
            # Which entry is for this machine is seen at the file itself.
            found += [entry.path for entry in parse_ld_cache(cache.read_bytes()) if entry.soname == LIBRARY]
    return list(dict.fromkeys(found))


def _unfit(path: Path, machine: str | None) -> str | None:
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return "is not an ELF file"
    if header[4] != 2:
        return "is a 32-bit library"
    wanted = _MACHINES.get(machine or "")
    if wanted is not None and int.from_bytes(header[18:20], "little") != wanted:
        return "is for another processor"
    return None


def _describe(inside: str, real: Path) -> LibraryFile:
    status = real.stat()
    return LibraryFile(inside, real, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _not_found(root: Path, unfit: list[str]) -> StackError:
    if resolve(root, f"{_WSL_DIR}/{LIBRARY}") is not None or resolve(root, "/dev/dxg") is not None:
        return StackError(
            "DRA-NVML-WSL",
            f"the driver root {root} is WSL2's ({_WSL_DIR}), which this driver does not support",
            remedy="Use a Linux machine with the NVIDIA kernel module; WSL2 has one paravirtual device and no NVML indices.",
            retryable=False,
        )
    if resolve(root, "/etc/nv_tegra_release") is not None:
        return StackError(
            "DRA-NVML-TEGRA",
            f"the driver root {root} is a Tegra system's, which this driver does not support",
            remedy="Integrated Tegra GPUs need NVIDIA's CSV-based injection.",
            retryable=False,
        )
    if unfit:
        return StackError(
            "DRA-NVML-LIBRARY-BAD",
            f"no usable {LIBRARY} under the driver root {root}: {'; '.join(unfit)}",
            remedy="Install the 64-bit NVIDIA driver of this machine's architecture again.",
        )
    empty = next(root.iterdir(), None) is None if os.access(root, os.R_OK) else False
    state = f"the driver root {root} is empty" if empty else f"{LIBRARY} is not under the driver root {root}"
    return StackError(
        LIBRARY_NOT_FOUND,
        f"{state}; searched {', '.join(SEARCH_DIRS)} and etc/ld.so.cache",
        remedy="Wait for the GPU operator's driver pod, install the NVIDIA driver on the node, or set "
        "--nvidia-driver-root to the directory that holds it (/run/nvidia/driver, /home/kubernetes/bin/nvidia).",
    )


_loaded: dict[str, LibraryFile] = {}
_keep_open: list[int] = []
_load_lock = threading.Lock()


def load_library(file: LibraryFile) -> ctypes.CDLL:
    """Load exactly this file.

    The loader answers by name: a path that was loaded before gives the old library even when the file behind it
    was replaced. Such a file is loaded through a descriptor of its own, which stays open so that its name is
    never used again. A library is never unloaded: a hung call may still be in it.

    Raises:
        StackError: DRA-NVML-LIBRARY-BAD.

    Source: dlopen(3); glibc compares the name before device and inode.
    """
    with _load_lock:
        name = str(file.real)
        before = _loaded.get(name)
        try:
            if before is not None and (before.device, before.inode) != (file.device, file.inode):
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                _keep_open.append(descriptor)
                library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            else:
                library = ctypes.CDLL(name)
        except OSError as error:
            raise StackError(
                "DRA-NVML-LIBRARY-BAD",
                f"{name} cannot be loaded: {error}",
                remedy="Install the NVIDIA driver again; in a container the image must be based on glibc, not musl.",
            ) from error
        _loaded.setdefault(name, file)
        return library
