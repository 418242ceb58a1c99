"""The node's own network namespace, with one link to the machine, so that its ports meet nobody else's."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """A network namespace and the two addresses of its link: `host` on the machine, `node` inside.

    The addresses are of 198.18.0.0/15, which is set aside for tests of networks (RFC 2544): the kubelet takes
    neither loopback nor link-local addresses for its own.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        self.name = f"dra-{mark}"
        self._link = f"dra{mark}"
        third, fourth = secrets.randbelow(256), 4 * secrets.randbelow(63)
        self.host, self.node = f"198.18.{third}.{fourth + 1}", f"198.18.{third}.{fourth + 2}"

    def start(self) -> None:
        """Make it. Raises OSError where the machine does not let us."""
        _run("ip", "netns", "add", self.name)
        try:
            _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _run("ip", "addr", "add", f"{self.host}/30", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{self.node}/30", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                # A way out that leads nowhere: programs look for a default route.
                ("route", "add", "unreachable", "default", "metric", "4000"),
            ):
                _run("ip", "-n", self.name, *words)
        except OSError:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove it; the link goes with it."""
        if Path("/run/netns", self.name).exists():
            subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)
