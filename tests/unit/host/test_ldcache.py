"""The loader's cache in its forms, whole and cut short."""

import struct

import pytest

from dra.errors import ValueFormatError
from dra.host.ldcache import CacheEntry, parse_ld_cache

X86, ARM = 0x0303, 0x0A03


def new_cache(entries, *, at=0):
    """Write the new form; offsets count from its header."""
    table = 48 + 24 * len(entries)
    strings, body = b"", b""
    for flags, soname, path in entries:
        key = table + len(strings)
        strings += soname.encode() + b"\0"
        value = table + len(strings)
        strings += path.encode() + b"\0"
        body += struct.pack("<iIIIQ", flags, key, value, 0, 0)
    return b"glibc-ld.so.cache1.1" + struct.pack("<II20x", len(entries), len(strings)) + body + strings


def old_cache(entries):
    """Write the old form; offsets count from its strings."""
    strings, body = b"", b""
    for flags, soname, path in entries:
        key = len(strings)
        strings += soname.encode() + b"\0"
        value = len(strings)
        strings += path.encode() + b"\0"
        body += struct.pack("<iII", flags, key, value)
    return b"ld.so-1.7.0\0" + struct.pack("<I", len(entries)) + body + strings


ENTRIES = [(X86, "libcuda.so.1", "/opt/lib64/libcuda.so.1"), (ARM, "libcuda.so.1", "/opt/arm/libcuda.so.1"),
           (0x0303 & ~3, "libother.so", "/opt/a.out"), (0x0803, "libx32.so", "/x32")]  # fmt: skip
FOUND = (
    CacheEntry("libcuda.so.1", "/opt/lib64/libcuda.so.1", "x86_64"),
    CacheEntry("libcuda.so.1", "/opt/arm/libcuda.so.1", "aarch64"),
    CacheEntry("libx32.so", "/x32", "x32"),
)


def test_the_new_form_alone():
    assert parse_ld_cache(new_cache(ENTRIES)) == FOUND


def test_the_old_form_alone():
    assert parse_ld_cache(old_cache(ENTRIES)) == FOUND


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_new_form_behind_an_old_one_wins_whatever_the_alignment(count):
    old = b"ld.so-1.7.0\0" + struct.pack("<I", count) + bytes(12 * count)
    padding = bytes(-len(old) % 8)
    assert parse_ld_cache(old + padding + new_cache(ENTRIES)) == FOUND


def test_an_empty_cache_has_no_entries():
    assert parse_ld_cache(new_cache([])) == ()


@pytest.mark.parametrize("make", [new_cache, old_cache])
def test_a_cache_cut_short_is_refused_at_whatever_place(make):
    whole = make(ENTRIES)
    for end in range(len(whole)):
        with pytest.raises(ValueFormatError, match="DRA-LDCACHE"):
            parse_ld_cache(whole[:end])


def test_another_file_is_refused():
    with pytest.raises(ValueFormatError, match="neither of the known headers"):
        parse_ld_cache(b"\x7fELF")
