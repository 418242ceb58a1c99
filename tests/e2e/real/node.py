"""A real node: containerd and the kubelet in the network namespace of the test's own.

Everything lies below one directory, also what usually is below /var/lib and /run. A network plugin of a few lines
links each pod to its node: it reaches the API server there, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.real.assets import Assets
from tests.e2e.real.control_plane import NODE_NAME, ControlPlane
from tests.e2e.real.images import PAUSE, write_images
from tests.e2e.real.network import Network
from tests.e2e.real.processes import Program, wait_until

START_SECONDS = 90.0

# Reads the address from the container's id, links the pod to the node, and nothing further.
_CNI = """#!/bin/sh
set -e
inside() {{ nsenter --net="$CNI_NETNS" ip "$@"; }}
id=$(printf %.8s "$CNI_CONTAINERID")
case $CNI_COMMAND-$CNI_IFNAME in
ADD-lo) address=127.0.0.1; inside link set lo up;;
ADD-*) address=10.244.$((0x$(printf %.2s "$id"))).$((0x${{id#??????}}))
  ip link add "v$id" type veth peer name "$CNI_IFNAME" netns "$CNI_NETNS"
  ip link set "v$id" up; ip route replace "$address/32" dev "v$id"
  inside addr add "$address/32" dev "$CNI_IFNAME"; inside link set "$CNI_IFNAME" up
  inside route add {node}/32 dev "$CNI_IFNAME"; inside route add default via {node};;
DEL-lo) ;;
DEL-*) ip link del "v$id" 2>/dev/null || true;;
esac
case $CNI_COMMAND in
ADD) printf '{{"cniVersion":"1.0.0","interfaces":[{{"name":"%s","sandbox":"%s"}}],' "$CNI_IFNAME" "$CNI_NETNS"
  printf '"ips":[{{"address":"%s/32","interface":0}}]}}' "$address";;
VERSION) printf '{{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0"]}}';;
esac
"""

_CONTAINERD = """version = 3
root = "{base}/containerd/root"
state = "{base}/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
  address = "{base}/containerd.sock"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "{snapshotter}"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{pause}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["{cdi}"]
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{base}/cni"]
    conf_dir = "{base}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
"""


class RealNode:
    """containerd and the kubelet. `directory` must have a short path, because of the sockets."""

    def __init__(
        self, assets: Assets, directory: Path, control_plane: ControlPlane, network: Network
    ) -> None:
        self.assets, self.directory, self.control_plane = assets, directory, control_plane
        self._network = network
        self._socket = directory / "containerd.sock"
        self.kubelet_root = directory / "kubelet"
        self.plugins = self.kubelet_root / "plugins"
        self.registry = self.kubelet_root / "plugins_registry"
        self.cdi = directory / "cdi"
        # containerd finds its shim by the path.
        environment = {**os.environ, "PATH": f"{assets.directory}:{os.environ.get('PATH', '')}"}
        self.containerd = Program(
            "containerd",
            [assets.path("containerd"), "--config", str(directory / "containerd.toml")],
            log=directory / "containerd.log", netns=network.name, environment=environment,
        )  # fmt: skip
        self.kubelet = Program(
            "kubelet",
            [
                assets.path("kubelet"), f"--config={directory / 'kubelet.json'}",
                f"--kubeconfig={control_plane.kubeconfig('kubelet')}", f"--hostname-override={NODE_NAME}",
                f"--node-ip={network.node}", f"--root-dir={self.kubelet_root}",
                f"--cert-dir={directory / 'kubelet-certificates'}", "--v=2",
            ],
            log=directory / "kubelet.log", netns=network.name,
        )  # fmt: skip

    def start(self) -> None:
        """Start both; returns when the node takes pods."""
        # Pods may ask for mounts that follow the node's: those must be shared.
        for words in (["--bind", str(self.directory)], ["--make-rshared"]):
            subprocess.run(["mount", *words, str(self.directory)], check=True, capture_output=True)
        for folder in (self.plugins, self.registry, self.cdi, self.directory / "cni"):
            folder.mkdir(parents=True, exist_ok=True)
        self._write_cni()
        self._write_containerd()
        self.containerd.start_and_wait(lambda: self.ctr("version", check=False), seconds=START_SECONDS)
        archive = self.directory / "images.tar"
        write_images(archive)
        self.ctr("images", "import", "--local", "--snapshotter", self._snapshotter(), str(archive))
        (self.directory / "kubelet.json").write_text(json.dumps(self._kubelet_config()))
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """Start the kubelet (again) and wait until its node takes pods."""
        self.kubelet.start_and_wait(self._healthy, seconds=START_SECONDS)
        self.wait_for_kubelet()

    def wait_for_kubelet(self) -> None:
        """Wait until the kubelet serves and its node takes pods."""
        wait_until(self._healthy, seconds=START_SECONDS, what="the kubelet serves")
        wait_until(self._takes_pods, seconds=START_SECONDS, what="the node is ready and has no taint")

    def stop(self) -> None:
        """End it: containers, processes, mounts. What remains is the directory's files."""
        self.kubelet.stop()
        sockets, sandboxes = self._shim_sockets(), []
        if self.containerd.running:
            with contextlib.suppress(subprocess.SubprocessError):
                sandboxes = self.ctr("containers", "ls", "-q", check=False).split()
                for task in self.ctr("tasks", "ls", "-q", check=False).split():
                    self.ctr("tasks", "rm", "-f", task, check=False)
        self._end_shims()
        self.containerd.stop()
        unmount_below(self.directory)
        # What goes to fixed places: sockets of shims, links to logs, the cache of network results.
        for path in sockets:
            path.unlink(missing_ok=True)
        for link in Path("/var/log/containers").glob("*.log"):
            if link.is_symlink() and str(link.readlink()).startswith(f"{self.directory}/"):
                link.unlink()
        for sandbox in sandboxes:
            for path in Path("/var/lib/cni/results").glob(f"*-{sandbox}-*"):
                path.unlink(missing_ok=True)

    def ctr(self, *arguments: str, check: bool = True) -> str:
        """Run containerd's own client; gives its output, nothing if it failed and may."""
        done = subprocess.run(
            [self.assets.path("ctr"), "--address", str(self._socket), "--namespace", "k8s.io", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"ctr {' '.join(arguments)}: {done.stderr}"
        return done.stdout if done.returncode == 0 else ""

    # -- configuration -----------------------------------------------------------------------------

    def _write_cni(self) -> None:
        for name in ("link", "loopback"):
            plugin = self.directory / "cni" / name
            plugin.write_text(_CNI.format(node=self._network.node))
            plugin.chmod(0o755)
        network = {"cniVersion": "1.0.0", "name": self._network.name, "plugins": [{"type": "link"}]}
        (self.directory / "cni" / "10-link.conflist").write_text(json.dumps(network))

    def _write_containerd(self) -> None:
        text = _CONTAINERD.format(
            base=self.directory, snapshotter=self._snapshotter(), pause=PAUSE, cdi=self.cdi,
            runc=self.assets.path("runc"),
        )  # fmt: skip
        (self.directory / "containerd.toml").write_text(text)

    def _snapshotter(self) -> str:
        """Give overlayfs where this directory's file system can carry it."""
        probe = self.directory / "overlay"
        folders = {name: probe / name for name in ("lower", "upper", "work", "merged")}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={folders['lower']},upperdir={folders['upper']},workdir={folders['work']}"
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, str(folders["merged"])],
            capture_output=True, check=False,
        ).returncode == 0  # fmt: skip
        unmount_below(probe)
        return "overlayfs" if mounted else "native"

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            # Nobody but this machine reaches the namespace's address.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            # Without cgroups of its own it never tidies those of another kubelet on this machine.
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "maxOpenFiles": 20000,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "podLogsDir": str(self.directory / "pod-logs"),
            "evictionHard": {
                "memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
                "imagefs.available": "0%", "imagefs.inodesFree": "0%",
            },
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "3s",
            # A failed prepare is tried again after this long, not after a minute.
            "syncFrequency": "2s",
        }  # fmt: skip

    # -- state -------------------------------------------------------------------------------------

    def _healthy(self) -> bool:
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self._network.name}", "--", "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/10248"],
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode == 0

    def _takes_pods(self) -> bool:
        node = self.control_plane.get(f"/api/v1/nodes/{NODE_NAME}", missing=True)
        if node is None:
            return False
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
        return ready and not node["spec"].get("taints")

    def _shim_sockets(self) -> list[Path]:
        """Give the sockets that shims keep outside of our directory."""
        found = []
        for path in (self.directory / "containerd/state").glob(
            "io.containerd.runtime.v2.task/*/*/bootstrap.json"
        ):
            with contextlib.suppress(OSError, ValueError, KeyError):
                address = json.loads(path.read_text())["address"]
                found.append(Path(re.sub("^unix://", "", address)))
        return found

    def _end_shims(self) -> None:
        """End the shims of our containerd: those that name its socket."""
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().decode(errors="replace").split("\0")
                if "containerd-shim" in words[0] and str(self._socket) in words:
                    os.kill(int(entry.parent.name), signal.SIGKILL)


def unmount_below(directory: Path) -> None:
    """Unmount everything at and below a directory, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    for point in sorted((p for p in points if f"{p}/".startswith(f"{directory}/")), reverse=True):
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)


def remove_tree(directory: Path) -> None:
    """Remove a directory; never through a mount that is still there."""
    unmount_below(directory)
    mounts = Path("/proc/self/mountinfo").read_text()
    if f" {directory}" not in mounts:
        shutil.rmtree(directory, ignore_errors=True)
