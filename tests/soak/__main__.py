"""`python -m tests.soak --seconds 3600`: random claims, faults and restarts against the real daemon, for as long as asked.

After each batch of steps the node is compared with what was asked of it: records, CDI files, partitions and holders agree,
the pool is whole, the log has no bug, and the process has no more descriptors, threads and memory than it had. Ends with 1
and the seed at the first thing that is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra.telemetry.log import configure
from tests.process.conftest import SOON
from tests.process.harness import DRIVER, RESOURCE_API, DaemonProcess, Node, ref_of, wait_until
from tests.process.invariants import MOST_DESCRIPTORS, MOST_THREADS, Vitals, check_exclusive, check_files
from tests.soak.world import Held, World

# Steps of a process before its memory counts, and what it may grow by afterwards: the middle of the last looks beside
# the highest of the first ones. Each new pool of partitions, and eight claims that are prepared beside the publishing of
# one, take some MiB for a moment, and Python gives back little of them: so the first looks are over many steps, and what
# is found is a leak. `--cycles` of the benchmark measures a small one.
WARM_STEPS = 100
FIRST_LOOKS, LAST_LOOKS = 30, 10
MOST_GROWTH = 1.1
BATCH = 20


class SoakError(AssertionError):
    """Something is not as it should be."""


class Soak:
    """One node, one daemon at a time, and steps at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.node = Node()
        self.kubelet = self.node.kubelet()
        self.node.allow_monitoring()
        self.counts: Counter[str] = Counter()
        self.growth: list[float] = []
        self._steps_of_process = 0
        self._resident: list[int] = []
        self.daemon: DaemonProcess = self._start()
        self.node.wait_published()
        # How often each happens among a thousand.
        self.steps: tuple[tuple[int, Callable[[], None]], ...] = (
            (320, self.prepare), (290, self.unprepare), (90, self.prepare_again), (80, self.prepare_batch),
            (50, self.prepare_what_is_held), (40, self.prepare_for_monitoring), (30, self.unprepare_unknown),
            (25, self.lose_a_spec), (25, self.api_refuses), (20, self.scrape), (10, self.wipe_slices),
            (8, self.delete_claim), (6, self.lose_a_gpu), (1, self.restart), (1, self.kill),
        )  # fmt: skip

    # -- the run -----------------------------------------------------------------------------------

    def run(self, seconds: float, *, report_seconds: float) -> None:
        """Go on for so long, then unprepare everything and look a last time."""
        end, told = time.monotonic() + seconds, time.monotonic()
        weights = [weight for weight, _ in self.steps]
        while time.monotonic() < end:
            for _, step in self.rng.choices(self.steps, weights, k=BATCH):
                self.counts[step.__name__] += 1
                self._steps_of_process += 1
                step()
            self.check()
            if time.monotonic() - told >= report_seconds:
                told = time.monotonic()
                self.report(seconds - (end - told))
        for each in list(self.world.held.values()):
            self._unprepare([each])
        self.check()

    def report(self, passed: float) -> None:
        """Say how it goes."""
        vitals = Vitals.of(self.daemon.process.pid)
        print(
            f"{passed:7.0f} s  {sum(self.counts.values()):>7} steps  {len(self.world.held):>3} held  "
            f"{vitals.resident_bytes / (1 << 20):6.1f} MiB  {vitals.threads} threads  {vitals.descriptors} descriptors",
            flush=True,
        )

    def close(self) -> None:
        """End everything."""
        self.node.machine.control.clear()
        self.node.close()

    # -- steps: claims -----------------------------------------------------------------------------

    def _claim(self, *devices: str, **more: Any) -> dict[str, Any]:
        return self.node.claim(self.world.next_name(), *devices, **more)

    def _prepare(self, *claims: dict[str, Any]) -> dict[str, str]:
        """Give the error of each claim, by UID; empty for one that was prepared."""
        answer = self._connection().prepare([ref_of(claim) for claim in claims]).claims
        for claim in claims:
            entry = answer[claim["metadata"]["uid"]]
            if not entry.error and not entry.devices:
                raise SoakError(f"no devices for {claim['metadata']['name']}")
        return {uid: entry.error for uid, entry in answer.items()}

    def _must(self, errors: dict[str, str]) -> None:
        wrong = [error for error in errors.values() if error]
        if wrong:
            raise SoakError(f"a call failed: {wrong}")

    def _unprepare(self, held: list[Held]) -> None:
        answer = self._connection().unprepare([ref_of(each.claim) for each in held]).claims
        self._must({uid: entry.error for uid, entry in answer.items()})
        for each in held:
            self.world.held.pop(each.uid, None)
            self._forget(each.claim)

    def _forget(self, claim: dict[str, Any]) -> None:
        """Take the claim out of the API, which would else grow for ever."""
        self.node.delete_claim(claim["metadata"]["name"])

    def _connection(self) -> Any:
        return self.kubelet.wait_registered(DRIVER, timeout_seconds=60)

    def prepare(self) -> None:
        """A new claim for something that is free."""
        free = self.world.free()
        if free:
            self._take([(self.rng.choice(free),)])

    def prepare_batch(self) -> None:
        """Several claims in one call, one of them perhaps with two devices."""
        free = self.world.free()
        self.rng.shuffle(free)
        wanted = [tuple(free[:2]), *((device,) for device in free[2:4])]
        self._take([devices for devices in wanted if devices])

    def _take(self, wanted: list[tuple[str, ...]]) -> None:
        claims = [self._claim(*devices) for devices in wanted]
        if not claims:
            return
        self._must(self._prepare(*claims))
        for claim, devices in zip(claims, wanted, strict=True):
            self.world.held[claim["metadata"]["uid"]] = Held(claim, devices)

    def unprepare(self) -> None:
        """A claim, or a few, that are no longer wanted; sometimes twice."""
        held = list(self.world.held.values())
        if not held:
            return
        chosen = self.rng.sample(held, min(len(held), self.rng.choice((1, 1, 1, 3))))
        refs = [ref_of(each.claim) for each in chosen]
        self._unprepare(chosen)
        if self.rng.random() < 0.2:
            answer = self._connection().unprepare(refs).claims
            self._must({uid: entry.error for uid, entry in answer.items()})

    def prepare_again(self) -> None:
        """The kubelet asks once more, as after its restart."""
        held = list(self.world.held.values())
        if held:
            self._must(self._prepare(self.rng.choice(held).claim))

    def prepare_what_is_held(self) -> None:
        """A claim for what another one holds is refused."""
        taken = sorted(self.world.taken())
        if not taken:
            return
        claim = self._claim(self.rng.choice(taken))
        (error,) = self._prepare(claim).values()
        if "DRA-DEVICE-HELD" not in error:
            raise SoakError(f"a device that is held was given again, or refused otherwise: {error!r}")
        self._forget(claim)

    def prepare_for_monitoring(self) -> None:
        """Access for monitoring goes beside holders."""
        device = self.rng.choice(self.world.whole())
        claim = self._claim(device, admin=True)
        self._must(self._prepare(claim))
        self.world.held[claim["metadata"]["uid"]] = Held(claim, (device,), admin=True)

    def unprepare_unknown(self) -> None:
        """What was never prepared is unprepared."""
        claim = self._claim("gpu-0")
        answer = self._connection().unprepare([ref_of(claim)]).claims
        self._must({uid: entry.error for uid, entry in answer.items()})
        self._forget(claim)

    def delete_claim(self) -> None:
        """A claim is deleted by force while it is prepared: the janitor releases it."""
        held = list(self.world.held.values())
        if not held:
            return
        each = self.rng.choice(held)
        self._forget(each.claim)
        wait_until(
            lambda: each.uid not in self.node.records(), what="the janitor releases a claim that is gone"
        )
        self.world.held.pop(each.uid)

    # -- steps: faults -----------------------------------------------------------------------------

    def lose_a_spec(self) -> None:
        """Somebody deletes a CDI file: it is written again."""
        held = list(self.world.held.values())
        if held:
            each = self.rng.choice(held)
            self.node.cdi_file(each.uid).unlink(missing_ok=True)
            if self.rng.random() < 0.5:
                self._must(self._prepare(each.claim))
            wait_until(lambda: self.node.cdi_file(each.uid).exists(), what="the CDI file is there again")

    def api_refuses(self) -> None:
        """While the API server is away pods that are known start, and pods end."""
        held = list(self.world.held.values())
        fault = self.node.api.faults.set("error", code=503, method="GET", path="resourceclaims/")
        try:
            if held:
                self._must(self._prepare(self.rng.choice(held).claim))
                chosen = self.rng.choice(held)
                answer = self._connection().unprepare([ref_of(chosen.claim)]).claims
                self._must({uid: entry.error for uid, entry in answer.items()})
                self.world.held.pop(chosen.uid)
        finally:
            self.node.api.faults.clear(fault)
        if held:
            self._forget(chosen.claim)

    def wipe_slices(self) -> None:
        """Somebody deletes the slices: they come back."""
        self.node.api.request("DELETE", f"{RESOURCE_API}/resourceslices")
        self._wait_whole()

    def lose_a_gpu(self) -> None:
        """A GPU falls off the bus and comes back."""
        control, minor = self.node.machine.control, self.rng.randrange(8)
        control.lose_gpu(minor)
        time.sleep(self.rng.random())
        control.recover_gpu(minor)
        self._wait_untainted(minor)
        # The reset took its partitions. The kubelet prepares again for what still runs, and they are made anew.
        for each in list(self.world.held.values()):
            if not each.admin and any(device.startswith(f"gpu-{minor}-mig-") for device in each.devices):
                wait_until(
                    lambda each=each: not any(self._prepare(each.claim).values()),
                    what="the partition is made anew",
                )

    def _wait_untainted(self, minor: int) -> None:
        wait_until(
            lambda: f"gpu-{minor}" not in self._tainted(), seconds=90, what=f"gpu-{minor} is well again"
        )

    def scrape(self) -> None:
        """Prometheus comes by."""
        (bound,) = wait_until(lambda: self.daemon.logged("http_endpoint_bound"))
        with urllib.request.urlopen(f"http://127.0.0.1:{bound['port']}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        infos = sum(line.startswith("dra_claim_device_info{") for line in page.splitlines())
        devices = sum(len(each.devices) for each in self.world.held.values())
        if infos != devices:
            raise SoakError(f"the metrics show {infos} allocations, not {devices}")

    def kill(self) -> None:
        """The process is killed, and another one started."""
        self.daemon.kill()
        self._end_of_process()
        self.daemon = self._start()

    def restart(self) -> None:
        """The process is told to end, and another one started."""
        if self.daemon.terminate(within_seconds=30) != 0:
            raise SoakError("the daemon ended with an error")
        self._end_of_process()
        self.daemon = self._start()

    # -- the process -------------------------------------------------------------------------------

    def _start(self) -> DaemonProcess:
        before = len(self.kubelet.registry.connections(DRIVER))
        daemon = self.node.daemon(
            "--mig-mode=dynamic", "--inventory-interval=2", "--http-endpoint=127.0.0.1:0", periods=SOON
        )
        self._steps_of_process, self._resident = 0, []
        wait_until(lambda: daemon.logged("plugin_started"), what="the daemon starts")
        wait_until(lambda: self._is_back(before), what="the daemon is registered")
        return daemon

    def _is_back(self, before: int) -> bool:
        connections = self.kubelet.registry.connections(DRIVER)
        return len(connections) > before or (before > 0 and bool(connections) and connections[-1].connected)

    def _end_of_process(self) -> None:
        self._check_log()
        self.daemon.log.write_text("")  # an hour of debug lines is a gigabyte

    # -- what must be so ---------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the node with what was asked of it."""
        if self.daemon.process.poll() is not None:
            raise SoakError(f"the daemon ended: {self.daemon.log.read_text()[-2000:]}")
        check_exclusive(self.node)
        wait_until(
            lambda: self.node.records() == set(self.world.held), what="records are those of the claims"
        )
        wait_until(
            lambda: self.node.cdi_files() == set(self.world.held), what="CDI files are those of the claims"
        )
        check_files(self.node)
        self._check_partitions()
        self._wait_whole()
        self._check_log()
        self._check_vitals()

    def _check_partitions(self) -> None:
        state = self.node.machine.control.state
        slots = {slot.uuid: slot.minor for slot in self.node.machine.profile.gpus}
        found = {slots[gpu.uuid]: len(gpu.instances) for gpu in state.gpus if gpu.instances}
        if found != self.world.partitions():
            raise SoakError(f"partitions {found}, asked for {self.world.partitions()}")

    def _wait_whole(self) -> None:
        wait_until(self._is_whole, what="the pool is whole")

    def _is_whole(self) -> bool:
        slices = [each for each in self.node.slices() if each["spec"]["driver"] == DRIVER]
        pools = {(s["spec"]["pool"]["generation"], s["spec"]["pool"]["resourceSliceCount"]) for s in slices}
        names = {device["name"] for each in slices for device in each["spec"].get("devices") or ()}
        whole = len(pools) == 1 and next(iter(pools))[1] == len(slices)
        return whole and {f"gpu-{minor}" for minor in range(8)} <= names

    def _tainted(self) -> set[str]:
        return {
            device["name"]
            for each in self.node.slices()
            for device in each["spec"].get("devices") or ()
            if any(taint["effect"] != "None" for taint in device.get("taints") or ())
        }

    def _check_log(self) -> None:
        text = self.daemon.log.read_text()
        if "Traceback" in text or "DRA-BUG" in text:
            lines = [line for line in text.splitlines() if "DRA-BUG" in line or "Traceback" in line]
            raise SoakError("\n".join(lines[:3])[:3000])

    def _check_vitals(self) -> None:
        vitals = Vitals.of(self.daemon.process.pid)
        if vitals.threads > MOST_THREADS or vitals.descriptors > MOST_DESCRIPTORS:
            raise SoakError(f"{vitals}")
        if self._steps_of_process < WARM_STEPS:
            return
        self._resident.append(vitals.resident_bytes)
        if len(self._resident) < FIRST_LOOKS + LAST_LOOKS:
            return
        base, now = max(self._resident[:FIRST_LOOKS]), statistics.median(self._resident[-LAST_LOOKS:])
        growth = now / base
        self.growth.append(growth)
        if growth > MOST_GROWTH:
            raise SoakError(
                f"memory grew from {base / 1e6:.0f} to {now / 1e6:.0f} MB in {self._steps_of_process} steps"
            )


def main() -> int:
    """Run; 0 if everything held."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (default 120)")
    parser.add_argument("--seed", type=int, default=None, help="for the same steps again")
    parser.add_argument("--report-seconds", type=float, default=30.0)
    args = parser.parse_args()
    configure(level="error", console=True)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}", flush=True)
    soak = Soak(seed)
    try:
        soak.run(args.seconds, report_seconds=args.report_seconds)
    except Exception as error:
        traceback.print_exc()
        kind = "not as it should be" if isinstance(error, AssertionError) else "the soak itself failed"
        print(f"{kind}; seed {seed}; steps so far: {json.dumps(soak.counts)}", file=sys.stderr)
        kept = shutil.copy(soak.daemon.log, Path(tempfile.gettempdir(), f"dra-soak-{seed}.log"))
        print(f"the daemon's log: {kept}", file=sys.stderr)
        return 1
    finally:
        soak.close()
    growth = f"{max(soak.growth) - 1:+.1%}" if soak.growth else "not long enough to tell"
    print(f"all held: {json.dumps(soak.counts)}; memory at most {growth}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
