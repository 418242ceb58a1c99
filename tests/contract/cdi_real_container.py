"""Real containers by runc or crun, with a CDI spec applied as the CDI library applies it.

The root file system is made of this machine's own programs, so that no image is needed. What the container prints is
the evidence: nothing here looks at the spec to say what the container has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("sh", "cat", "ls", "mknod")
# What programs built for an older libc ask for beside it.
_MORE_LIBRARIES = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6")
_CAPABILITIES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_MKNOD", "CAP_SETUID", "CAP_SETGID"]
_HYBRID = Path("/sys/fs/cgroup/unified")
_NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
_SYSTEM_MOUNTS = (
    ("/proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
)


def find_program(name: str) -> str:
    """Give a program of `KUBEBUILDER_ASSETS`, else of the PATH; empty if there is none."""
    own = Path(os.environ.get("KUBEBUILDER_ASSETS") or "/nowhere", name)
    return str(own) if own.is_file() else shutil.which(name) or ""


def why_no_runtime(name: str) -> str:
    """Say why no container can be run by this runtime; empty if one can."""
    if not os.environ.get("KUBEBUILDER_ASSETS"):
        return "KUBEBUILDER_ASSETS is not set: the directory of real binaries, runc among them"
    if os.geteuid() != 0:
        return "containers with device nodes need root"
    if not find_program(name):
        return f"no {name} in KUBEBUILDER_ASSETS or on the PATH"
    missing = [
        program
        for program in (*PROGRAMS, "ldd", "ldconfig", "mount", "unshare")
        if shutil.which(program) is None
    ]
    return f"not on this machine: {', '.join(missing)}" if missing else ""


def make_rootfs(root: Path) -> Path:
    """Make a small image with a shell, a loader and ldconfig's directories, laid out as Debian's and Red Hat's."""
    for directory in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "proc",
        "dev",
        "sys",
        "tmp",
        "run",
    ):
        (root / directory).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    for program in PROGRAMS:
        found = shutil.which(program)
        assert found is not None
        shutil.copy(os.path.realpath(found), root / "usr/bin" / program)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            place = root / library.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            for name in (place.name, *_MORE_LIBRARIES):
                source = Path(library).with_name(name)
                if source.exists() and not place.with_name(name).exists():
                    shutil.copy(os.path.realpath(source), place.with_name(name))
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    return root


@dataclass
class Ran:
    """What a container printed, part by part, and what the runtime did."""

    status: int
    errors: str
    parts: dict[str, str] = field(default_factory=dict)

    def mapped(self, library: str) -> str:
        """Give the file that a program has mapped after dlopen of this name; empty if it found none."""
        lines = self.parts[f"load {library}"].splitlines()
        stem = library.partition(".so")[0]
        return next((line.split()[-1] for line in lines if f"/{stem}" in line), "")

    @property
    def nodes(self) -> dict[str, tuple[str, int, int]]:
        """Character devices below /dev/nvidia* and /dev/dri: path -> (mode, major, minor)."""
        found = {}
        for line in self.parts["nodes"].splitlines():
            match = re.match(r"(c\S+)\s+\d+ \S+ \S+\s+(\d+),\s*(\d+) .* (/\S+)$", line)
            if match:
                found[match[4]] = (match[1], int(match[2]), int(match[3]))
        return found

    @property
    def mounts(self) -> list[tuple[str, str, str, str]]:
        """Each mount as the container sees it: (point, options, optional fields, file system)."""
        rows = (line.partition(" - ") for line in self.parts["mounts"].splitlines())
        parts = ((before.split(), after.split()) for before, _, after in rows)
        return [(before[4], before[5], " ".join(before[6:]), after[0]) for before, after in parts]

    @property
    def env(self) -> dict[str, str]:
        """The environment of the container's process."""
        pairs = re.findall(r"^export (\w+)='(.*)'$", self.parts["env"], re.MULTILINE)
        return dict(pairs)


def script(libraries: tuple[str, ...], *more: tuple[str, str]) -> str:
    """Give the program that a container runs: it shows what it has, in parts."""
    parts = [
        ("env", "export -p"),
        ("nodes", "ls -ln /dev/nvidia* /dev/nvidia-caps/* /dev/dri/* 2>/dev/null"),
        ("mounts", "cat /proc/self/mountinfo"),
        *((f"load {name}", f"LD_PRELOAD={name} cat /proc/self/maps 2>/dev/null") for name in libraries),
        *more,
    ]
    return "\n".join(f"echo '=== {name}'\n{command}" for name, command in parts)


def config_for(spec: dict, names: list[str], *, rootfs: Path, command: str, readonly: bool) -> dict:
    """Give the OCI configuration of a container with these devices of a CDI spec.

    Source: the CDI library: root edits once, then each device's; mounts by depth; one cgroup rule for each node.
    """
    edits = [spec.get("containerEdits") or {}]
    edits += [device["containerEdits"] for device in spec["devices"] if device["name"] in names]
    nodes = [node for edit in edits for node in edit.get("deviceNodes", [])]
    mounts = [
        {"destination": mount["containerPath"], "source": mount["hostPath"], "options": mount["options"]}
        for edit in edits
        for mount in edit.get("mounts", [])
    ]
    system = [
        {"destination": point, "type": kind, "source": kind, "options": list(options)}
        for point, kind, options in _SYSTEM_MOUNTS
    ]
    hooks: dict[str, list[dict]] = {}
    for hook in (hook for edit in edits for hook in edit.get("hooks", [])):
        hooks.setdefault(hook["hookName"], []).append({key: hook[key] for key in ("path", "args", "env")})
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/sh", "-c", command],
            "env": [f"PATH={path}", *(entry for edit in edits for entry in edit.get("env", []))],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs), "readonly": readonly},
        "hostname": "cdi",
        "mounts": sorted([*system, *mounts], key=lambda mount: mount["destination"].count("/")),
        "hooks": hooks,
        "linux": {
            "namespaces": [{"type": kind} for kind in _NAMESPACES],
            "devices": [_device(node) for node in nodes],
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *map(_rule, nodes)]},
        },
    }  # fmt: skip


def run_container(runtime: str, config: dict, bundle: Path, *, name: str) -> Ran:
    """Run a container to its end."""
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "config.json").write_text(json.dumps(config))
    call = [*_start(runtime), "--root", str(bundle / "state")]
    done = subprocess.run(
        [*call, "run", "--bundle", str(bundle), name],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run([*call, "delete", "-f", name], capture_output=True, check=False)
    ran = Ran(done.returncode, done.stderr)
    for part in done.stdout.split("=== ")[1:]:
        title, _, text = part.partition("\n")
        ran.parts[title] = text
    return ran


@contextlib.contextmanager
def shared_directory(directory: Path) -> Iterator[Path]:
    """Make a directory a shared mount, as `/` is on most hosts: what a container mounts carelessly shows in it."""
    place = str(directory)
    subprocess.run(["mount", "--bind", place, place], check=True)
    try:
        subprocess.run(["mount", "--make-shared", place], check=True)
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def mounts_below(directory: Path) -> set[str]:
    """Give this machine's mount points below a directory."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return {point for point in points if point.startswith(f"{directory}/")}


def _start(runtime: str) -> list[str]:
    if not (runtime.endswith("crun") and _HYBRID.is_dir()):
        return [runtime]
    # Where both versions of cgroups are mounted crun wants to see one of them only.
    hide = f'mount --make-rprivate /sys/fs/cgroup; umount {_HYBRID}; exec "$0" "$@"'
    return ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", hide, runtime]


def _device(node: dict) -> dict:
    # A spec without numbers leaves them to the engine, which asks the host.
    found = node if "type" in node else _asked(node)
    keys = ("type", "major", "minor", "fileMode", "uid", "gid")
    return {"path": node["path"], **{key: found[key] for key in keys if key in found}}


def _asked(node: dict) -> dict:
    status = os.stat(node.get("hostPath", node["path"]))
    numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
    return {**numbers, **node, "type": "c"}


def _rule(node: dict) -> dict:
    device = _device(node)
    return {
        "allow": True,
        "type": device["type"],
        "major": device["major"],
        "minor": device.get("minor", 0),
        "access": node.get("permissions") or "rwm",
    }
