"""A simulated container engine: CDI names in, what the container sees out."""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dra.sim.runtime.oci import CreateError, OciSpec, empty_oci_spec, inject
from dra.sim.runtime.rootfs import ContainerFiles, follow
from dra.sim.runtime.specs import VERSIONS, SpecCache, UnresolvableError

# Where a loader looks besides its cache and LD_LIBRARY_PATH, by the image's family (x86_64).
LOADER_DIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "debian": ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"),
        "redhat": ("/lib64", "/usr/lib64"),
    }
)
_BINARY_DIRS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

# Major number of the NVIDIA driver's own nodes; 254 and 255 are modeset and control.
_NVIDIA_MAJOR, _LAST_GPU_MINOR = 195, 253


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node in a container, and whether the device cgroup lets it be opened."""

    path: str
    kind: str
    major: int
    minor: int
    file_mode: int | None
    access: str


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A bind mount in a container."""

    source: str
    destination: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContainerView:
    """What a process in the container finds.

    Args:
        env: the environment, later entries over earlier ones.
        device_nodes: by path.
        mounts: by destination.
        libraries: the host's file for each name that `dlopen` finds.
        binaries: the host's file for each program on the usual PATH.
        gpus: minor numbers of the GPUs whose nodes are there and allowed.
        links: links that hooks made, path to target.
        hooks: (stage, argument vector) of each hook that ran.
        oci: the complete OCI spec.
    """

    env: Mapping[str, str]
    device_nodes: Mapping[str, DeviceNode]
    mounts: Mapping[str, MountPoint]
    libraries: Mapping[str, Path]
    binaries: Mapping[str, Path]
    gpus: tuple[int, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    hooks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    oci: Mapping[str, Any] = field(default_factory=dict)


class Runtime:
    """A container engine of one node.

    Args:
        host_root: the node's `/`.
        cdi_dirs: host paths of the spec directories, lowest priority first.
        engine_version: highest CDI version that the engine supports.
    """

    def __init__(
        self,
        host_root: Path,
        *,
        cdi_dirs: Sequence[str] = ("/etc/cdi", "/var/run/cdi"),
        engine_version: str = VERSIONS[-1],
    ) -> None:
        self._root = host_root
        self.cache = SpecCache(
            tuple(host_root / directory.lstrip("/") for directory in cdi_dirs), engine_version=engine_version
        )

    def create(
        self,
        cdi_ids: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        image: str = "debian",
        uid: int = 0,
        gid: int = 0,
    ) -> ContainerView:
        """Make a container with these CDI devices.

        Args:
            cdi_ids: qualified names, in the kubelet's order; repeated ones count once.
            env: the environment of image and pod, which the injected one follows.
            image: `debian` or `redhat`: where its loader looks.
            uid: user of the process.
            gid: group of the process.

        Raises:
            CreateError: as the engine or the low-level runtime would fail, with what the pod's status shows.
        """
        spec = empty_oci_spec(env=[f"{key}={value}" for key, value in (env or {}).items()], uid=uid, gid=gid)
        try:
            devices = self.cache.resolve(list(dict.fromkeys(cdi_ids)))
        except UnresolvableError as error:
            raise CreateError(f"CDI device injection failed: {error}") from error
        inject(spec, devices, host_root=self._root)
        files = self._mount(spec)
        cache_dirs = self._run_hooks(spec, files)
        return _look_around(spec, files, cache_dirs=cache_dirs, image=image)

    def _mount(self, spec: OciSpec) -> ContainerFiles:
        files = ContainerFiles()
        links: dict[str, str] = {}
        for mount in spec["mounts"]:
            source, destination = mount["source"], mount["destination"]
            if not source.startswith("/") or not destination.startswith("/"):
                raise CreateError(f"mount {source} -> {destination}: paths must be absolute")
            if destination == "/proc" or destination.startswith("/proc/"):
                # Source: runc refuses mounts inside /proc.
                raise CreateError(f"{destination} cannot be mounted because it is inside /proc")
            found = follow(self._root, source, links)
            if found is None:
                raise CreateError(f"error mounting {source} to {destination}: no such file or directory")
            files.mounts[posixpath.normpath(destination)] = found
        return files

    def _run_hooks(self, spec: OciSpec, files: ContainerFiles) -> list[str]:
        """Run all hooks on the model of the container; gives the directories of the loader's cache."""
        cache_dirs: list[str] = []
        for stage, hooks in spec["hooks"].items():
            for hook in hooks:
                program = follow(self._root, hook["path"])
                if program is None or not program.stat().st_mode & 0o111:
                    raise CreateError(f"error running {stage} hook: fork/exec {hook['path']}: no such file")
                _run_hook(hook["args"], files, cache_dirs)
        return cache_dirs


def _run_hook(args: Sequence[str], files: ContainerFiles, cache_dirs: list[str]) -> None:
    # `nvidia-cdi-hook NAME …`, or `nvidia-ctk hook NAME …`.
    words = [word for word in args[1:] if word != "hook"]
    if not words:
        return
    options = _options(words[1:])
    if words[0] == "create-symlinks":
        for value in options.get("link", ()):
            target, separator, link = value.partition("::")
            if not separator:
                raise CreateError(f"create-symlinks: invalid link {value!r}")
            files.add_link(link, target)
    elif words[0] == "update-ldcache":
        cache_dirs.extend(options.get("folder", ()))
    # Others change nothing that a view holds; an unknown one is a warning of the hook, not a failure.


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    position = 0
    while position < len(words):
        name, equals, value = words[position].removeprefix("--").partition("=")
        if not equals and position + 1 < len(words) and not words[position + 1].startswith("--"):
            position += 1
            value = words[position]
        found.setdefault(name, []).append(value)
        position += 1
    return found


def _look_around(
    spec: OciSpec, files: ContainerFiles, *, cache_dirs: Sequence[str], image: str
) -> ContainerView:
    env = dict(entry.split("=", 1) for entry in spec["process"]["env"])
    nodes = _device_nodes(spec)
    gpus = sorted(
        node.minor
        for node in nodes.values()
        if node.major == _NVIDIA_MAJOR and node.minor <= _LAST_GPU_MINOR and "r" in node.access
    )
    return ContainerView(
        env=env,
        device_nodes=nodes,
        mounts={
            mount["destination"]: MountPoint(mount["source"], mount["destination"], tuple(mount["options"]))
            for mount in spec["mounts"]
        },
        libraries=_libraries(files, env.get("LD_LIBRARY_PATH", ""), cache_dirs=cache_dirs, image=image),
        binaries=_binaries(files),
        gpus=tuple(gpus),
        links=dict(files.links),
        hooks=tuple((stage, tuple(hook["args"])) for stage, hooks in spec["hooks"].items() for hook in hooks),
        oci=spec,
    )


def _device_nodes(spec: OciSpec) -> dict[str, DeviceNode]:
    allowed: dict[tuple[str, int, int], str] = {}
    for rule in spec["linux"]["resources"]["devices"]:
        if rule["allow"]:
            allowed[rule["type"], rule["major"], rule["minor"]] = rule["access"]
    return {
        device["path"]: DeviceNode(
            device["path"],
            device["type"],
            device["major"],
            device["minor"],
            device["fileMode"],
            allowed.get((device["type"], device["major"], device["minor"]), ""),
        )
        for device in spec["linux"]["devices"]
    }


def _libraries(
    files: ContainerFiles, library_path: str, *, cache_dirs: Sequence[str], image: str
) -> dict[str, Path]:
    """Give what `dlopen` finds by name: LD_LIBRARY_PATH, then the cache, then the loader's own directories."""
    found: dict[str, Path] = {}
    for directory in (entry for entry in library_path.split(":") if entry):
        _add_names(found, files, directory)
    for directory in cache_dirs:
        _add_cached(found, files, directory)
    for directory in LOADER_DIRS[image]:
        _add_names(found, files, directory)
    return found


def _add_names(found: dict[str, Path], files: ContainerFiles, directory: str) -> None:
    for name in files.names_in(directory):
        path = files.resolve(f"{directory}/{name}") if ".so" in name else None
        if path is not None and path.is_file():
            found.setdefault(name, path)


def _add_cached(found: dict[str, Path], files: ContainerFiles, directory: str) -> None:
    # Source: ldconfig enters each library under its SONAME, and links under their own names.
    for name in files.names_in(directory):
        path = files.resolve(f"{directory}/{name}") if ".so" in name else None
        if path is not None and path.is_file():
            found.setdefault(name, path)
            soname = read_soname(path)
            if soname:
                found.setdefault(soname, path)


def _binaries(files: ContainerFiles) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for directory in _BINARY_DIRS:
        for name in files.names_in(directory):
            path = files.resolve(f"{directory}/{name}")
            if path is not None and path.is_file() and path.stat().st_mode & 0o111:
                found.setdefault(name, path)
    return found


def read_soname(path: Path) -> str:
    """Give the SONAME of a 64-bit little-endian ELF file; empty if it has none or is something else.

    Source: System V ABI: PT_DYNAMIC, DT_SONAME (14), DT_STRTAB (5), addresses mapped through PT_LOAD.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return ""
    try:
        return _soname(data)
    except (struct.error, IndexError):
        return ""


def _soname(data: bytes) -> str:
    (table,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    loads, dynamic = [], None
    for index in range(count):
        kind, _, offset, address, _, file_size = struct.unpack_from("<IIQQQQ", data, table + index * size)
        if kind == 1:
            loads.append((address, offset, file_size))
        elif kind == 2:
            dynamic = (offset, file_size)
    if dynamic is None:
        return ""
    entries = dict(
        struct.unpack_from("<qQ", data, position)
        for position in range(dynamic[0], dynamic[0] + dynamic[1] - 15, 16)
    )
    if 14 not in entries or 5 not in entries:
        return ""
    for address, offset, file_size in loads:
        if address <= entries[5] < address + file_size:
            start = entries[5] - address + offset + entries[14]
            return data[start : data.index(b"\0", start)].decode(errors="replace")
    return ""
