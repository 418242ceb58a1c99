"""SONAME and machine from ELF files, and nothing but None from everything else."""

import struct
import sys

import pytest

from dra.host.elf import ElfFacts, read_elf
from dra.sim.tree.elf import shared_object


@pytest.fixture
def write(tmp_path):
    def write(data):
        path = tmp_path / "lib.so"
        path.write_bytes(data)
        return str(path)

    return write


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_library_tells_its_soname_and_its_machine(write, machine):
    path = write(shared_object("libcuda.so.1", architecture=machine))
    assert read_elf(path) == ElfFacts(machine, 64, "libcuda.so.1")


def test_a_library_without_a_soname_has_none(write):
    assert read_elf(write(shared_object(None))) == ElfFacts("x86_64", 64, None)


def test_real_programs_and_libraries_of_this_machine_can_be_read():
    facts = read_elf(sys.executable)
    assert facts is not None
    assert facts.bits == 64
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "/libc.so" in line or "/libm.so" in line}
    for path in loaded:
        assert read_elf(path).soname in ("libc.so.6", "libm.so.6")


def test_a_32_bit_big_endian_file_is_read_in_its_own_terms(write):
    strings = b"\0libold.so.2\0"
    header, load, dynamic = 52, 52 + 64, 52 + 64 + 24
    body = struct.pack(">iIiIiI", 14, 1, 5, 0x1000 + dynamic, 0, 0)
    data = b"\x7fELF\x01\x02\x01" + bytes(9)
    data += struct.pack(">HHIIIIIHHHHHH", 3, 3, 1, 0, header, 0, 0, 52, 32, 2, 0, 0, 0)
    data += struct.pack(">IIIIIIII", 1, 0, 0x1000, 0, 4096, 4096, 5, 4096)
    data += struct.pack(">IIIIIIII", 2, load, 0x1000 + load, 0, len(body), len(body), 4, 4)
    assert len(data) == load
    assert read_elf(write(data + body + strings)) == ElfFacts("i386", 32, "libold.so.2")


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\n" * 64, b"\x7fELF\x09\x09" + bytes(58)]
)
def test_other_files_are_none(write, data):
    assert read_elf(write(data)) is None


def test_a_file_that_is_not_there_is_none(tmp_path):
    assert read_elf(str(tmp_path / "gone")) is None
    assert read_elf(str(tmp_path)) is None


def test_a_library_cut_at_any_place_never_raises(write):
    whole = shared_object("libcuda.so.1")
    answers = set()
    for end in range(0, len(whole), 7):
        facts = read_elf(write(whole[:end]))
        answers.add(facts if facts is None else facts.soname)
    assert answers <= {None, "libcuda.so.1"}


def test_an_offset_beyond_any_file_is_no_elf_file(write):
    data = bytearray(shared_object("libcuda.so.1"))
    struct.pack_into("<Q", data, 32, 2**63)
    assert read_elf(write(bytes(data))) is None
