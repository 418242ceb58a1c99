"""nvidia-cuda-mps-control of a simulated node: a control daemon that keeps what it is told, and its front-end.

`-f` is the daemon in the foreground, `-d` in the background; without either, commands are read from stdin, sent to the
daemon in CUDA_MPS_PIPE_DIRECTORY, and its answers are printed. What it does is written to `control.log` in
CUDA_MPS_LOG_DIRECTORY, and to `mps.log` of the node's `sim` folder, which outlives it. It ends with the simulation: when
its pipe directory is gone, or the process in DRA_SIM_LIFE (`pid start-time`).

The file `mps-faults.json` of the `sim` folder makes it fail: {"exit": true} (at start), {"start_seconds": 3} (slow to
listen), {"hang": true} (takes commands and never answers).
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

_NOT_RUNNING = "Cannot find MPS control daemon process"
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}


def sim_folder() -> Path | None:
    """Give the folder of the node's state: in one of the directories above this program."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "sim/state.json").is_file():
            return parent / "sim"
    return None


def faults() -> dict[str, Any]:
    """Give what should go wrong."""
    folder = sim_folder()
    try:
        return dict(json.loads((folder / "mps-faults.json").read_text())) if folder else {}
    except (OSError, ValueError):
        return {}


def pipe_directory() -> Path:
    """Give the directory in which daemon and clients meet."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108


class Daemon:
    """The control daemon: defaults for clients, and who asked for them."""

    def __init__(self, arguments: list[str]) -> None:
        self.multi_user = any(word in ("-M", "-multiuser-server") for word in arguments)
        self.devices = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        self.percentage = 100.0
        self.limits: dict[str, int] = {}
        self.ends = False
        self._log = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")) / "control.log"
        self._lock = threading.Lock()
        # A command that ends it wakes the loop up.
        self._woken, self._wakes = socket.socketpair()

    def run(self) -> int:
        """Serve until it is told to quit."""
        wanted = faults()
        self.record("start", devices=self.devices, multi_user=self.multi_user, pid=os.getpid())
        if wanted.get("exit"):
            print("Failed to initialize MPS: simulated")
            return 1
        time.sleep(wanted.get("start_seconds", 0))
        directory = pipe_directory()
        # The address of a socket is short; the directory may lie deep.
        os.chdir(directory)
        for name in ("control", "nvidia-cuda-mps-control.pid"):
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("control")
        Path("control").chmod(0o666)
        listener.listen(8)
        Path("nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
        while not self.ends and lives(directory):
            if listener in select.select([listener, self._woken], [], [], 0.5)[0]:
                connection, _ = listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()
        self.record("end", pid=os.getpid())
        return 0

    def serve(self, connection: socket.socket) -> None:
        """Answer the commands of one front-end."""
        with connection, connection.makefile("rw") as stream, contextlib.suppress(OSError):
            for line in stream:
                while faults().get("hang"):
                    time.sleep(0.1)
                with self._lock:
                    answer = self.answer(line.split())
                stream.write(json.dumps(answer) + "\n")
                stream.flush()
                if self.ends:
                    return

    def answer(self, words: list[str]) -> str:
        """Carry out one command. Source: nvidia-cuda-mps-control(1)."""
        command, rest = (words or [""])[0], words[1:]
        if not command.startswith("get_"):
            self.record("command", command=" ".join(words), pid=os.getpid())
        if command == "get_default_active_thread_percentage":
            return f"{self.percentage:.1f}"
        if command == "set_default_active_thread_percentage":
            value = float(rest[0])
            if not 0 < value <= 100:
                return f"Invalid active thread percentage {rest[0]}"
            self.percentage = value
            return f"{value:.1f}"
        if command == "get_default_device_pinned_mem_limit":
            return f"{self.limits.get(rest[0], 0)}M"
        if command == "set_default_device_pinned_mem_limit":
            if rest[0] not in self.devices and not rest[0].isdigit():
                return f"Invalid device {rest[0]}"
            self.limits[rest[0]] = int(float(rest[1][:-1]) * _MIB[rest[1][-1]])
            return ""
        if command in ("get_server_list", "get_device_client_list"):
            return ""
        if command == "quit":
            self.ends = True
            self._wakes.send(b"quit")
            return ""
        return f"Unknown command {command}"

    def record(self, what: str, **more: object) -> None:
        """Write down what happened."""
        line = json.dumps({"what": what, **more}) + "\n"
        folder = sim_folder()
        for path in (self._log, folder and folder / "mps.log"):
            with contextlib.suppress(OSError):
                if path:
                    with path.open("a") as file:
                        file.write(line)


def lives(directory: Path) -> bool:
    """Whether the simulation is still there."""
    pid, _, start = os.environ.get("DRA_SIM_LIFE", "").partition(" ")
    if pid:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        if stat.rpartition(")")[2].split()[19] != start:
            return False
    return directory.is_dir()


def front_end() -> int:
    """Send the commands of stdin."""
    directory = pipe_directory()
    try:
        os.chdir(directory)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect("control")
    except OSError:
        print(f"{_NOT_RUNNING}: {directory}")
        return 1
    with connection, connection.makefile("rw") as stream:
        for line in sys.stdin:
            stream.write(line if line.endswith("\n") else line + "\n")
            stream.flush()
            answer = stream.readline()
            if answer and json.loads(answer):
                print(json.loads(answer), flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Play the program."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "-d" in arguments:
        if os.fork():
            return 0
        os.setsid()
        return Daemon(arguments).run()
    if "-f" in arguments:
        return Daemon(arguments).run()
    return front_end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
