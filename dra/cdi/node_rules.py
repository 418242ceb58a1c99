"""Which device nodes the driver has, and what to say when one that a claim needs is missing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dra.cdi.node_making import may_make_nodes
from dra.errors import StackError
from dra.host.paths import HostPaths, join_root
from dra.host.proc import FRONTEND_NAMES, device_majors

# The majors that nodes have nearly everywhere: the frontend's is registered, nvidia-uvm's is whatever is free.
_USUAL_MAJORS = {"nvidia-uvm": 510}
_FRONTEND_MAJOR = 195


@dataclass(frozen=True, slots=True)
class NodeRule:
    """A node the driver may have: its path below the dev root, the drivers whose major it has, its minor."""

    path: str
    drivers: tuple[str, ...]
    minor: int
    required: bool = True
    mode: int = 0o666
    default_major: int | None = None


# Source: NVIDIA's open kernel modules (nvidia 255 and 254 are control and modeset, uvm 0 and 1).
CONTROL_NODES = (
    NodeRule("/dev/nvidia-modeset", ("nvidia-modeset", *FRONTEND_NAMES), 254, required=False),
    NodeRule("/dev/nvidia-uvm", ("nvidia-uvm",), 0),
    NodeRule("/dev/nvidia-uvm-tools", ("nvidia-uvm",), 1, required=False),
    NodeRule("/dev/nvidiactl", ("nvidiactl", *FRONTEND_NAMES), 255),
)


@functools.lru_cache(maxsize=64)
def gpu_rule(minor: int) -> NodeRule:
    """Give the rule of a GPU's own node."""
    return NodeRule(f"/dev/nvidia{minor}", FRONTEND_NAMES, minor)


def missing_nodes_error(paths: HostPaths, rules: Sequence[NodeRule], root: tuple[Path, str]) -> StackError:
    """Give the error for required nodes that are not there and could not be made; `root` is (view, host spelling)."""
    view, at_host = root
    names = [rule.path if at_host == "/" else join_root(at_host, rule.path) for rule in rules]
    majors = device_majors(paths)
    unloaded = sorted({rule.drivers[0] for rule in rules if not any(name in majors for name in rule.drivers)})
    wrong = [
        name
        for rule, name in zip(rules, names, strict=True)
        if not paths.stand_in_nodes and _is_something_else(view / rule.path.lstrip("/"))
    ]
    if not any(name in majors for name in (*FRONTEND_NAMES, "nvidia-uvm")):
        made = "; ".join(
            f"mknod -m 666 {name} c {_USUAL_MAJORS.get(rule.drivers[0], _FRONTEND_MAJOR)} {rule.minor}"
            for rule, name in zip(rules, names, strict=True)
        )
        why = f"{paths.proc / 'devices'} lists no NVIDIA driver"
        remedy = (
            "On a node with a GPU load the modules (modprobe -a nvidia nvidia-uvm, or nvidia-modprobe -u -c 0). "
            f"On a rig with a stand-in for NVML make what is missing: {made}. The call is retried."
        )
    elif unloaded:
        why = f"the kernel module of {', '.join(unloaded)} is not loaded"
        remedy = "Load it (modprobe nvidia-uvm, or nvidia-modprobe -u -c 0 on the node); the call is retried."
    elif not may_make_nodes(paths):
        why = "the driver was told not to make device nodes (ModifyDeviceFiles: 0)"
        remedy = "Let udev make it, or load the nvidia module without NVreg_ModifyDeviceFiles=0."
    else:
        why = "it could not be made"
        remedy = (
            "Run nvidia-modprobe -u -c 0 on the node, or nvidia-smi once; the plugin has to be privileged and to "
            "see the host's /dev. The call is retried."
        )
    what = f"the device node {names[0]} is" if len(names) == 1 else f"the device nodes {', '.join(names)} are"
    if wrong:
        why += f"; what is at {', '.join(wrong)} is no character device"
        remedy = f"Remove {' '.join(wrong)}. {remedy}"
    return StackError("DRA-DEVICE-NODE-MISSING", f"{what} missing and {why}", remedy=remedy, nodes=names)


def _is_something_else(path: Path) -> bool:
    # A mount of a device that was not there leaves a directory.
    return path.exists() and not path.is_char_device()
