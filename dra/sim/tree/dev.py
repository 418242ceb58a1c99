"""`/dev` of a simulated node."""

from __future__ import annotations

import re
from pathlib import Path

from dra.sim.tree.facts import NodeFacts
from dra.sim.tree.nodes import device_numbers, make_device_node, make_link
from dra.sim.tree.proc import compute_instance_minor, gpu_instance_minor

_OURS = re.compile(r"nvidia(\d+|ctl|-modeset|-uvm|-uvm-tools|-nvswitch\d+|-nvswitchctl)", re.ASCII)

# Stands for the kernel's log: a plain file with records as /dev/kmsg gives them.
KERNEL_LOG = "dev/kmsg"

_VIDEO_GID, _RENDER_GID = 44, 109

Node = tuple[int, int, int, int]  # major, minor, mode, gid


def wanted_nodes(facts: NodeFacts) -> dict[str, Node]:
    """Give the nodes below `/dev` that a running driver has, by relative path."""
    if not facts.loaded:
        return {}
    majors = facts.majors
    nodes: dict[str, Node] = {
        "nvidiactl": (195, 255, 0o666, 0),
        "nvidia-modeset": (195, 254, 0o666, 0),
        "nvidia-uvm": (majors["nvidia-uvm"], 0, 0o666, 0),
        "nvidia-uvm-tools": (majors["nvidia-uvm"], 1, 0o666, 0),
        "nvidia-caps/nvidia-cap1": (majors["nvidia-caps"], 1, 0o400, 0),
        "nvidia-caps/nvidia-cap2": (majors["nvidia-caps"], 2, 0o444, 0),
    }
    for slot in facts.gpus:
        # Made by a program and not by the kernel, it stays when another driver takes the GPU.
        nodes[f"nvidia{slot.minor}"] = (195, slot.minor, 0o666, 0)
        if slot.drm is not None and slot in facts.driven:
            card, render = slot.drm
            nodes[f"dri/card{card}"] = (226, card, 0o660, _VIDEO_GID)
            nodes[f"dri/renderD{render}"] = (226, render, 0o660, _RENDER_GID)
    for gpu, instance, computes in facts.mig:
        minors = [gpu_instance_minor(gpu, instance)]
        minors += [compute_instance_minor(gpu, instance, compute) for compute in computes]
        for minor in minors:
            nodes[f"nvidia-caps/nvidia-cap{minor}"] = (majors["nvidia-caps"], minor, 0o444, 0)
    if facts.machine.nvswitches:
        nodes["nvidia-nvswitchctl"] = (majors["nvidia-nvswitch"], 255, 0o666, 0)
        for switch in range(facts.machine.nvswitches):
            nodes[f"nvidia-nvswitch{switch}"] = (majors["nvidia-nvswitch"], switch, 0o666, 0)
    if facts.machine.fabric_cluster:
        nodes["nvidia-caps-imex-channels/channel0"] = (majors["nvidia-caps-imex-channels"], 0, 0o666, 0)
    return nodes


def sync_dev(dev: Path, facts: NodeFacts, *, real: bool | None = None) -> None:
    """Make a `dev` directory hold the nodes the facts ask for; others of ours go, strangers stay."""
    dev.mkdir(parents=True, exist_ok=True)
    nodes = wanted_nodes(facts)
    for name, (major, minor, mode, gid) in nodes.items():
        found = device_numbers(dev / name)
        if found is None or (found.major, found.minor, found.mode) != (major, minor, mode):
            make_device_node(dev / name, major, minor, mode=mode, gid=gid, real=real)
    for path in (*dev.glob("nvidia*"), *dev.glob("nvidia-caps/*"), *dev.glob("dri/*")):
        name = str(path.relative_to(dev))
        ours = _OURS.fullmatch(name) or name.startswith(("nvidia-caps/", "dri/card", "dri/render"))
        if ours and name not in nodes and not path.is_dir():
            path.unlink()
    _sync_by_path(dev / "dri/by-path", facts)


def _sync_by_path(directory: Path, facts: NodeFacts) -> None:
    wanted: dict[str, str] = {}
    for slot in facts.driven if facts.loaded else ():
        if slot.drm is not None:
            card, render = slot.drm
            wanted[f"pci-{slot.pci_address}-card"] = f"../card{card}"
            wanted[f"pci-{slot.pci_address}-render"] = f"../renderD{render}"
    for name, target in wanted.items():
        make_link(directory / name, target)
    for path in directory.glob("pci-*") if directory.is_dir() else ():
        if path.name not in wanted:
            path.unlink()
