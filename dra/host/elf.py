"""The two things an ELF file must tell us: the machine it is for and the SONAME the loader looks it up by.

Reads a few hundred bytes with pread; a driver library has up to 100 MB. A file that is no ELF file, is cut short
or lies about its tables gives None, never an exception.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_MAX_HEADERS = 256
_MAX_DYNAMIC_BYTES = 64 * 1024
_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class ElfFacts:
    """What an ELF file says: `machine` as uname spells it, 32 or 64 `bits`, `soname` if it has one."""

    machine: str
    bits: int
    soname: str | None


def read_elf(path: str) -> ElfFacts | None:
    """Give the facts of an ELF file; None if it is none or cannot be read.

    Source: ELF specification: PT_DYNAMIC holds DT_SONAME, an offset into the table at address DT_STRTAB, which the
    PT_LOAD segments map to a place in the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _read(descriptor)
    except (OSError, struct.error, ValueError, OverflowError):
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> ElfFacts | None:
    ident = os.pread(descriptor, 64, 0)
    # A header of the 32-bit form has 52 bytes.
    if len(ident) < 52 or ident[:4] != b"\x7fELF" or ident[4] not in (1, 2) or ident[5] not in (1, 2):
        return None
    wide = ident[4] == 2
    order = "<" if ident[5] == 1 else ">"
    (machine,) = struct.unpack_from(order + "H", ident, 18)
    facts = _MACHINES.get(machine, f"machine-{machine}")
    if wide:
        (table,) = struct.unpack_from(order + "Q", ident, 32)
        size, count = struct.unpack_from(order + "HH", ident, 54)
    else:
        (table,) = struct.unpack_from(order + "I", ident, 28)
        size, count = struct.unpack_from(order + "HH", ident, 42)
    bits = 64 if wide else 32
    if count > _MAX_HEADERS or size < (56 if wide else 32):
        return ElfFacts(facts, bits, None)
    headers = os.pread(descriptor, size * count, table)
    segments = [_segment(headers, i * size, order, wide=wide) for i in range(len(headers) // size)]
    return ElfFacts(facts, bits, _soname(descriptor, segments, order, wide=wide))


def _segment(headers: bytes, at: int, order: str, *, wide: bool) -> tuple[int, int, int, int]:
    """Give (type, offset in the file, address, bytes in the file) of a program header."""
    if wide:
        kind, _, offset, address, _, size = struct.unpack_from(order + "IIQQQQ", headers, at)
    else:
        kind, offset, address, _, size = struct.unpack_from(order + "IIIII", headers, at)
    return kind, offset, address, size


def _soname(
    descriptor: int, segments: list[tuple[int, int, int, int]], order: str, *, wide: bool
) -> str | None:
    dynamic = next(((offset, size) for kind, offset, _, size in segments if kind == _PT_DYNAMIC), None)
    if dynamic is None:
        return None
    data = os.pread(descriptor, min(dynamic[1], _MAX_DYNAMIC_BYTES), dynamic[0])
    entry = struct.Struct(order + ("qQ" if wide else "iI"))
    strings = name = None
    for at in range(0, len(data) - entry.size + 1, entry.size):
        tag, value = entry.unpack_from(data, at)
        if tag == _DT_NULL:
            break
        if tag == _DT_STRTAB:
            strings = value
        elif tag == _DT_SONAME:
            name = value
    if strings is None or name is None:
        return None
    for kind, offset, address, size in segments:
        if kind == _PT_LOAD and address <= strings < address + size:
            text = os.pread(descriptor, _MAX_NAME, offset + strings - address + name)
            end = text.find(b"\0")
            return text[:end].decode("ascii", "strict") or None if end > 0 else None
    return None
