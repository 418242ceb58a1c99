"""Looking a driver's files up under its root, the way the loader, the shell and the kernel would.

Every look-up happens inside the root (`dra.host.rooted`) and is recorded: the directories that were read become the
fingerprint under which a result may be kept, and the list that an error shows.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from posixpath import basename, dirname

from dra.errors import ValueFormatError
from dra.host.driver_lists import LIBRARY_DIRS, PLAIN_LIBRARY_DIRS
from dra.host.driver_required import CUDA, NVML, OnDisk
from dra.host.elf import read_elf
from dra.host.ldcache import parse_ld_cache
from dra.host.rooted import resolve_inside

# A library with the driver's version behind `.so.`; two numbers at least, so that `libcuda.so.1` is none.
_VERSIONED = re.compile(r"lib[A-Za-z0-9_+.-]+?\.so\.(\d+\.\d+(?:\.\d+)*)", re.ASCII)
# Libraries of the driver that count their own versions.
_OWN_VERSION = re.compile(r"lib(?:nvidia-egl-[a-z0-9]+|nvidia-nvvm70)\.so\.\d+\.\d+(?:\.\d+)*", re.ASCII)
_MACHINES = ("x86_64", "aarch64")


class RootSearch:
    """One search through a driver root. Not for use by several threads.

    `searched` lists what was looked at, in order; `watched` the directories (as this process sees them) whose change
    may change an answer.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.searched: list[str] = []
        self.watched: dict[str, None] = {}
        self._listings: dict[str, tuple[str, ...]] = {}

    def real(self, inside: str) -> str | None:
        """Give the real path, inside the root, of a path inside the root."""
        return resolve_inside(self.root, inside)

    def view(self, inside: str) -> str:
        """Give where this process sees a path inside the root."""
        return self.root + inside if inside != "/" else self.root or "/"

    def list_dir(self, inside: str) -> tuple[str, ...]:
        """Give the names in a real directory, sorted; nothing if it cannot be read."""
        if inside not in self._listings:
            view = self.view(inside)
            self.watched[view] = None
            try:
                names = os.listdir(view)  # noqa: PTH208 - names, not paths
                # A name that is no text cannot stand in a spec, and is none of the driver's.
                self._listings[inside] = tuple(sorted(name for name in names if name.isprintable()))
            except OSError:
                self._listings[inside] = ()
        return self._listings[inside]

    def find(self, inside: str) -> str | None:
        """Give the real path of what stands at `inside`, and watch for its coming."""
        self._note(inside)
        real = self.real(inside)
        if real is None:
            self._watch_nearest(dirname(inside))
        else:
            # What a link on the way leads to may change in either place.
            self._watch_nearest(dirname(inside))
            self.watched[self.view(dirname(real))] = None
        return real

    def glob(self, directory: str, pattern: str) -> list[str]:
        """Give the names in `directory` that match a shell pattern."""
        self._note(f"{directory.rstrip('/')}/{pattern}")
        real = self.real(directory)
        if real is None:
            self._watch_nearest(directory)
            return []
        return [name for name in self.list_dir(real) if fnmatch.fnmatchcase(name, pattern)]

    def kind(self, inside: str) -> int:
        """Give the mode of a real path (0 if it is gone)."""
        try:
            return os.lstat(self.view(inside)).st_mode
        except OSError:
            return 0

    def library_dirs(self, version: str, machine: str) -> tuple[str, ...]:
        """Give the distinct real directories that hold libraries of this version: usual ones, else the loader's cache.

        Empty if there are none.
        """
        for stage in (LIBRARY_DIRS, PLAIN_LIBRARY_DIRS):
            found = self._dirs_with(stage, version)
            if found:
                return found
        return self._dirs_with(self._cached_dirs(machine), version)

    def required_on_disk(self, machine: str, version: str) -> tuple[OnDisk, ...]:
        """Give libcuda and libnvidia-ml in the root's directories, each file once: of any version, or as `.so.1`.

        `version` is that which is looked for; it only shows in `searched`.
        """
        found: dict[str, OnDisk] = {}
        for directory in (*LIBRARY_DIRS, *PLAIN_LIBRARY_DIRS, *self._cached_dirs(machine)):
            self._note(f"{directory.rstrip('/')}/lib*.so.{version or '*'}")
            real = self.real(directory)
            if real is None:
                self._watch_nearest(directory)
                continue
            for name in self.list_dir(real):
                stem = next((stem for stem in (CUDA, NVML) if name.startswith(f"lib{stem}.so.")), "")
                if not stem or not (name == f"lib{stem}.so.1" or _VERSIONED.fullmatch(name)):
                    continue
                target = self.real(f"{real.rstrip('/')}/{name}")
                if target is None or target in found or not stat.S_ISREG(self.kind(target)):
                    continue
                if not self._is_32_bit(target):
                    match = _VERSIONED.fullmatch(basename(target))
                    found[target] = OnDisk(stem, target, real, match[1] if match else "")
        return tuple(found.values())

    def libraries_in(self, directory: str, version: str) -> list[str]:
        """Give the names of the driver's libraries in a real directory: with its version, or with their own."""
        suffix = f".so.{version}"
        return [
            name
            for name in self.list_dir(directory)
            if (name.startswith("lib") and name.endswith(suffix)) or _OWN_VERSION.fullmatch(name)
        ]

    def _dirs_with(self, directories: tuple[str, ...], version: str) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for directory in directories:
            self._note(f"{directory.rstrip('/')}/lib*.so.{version}")
            real = self.real(directory)
            if real is None:
                self._watch_nearest(directory)
                continue
            suffix = f".so.{version}"
            for name in self.list_dir(real):
                if not (name.startswith("lib") and name.endswith(suffix)):
                    continue
                target = self.real(f"{real.rstrip('/')}/{name}")
                if target is not None and not self._is_32_bit(target):
                    found[dirname(target) or "/"] = None
        return tuple(found)

    def _is_32_bit(self, inside: str) -> bool:
        facts = read_elf(self.view(inside))
        return facts is not None and facts.bits != 64

    def _cached_dirs(self, machine: str) -> tuple[str, ...]:
        """Give the directories of NVIDIA's libraries in the root's loader cache."""
        self._note("/etc/ld.so.cache")
        real = self.find("/etc/ld.so.cache")
        if real is None:
            return ()
        try:
            with open(self.view(real), "rb") as file:  # noqa: PTH123 - paths are text here
                entries = parse_ld_cache(file.read())
        except OSError as error:
            self.searched[-1] += f" ({error.strerror})"
            return ()
        except ValueFormatError as error:
            self.searched[-1] += f" ({error.message})"
            return ()
        found: dict[str, dict[str, None]] = {}
        for entry in entries:
            if entry.machine in _MACHINES and entry.soname.startswith(("libcuda.so", "libnvidia-")):
                target = self.real(entry.path)
                if target is not None:
                    found.setdefault(entry.machine, {})[dirname(target)] = None
        # Another machine's only where there are none of ours: the root of a simulated node.
        chosen = found.get(machine) or next((found[name] for name in _MACHINES if name in found), {})
        return tuple(chosen)

    def _note(self, what: str) -> None:
        if what not in self.searched:
            self.searched.append(what)

    def _watch_nearest(self, inside: str) -> None:
        """Watch a directory, or the nearest one above it that exists: its coming changes that one."""
        while inside not in ("", "/"):
            real = self.real(inside)
            if real is not None:
                self.watched[self.view(real)] = None
                return
            inside = dirname(inside)
        self.watched[self.view("/")] = None


def is_executable(mode: int) -> bool:
    """Whether a mode is that of a program."""
    return stat.S_ISREG(mode) and bool(mode & 0o111)
