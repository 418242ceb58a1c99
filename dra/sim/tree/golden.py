"""Turn a recorded file tree (`*.tree.json`) into files.

A recording says of each path one of: `link` (target), `char` ([major, minor], mode, gid), `socket`, `dir`,
`text`, `base64`, or only `file` (the size). Files of which only the size is known get the content that the
consumers look at: a library is an ELF with the SONAME its links imply, a program is a shell script.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dra.sim.tree import elf, proc
from dra.sim.tree.nodes import make_device_node, make_link, make_socket, under, write_bytes, write_text
from dra.sim.tree.sysfs import link_pci_devices

_LIBRARY = re.compile(r"[^/]+\.so(\.[0-9][0-9.]*)?$", re.ASCII)
_PROGRAM = "#!/bin/sh\nexit 0\n"

Entry = Mapping[str, Any]


def materialise_golden_tree(
    tree: Mapping[str, Mapping[str, Entry]],
    root: Path,
    *,
    driver_root: str = "/",
    architecture: str = "x86_64",
    real_nodes: bool | None = None,
) -> Path:
    """Write a recorded tree below `root`, which then is the node's `/`.

    Args:
        tree: the recording: sections `root`, `proc` and `sys_bus_pci_devices`.
        root: an empty or missing directory.
        driver_root: where the section `root` goes (`/run/nvidia/driver` makes a driver container of it).
        architecture: of the libraries.
        real_nodes: see `make_device_node`.

    Returns:
        The directory that holds the driver's `usr`, `etc`, `dev`.
    """
    driver = under(root, driver_root)
    for directory in ("proc", "sys", "dev", "etc", "run"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    sonames = sonames_from_links(tree["root"])
    _write_section(tree["root"], driver, sonames, architecture=architecture, real_nodes=real_nodes)
    # The recorder laid drm children under /proc/sys as well; they belong to sysfs only.
    recorded = {path: entry for path, entry in tree["proc"].items() if not path.startswith("/sys/")}
    _write_section(recorded, root / "proc", {}, architecture=architecture, real_nodes=real_nodes)
    minors = root / "proc/driver/nvidia-caps/mig-minors"
    if "/driver/nvidia-caps/mig-minors" in recorded:
        write_text(
            minors, proc.mig_minors_text(_gpu_count(recorded["/driver/nvidia-caps/mig-minors"])), mode=0o444
        )
    if "/devices" not in recorded:
        write_text(root / "proc/devices", _devices_text(tree["root"]))
    link_pci_devices(root, tree["sys_bus_pci_devices"])
    return driver


def sonames_from_links(section: Mapping[str, Entry]) -> dict[str, str]:
    """Give the SONAME of each library file, by path.

    A link that points at a file and has a number after `.so` is named by the SONAME
    (`libcuda.so.1 -> libcuda.so.580.95.05`); without a number it is taken where there is no other. A file
    without links has its own name for SONAME.
    """
    found: dict[str, str] = {}
    for path, entry in sorted(section.items()):
        target = entry.get("link")
        if target is None or "/" in target or not _LIBRARY.search(path):
            continue
        directory, _, name = path.rpartition("/")
        file = f"{directory}/{target}"
        if "file" not in section.get(file, {}):
            continue
        if file not in found or not name.endswith(".so"):
            found[file] = name
    for path, entry in section.items():
        if "file" in entry and _LIBRARY.search(path):
            found.setdefault(path, path.rpartition("/")[2])
    return found


def _write_section(
    section: Mapping[str, Entry],
    top: Path,
    sonames: Mapping[str, str],
    *,
    architecture: str,
    real_nodes: bool | None,
) -> None:
    # Links between directories come first: files may be recorded below them.
    for path, entry in sorted(section.items(), key=lambda item: ("link" not in item[1], item[0])):
        where = under(top, path)
        if "link" in entry:
            make_link(where, entry["link"])
        elif "char" in entry:
            major, minor = entry["char"]
            make_device_node(
                where,
                major,
                minor,
                mode=int(entry.get("mode", "0o666"), 8),
                gid=entry.get("gid", 0),
                real=real_nodes,
            )
        elif entry.get("socket"):
            make_socket(where)
        elif entry.get("dir"):
            where.mkdir(parents=True, exist_ok=True)
        else:
            write_bytes(
                where,
                _content(path, entry, sonames, architecture),
                mode=0o755 if entry.get("exec") else 0o644,
            )


def _content(path: str, entry: Entry, sonames: Mapping[str, str], architecture: str) -> bytes:
    if "text" in entry:
        return str(entry["text"]).encode()
    if "base64" in entry:
        return base64.b64decode(entry["base64"])
    if path in sonames:
        return elf.shared_object(sonames[path], architecture=architecture)
    if entry.get("exec"):
        return _PROGRAM.encode()
    if path.endswith("nvidia.icd"):
        return b"libnvidia-opencl.so.1\n"
    if path.endswith(".json"):
        return b"{}\n"
    size = int(entry["file"])
    return b"\n" * min(size, 64)


def _devices_text(section: Mapping[str, Entry]) -> str:
    """Give a `/proc/devices` that agrees with the recorded nodes, for a recording without one."""
    names = {"nvidiactl": "nvidia", "nvidia-uvm": "nvidia-uvm", "nvidia-cap1": "nvidia-caps",
             "channel0": "nvidia-caps-imex-channels"}  # fmt: skip
    majors = {
        names[path.rpartition("/")[2]]: entry["char"][0]
        for path, entry in section.items()
        if "char" in entry and path.rpartition("/")[2] in names
    }
    lines = [f"{major:3d} {name}" for name, major in sorted(majors.items(), key=lambda item: item[1])]
    return "Character devices:\n  1 mem\n" + "\n".join(lines) + "\n\nBlock devices:\n  8 sd\n"


def _gpu_count(entry: Entry) -> int:
    """Give how many GPUs a table of MIG minors of this size covers; the recording has only the size."""
    size = int(entry["file"])
    return next((count for count in range(1, 33) if len(proc.mig_minors_text(count)) >= size), 32)
