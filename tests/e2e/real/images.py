"""Container images made here and now, of the machine's own programs: nothing is pulled.

The examples ask for `ubuntu:22.04`; what they get under this name has a shell, a few programs, and the C library
that a driver's own programs need.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

UBUNTU = "docker.io/library/ubuntu:22.04"
PAUSE = "localhost/dra-test/pause:1"

_PROGRAMS = ("bash", "cat", "ls", "env", "sleep", "stat", "mknod", "readlink")
# A library that is opened at run time, or asked for by name only, by programs of a driver root.
_MORE_LIBRARIES = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
_FOLDERS = (
    "dev",
    "etc",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib64",
    "var",
)
_LINKS = {
    "bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "../run",
    "usr/bin/sh": "bash",
}  # fmt: skip
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_images(path: Path) -> None:
    """Write an OCI archive with both images."""
    layer = _layer()
    blobs: dict[str, bytes] = {}

    def add(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    rootfs = add(layer, "layer.v1.tar")
    architecture = _ARCHITECTURES[platform.machine()]
    manifests = []
    for name, command in (
        (UBUNTU, {"Cmd": ["bash"]}),
        (PAUSE, {"Entrypoint": ["/usr/bin/sleep", "infinity"]}),
    ):
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], **command},
            "rootfs": {"type": "layers", "diff_ids": [rootfs["digest"]]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": add(json.dumps(config).encode(), "config.v1+json"),
            "layers": [rootfs],
        }
        entry = add(json.dumps(manifest).encode(), "manifest.v1+json")
        entry["platform"] = {"architecture": architecture, "os": "linux"}
        entry["annotations"] = {"io.containerd.image.name": name}
        manifests.append(entry)
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()},
    }
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            _add_file(archive, name, data)


def _layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name, target in _LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            archive.addfile(entry)
        for name, source in sorted(_files().items()):
            _add_file(archive, name, source.read_bytes(), mode=0o755)
        _add_file(archive, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        _add_file(archive, "etc/group", b"root:x:0:\n")
    return buffer.getvalue()


def _files() -> dict[str, Path]:
    """Give the programs and the libraries that they need, by their place in the image."""
    programs = [Path(found).resolve() for name in _PROGRAMS if (found := shutil.which(name)) is not None]
    files = {f"usr/bin/{name}": path for name, path in zip(_PROGRAMS, programs, strict=True)}
    libraries: set[Path] = set()
    for program in programs:
        done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        libraries |= {Path(text) for text in re.findall(r"(/\S+)\s+\(0x", done.stdout)}
    for library in list(libraries):
        libraries |= {path for name in _MORE_LIBRARIES if (path := library.with_name(name)).exists()}
    for library in libraries:
        # /lib is a link to usr/lib in the image, as it is on most machines.
        inside = str(library).lstrip("/")
        files[inside if inside.startswith("usr/") else f"usr/{inside}"] = library.resolve()
    return files


def _add_file(archive: tarfile.TarFile, name: str, data: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
