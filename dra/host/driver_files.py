"""The files of an NVIDIA driver: libraries, programs, firmware, sockets and configuration under a driver root.

`find_driver_files` looks each time it is called; `dra.host.driver_catalog` keeps what it found.

Source: the discovery of NVIDIA's container toolkit, described in the CDI fact sheet; differences are said where they are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from posixpath import basename, dirname

from dra.host.driver_lists import (
    ALWAYS_NAMED,
    BINARIES,
    BINARY_DIRS,
    CAPABILITIES,
    COMPUTE,
    CONFIG_FILES,
    COS_FIRMWARE_DIR,
    DISPLAY,
    LIBRARY_CAPABILITIES,
    RUN_DIRS,
    SOCKETS,
    UTILITY,
    XORG_DIRS,
)
from dra.host.driver_required import (
    CUDA,
    NVML,
    OnDisk,
    mismatch_error,
    missing_error,
    missing_names,
    plan_stand_ins,
    required_stems,
)
from dra.host.driver_search import RootSearch, is_executable
from dra.host.elf import ElfFacts, read_elf
from dra.host.paths import HostPaths, strip_root
from dra.host.proc import kernel_driver_version


@dataclass(frozen=True, slots=True)
class Library:
    """A library: `path` is the real file inside the driver root, `names` the other file names it must be found by.

    `names` holds its SONAME (first, if it has one) and the links that stand beside it; `subdir` is the place below a
    library directory in which the loader's users expect it (`vdpau`, `nvidia/xorg`), empty for most.
    """

    path: str
    names: tuple[str, ...]
    subdir: str
    capabilities: frozenset[str]

    @property
    def file_name(self) -> str:
        """The real file's own name."""
        return basename(self.path)

    @property
    def stem(self) -> str:
        """`nvidia-ml` of `libnvidia-ml.so.580.95.05`."""
        return library_stem(self.file_name)


@dataclass(frozen=True, slots=True)
class DriverFile:
    """Any other file: `path` is the real one inside the driver root, `container_path` where a program looks for it."""

    path: str
    container_path: str
    capabilities: frozenset[str]
    is_socket: bool = False


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """All that was found under one driver root, ordered by path.

    `machine` is uname's word for what the libraries are for, `library_dirs` the real directories that hold them,
    `searched` where libraries were looked for.
    `missing` names libraries that containers will miss (`libcuda.so.580.95.05`); `assumed` are paths of libraries that
    were taken although their names do not give the driver's version, as a stand-in's.
    """

    version: str
    machine: str
    library_dirs: tuple[str, ...]
    libraries: tuple[Library, ...]
    binaries: tuple[DriverFile, ...]
    firmware: tuple[DriverFile, ...]
    sockets: tuple[DriverFile, ...]
    configuration: tuple[DriverFile, ...]
    searched: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def find_driver_files(
    paths: HostPaths, version: str, *, capabilities: frozenset[str] = CAPABILITIES
) -> DriverFiles:
    """Look for the files of the driver of this version (NVML's text; empty: the loaded module's, else the library's).

    A libcuda or libnvidia-ml that is not there is no error while there is anything of a driver: it stands in `missing`.

    Raises:
        StackError: DRA-DRIVER-LIBRARIES-MISSING: no library of a driver at all; the text lists what was searched.
            DRA-DRIVER-VERSION-MISMATCH: the libraries on disk are of another version.
    """
    search = RootSearch(str(paths.driver_root))
    machine = os.uname().machine
    version = version or kernel_driver_version(paths)
    if not version:
        version = next((one.version for one in search.required_on_disk(machine, "") if one.version), "")
    directories = search.library_dirs(version, machine) if version else ()
    libraries = _libraries(search, directories, version)
    lacking = tuple(stem for stem in (CUDA, NVML) if all(library.stem != stem for library in libraries))
    required = [stem for stem in required_stems(capabilities) if stem in lacking]
    taken: tuple[OnDisk, ...] = ()
    if required or not libraries:
        taken = _stand_ins(
            paths, search, version, lacking=lacking, refused=required if libraries else lacking
        )
        if not (libraries or taken):
            raise missing_error(paths, search.searched, f"lib*.so.{version or '<version>'}")
        libraries = _with_stand_ins(search, libraries, taken)
        directories = tuple(dict.fromkeys((*directories, *(dirname(one.path) or "/" for one in taken))))
    searched = tuple(search.searched)
    stems = {one.stem for one in taken}
    machine = _machine(search, libraries, directories) or machine
    return DriverFiles(
        version=version,
        machine=machine,
        library_dirs=directories,
        libraries=libraries,
        binaries=_binaries(search),
        firmware=_firmware(paths, search, version) if version else (),
        sockets=_sockets(search, stand_ins=paths.stand_in_nodes),
        configuration=_configuration(search),
        searched=searched,
        watched=tuple(search.watched),
        missing=missing_names([stem for stem in required if stem not in stems], version),
        assumed=tuple(one.path for one in taken),
    )


def library_stem(name: str) -> str:
    """Give `cuda` of `libcuda.so.1`."""
    return name.removeprefix("lib").partition(".so")[0]


def _libraries(search: RootSearch, directories: Iterable[str], version: str) -> tuple[Library, ...]:
    places = [(directory, "") for directory in directories]
    for directory in directories:
        base = directory.rstrip("/")
        places.append((f"{base}/vdpau", "vdpau"))
        places += [(f"{base}/{xorg}", "nvidia/xorg") for xorg in XORG_DIRS if not xorg.startswith("/")]
    places += [(xorg, "nvidia/xorg") for xorg in XORG_DIRS if xorg.startswith("/")]
    found: dict[str, Library] = {}
    for place, subdir in places:
        real = search.real(place)
        if real is None:
            continue
        names = search.libraries_in(real, version)
        if subdir == "nvidia/xorg" and "nvidia_drv.so" in search.list_dir(real):
            names.append("nvidia_drv.so")
        for name in names:
            target = search.real(f"{real.rstrip('/')}/{name}")
            if target is None or target in found or not stat.S_ISREG(search.kind(target)):
                continue
            facts = read_elf(search.view(target))
            if facts is None or facts.bits == 64:
                found[target] = _library(search, target, real, subdir, facts)
    return tuple(found[path] for path in sorted(found))


def _stand_ins(
    paths: HostPaths, search: RootSearch, version: str, *, lacking: Iterable[str], refused: Iterable[str]
) -> tuple[OnDisk, ...]:
    """Give what may be taken for libraries that do not stand with the driver's version.

    Raises:
        StackError: DRA-DRIVER-VERSION-MISMATCH.
    """
    loaded = kernel_driver_version(paths)
    plan = plan_stand_ins(
        version,
        loaded,
        lacking=tuple(lacking),
        refused=tuple(refused),
        on_disk=search.required_on_disk(os.uname().machine, version),
    )
    if plan.others:
        raise mismatch_error(paths, version, plan.others, kernel_version=loaded)
    return plan.taken


def _with_stand_ins(
    search: RootSearch, libraries: tuple[Library, ...], taken: Iterable[OnDisk]
) -> tuple[Library, ...]:
    found = {library.path: library for library in libraries}
    for one in taken:
        facts = read_elf(search.view(one.path))
        found[one.path] = _library(search, one.path, one.seen_in, "", facts, stem=one.stem)
    return tuple(found[path] for path in sorted(found))


def _library(
    search: RootSearch, target: str, seen_in: str, subdir: str, facts: ElfFacts | None, *, stem: str = ""
) -> Library:
    file_name = basename(target)
    stem = stem or library_stem(file_name)
    home = dirname(target) or "/"
    names: dict[str, None] = {}
    if facts is not None and facts.soname and "/" not in facts.soname:
        names[facts.soname] = None
    # Longer names first: libcuda.so.1 before libcuda.so. Links tell the SONAME where the file itself does not.
    for directory in dict.fromkeys((home, seen_in)):
        beside = [name for name in search.list_dir(directory) if name.startswith(f"lib{stem}.so")]
        for name in sorted(beside, key=lambda name: (-len(name), name)):
            if name not in names and search.real(f"{directory.rstrip('/')}/{name}") == target:
                names[name] = None
    names |= dict.fromkeys(ALWAYS_NAMED.get(stem, ()))
    if subdir == "nvidia/xorg":
        capabilities = frozenset({DISPLAY})
    else:
        capabilities = LIBRARY_CAPABILITIES.get(stem, CAPABILITIES)
    names.pop(file_name, None)
    return Library(target, tuple(names), subdir, capabilities)


def _machine(search: RootSearch, libraries: tuple[Library, ...], directories: tuple[str, ...]) -> str:
    for library in libraries:
        if library.stem in ("cuda", "nvidia-ml"):
            facts = read_elf(search.view(library.path))
            if facts is not None:
                return facts.machine
    return next(
        (name for name in ("aarch64", "x86_64") for path in directories if f"{name}-linux" in path), ""
    )


def _binaries(search: RootSearch) -> tuple[DriverFile, ...]:
    found = []
    for name, capabilities in BINARIES.items():
        for directory in BINARY_DIRS:
            at = f"{directory}/{name}"
            real = search.find(at)
            if real is not None and is_executable(search.kind(real)):
                found.append(DriverFile(real, at, capabilities))
                break
    return tuple(found)


def _firmware(paths: HostPaths, search: RootSearch, version: str) -> tuple[DriverFile, ...]:
    release = os.uname().release
    usual = [
        f"/lib/firmware/updates/{release}",
        "/lib/firmware/updates",
        f"/lib/firmware/{release}",
        "/lib/firmware",
    ]
    # A driver container tells the kernel where its firmware stands, in the host's spelling.
    own = _firmware_class_path(paths)
    inside = strip_root(own, paths.driver_root_host) if own else None
    candidates = [path for path in (own, inside) if path and path.startswith("/")] + usual
    for directory in (*candidates, COS_FIRMWARE_DIR):
        place = f"{directory.rstrip('/')}/nvidia/{version}"
        shown = "/lib/firmware" if directory == COS_FIRMWARE_DIR else directory.rstrip("/")
        names = search.glob(place, "gsp*.bin")
        found = [
            DriverFile(real, f"{shown}/nvidia/{version}/{name}", CAPABILITIES)
            for name in names
            if (real := search.real(f"{place}/{name}")) is not None and stat.S_ISREG(search.kind(real))
        ]
        if found:
            return tuple(found)
    return ()


def _firmware_class_path(paths: HostPaths) -> str:
    try:
        text = (paths.sys / "module/firmware_class/parameters/path").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    return text.strip()


def _sockets(search: RootSearch, *, stand_ins: bool) -> tuple[DriverFile, ...]:
    found = []
    for name in SOCKETS:
        for directory in RUN_DIRS:
            at = f"{directory}/{name}"
            real = search.find(at)
            mode = 0 if real is None else search.kind(real)
            if real is not None and (stat.S_ISSOCK(mode) or (stand_ins and stat.S_ISREG(mode))):
                found.append(DriverFile(real, at, frozenset({UTILITY, COMPUTE}), is_socket=True))
                break
    return tuple(found)


def _configuration(search: RootSearch) -> tuple[DriverFile, ...]:
    found: dict[str, DriverFile] = {}
    for roots, pattern, container_root, capabilities in CONFIG_FILES:
        below, _, name_pattern = pattern.rpartition("/")
        for root in roots:
            place = f"{root.rstrip('/')}/{below}"
            for name in search.glob(place, name_pattern):
                at = f"{container_root or root}/{below}/{name}"
                real = search.real(f"{place}/{name}")
                if at not in found and real is not None and stat.S_ISREG(search.kind(real)):
                    found[at] = DriverFile(real, at, capabilities)
    return tuple(found[at] for at in sorted(found))
