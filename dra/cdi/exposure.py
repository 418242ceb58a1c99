"""Three ways to bring the driver's libraries to a container's loader.

* `hooks`: each library at its own place, and NVIDIA's hook program makes the links and runs ldconfig;
* `soname`: each library mounted under each name it is asked for, in the directories every loader searches: no hook,
  no ldconfig, works also where hooks cannot (a read-only root file system under a crun before 1.26);
* `ld-library-path`: the same names in one private directory, and LD_LIBRARY_PATH. It replaces the image's own, so it
  is never chosen by itself.

Pure: takes what the node has, gives mounts, hooks and environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from posixpath import basename, dirname

from dra.cdi.model import CdiOptions, Exposure, Mount, NodeFiles, SpecDict
from dra.errors import StackError
from dra.host.driver_files import DriverFile, DriverFiles, Library
from dra.host.driver_lists import DISPLAY
from dra.host.paths import join_root

# rprivate: without it a mount leaks to the host. noexec would keep a library from being mapped.
FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET_OPTIONS = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
HOOK_ENV = ("NVIDIA_CTK_DEBUG=false",)
PRIVATE_DIR = "/usr/local/nvidia/lib64"
# Mesa's loader for GBM looks here for the driver's back end.
_GBM_LINK = "gbm/nvidia-drm_gbm.so"


@dataclass(frozen=True, slots=True)
class CommonEdits:
    """What every container of a claim gets beside device nodes."""

    env: tuple[str, ...]
    mounts: tuple[Mount, ...]
    hooks: tuple[SpecDict, ...]


def choose_exposure(options: CdiOptions, hook_path: str) -> Exposure:
    """Decide between the ways; `hook_path` is where the hook program was found, empty if nowhere.

    Raises:
        StackError: DRA-CDI-HOOK-MISSING: hooks were asked for and there is no program to run.
    """
    if options.exposure == "auto":
        return "hooks" if hook_path else "soname"
    if options.exposure == "hooks" and not hook_path:
        where = options.hook_path or "the usual places"
        raise StackError(
            "DRA-CDI-HOOK-MISSING",
            f"--cdi-exposure=hooks needs nvidia-cdi-hook on the host, and there is none at {where}",
            remedy="Install the NVIDIA container toolkit, set --nvidia-cdi-hook-path to a path of the host, "
            "or use --cdi-exposure=auto.",
        )
    return options.exposure


def common_edits(node: NodeFiles, options: CdiOptions) -> CommonEdits:
    """Give the mounts, hooks and environment of the driver's files.

    Raises:
        StackError: as `choose_exposure`.
    """
    exposure = choose_exposure(options, node.hook_path)
    driver = node.driver
    libraries = [library for library in driver.libraries if library.capabilities & options.capabilities]
    mounts = [_file_mount(node, file, FILE_OPTIONS) for file in _plain_files(driver, options)]
    if options.sockets:
        sockets = [file for file in driver.sockets if file.capabilities & options.capabilities]
        mounts += [_file_mount(node, file, SOCKET_OPTIONS) for file in sockets]
    env = ["NVIDIA_VISIBLE_DEVICES=void"]
    hooks: tuple[SpecDict, ...] = ()
    if exposure == "hooks":
        for library in libraries:
            at_host = join_root(node.driver_root_host, library.path)
            mounts.append(Mount(at_host, library.path, FILE_OPTIONS))
        hooks = driver_hooks(node, options, libraries)
        directories: tuple[str, ...] = tuple(
            dict.fromkeys(dirname(library.path) for library in libraries if library.stem == "cuda")
        )
    else:
        directories = _target_dirs(driver, options, exposure)
        # A program that loads libvdpau finds its driver by LD_LIBRARY_PATH only beside the other libraries.
        flat = exposure == "ld-library-path"
        for directory in directories:
            mounts += _named_mounts(node, libraries, directory, flat=flat)
        if flat:
            env.append(f"LD_LIBRARY_PATH={PRIVATE_DIR}")
    if directories:
        # Where libcuda is, for those that look it up by NVIDIA's own hooks and tools.
        env.append(f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(directories)}")
    return CommonEdits(tuple(sorted(env)), _one_per_target(mounts), hooks)


def driver_hooks(node: NodeFiles, options: CdiOptions, libraries: Iterable[Library]) -> tuple[SpecDict, ...]:
    """Give the hooks of the first way, in the order in which they must run. All are idempotent."""
    chosen = sorted(libraries, key=lambda library: library.path)
    folders = sorted({dirname(library.path) for library in chosen if library.subdir != "nvidia/xorg"})
    links = [link for library in chosen for link in _links_of(library)]
    hooks = []
    if links:
        args = [part for target, link in links for part in ("--link", f"{target}::{link}")]
        hooks.append(hook(node.hook_path, "create-symlinks", *args))
    if node.driver.version and any(library.stem == "cuda" for library in chosen):
        hooks.append(
            hook(node.hook_path, "enable-cuda-compat", f"--host-driver-version={node.driver.version}")
        )
    if folders:
        args = [part for folder in folders for part in ("--folder", folder)]
        hooks.append(hook(node.hook_path, "update-ldcache", *args))
    hooks.append(hook(node.hook_path, "disable-device-node-modification"))
    if DISPLAY in options.capabilities:
        # Fails where /etc/nvidia of the container cannot be written; so only for those who ask for it.
        hooks.append(hook(node.hook_path, "update-application-profile"))
    return tuple(hooks)


def hook(path: str, command: str, *args: str) -> SpecDict:
    """Give one run of the hook program. Its environment is fixed: a hook without one gets the image's."""
    name = basename(path)
    start = ["nvidia-ctk", "hook"] if name == "nvidia-ctk" else ["nvidia-cdi-hook"]
    return {
        "hookName": "createContainer",
        "path": path,
        "args": [*start, command, *args],
        "env": list(HOOK_ENV),
    }


def mount_names(library: Library) -> tuple[str, ...]:
    """Give the names under which a library must be found without links: its own, its SONAME, the bare `.so`.

    A library whose SONAME is its file name is private to the driver; it gets a bare name only if the host has it.
    """
    names = dict.fromkeys((library.file_name, *library.names))
    bare = f"lib{library.stem}.so"
    if library.names and library.file_name.startswith(bare):
        names[bare] = None
    return tuple(names)


def _links_of(library: Library) -> list[tuple[str, str]]:
    """Give (target, link) for the names of a library: the SONAME leads to the file, the bare name to the SONAME."""
    directory = dirname(library.path)
    bare = f"lib{library.stem}.so"
    versioned = [name for name in library.names if name != bare]
    links = [(library.file_name, f"{directory}/{name}") for name in versioned]
    own = [name for name in versioned if name.startswith(bare)]
    if bare in library.names and bare != library.file_name:
        links.append((own[0] if own else library.file_name, f"{directory}/{bare}"))
    if library.stem == "nvidia-allocator":
        links.append((f"../{own[0] if own else library.file_name}", f"{directory}/{_GBM_LINK}"))
    return links


def _plain_files(driver: DriverFiles, options: CdiOptions) -> Iterable[DriverFile]:
    for file in (*driver.binaries, *driver.firmware, *driver.configuration):
        if file.capabilities & options.capabilities:
            yield file


def _file_mount(node: NodeFiles, file: DriverFile, how: tuple[str, ...]) -> Mount:
    return Mount(join_root(node.driver_root_host, file.path), file.container_path, how)


def _target_dirs(driver: DriverFiles, options: CdiOptions, exposure: Exposure) -> tuple[str, ...]:
    if exposure == "ld-library-path":
        return (PRIVATE_DIR,)
    return options.library_dirs or (f"/usr/lib/{driver.machine}-linux-gnu", "/usr/lib64")


def _named_mounts(
    node: NodeFiles, libraries: Iterable[Library], directory: str, *, flat: bool
) -> Iterable[Mount]:
    for library in libraries:
        source = join_root(node.driver_root_host, library.path)
        place = directory if flat or not library.subdir else f"{directory}/{library.subdir}"
        for name in mount_names(library):
            yield Mount(source, f"{place}/{name}", FILE_OPTIONS)
        if library.stem == "nvidia-allocator":
            yield Mount(source, f"{directory}/{_GBM_LINK}", FILE_OPTIONS)


def _one_per_target(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    found = {mount.container_path: mount for mount in mounts}
    return tuple(found[path] for path in sorted(found))
