"""How a daemon's process comes to be: gate, mounts of its own, chroot; and what is left where mounts are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dra.mps import launch
from dra.mps.launcher import Launcher
from dra.prepare.sharing import mps_folders
from dra.prepare.sharing.mps_model import DaemonFolders, DaemonSpec

SHOW = "import os; print(sorted(os.listdir({0!r})))"


def run(wanted: dict, text: str = "", **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-I", "-S", launch.__file__, json.dumps(wanted)],
        input=text, capture_output=True, text=True, timeout=60, check=False, **more,
    )  # fmt: skip


def may_mount() -> bool:
    """Whether this process may have a mount namespace of its own."""
    if os.geteuid() != 0:
        return False
    code = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x20000) != 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not may_mount(), reason="this process may not mount")


def test_it_becomes_the_program_once_it_is_let_go():
    command = [sys.executable, "-c", "import sys; print(sys.stdin.read() == '')"]
    assert run({"wait": True, "command": command}, "go\n").stdout == "True\n"
    ended = run({"wait": True, "command": command}, "")
    assert (ended.returncode, ended.stdout) == (launch.FAILED, "")


def test_a_program_that_is_not_there_is_said():
    ended = run({"command": ["/nowhere/program"]})
    assert ended.returncode == launch.FAILED
    assert "cannot start" in ended.stderr


@needs_mounts
def test_mounts_are_the_programs_own(tmp_path):
    source, target = tmp_path / "source", tmp_path / "deep/target"
    source.mkdir()
    (source / "inside").touch()
    command = [sys.executable, "-c", SHOW.format(str(target))]
    ended = run({"binds": [[str(source), str(target)]], "command": command})
    assert ended.stdout == "['inside']\n", ended.stderr
    assert list(target.iterdir()) == []


@needs_mounts
def test_a_root_that_is_read_only_is_no_obstacle(tmp_path):
    root, source = tmp_path / "root", tmp_path / "source"
    (root / "tmp").mkdir(parents=True)
    source.mkdir()
    (source / "inside").touch()
    target = root / "tmp/nvidia-mps"
    command = [sys.executable, "-c", SHOW.format(str(target))]
    wanted = {"empty": str(root / "tmp"), "binds": [[str(source), str(target)]], "command": command}
    # As a pod's mount of the driver root is: bound, then made read-only.
    script = (
        "import ctypes, os, sys; libc = ctypes.CDLL(None); root = os.fsencode(sys.argv[1])\n"
        "none = libc.unshare(0x20000) or libc.mount(b'none', b'/', None, ctypes.c_ulong(16384 | 1 << 18), None)\n"
        "none = none or libc.mount(root, root, None, ctypes.c_ulong(4096), None)\n"
        "none = none or libc.mount(b'none', root, None, ctypes.c_ulong(4096 | 32 | 1), None)\n"
        "assert not none\n"
        "os.execv(sys.executable, [sys.executable, '-I', '-S', *sys.argv[2:]])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(root), launch.__file__, json.dumps(wanted)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.stdout == "['inside']\n", ended.stderr
    assert list((root / "tmp").iterdir()) == []


@needs_mounts
def test_what_lies_below_the_empty_directory_is_mounted_too(tmp_path):
    """A node whose kubelet has its files under /tmp."""
    source, target = tmp_path / "kubelet/mps/shm", tmp_path / "nvidia-mps"
    source.mkdir(parents=True)
    (source / "inside").touch()
    command = [sys.executable, "-c", SHOW.format(str(target))]
    ended = run({"empty": str(tmp_path), "binds": [[str(source), str(target)]], "command": command})
    assert ended.stdout == "['inside']\n", ended.stderr
    ended = run({"binds": [[str(source / "none"), str(target)]], "command": command})
    assert f"{source}/none" in ended.stderr


@needs_mounts
def test_the_root_is_entered(tmp_path):
    """With the C library of this machine, linked into a root: as a whole file system, not as COS's directory."""
    program = shutil.which("true")
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    found = [word for word in libraries.split() if word.startswith("/")]
    if not found:
        pytest.skip("the program's libraries are not known")
    for path in (program, *found):
        copy = tmp_path / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    assert run({"root": str(tmp_path), "command": [program]}).returncode == 0
    assert run({"root": str(tmp_path), "command": [sys.executable, "-V"]}).returncode == launch.FAILED


@needs_mounts
def test_shared_memory_is_a_file_system_of_its_own_and_goes_without_a_trace(tmp_path):
    folders = DaemonFolders(tmp_path / "claim-1")
    mps_folders.make_folders(folders, memory=True)
    try:
        assert os.path.ismount(folders.shm)
        assert folders.shm.stat().st_mode & 0o7777 == 0o1777
        mps_folders.make_folders(folders, memory=True)
        mounts = Path("/proc/self/mountinfo").read_text()
        assert mounts.count(f" {folders.shm} ") == 1
        (folders.shm / "segment").touch()
    finally:
        mps_folders.remove_folders(folders)
    assert not folders.root.exists()
    mps_folders.remove_folders(folders)


def test_where_nothing_may_be_mounted_it_is_a_directory(tmp_path, monkeypatch):
    class Libc:
        def mount(self, *_):
            return -1

    monkeypatch.setattr(mps_folders.ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(mps_folders.ctypes, "get_errno", lambda: 1)
    folders = DaemonFolders(tmp_path / "claim-1")
    mps_folders.make_folders(folders, memory=True)
    assert folders.shm.is_dir()
    assert folders.shm.stat().st_mode & 0o7777 == 0o1777


class Paths:
    def __init__(self, root: Path) -> None:
        self.driver_root = root


@pytest.mark.parametrize("whole", [True, False])
def test_real_nodes_get_the_usual_places_inside_the_driver_root(tmp_path, whole):
    """A driver root with a loader is entered; one with the driver's files only (COS) is not."""
    root = tmp_path / "driver-root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/lib64").mkdir()
    (root / "usr/bin/nvidia-cuda-mps-control").touch(mode=0o755)
    if whole:
        (root / "lib64").mkdir()
        (root / "lib64/ld-linux-x86-64.so.2").touch()
    folders = DaemonFolders(tmp_path / "claim-1")
    command, environment = Launcher(Paths(root), True, {})._call(
        folders, ["-f"], devices=("GPU-1", "GPU-2"), wait=True
    )
    wanted = json.loads(command[-1])
    base = str(root) if whole else ""
    assert wanted["binds"] == [
        [str(folders.shm), f"{base}/dev/shm"],
        [str(folders.pipe), f"{base}/tmp/nvidia-mps"],
        [str(folders.log), f"{base}/tmp/nvidia-mps-log"],
    ]
    assert wanted["empty"] == f"{base}/tmp"
    assert wanted["root"] == base
    assert wanted["command"] == [
        "/usr/bin/nvidia-cuda-mps-control" if whole else f"{root}/usr/bin/nvidia-cuda-mps-control",
        "-f",
    ]
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/nvidia-mps"
    assert environment["CUDA_MPS_LOG_DIRECTORY"] == "/tmp/nvidia-mps-log"
    assert ("LD_LIBRARY_PATH" in environment) is not whole


def test_commands_are_those_of_the_control_daemon():
    spec = DaemonSpec("a", ("GPU-b", "GPU-a"), 50, {"GPU-b": 2, "GPU-a": 1024})
    assert spec.commands() == (
        "set_default_active_thread_percentage 50",
        "set_default_device_pinned_mem_limit GPU-a 1024M",
        "set_default_device_pinned_mem_limit GPU-b 2M",
    )


@needs_mounts
def test_daemons_of_a_real_node_have_shared_memory_of_their_own():
    """Everything as on a node: mounts, namespaces, and a file system for shared memory that goes with the daemon."""
    from keeper_rig import KeeperRig, spec

    # Not below /tmp, of which each daemon has its own: there the stand-in of the daemon would not find Python.
    if any(Path(place).resolve().is_relative_to("/tmp") for place in (sys.prefix, __file__)):
        pytest.skip("this checkout is below /tmp, which the daemon does not see")
    root = Path(tempfile.mkdtemp(prefix="mps", dir="/var/tmp"))
    rig = KeeperRig(root)
    try:
        service = rig.keeper(isolate=True)
        rig.client.ensure(spec("claim-1", active_thread_percentage=30))
        rig.client.ensure(spec("claim-2"))
        one, two = (rig.client.status(name).pid for name in ("claim-1", "claim-2"))
        folders = rig.state_dir / "mps/claim-1"
        assert os.path.ismount(folders / "shm")
        (folders / "shm/segment").touch()
        assert os.listdir(f"/proc/{one}/root/dev/shm") == ["segment"]
        assert os.listdir(f"/proc/{two}/root/dev/shm") == []
        assert not (Path("/dev/shm") / "segment").exists()
        environment = Path(f"/proc/{one}/environ").read_text().split("\0")
        assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in environment
        assert "control" in os.listdir(folders / "pipe")
        assert rig.ask("claim-1", "get_default_active_thread_percentage") == ["30.0"]
        service.stop()
        rig.keeper(isolate=True)
        assert rig.client.status("claim-1").pid == one
        for name in ("claim-1", "claim-2"):
            rig.client.stop(name)
        assert rig.folders() == []
        assert str(root) not in Path("/proc/self/mountinfo").read_text()
    finally:
        rig.close()
        for name in rig.folders():
            mps_folders.remove_folders(DaemonFolders(rig.state_dir / "mps" / name))
        shutil.rmtree(root, ignore_errors=True)
