"""Starts child processes that cannot outlive this process, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dra.sim import leashed


class Leash:
    """Starts children from one thread that lives as long as they may: see `dra.sim.leashed`. Thread-safe.

    The parent-death signal fires when the *thread* that started a child ends, so that no passing thread may do it.
    """

    def __init__(self) -> None:
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="sim-spawner")

    def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str], session: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a program by its absolute path, in a session of its own if asked; its output is added to `log`."""
        return self._spawner.submit(self._start, list(command), log, dict(env), session).result()

    def close(self) -> None:
        """End the thread; children that still run are killed by that."""
        self._spawner.shutdown(wait=True)

    @staticmethod
    def _start(command: list[str], log: Path, env: dict[str, str], session: bool) -> subprocess.Popen[bytes]:
        # -I -S: the few lines that set the signal need no packages.
        before = [sys.executable, "-I", "-S", str(Path(leashed.__file__)), str(os.getpid())]
        with log.open("ab") as out:
            return subprocess.Popen(
                [*before, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=session,
            )
