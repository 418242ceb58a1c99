"""Any history of claims that share, kills, failures, reboots and hands: what is ours is given back, and only that."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "prepare"))

from prepare_fakes import Killed, result
from sharing_node import SharingNode, gpu_config, interval, mps, opaque, share

from dra.errors import DeviceError, DraError
from dra.prepare import steps

EFFECTS = 4
STEPS = steps.all_steps(effects=EFFECTS)
CALLS = ["nvmlDeviceGetComputeMode", "nvmlDeviceSetComputeMode"]
EXCLUSIVE = 3
# What the GPU had before: an administrator's hand.
BEFORE = {0: 0, 1: 2}


class SharingHistory:
    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dra-sharing-history-"))
        self.node = node = SharingNode(self.root)
        for minor, mode in BEFORE.items():
            node.sim.set_gpu(minor, compute_mode=mode)
        claims = {
            1: (["gpu-0"], interval("Long")),
            2: (["gpu-1"], mps(defaultActiveThreadPercentage=30)),
            3: (["gpu-0"], mps(defaultPinnedDeviceMemoryLimit="1Gi")),
            4: ([share("gpu-0", "a")], interval("Long")),
            5: ([share("gpu-0", "b")], interval("Long")),
            6: ([share("gpu-0", "c")], interval("Short")),
            7: (["gpu-1", "gpu-0"], mps()),
            8: (["gpu-1"], gpu_config("TimeSlicing")),
            9: ([result("gpu-0", adminAccess=True)], mps()),
        }
        self.refs = {
            number: node.claim(number, *devices, configs=[opaque(config)])
            for number, (devices, config) in claims.items()
        }

    def step(self, chance: random.Random) -> None:
        node = self.node
        what = chance.random()
        number = chance.choice(sorted(self.refs))
        kill_at = chance.choice(STEPS) if chance.random() < 0.3 else ""
        if what < 0.45:
            self._call(node.prepare, number, kill_at)
        elif what < 0.72:
            self._call(node.unprepare, number, kill_at)
        elif what < 0.8:
            node.sim.set_fault(chance.choice(CALLS), gpu=chance.choice([0, 1]), error="UNKNOWN", times=1)
        elif what < 0.85:
            node.slices.error = chance.choice(
                [None, DeviceError("DRA-TIME-SLICE-FAILED", "it hangs", retryable=True)]
            )
        elif what < 0.9:
            node.keeper.fail = chance.choice(
                [None, DeviceError("DRA-MPS-DAEMON-FAILED", "it ended", retryable=True)]
            )
        elif what < 0.93:
            node.keeper.absent = not node.keeper.absent
        elif what < 0.96:
            node.keeper.dead |= set(
                chance.sample(sorted(node.keeper.daemons), k=min(1, len(node.keeper.daemons)))
            )
        else:
            self._reboot()
        self._check()

    def _call(self, call, number, step):
        self.node.kill_at = step or None
        try:
            call(self.refs[number])
        except Killed:
            self.node.restart()
            self.node.janitor().restore_specs()
        self.node.kill_at = None

    def _reboot(self):
        node = self.node
        node.keeper.daemons.clear()
        node.reboot()
        # Compute modes end with the boot; the administrator sets his again.
        for minor, mode in BEFORE.items():
            node.sim.set_gpu(minor, compute_mode=mode)

    def _check(self):
        """A prepared claim that was just looked at is what it asked for; each daemon is some claim's."""
        node = self.node
        node.check_invariants()
        recorded = {
            entry.args["id"]
            for record in node.the_engine.store.records()
            for entry in record.journal
            if entry.kind == "mps-daemon"
        }
        assert set(node.keeper.daemons) <= recorded
        held = {
            entry.args["gpu"]
            for record in node.the_engine.store.records()
            if record.holds(node.boot_id)
            for entry in record.journal
            if entry.kind == "compute-mode"
        }
        for minor, mode in BEFORE.items():
            if node.uuid(minor) not in held:
                assert node.compute_mode(minor) == mode

    def what_is_prepared_now_is_so(self):
        node = self.node
        self._mend()
        for number, ref in self.refs.items():
            if isinstance(node.prepare(ref), DraError):
                continue
            if number in (2, 3, 7):
                gpus = [1] if number == 2 else [0] if number == 3 else [0, 1]
                assert {node.compute_mode(gpu) for gpu in gpus} == {EXCLUSIVE}
                assert any(name.startswith(ref.uid) for name in node.keeper.daemons)
            elif number in (1, 4, 5, 6):
                assert node.time_slice(0) == (1 if number == 6 else 3)

    def teardown(self) -> None:
        node = self.node
        try:
            self._mend()
            for ref in self.refs.values():
                assert node.unprepare(ref) is None
            assert node.files() == []
            assert node.keeper.daemons == {}
            assert node.daemon_folders() == []
            assert {gpu.timeslice for gpu in node.sim.state.gpus} == {0}
            # What an administrator had set is there again.
            for minor, mode in BEFORE.items():
                assert node.compute_mode(minor) == mode
        finally:
            node.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def _mend(self):
        self.node.sim.clear()
        self.node.slices.error = self.node.keeper.fail = None
        self.node.keeper.absent = False
        self.node.restart()


@pytest.mark.parametrize("seed", range(10))
def test_any_history_gives_everything_back(seed):
    chance = random.Random(seed)
    history = SharingHistory()
    for _ in range(40):
        history.step(chance)
    history.what_is_prepared_now_is_so()
    history.teardown()
