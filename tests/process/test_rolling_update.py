"""An update of the DaemonSet as a node sees it: two instances at once, and nobody notices."""

from __future__ import annotations

import threading
import time

import pytest

from tests.process.harness import DRIVER, new_uid, ref_of, wait_until
from tests.process.invariants import check_invariants

# How often the kubelet has something to prepare.
PERIOD_SECONDS = 0.1


class Traffic:
    """A kubelet that prepares and unprepares a claim every 100 ms, each time through the instance it would choose."""

    def __init__(self, kubelet, claims):
        self.kubelet, self.refs = kubelet, [ref_of(claim) for claim in claims]
        self.calls, self.failures, self.gaps = 0, [], 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-traffic")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)

    def _run(self):
        number = 0
        while not self._stop.wait(PERIOD_SECONDS):
            ref = self.refs[number % len(self.refs)]
            number += 1
            connection = self.kubelet.connection(DRIVER)
            if connection is None:
                self.gaps += 1
                continue
            for verb in (connection.prepare, connection.unprepare):
                try:
                    entry = verb([ref]).claims[ref.uid]
                except Exception as error:
                    self.failures.append(f"{verb.__name__} {ref}: {error!r}")
                    continue
                self.calls += 1
                if entry.error:
                    self.failures.append(f"{verb.__name__} {ref}: {entry.error}")


class Slices:
    """Somebody who looks at the node's slices all the time, as schedulers do."""

    def __init__(self, node):
        self.node, self.looks, self.missing = node, 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-slices")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)

    def _run(self):
        while not self._stop.wait(0.02):
            slices = self.node.slices()
            self.looks += 1
            wanted = slices[0]["spec"]["pool"]["resourceSliceCount"] if slices else 1
            devices = [d["name"] for s in slices for d in s["spec"].get("devices") or []]
            whole = [f"gpu-{n}" for n in range(8)]
            if len(slices) != wanted or not set(whole) <= set(devices):
                self.missing.append((len(slices), wanted, devices))


@pytest.mark.fault("F27")
def test_an_update_with_two_instances_fails_no_prepare_and_misses_no_slice(node):
    """And back again, as a rollback does."""
    kubelet = node.kubelet()
    instance = node.daemon(pod_uid=new_uid())
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    wait_until(lambda: len(node.slices()) == node.slices()[0]["spec"]["pool"]["resourceSliceCount"])
    running = node.pod("running", node.claim("kept", "gpu-7", pods=("running",)))
    kubelet.run_pod(running)
    claims = [node.claim(f"c{number}", f"gpu-{number}") for number in range(4)]
    with Slices(node) as slices, Traffic(kubelet, claims) as traffic:
        for _ in range(2):
            before = traffic.calls
            wait_until(lambda before=before: traffic.calls >= before + 6, what="traffic before the change")
            successor = node.daemon(pod_uid=new_uid())
            kubelet.wait_registered(DRIVER, timeout_seconds=60, instances=2)
            both = traffic.calls
            wait_until(lambda both=both: traffic.calls >= both + 6, what="traffic while both run")
            assert instance.terminate(within_seconds=20) == 0
            after = traffic.calls
            wait_until(lambda after=after: traffic.calls >= after + 10, what="traffic after the change")
            instance = successor
        time.sleep(PERIOD_SECONDS)
    assert traffic.failures == []
    assert traffic.gaps == 0
    assert slices.missing == [] and slices.looks > 10
    # What ran through it all still runs, and ends.
    assert kubelet.pods.get("uid-running") is not None
    kubelet.stop_pod(running)
    check_invariants(node, instance)
    assert (node.records(), node.cdi_files()) == (set(), set())
