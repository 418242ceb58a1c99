"""Clocks that jump under the running driver, and a driver that does not run for a while."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.process.conftest import SOON as SWEEPS_SOON
from tests.process.conftest import call
from tests.process.harness import DRIVER, RESOURCE_API, wait_until
from tests.process.health_node import LOST, XID, added, started, taints, wait_taints, wait_well
from tests.process.health_node import SOON as HEALTH_SOON
from tests.process.invariants import check_invariants

HOUR = 3600
# Not durations: moments, in seconds since 1970.
TIMESTAMPS = ("_timestamp_seconds", "_time_seconds", "_published_seconds")
SOURCE = Path(__file__).parent / "moved_clock.c"


class MovedClock:
    """The clocks of one process: the time of day (and what a suspend adds to), and the monotonic one."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environment = {"LD_PRELOAD": str(library), "DRA_TEST_CLOCK": str(file)}
        file.write_bytes(bytes(16))

    def move(self, *, wall: int = 0, monotonic: int = 0) -> None:
        """Set by how many seconds they differ from the machine's."""
        with self._file.open("r+b") as out:
            out.write(struct.pack("qq", wall * 10**9, monotonic * 10**9))


@pytest.fixture
def clock(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the clock of the daemon cannot be moved")
    library = tmp_path / "moved_clock.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-pthread"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        pytest.skip(f"the library that moves clocks cannot be built here: {built.stderr[-300:]}")
    return MovedClock(library, tmp_path / "clock")


def looked(node, times):
    """Wait until the driver has asked all GPUs how they are for so many times more."""

    def asked():
        return node.machine.control.count_calls().get("nvmlDeviceGetTemperature", 0)

    before = asked()
    wait_until(lambda: asked() >= before + 8 * times, what=f"{times} checks of the GPUs")


def samples(daemon):
    """Give the metrics: {series: value}."""
    (bound,) = wait_until(lambda: daemon.logged("http_endpoint_bound"), what="metrics are served")
    with urllib.request.urlopen(f"http://127.0.0.1:{bound['port']}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        series: float(value)
        for series, _, value in (
            line.rpartition(" ") for line in text.splitlines() if line[:1] not in ("#", "")
        )
    }


def wipe(node):
    node.api.request("DELETE", f"{RESOURCE_API}/resourceslices")


def check_durations(daemon, *, longest):
    """No duration in the metrics and in the log is negative, or longer than so many seconds."""
    for series, value in samples(daemon).items():
        assert value >= 0, series
        name = series.partition("{")[0]
        if name.endswith(("_seconds", "_seconds_sum")) and not name.endswith(TIMESTAMPS):
            assert value < HOUR / 2, series
    for entry in daemon.events:
        for key, value in entry.items():
            if key in ("seconds", "again_in_s") or key.endswith(("_ms", "_seconds")):
                assert 0 <= value < longest * (1000 if key.endswith("_ms") else 1), entry


@pytest.mark.fault("F42")
def test_a_clock_that_jumps_by_an_hour_expires_nothing(node, clock):
    """Forward (as after a suspend), back, and a leap of the monotonic clock itself; then a restart in another hour."""
    arguments = ("--http-endpoint=127.0.0.1:0", "--inventory-interval=1")
    daemon, kubelet = started(node, *arguments, environment=clock.environment, **SWEEPS_SOON)
    claims = [node.claim(f"c{number}", f"gpu-{number}") for number in range(3)]
    first = call(kubelet.connection(DRIVER).prepare, claims[:2])
    assert [entry.error for entry in first] == ["", ""]
    held = {claim["metadata"]["uid"] for claim in claims[:2]}
    control = node.machine.control
    control.lose_gpu(3)
    control.push_xid(6, 31)
    wanted = {"gpu-3": {XID: ("79", "NoSchedule"), LOST: ("", "NoSchedule")}, "gpu-6": {XID: ("31", "None")}}
    wait_taints(node, wanted)
    times = {device: added(node, device, XID) for device in wanted}
    prepared_at = {name: value for name, value in samples(daemon).items() if "prepared_timestamp" in name}
    assert len(prepared_at) == 2
    jumps = ({"wall": HOUR}, {"wall": -HOUR}, {"wall": -HOUR, "monotonic": HOUR})
    for jump in jumps:
        clock.move(**jump)
        looked(node, 2)
        # Nothing is forgotten, freed or begun anew …
        assert (node.records(), node.cdi_files()) == (held, held), jump
        if "monotonic" in jump:
            # By that clock an hour has really passed: a remark is shown for ten minutes.
            wanted.pop("gpu-6", None)
        wait_taints(node, wanted)
        assert {device: added(node, device, XID) for device in wanted} == {
            each: times[each] for each in wanted
        }
        connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
        assert call(connection.prepare, claims[:2]) == first
        # … and everything goes on: claims, the pool, events, metrics.
        assert [entry.error for entry in call(connection.prepare, claims[2:])] == [""]
        assert [entry.error for entry in call(connection.unprepare, claims[2:])] == [""]
        wipe(node)
        node.wait_published()
        control.push_xid(5, 95)
        wait_until(lambda: "gpu-5" in taints(node), what=f"an XID is heard after {jump}")
        control.recover_gpu(5)
        wait_taints(node, wanted)
        shown = samples(daemon)
        assert {name: shown[name] for name in prepared_at} == prepared_at
        check_durations(daemon, longest=2 * HOUR if "monotonic" in jump else HOUR / 2)
    check_invariants(node, daemon)
    # The next instance lives in another hour, and takes up what this one has left.
    control.push_xid(6, 31)
    wanted["gpu-6"] = {XID: ("31", "None")}
    wait_taints(node, wanted)
    told = len(daemon.logged("xid_received"))
    assert daemon.terminate(within_seconds=45) == 0
    clock.move(wall=2 * HOUR, monotonic=HOUR)
    daemon = node.daemon("--mig-mode=static", *arguments, periods=HEALTH_SOON, **clock.environment)
    wait_until(lambda: daemon.logged("nvml_events_watched"), what="the next instance watches")
    looked(node, 2)
    wait_taints(node, wanted)
    assert told and daemon.logged("xid_received") == []
    assert (node.records(), node.cdi_files()) == (held, held)
    check_durations(daemon, longest=HOUR / 2)


@pytest.mark.skipif(
    not os.environ.get("DRA_TEST_SLOW"),
    reason="eight seconds; set DRA_TEST_SLOW=1 (unit/nvml/test_lanes always runs)",
)
@pytest.mark.fault("F42")
def test_a_driver_that_did_not_run_for_a_while_takes_no_gpu_for_hung(node):
    """As on a machine that was paused: a call was under way, and its answer could not come in time."""
    daemon, kubelet = started(node, **{"dra.health.monitor:HealthMonitor.deadline_seconds": 3.0})
    claim = node.claim("c", "gpu-0")
    assert [entry.error for entry in call(kubelet.connection(DRIVER).prepare, [claim])] == [""]
    control = node.machine.control
    # Two answers that take a while: when the driver goes on, the second one is still to come.
    for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrPcieLinkWidth"):
        control.set_fault(function, delay_seconds=0.4)
    looked(node, 1)
    daemon.pause()
    time.sleep(3.2)  # what is to be slept through
    daemon.resume()
    looked(node, 1)
    control.clear()
    wait_well(node)
    assert daemon.logged("health_condition_set") == []
    assert kubelet.wait_registered(DRIVER, timeout_seconds=60).connected
    check_invariants(node, daemon)
