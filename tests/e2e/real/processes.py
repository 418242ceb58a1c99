"""Programs of the cluster: each with a log of its own, ended by its own process object, none outliving the tests."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], Any], *, seconds: float, what: str, every: float = 0.05) -> Any:
    """Give the first true answer of `condition`; for states of other processes, which nobody announces."""
    end = time.monotonic() + seconds
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(every)


class Program:
    """One program that can be started, stopped, killed, and started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        netns: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        # Ends with the tests even if those are killed.
        leash = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        inside = ["nsenter", f"--net=/run/netns/{netns}", "--"] if netns else []
        self._command = [*leash, *inside, *command]
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its log goes on."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=self._environment,
            )  # fmt: skip

    def start_and_wait(self, ready: Callable[[], Any], *, seconds: float) -> None:
        """Start it and wait until it is ready; its last words are in the error if it ends instead."""
        self.start()

        def check() -> Any:
            if not self.running:
                raise AssertionError(f"{self.name} ended:\n{self.tail()}")
            return ready()

        try:
            wait_until(check, seconds=seconds, what=f"{self.name} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, *, seconds: float = 15.0) -> None:
        """End it kindly, then not."""
        if self.process is None or not self.running:
            return
        # A stopped process would not hear.
        self.signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Take it away as a crash does."""
        if self.process is not None and self.running:
            self.process.kill()
            self.process.wait(15)

    def tail(self, characters: int = 3000) -> str:
        """Give the end of its log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""
