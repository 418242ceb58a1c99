"""A small node for tests: driver 580.95.05 with a handful of libraries, two GPUs, in a temporary directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dra.host.paths import HostPaths
from dra.sim.tree.elf import shared_object
from dra.values import PciAddress

VERSION = "580.95.05"
UID = "6f1d2b3c-1111-4222-8333-444455556666"
LIB = "usr/lib/x86_64-linux-gnu"
BDF = PciAddress.parse("0000:1a:00.0")
DEVICES = """Character devices:
195 nvidia
195 nvidia-modeset
195 nvidiactl
226 drm
237 nvidia-caps
510 nvidia-uvm

Block devices:
  8 sd
"""
LIBRARIES = {
    "cuda": "libcuda.so.1",
    "nvidia-ml": "libnvidia-ml.so.1",
    "nvidia-gpucomp": None,
    "nvidia-encode": "libnvidia-encode.so.1",
    "EGL_nvidia": "libEGL_nvidia.so.0",
    "nvidia-ngx": "libnvidia-ngx.so.1",
}


def put(path: Path, content: bytes | str = b"", *, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def library(
    directory: Path, stem: str, soname: str | None, *, version: str = VERSION, machine="x86_64"
) -> Path:
    name = f"lib{stem}.so.{version}"
    return put(directory / name, shared_object(soname or name, architecture=machine))


def stand_in(path: Path, major: int, minor: int, *, gid: int = 0, mode: int = 0o666) -> None:
    put(path, f"simulated-device c {major} {minor} gid {gid}\n", mode=mode)


def install_driver(root: Path, *, lib: str = LIB, version: str = VERSION) -> None:
    for stem, soname in LIBRARIES.items():
        library(root / lib, stem, soname, version=version)
    (root / lib / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    put(root / "usr/bin/nvidia-smi", "#!/bin/sh\n", mode=0o755)
    put(root / f"lib/firmware/nvidia/{version}/gsp_ga10x.bin", b"firmware")
    put(root / "etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    for name in ("nvidia-persistenced", "nvidia-fabricmanager"):
        (root / "run" / name).mkdir(parents=True, exist_ok=True)
        os.mknod(root / "run" / name / "socket", stat.S_IFSOCK | 0o666)


def make_node(host: Path, *, driver_root: str = "/", dev: bool = True, driver: bool = True) -> HostPaths:
    """Make a node below `host`; device nodes are stand-ins."""
    paths = HostPaths(host_root=host, driver_root_host=driver_root, stand_in_nodes=True)
    put(host / "proc/devices", DEVICES)
    (host / "dev").mkdir(parents=True, exist_ok=True)
    if driver:
        install_driver(paths.driver_root)
    if dev:
        for name, major, minor in (
            ("nvidiactl", 195, 255), ("nvidia-modeset", 195, 254), ("nvidia0", 195, 0), ("nvidia1", 195, 1),
            ("nvidia-uvm", 510, 0), ("nvidia-uvm-tools", 510, 1),
        ):  # fmt: skip
            stand_in(host / "dev" / name, major, minor)
    return paths


def settle(*directories: Path) -> None:
    """Make a tree look as if nothing had changed in it for a while, so that what is found may be kept."""
    for top in directories:
        for directory, _, _ in os.walk(top):
            os.utime(directory, (1_700_000_000, 1_700_000_000))
