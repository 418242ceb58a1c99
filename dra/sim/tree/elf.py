"""Minimal shared objects: real ELF files that hold a SONAME and nothing else.

`readelf -d`, `ldconfig` and `dlopen` accept them. Load addresses differ from file offsets, so that a reader
which confuses the two is found out.
Source: System V ABI, chapters 4 and 5.
"""

from __future__ import annotations

import struct

MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}

_BASE = 0x200000
_PAGE = 0x1000
_HEADER, _PROGRAM = 64, 56
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_NULL = 4, 5, 6, 10, 11, 14, 0


def shared_object(soname: str | None, *, architecture: str = "x86_64") -> bytes:
    """Give the bytes of a shared object with this SONAME, or with none."""
    strings = b"\0" + (soname.encode() + b"\0" if soname else b"")
    string_at = _HEADER + 2 * _PROGRAM
    symbol_at = _aligned(string_at + len(strings))
    hash_at = symbol_at + 24
    dynamic_at = _aligned(hash_at + 16)
    entries = [
        (_DT_HASH, _BASE + hash_at),
        (_DT_STRTAB, _BASE + string_at),
        (_DT_SYMTAB, _BASE + symbol_at),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMENT, 24),
    ]
    if soname:
        entries.insert(0, (_DT_SONAME, 1))
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in [*entries, (_DT_NULL, 0)])
    size = dynamic_at + len(dynamic)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + bytes(9), 3, MACHINES[architecture], 1, 0, _HEADER, 0, 0,
        _HEADER, _PROGRAM, 2, 64, 0, 0,
    )  # fmt: skip
    # Readable and writable: the loader relocates the dynamic section in place.
    load = struct.pack("<IIQQQQQQ", _PT_LOAD, 6, 0, _BASE, _BASE, size, size, _PAGE)
    dynamic_header = struct.pack(
        "<IIQQQQQQ", _PT_DYNAMIC, 6, dynamic_at, _BASE + dynamic_at, _BASE + dynamic_at, len(dynamic),
        len(dynamic), 8,
    )  # fmt: skip
    image = bytearray(size)
    # One bucket, one (undefined) symbol: a hash table in which nothing is found.
    parts = (
        (0, header),
        (_HEADER, load + dynamic_header),
        (string_at, strings),
        (hash_at, struct.pack("<IIII", 1, 1, 0, 0)),
        (dynamic_at, dynamic),
    )
    for offset, part in parts:
        image[offset : offset + len(part)] = part
    return bytes(image)


def _aligned(offset: int) -> int:
    return (offset + 7) & ~7
