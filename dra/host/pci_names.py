"""What the PCI ID database calls a GPU, and how large its memory regions are: for GPUs that no NVML sees.

The names of data-centre boards stand here, so that nodes with databases of different age publish the same; other boards
are looked up in the node's own database. Source: pci.ids, vendor 10de.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dra.host.paths import HostPaths
from dra.host.pci import device_dir
from dra.host.rooted import resolve
from dra.values import PciAddress

# What NVIDIA's driver publishes for a board that its database does not have.
UNKNOWN_DEVICE = "UNKNOWN_DEVICE"
_DATABASES = ("/usr/share/hwdata/pci.ids", "/usr/share/misc/pci.ids", "/usr/share/pci.ids")
_VENDOR = "10de"
_BOARDS = {
    0x1DB1: "GV100GL [Tesla V100 SXM2 16GB]", 0x1DB4: "GV100GL [Tesla V100 PCIe 16GB]",
    0x1DB5: "GV100GL [Tesla V100 SXM2 32GB]", 0x1DB6: "GV100GL [Tesla V100 PCIe 32GB]",
    0x1EB8: "TU104GL [Tesla T4]",
    0x20B0: "GA100 [A100 SXM4 40GB]", 0x20B2: "GA100 [A100 SXM4 80GB]", 0x20B5: "GA100 [A100 PCIe 80GB]",
    0x20F1: "GA100 [A100 PCIe 40GB]", 0x20B7: "GA100GL [A30 PCIe]",
    0x2235: "GA102GL [A40]", 0x2236: "GA102GL [A10]", 0x2237: "GA102GL [A10G]", 0x25B6: "GA107GL [A2 / A16]",
    0x26B5: "AD102GL [L40]", 0x26B9: "AD102GL [L40S]", 0x27B8: "AD104GL [L4]",
    0x2321: "GH100 [H100L 94GB]", 0x2322: "GH100 [H800 PCIe]", 0x2324: "GH100 [H800]", 0x2329: "GH100 [H20]",
    0x2330: "GH100 [H100 SXM5 80GB]", 0x2331: "GH100 [H100 PCIe]", 0x2335: "GH100 [H200 SXM 141GB]",
    0x233B: "GH100 [H200 NVL]", 0x2342: "GH100 [GH200 120GB / 480GB]",
    0x2901: "GB100 [B200]", 0x2941: "GB100 [HGX GB200]", 0x29BC: "GB102 [B100]",
    0x2BB5: "GB202GL [RTX PRO 6000 Blackwell Server Edition]", 0x31C2: "GB110 [GB300]",
}  # fmt: skip

# Regions of a function proper; what follows are the expansion ROM and those of virtual functions.
_BARS = 6
# Bits of a region's flags: its kind by width (0x4: 64 bits). Source: PCI specification, base address register.
_WIDTH, _WIDE = 0x6, 0x4


def board_name(paths: HostPaths, device_id: int) -> str:
    """Give the name of one of NVIDIA's boards, `UNKNOWN_DEVICE` if nobody knows it."""
    known = _BOARDS.get(device_id)
    if known is not None:
        return known
    for place in _DATABASES:
        file = resolve(paths.host_root, place)
        if file is not None:
            return _name_in(file, device_id) or UNKNOWN_DEVICE
    return UNKNOWN_DEVICE


def find_name(lines: Iterable[str], device_id: int) -> str:
    """Give the name of one of NVIDIA's boards in the lines of a pci.ids; empty if it is not there."""
    ours = False
    for line in lines:
        if line.startswith(("#", "\n", "\t\t")):
            continue
        if not line.startswith("\t"):
            if ours:
                return ""
            ours = line.lower().startswith(_VENDOR)
        elif ours:
            number, _, name = line.strip().partition(" ")
            if number.lower() == f"{device_id:04x}":
                return name.strip()
    return ""


def addressable_bytes(paths: HostPaths, address: PciAddress) -> int:
    """Give the size of a function's 64-bit memory regions together, up to the next power of two; 0 if it has none.

    That is what a virtual machine needs room for. Source: /sys/bus/pci/devices/<address>/resource: start, end and flags
    of each region; reference driver, capacity addressableMemory.
    """
    try:
        text = (device_dir(paths, address) / "resource").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return 0
    total = 0
    for line in text.splitlines()[:_BARS]:
        try:
            start, end, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if flags & _WIDTH == _WIDE and end > start:
            total += end - start + 1
    return 1 << (total - 1).bit_length() if total else 0


def _name_in(file: Path, device_id: int) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return find_name(lines, device_id)
    except OSError:
        return ""
