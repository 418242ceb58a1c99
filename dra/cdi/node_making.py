"""Making device nodes on the host: the driver's own program, the driver's own wishes, the links systemd needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dra.cdi.model import DeviceNode
from dra.host.chroot import chroot_command
from dra.host.driver_lists import BINARY_DIRS, LIBRARY_DIRS
from dra.host.paths import HostPaths
from dra.host.rooted import resolve_inside
from dra.telemetry.log import get_logger

# (arguments, environment, seconds) -> exit status, 127 where it could not be run.
Runner = Callable[[Sequence[str], Mapping[str, str], float], int]
_log = get_logger(room="cdi")


def run_program(arguments: Sequence[str], environment: Mapping[str, str], seconds: float) -> int:
    """Run a program without a shell and without input; give its exit status, 127 if it did not run or end in time."""
    try:
        done = subprocess.run(
            list(arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("nvidia_modprobe_failed", program=arguments[0], error=str(error))
        return 127
    return done.returncode


def modprobe_command(paths: HostPaths, minors: Sequence[int]) -> tuple[list[str], dict[str, str]] | None:
    """Give the call of the driver's own nvidia-modprobe that loads nvidia-uvm and makes the nodes: (arguments, environment).

    None where the driver has no such program. A driver root with its own `dev` is entered with chroot, since the program
    makes nodes below `/dev`; else it runs here with the root's libraries.

    Source: nvidia-modprobe(1): -u loads and makes nvidia-uvm, -c a GPU's node.
    """
    root = str(paths.driver_root)
    found = (resolve_inside(root, f"{directory}/nvidia-modprobe") for directory in BINARY_DIRS)
    inside = next((path for path in found if path is not None), None)
    if inside is None:
        return None
    flags = ["-u", "-c0", *(f"-c{minor}" for minor in dict.fromkeys(minors) if minor)]
    environment = {"PATH": ":".join(BINARY_DIRS)}
    if root == "/":
        return [inside, *flags], environment
    if (paths.driver_root / "dev").is_dir():
        return chroot_command(root, [inside, *flags]), environment
    libraries = [real for path in LIBRARY_DIRS if (real := resolve_inside(root, path)) not in (None, "/")]
    environment["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(root + path for path in libraries if path))
    return [root + inside, *flags], environment


def may_make_nodes(paths: HostPaths) -> bool:
    """Whether the driver's parameters leave device nodes to programs like us (ModifyDeviceFiles)."""
    return _parameters(paths).get("ModifyDeviceFiles", 1) != 0


def node_parameters(paths: HostPaths) -> tuple[int, int, int]:
    """Give (mode, uid, gid) that the driver wants its nodes to have.

    Source: /proc/driver/nvidia/params (NVreg_DeviceFileMode, _UID, _GID).
    """
    known = _parameters(paths)
    mode = known.get("DeviceFileMode", 0o666) & 0o777
    return mode, known.get("DeviceFileUID", 0), known.get("DeviceFileGID", 0)


def missing_char_links(paths: HostPaths, nodes: Iterable[DeviceNode]) -> tuple[str, ...]:
    """Give the links `/dev/char/<major>:<minor>` that are not there.

    Without them systemd forgets a container's rule for the node at the next daemon-reload (runc#3708), and the
    container loses its GPU.
    """
    wanted = [f"/dev/char/{node.major}:{node.minor}" for node in nodes]
    return tuple(path for path in wanted if not os.path.lexists(f"{paths.dev.parent}{path}"))


def link_by_number(root: Path, path: str, major: int, *, minor: int) -> None:
    """Make `/dev/char/<major>:<minor>` for a node; without it all still works until systemd reloads."""
    link = root / f"dev/char/{major}:{minor}"
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"..{path.removeprefix('/dev')}")


def _parameters(paths: HostPaths) -> dict[str, int]:
    try:
        text = (paths.proc / "driver/nvidia/params").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): int(value) for key, _, value in pairs if value.strip().isdigit()}
