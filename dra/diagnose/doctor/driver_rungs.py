"""The lowest rungs: the driver's modules and files, NVML, the device nodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from dra.cdi.node_making import missing_char_links
from dra.cdi.node_rules import CONTROL_NODES, NodeRule, gpu_rule
from dra.cdi.nodes import read_node
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, note, warning
from dra.errors import StackError
from dra.host.driver_files import find_driver_files
from dra.host.paths import HostPaths
from dra.host.pci_binding import is_vfio_driver
from dra.host.proc import device_majors, kernel_driver_version
from dra.inventory.model import NODE
from dra.nvml.library import find_library

# Where drivers are found in the field. Source: reference on driver roots; GPU operator, GKE, Talos.
USUAL_ROOTS = ("/", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/usr/local/nvidia", "/usr/local")
_VENDOR, _DISPLAY = "0x10de", "0x03"
_REFUSED = (errno.EPERM, errno.EACCES)


def pci_gpus(paths: HostPaths) -> dict[str, str]:
    """Give the NVIDIA GPUs on the PCI bus with the kernel driver that has each; empty where none has it."""
    found: dict[str, str] = {}
    try:
        devices = sorted((paths.sys / "bus/pci/devices").iterdir())
    except OSError:
        return {}
    for device in devices:
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY):
            try:
                found[device.name] = os.path.basename(os.readlink(device / "driver"))  # noqa: PTH115, PTH119
            except OSError:
                found[device.name] = ""
    return found


def look_at_driver(ctx: NodeContext) -> Looked:
    """The PCI bus, the kernel module, the driver's files under the driver root, and whether they are one version."""
    paths = ctx.paths
    on_bus = pci_gpus(paths)
    loaded = kernel_driver_version(paths)
    if not loaded:
        library = _library(paths)
        if not on_bus and isinstance(library, StackError):
            raise StackError(
                "DRA-NO-GPU", f"there is no NVIDIA GPU on the PCI bus of node {ctx.node_name}",
                remedy="Keep the driver's DaemonSet off this node, or check the machine (lspci -d 10de:).",
            )  # fmt: skip
        if isinstance(library, StackError):
            raise _with_other_roots(ctx, library)
        raise StackError(
            "DRA-DRIVER-NOT-LOADED",
            f"the nvidia kernel module is not loaded ({paths.proc / 'driver/nvidia/version'} is not there)"
            + _held_by_others(on_bus),
            remedy="Load it (modprobe nvidia); if that fails, dmesg says why: a module built for another kernel, "
            "Secure Boot, or nouveau holding the GPU.",
        )
    library = _library(paths)
    if isinstance(library, StackError):
        raise _with_other_roots(ctx, library)
    files = find_driver_files(paths, loaded)
    findings: list[Finding] = [
        warning(
            "DRA-DRIVER-LIBRARIES-MISSING",
            f"{name} is not under the driver root {paths.driver_root_host}: containers will miss it",
            "Install the whole driver (the compute libraries are a package of their own on some systems).",
        )
        for name in files.missing
    ]
    findings += [
        note(
            "DRA-DRIVER-STAND-IN", f"{path} is taken for the driver's although its name gives no such version"
        )
        for path in files.assumed
    ]
    # With its gate on, those that are passed through have a rung of their own.
    findings += _foreign_drivers(
        {address: name for address, name in on_bus.items() if not (ctx.passthrough and is_vfio_driver(name))}
    )
    text = f"kernel module {loaded}, {len(files.libraries)} libraries under {paths.driver_root_host}, {len(on_bus)} GPUs on the PCI bus"
    return Looked(text, tuple(findings))


def _library(paths: HostPaths) -> StackError | Path:
    machine = None if paths.stand_in_nodes else os.uname().machine
    try:
        return find_library([paths.driver_root], machine=machine).real
    except StackError as problem:
        # A simulated node's library may be of another machine than this one.
        if problem.code == "DRA-NVML-LIBRARY-BAD" and paths.host_root != Path("/"):
            try:
                return find_library([paths.driver_root], machine=None).real
            except StackError as again:
                return again
        return problem


def _with_other_roots(ctx: NodeContext, problem: StackError) -> StackError:
    """Say where a driver is, if it lies in another of the usual roots."""
    if not ctx.paths.sees_whole_host:
        return problem
    for root in USUAL_ROOTS:
        if root == ctx.paths.driver_root_host:
            continue
        other = HostPaths(host_root=ctx.paths.host_root, driver_root_host=root)
        try:
            find_library([other.driver_root], machine=None)
        except StackError:
            continue
        return StackError(
            "DRA-DRIVER-ROOT-WRONG",
            f"no driver is under the driver root {ctx.paths.driver_root_host}, but there is one under {root}",
            remedy=f"Set --nvidia-driver-root (nvidiaDriverRoot in the chart) to {root}.",
        )
    return problem


def _held_by_others(on_bus: dict[str, str]) -> str:
    held = [f"{address} is held by {name}" for address, name in on_bus.items() if name not in ("", "nvidia")]
    return f"; {', '.join(held)}" if held else ""


def _foreign_drivers(on_bus: dict[str, str]) -> list[Finding]:
    return [
        warning(
            "DRA-GPU-OTHER-DRIVER",
            f"GPU {address} " + (f"is bound to the kernel driver {name}" if name else "has no kernel driver"),
            "Expected for a GPU that is passed through (vfio-pci); else bind it to nvidia or look at dmesg.",
        )
        for address, name in on_bus.items()
        if name != "nvidia"
    ]


def look_at_nvml(ctx: NodeContext) -> Looked:
    """Whether NVML answers, and for which GPUs."""
    inventory = ctx.inventory
    for problem in inventory.problems:
        if problem.subject == NODE:
            raise StackError(problem.code, problem.message, remedy=problem.remedy)
    findings = [
        warning(problem.code, f"{problem.subject}: {problem.message}", problem.remedy)
        for problem in inventory.problems
    ]
    usable = [gpu for gpu in inventory.gpus if not gpu.unusable]
    passed = [name for name in pci_gpus(ctx.paths).values() if ctx.passthrough and is_vfio_driver(name)]
    if not usable and not passed:
        findings.append(
            error(
                "DRA-NVML-NO-GPU",
                "NVML answers and has no GPU that can be given out",
                "Look at dmesg for NVRM lines; run nvidia-smi -q; a GPU that fell off the bus needs a reset or a reboot.",
            )
        )
    bound = sum(1 for name in pci_gpus(ctx.paths).values() if name == "nvidia")
    if bound > len(inventory.gpus):
        findings.append(
            warning(
                "DRA-NVML-GPU-ABSENT",
                f"{bound} GPUs are bound to the nvidia driver, NVML lists {len(inventory.gpus)}",
                "One is excluded (NVreg_ExcludedGpus), lost, or in use for passthrough: nvidia-smi -L and dmesg tell which.",
            )
        )
    sleepers = [f"gpu-{gpu.minor}" for gpu in usable if not gpu.persistence]
    if sleepers:
        findings.append(
            note(
                "DRA-NVML-PERSISTENCE-OFF",
                f"persistence mode is off on {', '.join(sleepers)}: such a GPU is not watched while nobody uses it, and its "
                "first use takes seconds",
                "Run nvidia-persistenced on the node.",
            )
        )
    migs = sum(len(gpu.mig_devices) for gpu in inventory.gpus)
    cuda = "{}.{}".format(*inventory.cuda_version) if inventory.cuda_version else "unknown"
    text = (
        f"driver {inventory.driver_version}, CUDA {cuda}, {len(usable)} of {len(inventory.gpus)} GPUs usable"
    )
    return Looked(text + (f", {migs} MIG devices" if migs else ""), tuple(findings))


def look_at_device_nodes(ctx: NodeContext) -> Looked:
    """Whether each node is there, has the numbers of this moment, and may be opened."""
    paths = ctx.paths
    majors = device_majors(paths)
    view, _ = paths.dev_root()
    rules = (*CONTROL_NODES, *(gpu_rule(gpu.minor) for gpu in ctx.inventory.gpus))
    findings: list[Finding] = []
    seen = 0
    present = []
    for rule in rules:
        node = read_node(view, rule.path, stand_ins=paths.stand_in_nodes)
        major = next((majors[name] for name in rule.drivers if name in majors), rule.default_major)
        if node is None:
            if rule.required:
                findings.append(_missing(rule, majors))
            continue
        seen += 1
        if major is not None and node.major:
            present.append(node)
            if (node.major, node.minor) != (major, rule.minor):
                findings.append(_stale(rule, (node.major, node.minor), (major, rule.minor)))
        if refused := _refusal(view, rule):
            findings.append(refused)
    links = missing_char_links(paths, present)
    if links:
        findings.append(
            warning(
                "DRA-DEV-CHAR-LINKS",
                f"{len(links)} links are missing below /dev/char ({', '.join(links[:3])}…): after systemctl daemon-reload "
                "running containers may lose their GPU",
                "Start the plugin with --dev-char-links (on in the chart), or run nvidia-ctk system create-dev-char-symlinks.",
            )
        )
    return Looked(f"{seen} NVIDIA device nodes below {view / 'dev'}", tuple(findings))


def _missing(rule: NodeRule, majors: Mapping[str, int]) -> Finding:
    if not any(name in majors for name in rule.drivers):
        module = "nvidia-uvm" if "uvm" in rule.path else "nvidia"
        return error(
            "DRA-DEVICE-NODE-MISSING",
            f"the device node {rule.path} is missing and the module {module} is not loaded",
            f"Load it: modprobe {module} (or nvidia-modprobe -u -c 0).",
        )
    return warning(
        "DRA-DEVICE-NODE-MISSING",
        f"the device node {rule.path} is missing; its module is loaded",
        "The plugin makes it when a claim is prepared; nvidia-modprobe -u -c 0 makes it now.",
    )


def _stale(rule: NodeRule, found: tuple[int, int], wanted: tuple[int, int]) -> Finding:
    return error(
        "DRA-DEVICE-NODE-STALE",
        f"{rule.path} is device {found[0]}:{found[1]}, the loaded module has {wanted[0]}:{wanted[1]}",
        f"Remove it and let it be made again: rm {rule.path} && nvidia-modprobe -u -c 0.",
    )


def _refusal(view: Path, rule: NodeRule) -> Finding | None:
    """Open a node as a container would; only a refusal counts (a device may also be busy or absent)."""
    try:
        os.close(os.open(str(view).rstrip("/") + rule.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as problem:
        if problem.errno in _REFUSED:
            return error(
                "DRA-DEVICE-NODE-DENIED",
                f"{rule.path} may not be opened: {problem.strerror}",
                "SELinux, AppArmor or a device cgroup denies it: run the plugin privileged, and look at ausearch -m avc.",
            )
    return None
