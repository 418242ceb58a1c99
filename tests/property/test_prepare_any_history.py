"""Any history of calls, kills, lost files, reboots and API outages: the invariants hold after each step."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "prepare"))

from prepare_fakes import Killed, Node, make_claim, result

from dra.errors import DraError, HostError
from dra.prepare import steps

# Which devices each claim was allocated: a scheduler that gives some of them twice.
ALLOCATIONS = {
    1: [result("gpu-0")],
    2: [result("gpu-0")],
    3: [result("gpu-1"), result("gpu-2")],
    4: [result("gpu-2")],
    5: [result("gpu-0", adminAccess=True)],
    6: [result("gpu-3", shareID="aaaaaaaa-1111-4111-8111-111111111111")],
    7: [result("gpu-3", shareID="bbbbbbbb-1111-4111-8111-111111111111")],
}
EXPECTED = {
    "DRA-DEVICE-HELD", "DRA-KUBE-UNREACHABLE", "DRA-CLAIM-NOT-FOUND", "DRA-CLAIM-NOT-RESERVED", "DRA-TEST-RENDER",
}  # fmt: skip

numbers = st.sampled_from(sorted(ALLOCATIONS))
garbage = st.sampled_from([b"", b"\x00" * 40, b"[]", b'{"version":1}', b'{"version":1,"claim":{'])


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="dra-history-"))
        self.node = Node(self.root, gpus=4)
        # Claims whose spec somebody removed or changed, or whose call died between record and spec: prepared by
        # their record, but not so on disk, until prepare or unprepare comes again.
        self.harmed: set[str] = set()
        self.answers: dict[str, object] = {}
        self.refs = {}
        for number, results in ALLOCATIONS.items():
            self.refs[number] = self.node.claim(number, *results)

    def teardown(self) -> None:
        node = self.node
        node.kill_at, node.api.down, node.renderer.fail = None, False, None
        node.api.claims.clear()
        node.restart()
        janitor = node.janitor()
        janitor.sweep()
        janitor.sweep()
        left = node.files()
        shutil.rmtree(self.root)
        assert left == []

    @rule(number=numbers)
    def prepare(self, number):
        ref = self.refs[number]
        outcome = self.node.prepare(ref)
        if isinstance(outcome, DraError):
            assert outcome.code in EXPECTED, outcome
            return
        assert self.answers.setdefault(ref.uid, outcome) == outcome
        assert self.node.record(ref)["state"] == "prepared"
        assert ref.uid in self.node.cdi_file(ref).read_text()
        self.harmed.discard(ref.uid)

    @rule(number=numbers)
    def unprepare(self, number):
        ref = self.refs[number]
        assert self.node.unprepare(ref) is None
        assert not self.node.record_file(ref).exists()
        assert not self.node.cdi_file(ref).exists()
        self.harmed.discard(ref.uid)

    @rule(
        number=numbers,
        step=st.sampled_from(steps.all_steps()),
        verb=st.sampled_from(["prepare", "unprepare"]),
    )
    def killed(self, number, step, verb):
        node = self.node
        node.kill_at = step
        try:
            getattr(node, verb)(self.refs[number])
        except Killed:
            # The complete record is written before the spec and removed after it.
            self.harmed.add(self.refs[number].uid)
        node.restart()

    @rule()
    def restart(self):
        self.node.restart()

    @rule(keep_cdi=st.booleans())
    def reboot(self, keep_cdi):
        self.node.reboot(keep_cdi=keep_cdi)

    @rule(down=st.booleans())
    def api(self, down):
        self.node.api.down = down

    @rule(fails=st.booleans())
    def renderer(self, fails):
        self.node.renderer.fail = HostError("DRA-TEST-RENDER", "no space") if fails else None

    @rule(number=numbers)
    def claim_deleted(self, number):
        ref = self.refs[number]
        self.node.api.claims.pop((ref.namespace, ref.name), None)

    @rule(number=numbers, reserved=st.booleans())
    def claim_there(self, number, reserved):
        pods = ("pod-a",) if reserved else ()
        self.node.api.put(make_claim(self.refs[number], *ALLOCATIONS[number], pods=pods))

    @rule(number=numbers)
    def spec_removed(self, number):
        ref = self.refs[number]
        self.node.cdi_file(ref).unlink(missing_ok=True)
        self.harmed.add(ref.uid)

    @rule(number=numbers, data=garbage)
    def spec_changed(self, number, data):
        path = self.node.cdi_file(self.refs[number])
        if path.exists():
            path.write_bytes(data)

    @rule(number=numbers, data=garbage)
    def record_damaged(self, number, data):
        path = self.node.record_file(self.refs[number])
        # A spec and a record that both tell nothing leave nothing to hold by.
        if path.exists() and self.node.cdi_file(self.refs[number]).exists():
            uid = self.refs[number].uid
            if uid in self.node.cdi_file(self.refs[number]).read_text():
                path.write_bytes(data)
                self.node.the_engine.store.refresh(fully=True)

    @rule(hours=st.booleans())
    def sweep(self, hours):
        node = self.node
        janitor = node.janitor()
        janitor.sweep()
        if hours:
            node.now += 3600
            janitor.sweep()

    @invariant()
    def no_device_has_two_holders_and_specs_belong_to_claims(self):
        node = self.node
        held: dict[str, list[tuple[str, str | None]]] = {}
        for hold in node.the_engine.store.holds(node.boot_id):
            # What the lost record of a claim for monitoring held is not known: it counts, but takes nothing away.
            if hold.ref.uid != self.refs[5].uid:
                held.setdefault(hold.device, []).append((hold.ref.uid, hold.share_id))
        for device, holders in held.items():
            distinct = {uid for uid, _ in holders}
            shares = [share for _, share in holders]
            assert len(distinct) == 1 or (all(shares) and len(set(shares)) == len(shares)), (device, holders)
        node.check_invariants(harmed=self.harmed)


History.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyHistory = pytest.mark.timeout(120)(History.TestCase)
