"""`/proc` of a simulated node."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from dra.sim.profiles import GpuSlot
from dra.sim.tree.facts import KERNEL_RELEASE, VFIO_MAJORS, NodeFacts
from dra.sim.tree.nodes import write_text

# The driver numbers MIG capabilities by formula, up to 15 GPU instances of 8 compute instances a GPU.
_GPU_INSTANCES, _COMPUTE_INSTANCES = 15, 8


def gpu_instance_minor(gpu_minor: int, gpu_instance: int) -> int:
    """Give the minor of a GPU instance's capability node."""
    return 3 + gpu_minor * _GPU_INSTANCES * (_COMPUTE_INSTANCES + 1) + gpu_instance * (_COMPUTE_INSTANCES + 1)


def compute_instance_minor(gpu_minor: int, gpu_instance: int, compute_instance: int) -> int:
    """Give the minor of a compute instance's capability node."""
    return gpu_instance_minor(gpu_minor, gpu_instance) + 1 + compute_instance


@functools.cache
def mig_minors_text(gpus: int) -> str:
    """Give `/proc/driver/nvidia-caps/mig-minors` for that many GPUs."""
    lines = ["config 1", "monitor 2"]
    for gpu in range(gpus):
        for instance in range(_GPU_INSTANCES):
            lines.append(f"gpu{gpu}/gi{instance}/access {gpu_instance_minor(gpu, instance)}")
            lines += [
                f"gpu{gpu}/gi{instance}/ci{compute}/access {compute_instance_minor(gpu, instance, compute)}"
                for compute in range(_COMPUTE_INSTANCES)
            ]
    return "\n".join(lines) + "\n"


def access_text(minor: int, mode: int) -> str:
    """Give a capability's `access` file."""
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def sync_proc(root: Path, facts: NodeFacts) -> None:
    """Make `<root>/proc` say what the facts say."""
    proc = root / "proc"
    write_text(proc / "devices", _devices_text(facts))
    write_text(proc / "meminfo", _meminfo_text(facts.machine.memory_gib))
    write_text(proc / "sys/kernel/random/boot_id", facts.boot_id + "\n")
    write_text(proc / "sys/kernel/osrelease", KERNEL_RELEASE + "\n")
    write_text(proc / "modules", _modules_text(facts))
    write_text(proc / "cmdline", "BOOT_IMAGE=/vmlinuz root=LABEL=root ro\n")
    nvidia = proc / "driver/nvidia"
    if not facts.loaded:
        shutil.rmtree(proc / "driver", ignore_errors=True)
        return
    write_text(nvidia / "version", _version_text(facts))
    write_text(
        nvidia / "params",
        "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\n"
        "DeviceFileMode: 438\nInitializeSystemMemoryAllocations: 1\nPreserveVideoMemoryAllocations: 0\n",
    )
    write_text(
        proc / "driver/nvidia-caps/mig-minors", mig_minors_text(max(8, _highest_minor(facts) + 1)), mode=0o444
    )
    write_text(proc / "driver/nvidia-caps/sys-minors", "fabric-imex-mgmt 2084\n", mode=0o444)
    _sync_gpus(nvidia / "gpus", facts)
    sync_capabilities(nvidia / "capabilities", facts)


def _sync_gpus(directory: Path, facts: NodeFacts) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    present = {str(slot.pci_address) for slot in facts.driven}
    for gone in [path for path in directory.iterdir() if path.name not in present]:
        shutil.rmtree(gone, ignore_errors=True)
    for slot in facts.driven:
        write_text(
            directory / str(slot.pci_address) / "information", _information_text(slot, facts), mode=0o444
        )


def sync_capabilities(directory: Path, facts: NodeFacts) -> None:
    """Make `/proc/driver/nvidia/capabilities` list the partitions of the facts."""
    wanted: dict[str, tuple[int, int]] = {
        "fabric-imex-mgmt": (2084, 0o400),
        "mig/config": (1, 0o400),
        "mig/monitor": (2, 0o444),
    }
    for gpu, instance, computes in facts.mig:
        top = f"gpu{gpu}/mig/gi{instance}"
        wanted[f"{top}/access"] = (gpu_instance_minor(gpu, instance), 0o444)
        for compute in computes:
            wanted[f"{top}/ci{compute}/access"] = (compute_instance_minor(gpu, instance, compute), 0o444)
    for name, (minor, mode) in wanted.items():
        if not (directory / name).exists():
            write_text(directory / name, access_text(minor, mode), mode=0o444)
    for slot in facts.driven:
        if slot.model.mig_table is not None:
            (directory / f"gpu{slot.minor}/mig").mkdir(parents=True, exist_ok=True)
    for file in sorted(directory.rglob("access"), reverse=True):
        if str(file.relative_to(directory)) not in wanted:
            file.unlink()
            shutil.rmtree(file.parent, ignore_errors=True)


def _devices_text(facts: NodeFacts) -> str:
    characters = {"mem": 1, "misc": 10, "drm": 226}
    if facts.loaded:
        characters |= {name: major for name, major in facts.majors.items() if _has_driver(name, facts)}
    if facts.vfio_drivers:
        characters |= VFIO_MAJORS
    lines = [f"{major:3d} {name}" for name, major in sorted(characters.items(), key=lambda item: item[1])]
    return "Character devices:\n" + "\n".join(lines) + "\n\nBlock devices:\n  8 sd\n259 blkext\n"


def _has_driver(name: str, facts: NodeFacts) -> bool:
    return name != "nvidia-nvswitch" or facts.machine.nvswitches > 0


def _modules_text(facts: NodeFacts) -> str:
    modules = ["ext4 1105920 1 - Live 0x0000000000000000"]
    modules += [f"{name.replace('-', '_')} 16384 0 - Live 0x0000000000000000" for name in facts.vfio_drivers]
    if facts.loaded:
        modules += [
            "nvidia_uvm 2076672 0 - Live 0x0000000000000000 (O)",
            "nvidia_modeset 1814528 0 - Live 0x0000000000000000 (O)",
            f"nvidia 104165376 {2 + 4 * len(facts.gpus)} nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (O)",
        ]
    return "\n".join(modules) + "\n"


def _meminfo_text(gib: int) -> str:
    total = gib * 1024 * 1024
    return (
        f"MemTotal:       {total} kB\nMemFree:        {total // 2} kB\nMemAvailable:   {total * 3 // 4} kB\n"
    )


def _version_text(facts: NodeFacts) -> str:
    return (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for {facts.machine.architecture}  {facts.driver_version}"
        "  Release Build  (dvs-builder@U22-I3-AE18-09-6)\nGCC version:  gcc version 13.3.0 (Ubuntu 13.3.0)\n"
    )


def _information_text(slot: GpuSlot, facts: NodeFacts) -> str:
    return (
        f"Model: \t\t {slot.model.name}\nIRQ:   \t\t {100 + slot.minor}\nGPU UUID: \t {slot.uuid}\n"
        "Video BIOS: \t 96.00.9f.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {slot.pci_address}\nDevice Minor: \t {slot.minor}\n"
        f"GPU Firmware: \t {facts.driver_version}\nGPU Excluded:\t No\n"
    )


def _highest_minor(facts: NodeFacts) -> int:
    return max((slot.minor for slot in facts.machine.gpus), default=0)
