"""Signals at any moment, one or many: the daemon ends, quickly, with 0, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from dra.sim.kubelet.connection import CallError
from tests.process.harness import DRIVER, NODE, ref_of, wait_until

# Before Python has come to our first line a signal ends it as it ends any process.
ENDS = (0, -signal.SIGTERM)
# Seconds after the start of the process: Python loads, the daemon starts, it runs.
MOMENTS = (0.0, 1.0)


def check_ended(node, daemon, status):
    text = daemon.log.read_text()
    assert "Traceback" not in text, text[-2000:]
    if status == 0:
        assert daemon.logged("plugin_stopped")
        assert list(node.registry.iterdir()) == []


def test_a_signal_at_any_moment_of_the_start_ends_it(node):
    moments = random.Random(int(os.environ.get("DRA_SEED", "7")))
    daemons = []
    for _ in range(5):
        daemon = node.daemon()
        time.sleep(moments.uniform(*MOMENTS))
        daemon.process.send_signal(signal.SIGTERM)
        status = daemon.wait(within_seconds=45)
        assert status in ENDS
        check_ended(node, daemon, status)
        daemons.append((daemon, status))
    # As soon as it says anything it hears signals.
    daemon = node.daemon()
    wait_until(lambda: "plugin_starting" in daemon.log.read_text())
    assert daemon.terminate(within_seconds=45) == 0
    check_ended(node, daemon, 0)


@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(0.0, id="at once"),
        pytest.param(0.002, id="during the stop"),
    ],
)
def test_many_signals_in_a_row_are_one_stop(node, pause):
    daemon = node.daemon()
    wait_until(lambda: daemon.logged("plugin_started"))
    for number in (
        signal.SIGUSR1,
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGUSR1,
        signal.SIGTERM,
        signal.SIGHUP,
    ) * 3:
        try:
            daemon.process.send_signal(number)
        except ProcessLookupError:
            break
        time.sleep(pause)
    assert daemon.wait(within_seconds=45) == 0
    check_ended(node, daemon, 0)


def test_who_interrupts_twice_does_not_wait_for_calls_and_the_claim_can_be_prepared_later(node):
    daemon, kubelet = node.daemon(), node.kubelet()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    claim = node.claim("c", "gpu-0")
    fault = node.api.faults.set("freeze", method="GET", path="/resourceclaims/c")
    connection = kubelet.connection(DRIVER)

    def prepare():
        # This client may wait for the next instance.
        with contextlib.suppress(CallError):
            connection.prepare([ref_of(claim)])

    thread = threading.Thread(target=prepare)
    thread.start()
    wait_until(lambda: fault.hits, what="the driver asks for the claim")
    began = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    wait_until(lambda: daemon.logged("signal_received"))
    for _ in range(2):
        daemon.process.send_signal(signal.SIGINT)
    assert daemon.wait(within_seconds=30) == 0
    assert time.monotonic() - began < 30
    node.api.faults.clear()
    node.daemon()
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert kubelet.connection(DRIVER).prepare([ref_of(claim)]).claims[claim["metadata"]["uid"]].devices
    connection.close()
    thread.join(10)


def test_it_ends_although_nobody_reads_what_it_says_any_more(node):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "dra.cli.plugin", "--simulate", node.profile, "--host-root", str(node.root),
            "--node-name", NODE, "--kubeconfig", str(node.kubeconfig),
        ],
        stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    try:
        wait_until(lambda: list(node.registry.iterdir()), what="the driver registers")
        os.close(reader)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(5)
    assert list(node.registry.iterdir()) == []


def test_what_had_started_is_stopped_when_the_start_fails_half_way(node):
    first = node.daemon("--healthcheck-port=0")
    port = wait_until(lambda: first.logged("plugin_started"))[0]["probe_port"]
    second = node.daemon(f"--healthcheck-port={port}", pod_uid="0a1b2c3d-0000-4000-8000-0123456789ab")
    assert second.wait(within_seconds=45) == 1
    (event,) = second.logged("plugin_not_started")
    assert event["error_code"] == "DRA-PROBE-PORT"
    assert [path.name for path in node.registry.iterdir()] == [f"{DRIVER}-reg.sock"]
