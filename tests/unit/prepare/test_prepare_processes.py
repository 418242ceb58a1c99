"""Real processes on one state directory: two at once, and killed ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dra.prepare import steps


class Process:
    def __init__(self, node, kill_at: str = "") -> None:
        (node.root / "claims.json").write_text(json.dumps(list(node.api.claims.values())))
        script = Path(__file__).with_name("prepare_process.py")
        self.popen = subprocess.Popen(
            [sys.executable, str(script), str(node.root), *([kill_at] if kill_at else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.line = self.popen.stdout.readline()
        assert self.line == "ready\n"

    def call(self, verb: str, ref):
        self.popen.stdin.write(json.dumps([verb, ref.namespace, ref.name, ref.uid]) + "\n")
        self.popen.stdin.flush()
        line = self.popen.stdout.readline()
        return json.loads(line) if line else "killed"

    def close(self) -> int:
        self.popen.communicate()
        return self.popen.returncode


def test_two_processes_give_one_answer_and_one_holder(node):
    shared = [node.claim(n, f"gpu-{n}") for n in range(4)]
    rivals = [node.claim(10 + n, "gpu-7") for n in range(6)]
    processes = [Process(node), Process(node)]
    outcomes: list[list] = [[], []]

    def work(index: int) -> None:
        process, found = processes[index], outcomes[index]
        for _ in range(3):
            found.append([process.call("prepare", ref) for ref in shared])
        found.append([process.call("prepare", ref) for ref in rivals[index::2]])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        expected = [
            [[f"gpu-{n}", f"k8s.gpu.nvidia.com/claim={ref.uid}-gpu-{n}"]] for n, ref in enumerate(shared)
        ]
        for found in outcomes:
            assert found[:3] == [expected] * 3
        answers = outcomes[0][3] + outcomes[1][3]
        winners = [answer for answer in answers if isinstance(answer, list)]
        assert len(winners) == 1, answers
        assert sum("DRA-DEVICE-HELD" in str(answer) for answer in answers) == 5
        node.check_invariants()

        # What one prepared, the other unprepares; then the device is free for both.
        for n, ref in enumerate(shared):
            assert processes[n % 2].call("unprepare", ref) is None
            assert processes[(n + 1) % 2].call("unprepare", ref) is None
        for ref in rivals:
            assert processes[0].call("unprepare", ref) is None
        assert node.files() == []
        assert isinstance(processes[1].call("prepare", rivals[0]), list)
    finally:
        assert [process.close() for process in processes] == [0, 0]


@pytest.mark.parametrize("step", steps.prepare_steps())
def test_kill_9_in_prepare_and_a_process_that_takes_over(node, step):
    ref = node.claim(1, "gpu-0")
    doomed = Process(node, step)
    assert doomed.call("prepare", ref) == "killed"
    assert doomed.close() == -signal.SIGKILL
    node.restart()
    assert [device.device for device in node.prepared(ref)] == ["gpu-0"]
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert node.files() == []


@pytest.mark.parametrize("step", steps.unprepare_steps())
def test_kill_9_in_unprepare_and_a_process_that_takes_over(node, step):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    doomed = Process(node, step)
    assert doomed.call("unprepare", ref) == "killed"
    assert doomed.close() == -signal.SIGKILL
    node.restart()
    assert node.unprepare(ref) is None
    node.janitor().sweep()
    assert node.files() == []
    node.prepared(node.claim(2, "gpu-0"))
