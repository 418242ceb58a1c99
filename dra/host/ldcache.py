"""The loader's cache of a root (`etc/ld.so.cache`): where the libraries are that stand in no usual directory.

Source: glibc, sysdeps/generic/dl-cache.h. Two forms exist: the old one (`ld.so-1.7.0`, 12 bytes an entry), and
the new one (`glibc-ld.so.cache1.1`, 24 bytes an entry) which may stand alone or, aligned to 8, behind an old one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dra.errors import ValueFormatError

_OLD_MAGIC = b"ld.so-1.7.0"
_NEW_MAGIC = b"glibc-ld.so.cache1.1"
_OLD_HEADER, _OLD_ENTRY = 16, 12
_NEW_HEADER, _NEW_ENTRY = 48, 24
# Low byte of the flags: what kind of library; 3 is ELF for glibc 2.
_ELF_LIBC6 = 3
_MACHINES = {0x0300: "x86_64", 0x0A00: "aarch64", 0x0000: "i386", 0x0800: "x32", 0x0900: "armhf"}


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One library of the cache: the SONAME it is found by, its path in the root, the machine it is for."""

    soname: str
    path: str
    machine: str


def parse_ld_cache(data: bytes) -> tuple[CacheEntry, ...]:
    """Read a cache; entries of other kinds than ELF are left out.

    Raises:
        ValueFormatError: DRA-LDCACHE: neither form, or cut short.
    """
    if data.startswith(_NEW_MAGIC):
        return _entries(data, 0, _NEW_HEADER, _NEW_ENTRY)
    if not data.startswith(_OLD_MAGIC):
        raise _bad("it has neither of the known headers")
    if len(data) < _OLD_HEADER:
        raise _bad("it ends within its header")
    (count,) = struct.unpack_from("<I", data, 12)
    behind = _OLD_HEADER + count * _OLD_ENTRY
    aligned = (behind + 7) & ~7
    if data.startswith(_NEW_MAGIC, aligned):
        return _entries(data, aligned, _NEW_HEADER, _NEW_ENTRY)
    return _entries(data, 0, _OLD_HEADER, _OLD_ENTRY)


def _entries(data: bytes, start: int, header: int, size: int) -> tuple[CacheEntry, ...]:
    old = size == _OLD_ENTRY
    if len(data) < start + header:
        raise _bad("it ends within its header")
    (count,) = struct.unpack_from("<I", data, start + (12 if old else 20))
    table = start + header
    if len(data) < table + count * size:
        raise _bad(f"it says that it has {count} entries and ends before them")
    # Offsets count from the strings in the old form, from the new header in the new one.
    base = table + count * size if old else start
    found = []
    for at in range(table, table + count * size, size):
        flags, key, value = struct.unpack_from("<iII", data, at)
        if flags & 0xFF != _ELF_LIBC6:
            continue
        machine = _MACHINES.get(flags & 0xFF00, f"flags-{flags & 0xFF00:#06x}")
        found.append(CacheEntry(_string(data, base + key), _string(data, base + value), machine))
    return tuple(found)


def _string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    if at >= len(data) or end < 0:
        raise _bad("a name lies behind its end")
    return data[at:end].decode("utf-8", "surrogateescape")


def _bad(why: str) -> ValueFormatError:
    return ValueFormatError(
        "DRA-LDCACHE", f"the loader's cache cannot be read: {why}", remedy="Run ldconfig in the driver root."
    )
