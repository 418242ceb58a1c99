"""The doctor's rung about the MPS keeper, with a keeper that really runs."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from dra.api.claim import ClaimRef, Consumer
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import state_of
from dra.diagnose.doctor.mps_rung import look_at_mps
from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.mps.control import Timings
from dra.mps.service import KeeperService, KeeperSettings
from dra.prepare.record import JournalEntry, Record, encode_record
from dra.prepare.sharing.keeper_client import KeeperClient
from dra.prepare.sharing.mps_model import DaemonSpec
from dra.sim.node import SimulatedNode
from tests.places import SHORT

DRIVER = "gpu.nvidia.com"
UID = "00000000-0000-4000-8000-000000000001"


class Box:
    def __init__(self, root: Path) -> None:
        self.paths = HostPaths(**SimulatedNode("t4-x1", root, real_nodes=False).paths_kwargs())
        self.state_dir = self.paths.state_dir(DRIVER)
        self.client = KeeperClient(self.state_dir)
        self.service = None
        self.pids = []

    def keeper(self, **timings):
        settings = KeeperSettings(DRIVER, self.paths, isolate=False, timings=Timings(**timings))
        self.service = KeeperService(settings)
        self.service.start()

    def daemon(self, name):
        self.client.ensure(DaemonSpec(name, ("GPU-00000000-0000-0000-0000-00000000000a",)))
        self.pids.append(self.client.status(name).pid)
        return self.pids[-1]

    def claim(self, daemon):
        consumers = (Consumer("pods", "left", "u1"), Consumer("pods", "right", "u2"))
        entry = JournalEntry("mps-daemon", {"id": daemon}, "applied")
        record = Record(
            ClaimRef("team", "train", UID),
            "prepared",
            boot_id(self.paths),
            consumers=consumers,
            journal=(entry,),
        )
        folder = self.state_dir / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{UID}.json").write_bytes(encode_record(record))

    def look(self):
        return look_at_mps(NodeContext(self.paths, "node-a"))

    def close(self):
        if self.service is not None:
            self.service.stop()
        for status in self.pids:
            try:
                os.kill(status, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def box():
    with tempfile.TemporaryDirectory(prefix="dmp", dir=SHORT, ignore_cleanup_errors=True) as place:
        made = Box(Path(place))
        yield made
        made.close()


def codes(looked):
    return [finding.code for finding in looked.findings]


def test_without_keeper_and_claims_all_is_well(box):
    looked = box.look()
    assert looked.findings == ()
    assert "no keeper runs" in looked.text


def test_a_claim_that_needs_a_keeper_breaks_the_rung_and_is_named(box):
    box.claim(f"{UID}-abcde")
    looked = box.look()
    assert codes(looked) == ["DRA-MPS-KEEPER-ABSENT"]
    assert state_of(looked.findings) == "broken"
    assert "team/train" in looked.findings[0].message


def test_the_pods_that_a_new_keeper_would_end_are_named(box):
    box.keeper()
    box.claim(f"{UID}-abcde")
    box.daemon(f"{UID}-abcde")
    looked = box.look()
    assert looked.text == "the keeper runs, with 1 control daemon(s)"
    (held,) = looked.findings
    assert held.code == "DRA-MPS-KEEPER-HOLDS"
    assert "2 pod(s): team/left, team/right" in held.message
    assert state_of(looked.findings) == "ok"


def test_daemons_that_are_unknown_down_or_nobodys_are_told(box):
    box.keeper(first_back_off=300.0)
    box.claim(f"{UID}-abcde")
    box.daemon("somebody-12345")
    assert codes(box.look()) == ["DRA-MPS-DAEMON-UNKNOWN", "DRA-MPS-DAEMON-OF-NOBODY", "DRA-MPS-KEEPER-HOLDS"]
    # It lived for a moment only: its restart waits.
    os.kill(box.daemon(f"{UID}-abcde"), signal.SIGKILL)
    end = time.monotonic() + 60
    while "DRA-MPS-DAEMON-DOWN" not in codes(box.look()):
        assert time.monotonic() < end
        time.sleep(0.05)
