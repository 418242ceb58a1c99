"""The driver within a memory limit, with eight GPUs, of which two are divided; all with DRA_TEST_SLOW=1."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.process.harness import DRIVER, Node, ref_of

MIB = 1 << 20
# It takes some 53 MiB; mapped files count only as far as nobody else has them in use.
LIMIT = 64 * MIB
# All eight take a quarter of a minute on a simulated node.
DIVIDED = 8 if os.environ.get("DRA_TEST_SLOW") else 2


class Limit:
    """A memory cgroup of its own, of version 1 or 2; skips where none can be made."""

    def __init__(self, limit: int) -> None:
        top = Path("/sys/fs/cgroup")
        v1 = (top / "memory").is_dir()
        self.path = top / ("memory" if v1 else "") / f"dra-test-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))
        except OSError as error:
            self.close()
            pytest.skip(f"no memory cgroup can be made here: {error}")
        self._peak = self.path / ("memory.max_usage_in_bytes" if v1 else "memory.peak")

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def peak(self) -> int:
        """The most it had; 0 where the kernel does not say."""
        with contextlib.suppress(OSError):
            return int(self._peak.read_text())
        return 0

    def close(self) -> None:
        end = time.monotonic() + 10
        while self.path.is_dir() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            time.sleep(0.05)


@pytest.mark.fault("F48")
def test_divided_gpus_are_served_within_a_memory_limit():
    limit = Limit(LIMIT)
    node = Node()
    try:
        kubelet = node.kubelet()
        daemon = node.daemon("--mig-mode=dynamic", "--http-endpoint=127.0.0.1:0")
        limit.add(daemon.process.pid)
        connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
        node.wait_published()
        for gpu in range(DIVIDED):
            claims = [node.claim(f"c-{gpu}-{at}", f"gpu-{gpu}-mig-1g10gb-19-{at}") for at in range(7)]
            answer = connection.prepare([ref_of(claim) for claim in claims]).claims
            assert {entry.error for entry in answer.values()} == {""}
        assert len(node.records()) == 7 * DIVIDED
        assert daemon.process.poll() is None
        assert limit.peak() <= LIMIT
    finally:
        node.close()
        limit.close()
