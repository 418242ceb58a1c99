"""The monitor on a simulated machine, in this process: sessions that are lost, GPUs that sleep, partitions that change."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from dra.health.monitor import HealthMonitor, HealthPorts
from dra.health.policy import HealthPolicy
from dra.host.paths import HostPaths
from dra.inventory.diff import diff
from dra.inventory.model import Inventory
from dra.inventory.scan import Scanner
from dra.nvml.node import session_of
from dra.nvml.session import HoldPolicy
from dra.sim.node import SimulatedNode

SOON = {"check_seconds": 0.2, "fast_seconds": 0.05, "deadline_seconds": 1.0, "rescan_seconds": 0.1}


def checks_running():
    return [each for each in threading.enumerate() if each.name == "health-check"]


def wait_for(condition):
    end = time.monotonic() + 60
    while not (answer := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return answer


class Watched:
    """A monitor and what it says; the inventory is looked at when the monitor asks for it."""

    def __init__(self, root, profile="l40s-x4", *, hold=HoldPolicy.AUTO, held=(), kernel_log=True, **options):
        self.node = SimulatedNode(profile, root, real_nodes=False)
        self.control = self.node.control
        self.paths = HostPaths(**self.node.paths_kwargs())
        self.session = session_of(self.paths, hold=hold, library=self.node.library)
        self.scanner = Scanner(self.session, self.paths)
        self.inventory = self.scanner.scan()
        assert self.inventory.gpus, self.inventory.problems
        self.held, self.changed = set(held), threading.Condition()
        # UUIDs of GPUs that are passed through.
        self.away = set()
        self.verdict, self.scans = None, 0
        # All devices of which anything was ever said.
        self.ever = set()
        log = self.paths.dev / "kmsg"
        self.monitor = HealthMonitor(
            self.session,
            HealthPorts(
                inventory=lambda: self.inventory, held=lambda: self.held, rescan=lambda _why: self.rescan(),
                told=self._told, away=self.away.__contains__,
            ),
            policy=HealthPolicy(), state_path=root / "health.json",
            kernel_log_path=log if kernel_log else log.with_name("none"), boot_id="boot", **{**SOON, **options},
        )  # fmt: skip
        self.monitor.start()
        self.monitor.inventory_changed(self.inventory, diff(Inventory(), self.inventory))

    def rescan(self):
        self.scans += 1
        found = self.scanner.scan()
        if found != self.inventory:
            difference, self.inventory = diff(self.inventory, found), found
            self.monitor.inventory_changed(found, difference)

    def _told(self, verdict, _changes):
        with self.changed:
            self.verdict = verdict
            self.ever |= set(verdict.marks)
            self.changed.notify_all()

    def marks(self):
        return {
            device: {(mark.key.partition("/")[2], mark.effect, mark.value) for mark in marks}
            for device, marks in (self.verdict.marks if self.verdict else {}).items()
        }

    def until(self, condition, what=""):
        end = time.monotonic() + 60
        with self.changed:
            while not condition():
                assert time.monotonic() < end, f"{what}: {self.marks()}, {self.monitor.snapshot()}"
                self.changed.wait(0.02)

    def wait_marks(self, **wanted):
        wanted = {device.replace("_", "-"): marks for device, marks in wanted.items()}
        self.until(lambda: self.marks() == wanted, f"wanted {wanted}")

    def wait_watched(self, count):
        self.until(lambda: len(self.monitor.snapshot().watch.registered) == count, f"{count} watched")

    def close(self):
        # What hangs comes back, and then every thread ends: one that is left would open the session again.
        self.control.clear()
        self.monitor.stop(timeout_seconds=60)
        assert wait_for(lambda: not checks_running()), "a check is left"
        self.session.close()


@pytest.fixture
def watch(tmp_path):
    made = []

    def make(*arguments, **options):
        found = Watched(tmp_path / f"n{len(made)}", *arguments, **options)
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


def test_events_go_on_after_the_session_was_lost(watch):
    on = watch()
    on.wait_watched(4)
    before = on.session.state.generation
    on.session.reopen("a new GPU")
    on.until(lambda: on.session.state.generation > before, "another session")
    on.until(lambda: on.control.count_calls().get("nvmlDeviceRegisterEvents", 0) >= 8, "another event set")
    on.control.push_xid(1, 119, sources=("nvml",))
    on.wait_marks(gpu_1={("xid", "NoSchedule", "119")})


def test_a_gpu_that_is_lost_ends_no_other_gpus_events_and_is_watched_again_when_it_is_back(watch):
    on = watch()
    on.wait_watched(4)
    on.control.lose_gpu(2, xid=None)
    on.wait_watched(3)
    on.control.push_xid(0, 119, sources=("nvml",))
    on.until(lambda: ("xid", "NoSchedule", "119") in on.marks().get("gpu-0", ()), "the other one's event")
    on.control.recover_gpu(2)
    on.wait_watched(4)


def test_partitions_that_come_are_known_by_their_events(watch):
    on = watch("dgx-h100")
    on.wait_watched(8)
    uuid = on.control.set_mig_layout(5, [("1g.10gb", 0), ("1g.10gb", 1)])[1]
    on.rescan()
    gi, ci = on.control.mig_instances(5, uuid)
    on.control.push_xid(5, 95, gi=gi, ci=ci)
    on.until(lambda: on.marks() == {"gpu-5-mig-1g10gb-19-1": {("xid", "NoSchedule", "95")}}, "the partition")
    # With it goes what is held against it.
    on.control.destroy_mig(uuid)
    on.control.set_gpu(5, recovery_action=0)
    on.rescan()
    on.wait_marks()


def test_partitions_that_come_have_their_gpu_asked_and_no_other(watch):
    on = watch("dgx-h100", check_seconds=3600.0, fast_seconds=3600.0)

    def asked():
        return on.control.count_calls().get("nvmlDeviceGetTemperature", 0)

    on.wait_watched(8)
    assert wait_for(lambda: asked() >= 8 and not checks_running()), "the first check of all"
    on.control.reset_calls()
    on.control.set_mig_layout(5, [("1g.10gb", 0)])
    on.rescan()
    assert wait_for(lambda: asked() and not checks_running()), "a check"
    assert asked() == 1
    # Where a GPU goes, all are asked: what ails one may ail the others.
    on.control.reset_calls()
    on.control.lose_gpu(2)
    on.rescan()
    assert wait_for(lambda: asked() >= 7), "a check of all"


def test_instances_that_a_gpu_without_mig_cannot_have_mean_the_whole_gpu(watch):
    """NVML says 0xFFFFFFFF for them there; some of its stand-ins say 0."""
    on = watch("dgx-h100")
    on.wait_watched(8)
    on.control.push_xid(2, 79, gi=0, ci=0, sources=("nvml",))
    on.until(lambda: on.marks() == {"gpu-2": {("xid", "NoSchedule", "79")}}, "the whole GPU")


def test_sleeping_gpus_are_not_woken_and_heard_through_the_kernel_log(watch, tmp_path):
    on = watch(kernel_log=True)
    for gpu in range(4):
        on.control.set_gpu(gpu, persistence=False)
    on.rescan()
    on.wait_watched(0)
    on.session.close()
    on.control.reset_calls()
    on.control.push_xid(3, 31)
    on.until(lambda: on.monitor.snapshot().xids, "the XID is heard")
    time.sleep(0.5)  # several checks
    assert (
        on.control.count_calls().get("nvmlDeviceGetFieldValues", 0) <= 1
    )  # of the GPU that is awake, it had an XID
    # One that somebody holds is awake.
    on.held.add("gpu-1")
    on.monitor.resume()
    on.wait_watched(1)


def test_without_events_and_without_a_log_a_gpu_is_unmonitored(watch):
    on = watch(hold=HoldPolicy.NEVER, kernel_log=False, unheard_seconds=0.2)
    on.until(lambda: len(on.marks()) == 4, "all are unmonitored")
    assert on.marks()["gpu-0"] == {("unmonitored", "None", "")}
    assert "cannot be heard" in on.verdict.unknown["gpu-0"]
    on.session.set_policy(HoldPolicy.AUTO)
    on.monitor.resume()
    on.wait_marks()


def test_a_wait_that_hangs_in_the_driver_leaves_the_kernel_log_and_the_checks(watch):
    on = watch()
    on.wait_watched(4)
    on.control.set_fault("nvmlEventSetWait*", hang=True)
    on.control.push_xid(1, 119)
    on.until(lambda: ("xid", "NoSchedule", "119") in on.marks().get("gpu-1", ()), "heard in the log")
    on.control.set_gpu(2, temperature=200)
    on.until(lambda: "gpu-2" in on.marks(), "seen by a check")


def test_an_old_driver_has_no_recovery_action_and_the_list_decides(watch):
    on = watch()
    assert int(on.inventory.driver_version.split(".")[0]) < 570
    on.wait_watched(4)
    for gpu, xid in ((0, 13), (1, 48), (2, 79), (3, 63)):
        on.control.push_xid(gpu, xid, action=0)
    on.wait_marks(
        gpu_0={("xid", "None", "13")}, gpu_1={("xid", "NoSchedule", "48")}, gpu_2={("xid", "NoSchedule", "79")},
        gpu_3={("xid", "None", "63")},
    )  # fmt: skip


def test_stopping_leaves_no_thread(watch):
    before = set(threading.enumerate())
    on = watch()
    on.wait_watched(4)
    names = {"health", "nvml-events", "kernel-log"}
    made = [each for each in threading.enumerate() if each not in before and each.name in names]
    assert {each.name for each in made} == names
    on.monitor.stop(timeout_seconds=60)
    assert not [each for each in made if each.is_alive()]


def test_an_answer_that_comes_when_the_gpu_is_back_from_a_virtual_machine_is_not_held_against_it(watch):
    on = watch("l40s-x4", deadline_seconds=60.0)
    uuid = next(gpu.uuid for gpu in on.inventory.gpus if gpu.minor == 1)
    on.control.set_fault("nvmlDeviceGetFieldValues", gpu=1, error="GPU_IS_LOST", hang=True, times=1)
    on.until(lambda: on.control.state.faults[0].times == 0, "the GPU is asked")
    whole = on.inventory
    rest = replace(whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.uuid != uuid))
    on.away.add(uuid)
    on.inventory = rest
    on.monitor.inventory_changed(rest, diff(whole, rest))
    on.away.clear()
    on.inventory = whole
    on.monitor.inventory_changed(whole, diff(rest, whole))
    on.control.clear()
    on.control.lose_gpu(2, xid=None)
    on.wait_marks(gpu_2={("gpu-lost", "NoSchedule", "")})
    assert on.ever == {"gpu-2"}


def test_a_gpu_that_is_passed_through_is_not_ill(watch):
    """It does not answer any more; another that does not answer is ill."""
    on = watch("l40s-x4")
    uuids = {gpu.minor: gpu.uuid for gpu in on.inventory.gpus}
    on.away.add(uuids[1])
    on.control.lose_gpu(1, xid=None)
    on.control.lose_gpu(2, xid=None)
    on.wait_marks(gpu_2={("gpu-lost", "NoSchedule", "")})
    # Back before it was ever called lost.
    on.control.recover_gpu(1)
    on.away.clear()
    on.control.lose_gpu(3, xid=None)
    on.wait_marks(gpu_2={("gpu-lost", "NoSchedule", "")}, gpu_3={("gpu-lost", "NoSchedule", "")})
