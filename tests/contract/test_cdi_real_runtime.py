"""Our specs in real containers: runc and crun, every tier, writable and read-only root file systems.

Needs root, `KUBEBUILDER_ASSETS` with runc, and for more of it crun, nvidia-cdi-hook and nvidia-ctk there or on the PATH.
The driver is a small one made here, of libraries that a loader maps; with `DRA_TEST_DRIVER_ROOT` (the root of a driver,
real or a mock) also that one's nvidia-smi.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from dra.cdi.model import CdiDevice, CdiOptions
from dra.cdi.renderer import CdiRenderer
from dra.host.paths import HostPaths
from dra.host.proc import device_majors
from dra.sim.tree.elf import shared_object
from dra.values import PciAddress
from tests.contract.cdi_real_container import (
    config_for,
    find_program,
    make_rootfs,
    mounts_below,
    run_container,
    script,
    shared_directory,
    why_no_runtime,
)

pytestmark = pytest.mark.real

UID = "6f1d2b3c-1111-4222-8333-444455556666"
ADDRESS = PciAddress.parse("0000:1a:00.0")
VERSION = "580.95.05"
MACHINE = os.uname().machine
LIB = f"usr/lib/{MACHINE}-linux-gnu"
DEVICES = "Character devices:\n195 nvidia\n195 nvidiactl\n510 nvidia-uvm\n\nBlock devices:\n"
NODES = {"nvidiactl": (195, 255), "nvidia0": (195, 0), "nvidia1": (195, 1), "nvidia-uvm": (510, 0)}
LIBRARIES = {
    "cuda": "libcuda.so.1",
    "nvidia-ml": "libnvidia-ml.so.1",
    "nvidia-encode": "libnvidia-encode.so.1",
    "nvidia-gpucomp": f"libnvidia-gpucomp.so.{VERSION}",
}
NAMES = (
    "libcuda.so.1",
    "libcuda.so",
    "libnvidia-ml.so.1",
    "libnvidia-encode.so.1",
    LIBRARIES["nvidia-gpucomp"],
)
CASES = [
    (runtime, tier, readonly)
    for runtime in ("runc", "crun")
    for tier in ("hooks", "soname", "ld-library-path")
    for readonly in (False, True)
]
EVERY_WAY = pytest.mark.parametrize(("runtime", "tier", "readonly"), CASES)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A root file system that is copied for each container."""
    if reason := why_no_runtime("runc"):
        pytest.skip(reason)
    return make_rootfs(tmp_path_factory.mktemp("image") / "rootfs")


@pytest.fixture
def place(tmp_path, image):
    with shared_directory(tmp_path) as shared:
        subprocess.run(["cp", "-a", str(image), str(shared / "rootfs")], check=True)
        yield shared


def put(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def make_nodes(root: Path) -> HostPaths:
    """Make device nodes and /proc of a node; the host's paths are real ones, since a real runtime reads them."""
    (root / "driver/dev").mkdir(parents=True)
    for name, (major, minor) in NODES.items():
        os.mknod(root / "driver/dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        (root / "driver/dev" / name).chmod(0o666)
    put(root / "proc/devices", DEVICES.encode())
    return HostPaths(
        driver_root_host=str(root / "driver"), proc=root / "proc", sys=root / "sys", cdi_root=root / "cdi"
    )


def make_driver(root: Path) -> HostPaths:
    for stem, soname in LIBRARIES.items():
        put(root / f"driver/{LIB}/lib{stem}.so.{VERSION}", shared_object(soname, architecture=MACHINE))
    put(root / "driver/usr/bin/nvidia-smi", b"#!/bin/sh\necho GPU of the driver root\n", 0o755)
    return make_nodes(root)


def written_spec(paths: HostPaths, tier: str, version: str = VERSION) -> dict:
    """Give what an engine reads: the file, for the GPU with minor 0."""
    hook = find_program("nvidia-cdi-hook")
    if tier == "hooks" and not hook:
        pytest.skip("no nvidia-cdi-hook in KUBEBUILDER_ASSETS or on the PATH")
    renderer = CdiRenderer(paths, CdiOptions(exposure=tier, hook_path=hook))
    spec = renderer.render(UID, [CdiDevice("gpu-0", 0, ADDRESS)], driver_version=version)
    return json.loads(renderer.files.write(UID, spec).read_text())


def crun_version(program: str) -> tuple[int, ...]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said.splitlines()[0])[:2])


def run(place: Path, spec: dict, runtime: str, *, readonly: bool, names=NAMES, more=()):
    """Run a container with a spec's only device; nothing of it may stay on the host."""
    if reason := why_no_runtime(runtime):
        pytest.skip(reason)
    program = find_program(runtime)
    if (
        readonly
        and runtime == "crun"
        and spec["containerEdits"].get("hooks")
        and crun_version(program) < (1, 26)
    ):
        pytest.skip(
            "this crun makes the root file system read-only before NVIDIA's hook makes its links in it"
        )
    command = script(names, *more)
    devices = [device["name"] for device in spec["devices"]]
    config = config_for(spec, devices, rootfs=place / "rootfs", command=command, readonly=readonly)
    before = mounts_below(place)
    ran = run_container(
        find_program(runtime), config, place / "bundle", name=f"cdi-{os.getpid()}-{place.name}"[-60:]
    )
    assert ran.parts, f"{runtime} did not start the container: {ran.errors}"
    assert mounts_below(place) == before, "a mount of the container shows on the host"
    return ran


@EVERY_WAY
def test_a_container_loads_the_driver_s_libraries_and_runs_its_programs(place, runtime, tier, readonly):
    spec = written_spec(make_driver(place), tier)
    ran = run(place, spec, runtime, readonly=readonly, more=[("smi", "nvidia-smi")])
    assert ran.errors == ""
    assert ran.status == 0
    for name in NAMES:
        assert Path(ran.mapped(name)).name.startswith(name.partition(".so")[0]), name
    assert ran.parts["smi"].strip() == "GPU of the driver root"
    assert ran.env["NVIDIA_VISIBLE_DEVICES"] == "void"


@EVERY_WAY
def test_a_container_has_its_gpu_s_nodes_and_can_open_no_other_gpu(place, runtime, tier, readonly):
    spec = written_spec(make_driver(place), tier)
    opens = "cat /dev/nvidia0; mknod /dev/nvidia1 c 195 1; cat /dev/nvidia1"
    ran = run(place, spec, runtime, readonly=readonly, names=(), more=[("open", f"({opens}) 2>&1")])
    assert ran.nodes == {
        f"/dev/{name}": ("crw-rw-rw-", *numbers) for name, numbers in NODES.items() if name != "nvidia1"
    }
    own, other = (
        next(line for line in ran.parts["open"].splitlines() if f"cat: {node}" in line)
        for node in ("/dev/nvidia0", "/dev/nvidia1")
    )
    # The cgroup lets it through to the kernel, which has no such driver here or refuses a read.
    assert "Operation not permitted" not in own
    assert "Operation not permitted" in other


@EVERY_WAY
def test_the_driver_s_files_are_read_only_and_private_to_the_container(place, runtime, tier, readonly):
    spec = written_spec(make_driver(place), tier)
    ran = run(place, spec, runtime, readonly=readonly, names=())
    wanted = {mount["containerPath"] for mount in spec["containerEdits"]["mounts"]}
    seen = {point: options.split(",") for point, options, _, _ in ran.mounts}
    assert wanted <= set(seen)
    for point in wanted:
        assert {"ro", "nosuid", "nodev"} <= set(seen[point]), point
        assert "noexec" not in seen[point], point
    assert not [point for point, _, fields, _ in ran.mounts if point in wanted and "shared:" in fields]


@EVERY_WAY
def test_sockets_firmware_and_graphics_nodes_are_there_as_well(place, runtime, tier, readonly):
    paths = make_driver(place)
    sockets = place / "driver/run/nvidia-persistenced"
    sockets.mkdir(parents=True)
    os.mknod(sockets / "socket", stat.S_IFSOCK | 0o666)
    put(place / f"driver/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", b"firmware")
    for name, minor in (("card1", 1), ("renderD129", 129)):
        (place / f"sys/bus/pci/devices/{ADDRESS}/drm/{name}").mkdir(parents=True)
        (place / "driver/dev/dri").mkdir(exist_ok=True)
        os.mknod(place / "driver/dev/dri" / name, stat.S_IFCHR | 0o660, os.makedev(226, minor))
        os.chown(place / "driver/dev/dri" / name, 0, 44)
    shown = f"ls -ln /run/nvidia-persistenced/socket; cat /lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin; echo"
    links = "ls -ln /dev/dri/by-path 2>/dev/null"
    ran = run(
        place,
        written_spec(paths, tier),
        runtime,
        readonly=readonly,
        names=(),
        more=[("shown", shown), ("links", links)],
    )
    socket, firmware = ran.parts["shown"].splitlines()
    assert socket.startswith("s")
    assert firmware == "firmware"
    assert {path: numbers[1:] for path, numbers in ran.nodes.items() if "dri" in path} == {
        "/dev/dri/card1": (226, 1),
        "/dev/dri/renderD129": (226, 129),
    }
    drm = [line for line in ran.parts["nodes"].splitlines() if line.startswith("c") and "/dev/dri/" in line]
    assert all(re.search(r" 0 +44 ", line) for line in drm)
    # Without the hook nobody makes links.
    assert (f"pci-{ADDRESS}-render -> ../renderD129" in ran.parts["links"]) == (tier == "hooks")


@EVERY_WAY
def test_a_rig_of_one_file_without_a_version_works(place, runtime, tier, readonly):
    put(place / f"driver/{LIB}/libnvidia-ml.so.1", shared_object("libnvidia-ml.so.1", architecture=MACHINE))
    spec = written_spec(make_nodes(place), tier)
    ran = run(place, spec, runtime, readonly=readonly, names=("libnvidia-ml.so.1",))
    assert ran.errors == ""
    assert Path(ran.mapped("libnvidia-ml.so.1")).name == "libnvidia-ml.so.1"


@EVERY_WAY
def test_the_nvidia_smi_of_a_given_driver_root_lists_the_one_gpu(place, runtime, tier, readonly):
    root = os.environ.get("DRA_TEST_DRIVER_ROOT", "")
    if not root:
        pytest.skip("DRA_TEST_DRIVER_ROOT is not set: the root of a driver, real or a mock")
    paths = HostPaths(driver_root_host=root, cdi_root=place / "cdi")
    if "nvidia" not in device_majors(paths) and not (Path(root) / "dev/nvidia0").is_char_device():
        pytest.skip(f"DRA_TEST_DRIVER_ROOT={root} has no dev/nvidia0")
    names = ("libcuda.so.1", "libnvidia-ml.so.1")
    version = next(Path(root).glob("usr/lib*/**/libnvidia-ml.so.*.*")).name.removeprefix("libnvidia-ml.so.")
    spec = written_spec(paths, tier, version)
    ran = run(place, spec, runtime, readonly=readonly, names=names, more=[("smi", "nvidia-smi -L")])
    assert ran.errors == ""
    assert [line[:6] for line in ran.parts["smi"].splitlines()] == ["GPU 0:"]
    assert all(ran.mapped(name) for name in names)


@pytest.mark.parametrize("tier", ["hooks", "soname", "ld-library-path"])
def test_the_cdi_library_itself_takes_our_file(place, tier):
    program = find_program("nvidia-ctk")
    if not program:
        pytest.skip("no nvidia-ctk in KUBEBUILDER_ASSETS or on the PATH")
    written_spec(make_driver(place), tier)
    done = subprocess.run(
        [program, "cdi", "list", "--spec-dir", str(place / "cdi")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"k8s.gpu.nvidia.com/claim={UID}-gpu-0"]
    assert "Found 1 CDI devices" in done.stderr
    assert "warn" not in done.stderr.lower()
