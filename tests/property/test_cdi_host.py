"""Whatever the tree, the file or the text: links do not escape, parsers do not fall over, YAML reads what JSON says."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dra.cdi.edits import build_claim_spec
from dra.cdi.model import CdiDevice, CdiOptions, DeviceNode, GpuNodes, Mount, NodeFiles
from dra.cdi.spec import VERSIONS, check, encode, minimum_version, parse
from dra.errors import ValueFormatError
from dra.host.driver_files import DriverFiles
from dra.host.elf import read_elf
from dra.host.ldcache import parse_ld_cache
from dra.host.rooted import resolve
from dra.sim.tree.elf import shared_object
from dra.sim.tree.ldcache import ld_so_cache
from dra.values import PciAddress

quick = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

# -- links -------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "d"])
PARTS = st.lists(st.one_of(NAMES, st.sampled_from(["..", "."])), min_size=1, max_size=6)
PATHS = st.builds(lambda slash, parts: slash + "/".join(parts), st.sampled_from(["", "/"]), PARTS)
TREES = st.lists(
    st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.one_of(st.none(), st.just("file"), PATHS)),
    max_size=10,
)

SYS_OPENAT2, RESOLVE_IN_ROOT = 437, 0x10


def kernel_resolves(root: Path, path: str) -> str | int:
    """Give what the kernel finds for a path with this root (a path inside it), or its errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT)
        found, error = -1, errno.EAGAIN
        # Whenever something is renamed or mounted anywhere meanwhile, the kernel is not sure of `..` and says so.
        while found < 0 and error == errno.EAGAIN:
            found = libc.syscall(SYS_OPENAT2, directory, path.encode(), how, len(how))
            error = ctypes.get_errno() if found < 0 else 0
        if found < 0:
            return error
        try:
            return "/" + os.path.relpath(os.readlink(f"/proc/self/fd/{found}"), os.path.realpath(root))
        finally:
            os.close(found)
    finally:
        os.close(directory)


@quick
@given(TREES, PATHS)
def test_a_path_in_a_root_leads_where_the_kernel_says(tree, path):
    top = Path(tempfile.mkdtemp(prefix="dra-root-"))
    try:
        root = top / "root"
        root.mkdir()
        (top / "a").write_text("outside")
        for parts, content in tree:
            where = root.joinpath(*parts)
            try:
                where.parent.mkdir(parents=True, exist_ok=True)
                if content is None:
                    where.mkdir(exist_ok=True)
                elif content == "file":
                    where.touch()
                else:
                    where.symlink_to(content)
            except OSError:
                continue
        ours = resolve(root, path)
        kernel = kernel_resolves(root, path)
        if kernel == errno.ENOSYS or kernel == errno.EPERM:
            pytest.skip("this kernel or sandbox has no openat2")
        # `file/..` is an error for the kernel and the directory for us; nobody asks that.
        assume(kernel != errno.ENOTDIR)
        if isinstance(kernel, int):
            assert ours is None
        else:
            assert ours is not None
            assert os.path.normpath(f"/{ours.relative_to(root)}") == os.path.normpath(kernel)
    finally:
        shutil.rmtree(top)


# -- files that lie ----------------------------------------------------------------------------------------------

EDITS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=12)


def changed(data: bytes, edits: list[tuple[int, int]], end: int) -> bytes:
    image = bytearray(data)
    for place, value in edits:
        image[place % len(image)] = value
    return bytes(image[:end])


@quick
@given(EDITS, st.integers(0, 600))
def test_a_damaged_library_gives_facts_or_none(edits, end):
    with tempfile.NamedTemporaryFile() as file:
        file.write(changed(shared_object("libcuda.so.1"), edits, end))
        file.flush()
        facts = read_elf(file.name)
    assert facts is None or (facts.bits in (32, 64) and (facts.soname is None or facts.soname))


CACHE = ld_so_cache(
    [(f"lib{name}.so.1", f"/opt/{name}/lib{name}.so.1") for name in ("cuda", "nvidia-ml", "c")]
)


@quick
@given(EDITS, st.integers(0, 600), st.booleans())
def test_a_damaged_loader_cache_is_read_or_refused(edits, end, behind_old):
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 0) if behind_old else b""
    try:
        entries = parse_ld_cache(changed(old + CACHE, edits, end))
    except ValueFormatError as error:
        assert error.code == "DRA-LDCACHE"
    else:
        assert all(isinstance(entry.path, str) for entry in entries)


# -- specs -------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
ENV = st.builds(lambda value: f"NAME={value}", TEXT)
PATH = st.builds(
    lambda parts: "/" + "/".join(parts),
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=8),
        min_size=1, max_size=3,
    ),
).filter(lambda path: not {".", ".."} & set(path.split("/")) and not path.startswith("/proc"))  # fmt: skip
MOUNT = st.builds(lambda host, container: Mount(host, container, ("ro", "rbind")), PATH, PATH)
NODE = st.builds(
    DeviceNode, PATH, st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 0o777),
    st.integers(0, 2**32 - 1), st.one_of(st.just(""), PATH),
)  # fmt: skip
UIDS = st.uuids().map(str)


@quick
@given(
    uid=UIDS,
    env=st.lists(ENV, max_size=3),
    mounts=st.lists(MOUNT, max_size=3),
    nodes=st.lists(NODE, max_size=3),
    shares=st.lists(
        st.one_of(st.none(), UIDS), min_size=1, max_size=3, unique_by=lambda share: (share or "")[:8]
    ),
)
def test_whatever_stands_in_a_spec_it_is_valid_and_json_and_yaml_read_the_same(
    uid, env, mounts, nodes, shares
):
    driver = DriverFiles("1.2", "x86_64", (), (), (), (), (), ())
    node = NodeFiles(driver, "/", (DeviceNode("/dev/nvidiactl", 195, 255),),
                     {0: GpuNodes(DeviceNode("/dev/nvidia0", 195, 0))})  # fmt: skip
    devices = [
        CdiDevice("gpu-0", 0, PciAddress(0, 1, 0, 0), share_id=share, extra_nodes=tuple(nodes), extra_env=tuple(env),
                  extra_mounts=tuple(mounts))
        for share in shares
    ]  # fmt: skip
    spec = build_claim_spec(claim_uid=uid, devices=devices, node=node, options=CdiOptions())
    check(spec)
    data = encode(spec)
    assert parse(data) == json.loads(data) == yaml.safe_load(data) == spec
    assert (
        VERSIONS.index(minimum_version(spec)) <= VERSIONS.index(spec["cdiVersion"]) == VERSIONS.index("0.5.0")
    )
