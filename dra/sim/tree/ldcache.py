"""Write `/etc/ld.so.cache` in the format glibc has used since 2.32 (new header only).

Source: sysdeps/generic/dl-cache.h; the layout is described in the reference on CDI, section 2.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_MAGIC = b"glibc-ld.so.cache1.1"
_LITTLE_ENDIAN = 2
_LIBC6 = 3
_FLAGS = {"x86_64": 0x0300 | _LIBC6, "aarch64": 0x0A00 | _LIBC6}


def ld_so_cache(entries: Iterable[tuple[str, str]], *, architecture: str = "x86_64") -> bytes:
    """Give the cache for (soname, path) pairs."""
    ordered = sorted(set(entries), reverse=True)  # glibc searches from the greatest name down
    header_size, entry_size = 48, 24
    strings = bytearray()
    table = bytearray()
    base = header_size + entry_size * len(ordered)
    for soname, path in ordered:
        key = base + len(strings)
        strings += soname.encode() + b"\0"
        value = base + len(strings)
        strings += path.encode() + b"\0"
        table += struct.pack("<iIIIQ", _FLAGS[architecture], key, value, 0, 0)
    header = _MAGIC + struct.pack("<IIB3xI8x", len(ordered), len(strings), _LITTLE_ENDIAN, 0)
    return header.ljust(header_size, b"\0") + bytes(table) + bytes(strings)
