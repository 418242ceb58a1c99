"""Any history of claims, kills, NVML failures, reboots and hands on the layout: what is ours goes, what is not stays."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "prepare"))

from mig_node import MigNode
from prepare_fakes import Killed, result

from dra.prepare import steps
from dra.sim.nvml.library import mig_uuid
from dra.sim.nvml.memory import Status

SHARES = [f"{letter * 8}-1111-4111-8111-111111111111" for letter in "ab"]
EFFECTS = 3
# On a GPU of its own profile's placements: a hand never makes exactly what a claim is to get.
BY_HAND = [("1g.12gb", 3), ("1g.12gb", 5), ("2g.24gb", 0)]
CALLS = [
    "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance", "nvmlGpuInstanceGetInfo",
    "nvmlComputeInstanceGetInfo_v2", "nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "nvmlDeviceSetMigMode",
    "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode",
]  # fmt: skip

STEPS = steps.all_steps(effects=EFFECTS)


class MigHistory:
    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dra-mig-history-"))
        self.node = node = MigNode(self.root, profile="gh200")
        small, other = node.name(0, "1g.12gb", 0), node.name(0, "1g.12gb", 1)
        wanted = {
            1: [small],
            2: [other],
            3: [result(node.name(0, "2g.24gb", 2), shareID=SHARES[0])],
            4: [result(node.name(0, "2g.24gb", 2), shareID=SHARES[1])],
            5: ["gpu-0"],
            6: [result(small, adminAccess=True)],
        }
        self.refs = {number: node.claim(number, *devices) for number, devices in wanted.items()}
        # What hands made, by the number that no other instance ever has; and whether a hand switched the mode on.
        self.by_hand: set[int] = set()
        self.mode_by_hand = False

    def teardown(self) -> None:
        node = self.node
        try:
            node.sim.clear()
            node.sim.set_gpu(0, processes=[])
            node.restart()
            for ref in self.refs.values():
                assert node.unprepare(ref) is None
            assert node.files() == []
            assert self._serials() == self.by_hand
            if not self.by_hand and not self.mode_by_hand:
                assert node.mode(0) == 0
        finally:
            node.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def prepare(self, several, step):
        for number in several[:-1]:
            self._call(self.node.prepare, number, "")
        self._call(self.node.prepare, several[-1], step)

    def unprepare(self, number, step):
        self._call(self.node.unprepare, number, step)

    def nvml_will_fail_once(self, function, error):
        self.node.sim.set_fault(function, gpu=0, error=error, times=1)

    def a_process_uses_everything(self):
        for gpu in self.node.sim.state.gpus[:1]:
            for instance in gpu.instances:
                for compute in instance.computes:
                    self.node.sim.add_process(0, 1000 + instance.serial, gi=instance.gi, ci=compute.ci)

    def the_processes_end(self):
        self.node.sim.set_gpu(0, processes=[])

    def a_hand_makes_a_partition(self, place):
        # Under the mode of ours, or with one of its own where nobody is at work on the GPU.
        if self.node.mode(0) == 0:
            self.node.sim.set_mig_mode(0, enabled=True)
            self.mode_by_hand = True
        with contextlib.suppress(Status):
            before = self._serials()
            self.node.sim.create_mig(0, *place)
            self.by_hand |= self._serials() - before

    def a_hand_destroys_what_hands_made(self):
        def change(state):
            gpu = state.gpus[0]
            gpu.instances = [each for each in gpu.instances if each.serial not in self.by_hand]

        self.node.sim._change(change)
        self.by_hand.clear()

    def reboot(self):
        self.by_hand.clear()
        self.mode_by_hand = False
        self.node.sim.clear()
        self.node.reboot()

    def look_at_the_hardware(self):
        self.node.look()

    def sweep(self, seconds):
        self.node.now += seconds
        self.node.janitor().sweep()

    def what_hands_made_is_there_and_everything_else_has_a_record(self):
        assert self.by_hand <= self._serials()
        recorded = {made.device for made in self.node.the_engine.partitions()}
        ours = set()
        for instance in self.node.sim.state.gpus[0].instances:
            if instance.serial not in self.by_hand:
                ours.add((instance.profile_id, instance.start))
        known = {tuple(map(int, device.rsplit("-", 2)[1:])) for device in recorded}
        assert ours <= known

    def a_prepared_claim_has_its_partition(self):
        there = {
            mig_uuid(gpu.uuid, instance.gi, compute.ci)
            for gpu in self.node.sim.state.gpus
            for instance in gpu.instances
            for compute in instance.computes
        }
        for record in self.node.the_engine.store.records():
            if record.is_complete(self.node.boot_id):
                made = {e.outcome["uuid"] for e in record.journal if e.kind == "mig-device"}
                assert made <= there

    def no_two_claims_have_the_same_hardware(self):
        self.node.check_invariants()

    def _call(self, call, number, step):
        self.node.kill_at = step or None
        try:
            call(self.refs[number])
        except Killed:
            self.node.restart()
            # A spec that was never written, of a record that says so: the next prepare mends it, as the janitor does.
            self.node.janitor().restore_specs()
        self.node.kill_at = None

    def _serials(self) -> set[int]:
        return {instance.serial for instance in self.node.sim.state.gpus[0].instances}

    def step(self, chance: random.Random) -> None:
        """Do one thing, most often a call of the kubelet's."""
        what = chance.random()
        number = chance.choice(sorted(self.refs))
        kill_at = chance.choice(STEPS) if chance.random() < 0.3 else ""
        if what < 0.4:
            self.prepare([number], kill_at)
        elif what < 0.65:
            self.unprepare(number, kill_at)
        elif what < 0.75:
            self.nvml_will_fail_once(chance.choice(CALLS), chance.choice(["UNKNOWN", "IN_USE"]))
        elif what < 0.82:
            self.sweep(chance.choice([0, 10, 400]))
        elif what < 0.87:
            self.a_hand_makes_a_partition(chance.choice(BY_HAND))
        else:
            chance.choice(
                [
                    self.a_process_uses_everything, self.the_processes_end, self.the_processes_end,
                    self.a_hand_destroys_what_hands_made, self.reboot, self.look_at_the_hardware,
                ]
            )()  # fmt: skip
        self.what_hands_made_is_there_and_everything_else_has_a_record()
        self.a_prepared_claim_has_its_partition()
        self.no_two_claims_have_the_same_hardware()


@pytest.mark.parametrize("seed", range(12))
def test_any_history_leaves_only_what_hands_made(seed):
    chance = random.Random(seed)
    history = MigHistory()
    for _ in range(40):
        history.step(chance)
    history.teardown()
