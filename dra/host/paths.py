"""Where `/` is: the one settings object through which every path of the node is reached.

A process on the host, a process in a container that sees the driver under `/driver-root`, and a simulated node
under a temporary directory differ only in the values here. Two spellings of a path must never be mixed:

* the *host* spelling is what containerd or CRI-O understands; it goes into CDI specs;
* the *view* is where this process finds the same file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Stands for "not given": `__post_init__` puts the derived path in its place.
_DERIVED = Path()

DEFAULT_CDI_ROOT = "var/run/cdi"
DEFAULT_PLUGINS_DIR = "var/lib/kubelet/plugins"
DEFAULT_REGISTRY_DIR = "var/lib/kubelet/plugins_registry"


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where this process finds the node's files. Absolute paths only; nothing is looked up on construction.

    Fields that are not given follow from `host_root` (`dataclasses.replace` keeps them: make a new object to
    change the root).

    Args:
        host_root: prefix of /proc, /sys, /dev, /etc and /run; `/` except for simulated nodes and for a container
            that has the host mounted.
        driver_root_host: the driver root as the host spells it: `/`, `/run/nvidia/driver`, `/home/kubernetes/bin/nvidia`.
        driver_root: the same directory as this process sees it (`/driver-root` in a container).
        dev_root_host: the directory that holds `dev/`, as the host spells it; empty: the driver root if it has
            `dev/`, else `/`.
        cdi_root: where CDI specs are written. Host and view are the same path below `host_root`.
        kubelet_plugins_dir, kubelet_registry_dir: mounted at the same path as on the host.
        stand_in_nodes: regular files stand for device nodes, as simulated trees made without root rights have
            them. Never set on a real node.
    """

    host_root: Path = Path("/")
    driver_root_host: str = "/"
    driver_root: Path = _DERIVED
    dev_root_host: str = ""
    proc: Path = _DERIVED
    sys: Path = _DERIVED
    dev: Path = _DERIVED
    cdi_root: Path = _DERIVED
    kubelet_plugins_dir: Path = _DERIVED
    kubelet_registry_dir: Path = _DERIVED
    stand_in_nodes: bool = False

    def __post_init__(self) -> None:
        """Fill in what follows from the root."""
        clean = "/" + self.driver_root_host.strip("/")
        object.__setattr__(self, "driver_root_host", clean)
        derived = {
            "driver_root": self.host_root / clean.lstrip("/"),
            "proc": self.host_root / "proc",
            "sys": self.host_root / "sys",
            "dev": self.host_root / "dev",
            "cdi_root": self.host_root / DEFAULT_CDI_ROOT,
            "kubelet_plugins_dir": self.host_root / DEFAULT_PLUGINS_DIR,
            "kubelet_registry_dir": self.host_root / DEFAULT_REGISTRY_DIR,
        }
        for name, path in derived.items():
            if getattr(self, name) == _DERIVED:
                object.__setattr__(self, name, path)

    @property
    def sees_whole_host(self) -> bool:
        """Whether the whole host file system stands below `host_root`.

        Not so in a container to which only the driver root is mounted: there `/usr/bin` is the image's.
        """
        at_its_place = self.driver_root == self.host_root / self.driver_root_host.lstrip("/")
        return self.host_root != Path("/") or at_its_place

    def state_dir(self, driver: str) -> Path:
        """Give the directory in which the driver of this name keeps its state."""
        return self.kubelet_plugins_dir / driver

    def view_of(self, host_path: str) -> Path | None:
        """Give where this process sees a path that the host spells `host_path`; None where it cannot see it."""
        inside = strip_root(host_path, self.driver_root_host)
        if inside is not None:
            return self.driver_root / inside.lstrip("/")
        if self.sees_whole_host:
            return self.host_root / host_path.lstrip("/")
        # Mounted at the host's own paths.
        for shared in (self.kubelet_plugins_dir, self.kubelet_registry_dir, self.cdi_root):
            if strip_root(host_path, str(shared)) is not None:
                return Path(host_path)
        return None

    def host_spelling(self, view: Path) -> str:
        """Give how the host spells a path below the kubelet's directories, which are mounted at the host's own paths.

        Those of a simulated node lie below its root; a real container engine that is given such a node's files finds
        them where they really are, and then the driver root says so.
        """
        path, real = str(view), self.driver_root_host
        if real != "/" and strip_root(path, real) is not None:
            return path
        return strip_root(path, str(self.host_root)) or path

    def driver_file_at_host(self, inside: str) -> str:
        """Give the host's spelling of a path inside the driver root (`/usr/bin/nvidia-smi`)."""
        return join_root(self.driver_root_host, inside)

    def dev_root(self) -> tuple[Path, str]:
        """Give the directory that holds `dev/`: (view, host spelling).

        The driver root if it has `dev/`, else the host's root. One stat.
        """
        wanted = self.dev_root_host
        if not wanted and (self.driver_root / "dev").is_dir():
            return self.driver_root, self.driver_root_host
        if wanted and wanted.rstrip("/") == self.driver_root_host.rstrip("/"):
            return self.driver_root, self.driver_root_host
        if wanted.strip("/"):
            return self.view_of(wanted) or self.host_root / wanted.strip("/"), "/" + wanted.strip("/")
        return self.dev.parent, "/"


def strip_root(path: str, root: str) -> str | None:
    """Give `path` without `root` in front, cut at a component boundary; None if it is not below it."""
    root = root.rstrip("/")
    if not root:
        return path if path.startswith("/") else None
    if path == root:
        return "/"
    return path[len(root) :] if path.startswith(root + "/") else None


def join_root(root: str, inside: str) -> str:
    """Put `root` in front of an absolute path (`/` changes nothing)."""
    return root.rstrip("/") + "/" + inside.lstrip("/")
