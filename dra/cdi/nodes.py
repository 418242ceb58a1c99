"""The device nodes a claim needs: their numbers of this moment, and making them where a fresh node has none.

On a headless node nothing has opened the driver yet: /dev/nvidia* may be missing and nvidia-uvm not loaded, while NVML
works. A spec without these nodes would start a pod that sees no GPU, so they are made (`nvidia-modprobe`, else mknod) or
the prepare call fails and is retried.

Numbers come from /proc/devices and the driver's rules at each call: the major of nvidia-uvm and nvidia-caps changes with
every reload of the modules, and a node on disk may be older than that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from dra.cdi.model import DeviceNode, GpuNodes
from dra.cdi.node_making import (
    Runner,
    link_by_number,
    may_make_nodes,
    modprobe_command,
    node_parameters,
    run_program,
)
from dra.cdi.node_rules import CONTROL_NODES, NodeRule, gpu_rule, missing_nodes_error
from dra.host.paths import HostPaths, join_root
from dra.host.pci import drm_nodes
from dra.host.proc import FRONTEND_NAMES, device_majors
from dra.telemetry.log import get_logger
from dra.values import PciAddress

_MODPROBE_SECONDS = 20.0
_DRM_MAJOR = 226
# What a tree made without the right to mknod holds instead of a node.
_STAND_IN = re.compile(r"simulated-device c (\d+) (\d+) gid (\d+)", re.ASCII)

_log = get_logger(room="cdi")


@dataclass(frozen=True, slots=True)
class ClaimNodes:
    """What a claim's containers get of /dev: the control nodes, and each GPU's by minor number."""

    control: tuple[DeviceNode, ...]
    gpus: dict[int, GpuNodes]


class NodeSource:
    """Gives the nodes of claims, making what is missing. Safe for several threads; one makes nodes at a time."""

    def __init__(self, paths: HostPaths, *, runner: Runner = run_program) -> None:
        self._paths = paths
        self._runner = runner
        self._lock = Lock()

    def get(self, gpus: Mapping[int, PciAddress]) -> ClaimNodes:
        """Give the nodes for these GPUs (minor -> PCI address).

        Raises:
            StackError: DRA-DEVICE-NODE-MISSING: a required node is not there and could not be made.
            HostError: DRA-HOST-PROC-DEVICES.
        """
        root = self._paths.dev_root()
        rules = (*CONTROL_NODES, *(gpu_rule(minor) for minor in gpus))
        found = self._look(rules, root)
        missing = [rule for rule in rules if rule.required and rule.path not in found]
        if missing:
            with self._lock:
                self._make(missing, root)
                root = self._paths.dev_root()
                found = self._look(rules, root)
            still = [rule for rule in missing if rule.path not in found]
            if still:
                raise missing_nodes_error(self._paths, still, root)
        control = tuple(found[rule.path] for rule in CONTROL_NODES if rule.path in found)
        nodes = {
            minor: self._gpu_nodes(found[gpu_rule(minor).path], address, root)
            for minor, address in gpus.items()
        }
        return ClaimNodes(control, nodes)

    def _look(self, rules: Iterable[NodeRule], root: tuple[Path, str]) -> dict[str, DeviceNode]:
        majors = device_majors(self._paths)
        nodes = {rule.path: self._look_at(rule, majors, root) for rule in rules}
        return {path: node for path, node in nodes.items() if node is not None}

    def _look_at(
        self, rule: NodeRule, majors: Mapping[str, int], root: tuple[Path, str]
    ) -> DeviceNode | None:
        """Give a node as a container must have it; None if it is not there or its driver is not loaded."""
        seen = read_node(root[0], rule.path, stand_ins=self._paths.stand_in_nodes)
        if seen is None:
            return None
        known = next((majors[name] for name in rule.drivers if name in majors), rule.default_major)
        if known is None:
            if any(name in majors for name in (*FRONTEND_NAMES, "nvidia-uvm")) or not seen.major:
                # A node whose driver has no major is left over from an earlier load: opening it gives ENXIO.
                return None
            # The kernel names no NVIDIA driver at all although NVML answered: /proc/devices is not the one of the
            # machine that the nodes belong to (a nested node, a stand-in library). The nodes know their numbers.
            return replace(seen, mode=seen.mode or rule.mode, host_path=self._host_path(rule, root))
        return DeviceNode(
            rule.path, known, rule.minor, seen.mode or rule.mode, seen.gid, self._host_path(rule, root)
        )

    @staticmethod
    def _host_path(rule: NodeRule, root: tuple[Path, str]) -> str:
        return "" if root[1] == "/" else join_root(root[1], rule.path)

    def _gpu_nodes(self, node: DeviceNode, address: PciAddress, root: tuple[Path, str]) -> GpuNodes:
        drm, links = [], []
        for name in drm_nodes(self._paths, address):
            found = self._look_at(_drm_rule(name), {}, root)
            if found is None:
                # Listed by sysfs, made by udev a moment later or never: a GPU computes without it.
                continue
            drm.append(found)
            suffix = "render" if name.startswith("r") else "card"
            links.append((f"../{name}", f"/dev/dri/by-path/pci-{address}-{suffix}"))
        return GpuNodes(node, tuple(drm), tuple(links))

    def _make(self, missing: Sequence[NodeRule], root: tuple[Path, str]) -> None:
        """Make nodes: by the driver's own program, and what it leaves out by mknod."""
        if not may_make_nodes(self._paths):
            return
        if not self._paths.stand_in_nodes:
            self._run_modprobe([rule.minor for rule in missing if rule == gpu_rule(rule.minor)])
        majors = device_majors(self._paths)
        view = self._paths.dev_root()[0]
        for rule in missing:
            if self._look_at(rule, majors, (view, root[1])) is None:
                self._make_node(rule, majors, view)

    def _run_modprobe(self, minors: Sequence[int]) -> None:
        command = modprobe_command(self._paths, minors)
        if command is None:
            return
        status = self._runner(command[0], command[1], _MODPROBE_SECONDS)
        _log.info("nvidia_modprobe_ran", program=command[0][0], status=status)

    def _make_node(self, rule: NodeRule, majors: Mapping[str, int], view: Path) -> None:
        major = next((majors[name] for name in rule.drivers if name in majors), None)
        if major is None:
            return
        mode, uid, gid = node_parameters(self._paths)
        path = view / rule.path.lstrip("/")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._paths.stand_in_nodes:
                path.write_text(f"simulated-device c {major} {rule.minor} gid {gid}\n", encoding="ascii")
            else:
                os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, rule.minor))
                os.chown(path, uid, gid)
            path.chmod(mode)
        except OSError as error:
            _log.warning("device_node_not_made", node=str(path), error=error.strerror)
            return
        _log.info("device_node_made", node=str(path), major=major, minor=rule.minor)
        link_by_number(view, rule.path, major, minor=rule.minor)


@functools.lru_cache(maxsize=64)
def _drm_rule(name: str) -> NodeRule:
    """Give the rule of a node of nvidia-drm (`card1`, `renderD128`)."""
    return NodeRule(f"/dev/dri/{name}", (), int(name.lstrip("cardenD")), mode=0o660, default_major=_DRM_MAJOR)


def read_node(root: Path, path: str, *, stand_ins: bool) -> DeviceNode | None:
    """Give a character device below a dev root as it is on disk; None if there is none."""
    view = str(root).rstrip("/") + path
    try:
        found = os.stat(view)  # noqa: PTH116 - at each prepare
    except OSError:
        return None
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISCHR(found.st_mode):
        return DeviceNode(path, os.major(found.st_rdev), os.minor(found.st_rdev), mode=mode, gid=found.st_gid)
    if not (stand_ins and stat.S_ISREG(found.st_mode)):
        return None
    with contextlib.suppress(OSError), open(view, encoding="ascii", errors="replace") as file:  # noqa: PTH123
        if match := _STAND_IN.match(file.read(100)):
            return DeviceNode(path, int(match[1]), int(match[2]), mode=mode, gid=int(match[3]))
    # Any regular file will do; its own bits say nothing.
    return DeviceNode(path, 0, 0, mode=0, gid=found.st_gid)
