"""Prepare and unprepare calls, as the kubelet makes them, with the time of each."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.apiserver import ApiServerProcess, RealApi
from tests.process.harness import Node, ref_of

GPUS = 8
_SETTLE_SECONDS = 2.0
_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps a tmpfs


class BenchNode(Node):
    """A node whose API server has a process of its own, and whose CDI directory is in memory.

    So is /run on every node (systemd makes it a tmpfs); the state directory is on the disk that /tmp is on.
    """

    place = "/tmp"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._in_memory = ""
        if os.access(_MEMORY, os.W_OK):
            self._in_memory = tempfile.mkdtemp(prefix="cdi", dir=_MEMORY)
            folder = self.root / "var/run/cdi"
            folder.rmdir()
            folder.symlink_to(self._in_memory)

    def wait_settled(self) -> None:
        """Wait until the pool is published and the driver's files are taken as they are.

        This node's were made a moment ago: as long as they may be those of an installation that is under way, each prepare
        looks for all of them.
        """
        self.wait_published()
        time.sleep(_SETTLE_SECONDS)

    def close(self) -> None:
        """End all processes and threads, and remove the files."""
        super().close()
        if self._in_memory:
            shutil.rmtree(self._in_memory, ignore_errors=True)

    def api_server(self, version: str) -> ApiServerProcess | RealApi:
        """Start the API server: a real one where its binaries are, else the simulated one."""
        if os.environ.get("KUBEBUILDER_ASSETS"):
            return RealApi(self.root)
        return ApiServerProcess(version=version, folder=self.root)


class Calls:
    """Prepares and unprepares claims, and says how long each call took, in ms."""

    def __init__(self, node: Node, connection: Any) -> None:
        self._node, self._connection, self._made = node, connection, 0

    def claims(
        self, devices: Iterable[str], *, shared: bool = False, consumed: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Make a claim for each device; `shared`: each has a share of its device, with these amounts."""
        self._made += 1
        return [
            self._node.claim(
                f"c{self._made}-{index}", device, share=str(uuid.uuid4()) if shared else "", consumed=consumed
            )
            for index, device in enumerate(devices)
        ]

    def remove(self, claims: Iterable[dict[str, Any]]) -> None:
        """Delete claims."""
        for claim in claims:
            path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim['metadata']['name']}"
            self._node.api.request("DELETE", path)

    def prepare(self, claims: list[dict[str, Any]]) -> float:
        """Make one call for these claims."""
        refs = [ref_of(claim) for claim in claims]
        taken, answer = timed(lambda: self._connection.prepare(refs))
        failed = {uid: entry.error for uid, entry in answer.claims.items() if entry.error}
        if failed or len(answer.claims) != len(refs):
            raise RuntimeError(f"prepare failed: {failed}")
        return taken

    def unprepare(self, claims: list[dict[str, Any]]) -> float:
        """Make one call for these claims."""
        taken, answer = timed(lambda: self._connection.unprepare([ref_of(claim) for claim in claims]))
        if any(entry.error for entry in answer.claims.values()):
            raise RuntimeError(f"unprepare failed: {answer}")
        return taken

    def single(
        self,
        rounds: int,
        device: str = "gpu-0",
        *,
        shared: bool = False,
        consumed: dict[str, str] | None = None,
    ) -> tuple[list[float], list[float]]:
        """One claim after the other."""
        prepared, unprepared = [], []
        for _ in range(rounds):
            claims = self.claims([device], shared=shared, consumed=consumed)
            prepared.append(self.prepare(claims))
            unprepared.append(self.unprepare(claims))
            self.remove(claims)
        return prepared, unprepared

    def again(self, rounds: int) -> list[float]:
        """One claim that is prepared already, as the kubelet does after its own restart."""
        claims = self.claims(["gpu-0"])
        self.prepare(claims)
        taken = [self.prepare(claims) for _ in range(rounds)]
        self.unprepare(claims)
        self.remove(claims)
        return taken

    def batch(self, rounds: int) -> tuple[list[float], list[float]]:
        """Eight claims in one call."""
        prepared, unprepared = [], []
        for _ in range(rounds):
            claims = self.claims(f"gpu-{index}" for index in range(GPUS))
            prepared.append(self.prepare(claims))
            unprepared.append(self.unprepare(claims))
            self.remove(claims)
        return prepared, unprepared

    def concurrent(self, rounds: int) -> tuple[list[float], list[float]]:
        """Eight calls at once; each call's own time."""
        prepared: list[float] = []
        unprepared: list[float] = []
        with ThreadPoolExecutor(GPUS) as pool:
            for _ in range(rounds):
                claims = self.claims(f"gpu-{index}" for index in range(GPUS))
                prepared += pool.map(lambda claim: self.prepare([claim]), claims)
                unprepared += pool.map(lambda claim: self.unprepare([claim]), claims)
                self.remove(claims)
        return prepared, unprepared


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Give the milliseconds a call took, and its answer."""
    start = time.perf_counter()
    answer = call()
    return (time.perf_counter() - start) * 1000, answer
