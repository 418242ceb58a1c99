"""What the machine has for these tests: real Kubernetes binaries, the rights and the programs that a node needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CONTROL_PLANE = ("etcd", "kube-apiserver")
SCHEDULING = ("kube-controller-manager", "kube-scheduler")
NODE = ("kubelet", "containerd", "containerd-shim-runc-v2", "runc", "ctr")
HOST_PROGRAMS = ("ip", "nsenter", "mount", "umount", "ldd", "bash")


@dataclass(frozen=True, slots=True)
class Assets:
    """The binaries in the directory that `KUBEBUILDER_ASSETS` names (the convention of envtest)."""

    directory: Path

    def path(self, name: str) -> str:
        """Give the path of a binary; kubectl may also be the machine's own."""
        own = self.directory / name
        found = str(own) if own.is_file() else shutil.which(name)
        assert found is not None, f"{name} is neither in {self.directory} nor on the PATH"
        return found

    def has(self, name: str) -> bool:
        """Whether a binary is there."""
        return (self.directory / name).is_file() or (name == "kubectl" and shutil.which(name) is not None)

    def version(self, name: str) -> str:
        """Give what a binary says of its version."""
        argument = "-v" if name in ("containerd", "ctr") else "--version"
        done = subprocess.run([self.path(name), argument], capture_output=True, text=True, check=True)
        return done.stdout.strip().splitlines()[0]


def why_no_control_plane() -> str:
    """Say why no API server can run here; empty if it can."""
    named = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not named:
        return "KUBEBUILDER_ASSETS is not set: real Kubernetes binaries are needed"
    assets = Assets(Path(named))
    missing = [name for name in (*CONTROL_PLANE, "kubectl") if not assets.has(name)]
    return f"not in KUBEBUILDER_ASSETS: {', '.join(missing)}" if missing else ""


def why_no_node() -> str:
    """Say why no real node can run here; empty if it can."""
    if reason := why_no_control_plane():
        return reason
    assets = find_assets()
    if missing := [name for name in (*SCHEDULING, *NODE) if not assets.has(name)]:
        return f"a node needs more in KUBEBUILDER_ASSETS: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a kubelet and containerd need root"
    if missing := [name for name in HOST_PROGRAMS if shutil.which(name) is None]:
        return f"not on this machine: {', '.join(missing)}"
    return ""


def find_assets() -> Assets:
    """Give the binaries; only after `why_no_control_plane` had nothing to say."""
    return Assets(Path(os.environ["KUBEBUILDER_ASSETS"]))


def why_no_driver_root() -> str:
    """Say why there is no compiled NVML to test with; empty if there is one."""
    root = os.environ.get("DRA_TEST_DRIVER_ROOT", "")
    if not root:
        return "DRA_TEST_DRIVER_ROOT is not set: the root of a driver with libnvidia-ml.so.1, real or a mock"
    if not any(Path(root).glob("usr/lib*/**/libnvidia-ml.so.1")):
        return f"no libnvidia-ml.so.1 below DRA_TEST_DRIVER_ROOT={root}"
    return ""
