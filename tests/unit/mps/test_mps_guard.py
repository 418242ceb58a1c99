"""The process that starts the keeper again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from keeper_rig import spec, until

from dra.host.processes import start_ticks


def test_a_keeper_that_crashes_is_started_again_and_its_daemons_notice_nothing(rig):
    command = [
        sys.executable, "-m", "dra.cli.mps_keeper", "--guard",
        "--simulate", "t4-x1", "--host-root", str(rig.root),
    ]  # fmt: skip
    with (rig.root / "guard.log").open("wb") as log:
        guard = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        keeper = until(lambda: answers(rig), "the keeper answers")
        assert keeper != guard.pid
        rig.client.ensure(spec())
        daemon = rig.client.status("claim-1").pid
        os.kill(keeper, signal.SIGKILL)
        until(lambda: answers(rig) not in (0, keeper), "another keeper answers")
        assert rig.client.status("claim-1").pid == daemon
        second = answers(rig)
    finally:
        guard.terminate()
        assert guard.wait(60) == 0
    until(lambda: start_ticks(second) is None, "the keeper has ended with it")
    assert start_ticks(daemon) is not None


def answers(rig) -> int:
    """The keeper's process id, 0 if none answers."""
    from dra.errors import DraError

    try:
        return int(rig.client._call({"op": "hello"}, seconds=60)["pid"])
    except DraError:
        return 0
