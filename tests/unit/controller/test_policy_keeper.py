"""GPUs follow the policies: idle ones at once, busy ones when their claims end; the hardware is simulated."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dra.api.claim import ClaimRef
from dra.api.gpu_settings import NO_SETTINGS, parse_sharing
from dra.controller.policy_keeper import DRAINING, PolicyKeeper
from dra.controller.policy_model import PolicyPorts, PolicyTimings
from dra.controller.policy_state import AppliedFile
from dra.errors import HostError
from dra.health.feed import HealthFeed
from dra.host.paths import HostPaths
from dra.host.pci_binding import PciBus
from dra.inventory.diff import InventoryDiff
from dra.inventory.passthrough import scan_with_passthrough
from dra.inventory.scan import Scanner
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.plugin.mig_port import MigPort
from dra.plugin.pool_source import PoolSource
from dra.prepare.holds import Hold
from dra.prepare.layouts import LayoutChanger
from dra.prepare.locks import LockDirectory
from dra.sim.node import SimulatedNode
from dra.slices.sharing import identity_of


class ManualClock:
    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time

    def wall(self):
        return self.time

    def wait(self, event, seconds):
        return event.wait(0)


class Died(Exception):
    """The process ended here."""


class Rig:
    """A node whose policies are kept; `turn` is what happens within some seconds."""

    def __init__(self, root, profile="dgx-h100", base=NO_SETTINGS, *, passthrough=False):
        self.root, self.base = root, base
        self.machine = SimulatedNode(profile, root / "machine", real_nodes=False)
        self.sim = self.machine.control
        self.session = NvmlSession(InjectedLibrary(self.machine.library))
        paths = HostPaths(**{**self.machine.paths_kwargs(), "cdi_root": root / "cdi"})
        scanner = Scanner(self.session, paths)
        self.scan = lambda: scanner.scan(profiles=True)
        if passthrough:
            self.scan = scan_with_passthrough(self.scan, PciBus(paths, self.machine.kernel), paths)
        self.clock = ManualClock()
        self.claims: list[dict] = []
        self.holds: list[Hold] = []
        self.said: list[tuple[str, str, str]] = []
        self.reports = []
        self.history: list[dict[str, dict]] = []
        self.die_at = ("", 0)
        self.boot = "boot-1"
        self.stored = True
        self.begin()

    def begin(self):
        """Start as a new process does: what is known is on disk and in the hardware."""
        self.pool = PoolSource("gpu.nvidia.com", "n1", feed=HealthFeed(), settings=self.base)
        self.pool.publish_to(lambda pool: self.history.append({d["name"]: d for d in pool.devices}))
        self.look()
        self.changer = LayoutChanger(
            MigPort(self.session, lambda: self.inventory),
            locks=LockDirectory(self.root / "locks"),
            directory=self.root / "layouts",
            boot_id=self.boot,
            holds=lambda: self.holds,
            step=self._step,
        )
        self.keeper = PolicyKeeper(
            base=self.base,
            driver="gpu.nvidia.com",
            pool="n1",
            state=AppliedFile(self.root / "policy.json"),
            ports=PolicyPorts(
                inventory=lambda: self.inventory,
                look_again=self.look,
                claims=lambda: self.claims,
                holds=lambda: self.holds,
                publish=self.pool.settings_changed,
                taint=lambda taints: self.pool.set_taints("policy", taints),
                stored=lambda: self.stored,
                changer=self.changer,
                tell=lambda policy, device, _kind, reason, message: self.said.append(
                    (policy, reason, message)
                ),
                report=self.reports.append,
            ),
            timings=PolicyTimings(settle=1.0),
            clock=self.clock,
            step=self._step,
        )
        self.pool.settings_changed(self.keeper.settings)

    def _step(self, name):
        wanted, left = self.die_at
        if name == wanted:
            self.die_at = (wanted, left - 1)
            if left <= 1:
                self.die_at = ("", 0)
                raise Died

    def look(self):
        self.inventory = self.scan()
        self.pool.inventory_changed(self.inventory, InventoryDiff())
        return self.inventory

    def policies(self, *bodies, labels=None):
        self.keeper.policies_are(bodies)
        self.keeper.labels_are({"kubernetes.io/hostname": "n1", **(labels or {})})

    def turn(self, seconds=5.0):
        for _ in range(int(seconds * 2)):
            self.keeper.step()
            self.clock.time += 0.5
        self.keeper.step()

    @property
    def devices(self) -> Mapping[str, dict]:
        return self.history[-1]

    def tainted(self):
        return sorted(
            name
            for name, device in self.devices.items()
            if any(taint["key"] == DRAINING for taint in device.get("taints", ()))
        )

    def state(self, device="gpu-0"):
        return next(each for each in self.reports[-1].gpus if each.device == device)

    def partitions(self, gpu=0):
        found = next(each for each in self.inventory.gpus if each.minor == gpu)
        return sorted(mig.profile.name for mig in found.mig_devices)

    def uuid(self, gpu=0):
        return next(each.uuid for each in self.inventory.gpus if each.minor == gpu)


def policy(name="p", *groups, weight=0, created="2026-01-01T00:00:00Z", **spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name, "generation": 1, "creationTimestamp": created},
        "spec": {"gpus": list(groups), "weight": weight, **spec},
    }


def claim(name, *devices, pool="n1"):
    results = [{"request": "r", "driver": "gpu.nvidia.com", "pool": pool, "device": each} for each in devices]
    return {
        "metadata": {"namespace": "team", "name": name, "uid": name},
        "status": {"allocation": {"devices": {"results": results}}},
    }


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.session.close()


SHARES = {"sharing": {"strategy": "shares", "shares": 10}}
LAYOUT = {"mig": {"mode": "static", "layout": {"3g.40gb": 1, "1g.10gb": 4}}}


def only(rig, gpu, **blocks):
    return {"match": {"uuid": rig.uuid(gpu)}, **blocks}


def test_idle_gpus_are_shared_within_five_seconds_and_tainted_meanwhile(rig):
    rig.policies(policy("p", SHARES))
    rig.keeper.step()
    assert rig.tainted() == [f"gpu-{n}" for n in range(8)]
    assert not rig.devices["gpu-0"].get("allowMultipleAllocations")
    rig.turn(4)
    assert rig.tainted() == []
    assert all(device["allowMultipleAllocations"] for device in rig.devices.values())
    assert {each.state for each in rig.reports[-1].gpus} == {"Applied"}
    assert rig.reports[-1].policies == (("p", 1),)
    # It was shared while it still had the taint, and the taint went after that.
    changed = [each for each in rig.history if each["gpu-0"].get("allowMultipleAllocations")]
    assert changed[0]["gpu-0"]["taints"][0]["key"] == DRAINING


def test_a_busy_gpu_waits_for_its_claims_and_names_them_and_others_do_not_wait(rig):
    rig.claims = [claim("train", "gpu-3"), claim("elsewhere", "gpu-4", pool="n2")]
    rig.holds = [Hold(ClaimRef("team", "gone", "u"), "gpu-5", None)]
    rig.policies(policy("p", SHARES))
    rig.turn(30)
    assert rig.tainted() == ["gpu-3", "gpu-5"]
    assert (rig.state("gpu-3").state, rig.state("gpu-3").claims) == ("Waiting", ("team/train",))
    assert "team/train" in rig.state("gpu-3").message
    assert rig.state("gpu-5").claims == ("team/gone",)
    assert rig.state("gpu-4").state == "Applied"
    assert not rig.devices["gpu-3"].get("allowMultipleAllocations")
    assert [said for said in rig.said if said[1] == "PolicyWaiting" and "team/train" in said[2]]
    rig.claims, rig.holds = [], []
    rig.turn(2)
    assert rig.tainted() == []
    assert rig.devices["gpu-3"]["allowMultipleAllocations"]
    assert [said[1] for said in rig.said if said[2].startswith("gpu-3")][-1] == "PolicyApplied"


def test_what_may_change_under_a_claim_is_published_at_once(rig):
    rig.claims = [claim("train", "gpu-0")]
    group = only(
        rig, 0, attributes={"rail": {"int": 3}}, reserved={"value": "batch"}, timeSlice=None,
    )  # fmt: skip
    rig.policies(policy("p", group))
    rig.keeper.step()
    device = rig.devices["gpu-0"]
    assert device["attributes"]["gpudra.dev/rail"] == {"int": 3}
    assert device["taints"] == [{"key": "gpu.nvidia.com/reserved", "effect": "NoSchedule", "value": "batch"}]
    assert "gpudra.dev/rail" not in rig.devices["gpu-1"]["attributes"]
    rig.policies()
    rig.keeper.step()
    assert "taints" not in rig.devices["gpu-0"]
    assert "gpudra.dev/rail" not in rig.devices["gpu-0"]["attributes"]


def test_a_layout_is_made_changed_and_taken_away(rig):
    rig.policies(policy("p", only(rig, 0, **LAYOUT)))
    rig.turn()
    assert rig.partitions() == ["1g.10gb"] * 4 + ["3g.40gb"]
    names = [name for name in rig.devices if name.startswith("gpu-0")]
    assert len(names) == 5
    assert all("-mig-" in name for name in names)
    assert "gpu-1" in rig.devices
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"7g.80gb": 1}})))
    rig.turn()
    assert rig.partitions() == ["7g.80gb"]
    rig.policies()
    rig.turn()
    assert rig.partitions() == []
    assert "gpu-0" in rig.devices
    assert rig.sim.state.gpus[0].mig_current == 0
    assert not list((rig.root / "layouts").iterdir())


def test_a_layout_waits_for_a_claim_on_one_of_its_partitions(rig):
    rig.policies(policy("p", only(rig, 0, **LAYOUT)))
    rig.turn()
    name = next(name for name in rig.devices if name.startswith("gpu-0-mig-3g40gb"))
    rig.claims = [claim("infer", name)]
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"1g.10gb": 7}})))
    rig.turn(10)
    assert rig.partitions() == ["1g.10gb"] * 4 + ["3g.40gb"]
    assert rig.tainted() == sorted(name for name in rig.devices if name.startswith("gpu-0"))
    rig.claims = []
    rig.turn(2)
    assert rig.partitions() == ["1g.10gb"] * 7


@pytest.mark.parametrize("change", [SHARES, {"mig": {"mode": "static", "layout": {"1g.12gb": 7}}}])
@pytest.mark.parametrize("known_by", ["api", "record"])
def test_a_gpu_that_a_claim_is_to_have_passed_through_is_waited_for_as_any_other(tmp_path, change, known_by):
    rig = Rig(tmp_path, "h100-nvl-x2", passthrough=True)
    rig.claims = [claim("machine", "gpu-vfio-1")] if known_by == "api" else []
    rig.holds = [Hold(ClaimRef("team", "machine", "u"), "gpu-vfio-1", None)] if known_by == "record" else []
    rig.policies(policy("p", change))
    rig.turn(10)
    assert (rig.state("gpu-1").state, rig.state("gpu-1").claims) == ("Waiting", ("team/machine",))
    assert not rig.partitions(1) and not rig.devices["gpu-1"].get("allowMultipleAllocations")
    assert rig.state("gpu-0").state == "Applied"
    rig.claims, rig.holds = [], []
    rig.turn(2)
    assert rig.state("gpu-1").state == "Applied"
    rig.session.close()


@pytest.mark.parametrize(
    ("profile", "layout", "code"),
    [
        ("dgx-h100", {"3g.40gb": 3}, "DRA-MIG-LAYOUT"),
        ("dgx-h100", {"1g.5gb": 1}, "DRA-MIG-PROFILE"),
        ("dgx-a100", {"1g.5gb": 1}, "DRA-MIG-MODE-NEEDS-RESET"),
        ("l40s-x4", {"1g.5gb": 1}, "DRA-MIG-PROFILE"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_touched(tmp_path, profile, layout, code):
    rig = Rig(tmp_path, profile)
    before = dict(rig.devices)
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": layout}, timeSlice=None)))
    rig.turn()
    assert (rig.state().state, rig.state().code) == ("Refused", code)
    assert rig.devices == before
    assert [said[1] for said in rig.said] == ["PolicyRefused"]
    rig.session.close()


def test_an_invalid_policy_changes_nothing_until_it_is_mended(rig):
    rig.policies(policy("good", SHARES))
    rig.turn()
    before = dict(rig.devices)
    bad = policy("bad", {"sharing": {"strategy": "shares"}}, weight=5)
    rig.policies(policy("good", {"sharing": {"strategy": "memory"}}), bad)
    rig.turn()
    assert rig.devices == before
    assert "GpuNodePolicy bad" in rig.reports[-1].problem
    assert [said[:2] for said in rig.said if said[1] == "PolicyInvalid"] == [("bad", "PolicyInvalid")]
    rig.policies(policy("good", {"sharing": {"strategy": "memory"}}))
    rig.turn()
    assert rig.devices != before


SELECTOR = {"nodeSelector": {"matchLabels": {"pool": "a"}}}


def test_an_invalid_policy_stops_only_the_nodes_that_its_selector_chooses(rig):
    bad = policy("bad", {"timeSlice": "Forever"}, **SELECTOR)
    rig.policies(policy("good", SHARES), bad, labels={"pool": "b"})
    rig.turn()
    assert all(device["allowMultipleAllocations"] for device in rig.devices.values())
    assert rig.reports[-1].policies == (("good", 1),)
    assert rig.reports[-1].problem == ""
    assert not [said for said in rig.said if said[1] == "PolicyInvalid"]
    # The label moves the node below it: what it got stays, and nothing changes any more.
    before = dict(rig.devices)
    rig.policies(policy("good", {"sharing": {"strategy": "memory"}}), bad, labels={"pool": "a"})
    rig.turn()
    assert rig.devices == before
    assert "GpuNodePolicy bad" in rig.reports[-1].problem


@pytest.mark.parametrize(
    "selector",
    [{"matchLabels": {"pool": 7}}, {"matchNames": ["n2"]}, "pool=b", {"matchExpressions": [{"key": "pool"}]}],
)
def test_where_not_even_the_selector_can_be_read_it_may_be_for_any_node(rig, selector):
    bad = policy("bad", {"timeSlice": "Long"}, nodeSelector=selector)
    rig.policies(policy("good", SHARES), bad, labels={"pool": "b"})
    rig.turn()
    assert not any(device.get("allowMultipleAllocations") for device in rig.devices.values())
    assert "nodeSelector" in rig.reports[-1].problem


def test_what_a_reboot_took_away_is_made_again_also_while_a_policy_is_invalid(rig):
    rig.policies(policy("p", only(rig, 0, **LAYOUT)))
    rig.turn()
    made = rig.partitions()
    assert made
    rig.sim.reboot()
    rig.session.refresh()
    rig.boot = "boot-2"
    rig.begin()
    assert rig.partitions() == []
    rig.policies(policy("p", {"timeSlice": "Forever"}))
    rig.turn()
    assert rig.partitions() == made
    assert rig.reports[-1].problem


def test_a_fault_that_comes_back_is_told_again(rig):
    old = policy("old", {"sharing": {"strategy": "memory"}}, created="2025-01-01T00:00:00Z")
    clash, broken = policy("new", SHARES), policy("new", {"timeSlice": "Forever"})
    for _ in range(2):
        for bodies in ((old, clash), (old,), (old, broken), (old,)):
            rig.policies(*bodies)
            rig.turn(2)
    said = [(name, reason) for name, reason, _ in rig.said if reason in ("PolicyConflict", "PolicyInvalid")]
    once = [("old", "PolicyConflict"), ("new", "PolicyConflict"), ("new", "PolicyInvalid")]
    assert said == once * 2


def test_a_node_label_decides_and_a_policy_that_goes_leaves_the_flags(tmp_path):
    rig = Rig(tmp_path, base=parse_sharing("4"))
    pool = policy("pool", {"sharing": {"strategy": "exclusive"}}, nodeSelector={"matchLabels": {"pool": "a"}})
    rig.policies(pool)
    rig.turn()
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]
    rig.policies(pool, labels={"pool": "a"})
    rig.turn()
    assert not rig.devices["gpu-0"].get("allowMultipleAllocations")
    rig.policies()
    rig.turn()
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]
    rig.session.close()


def test_a_conflict_is_told_to_both_and_the_older_counts(rig):
    old = policy("old", {"sharing": {"strategy": "memory"}}, created="2025-01-01T00:00:00Z")
    new = policy("new", SHARES)
    rig.policies(old, new)
    rig.turn()
    assert {said[0] for said in rig.said if said[1] == "PolicyConflict"} == {"old", "new"}
    assert rig.reports[-1].conflicts
    assert rig.keeper.settings.of(identity_of(rig.inventory.gpus[0])).sharing.strategy == "memory"


def test_a_change_that_is_taken_back_in_time_lets_the_gpu_go(rig):
    rig.claims = [claim("train", "gpu-0")]
    rig.policies(policy("p", only(rig, 0, **SHARES)))
    rig.turn()
    assert rig.tainted() == ["gpu-0"]
    rig.policies()
    rig.keeper.step()
    assert rig.tainted() == []


def test_nothing_is_given_out_before_the_taint_is_stored(rig):
    rig.stored = False
    rig.policies(policy("p", only(rig, 0, **SHARES)))
    rig.turn(5)
    assert rig.tainted() == ["gpu-0"]
    assert not rig.devices["gpu-0"].get("allowMultipleAllocations")
    rig.stored = True
    rig.turn(3)
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]


def test_a_creation_that_fails_goes_back_to_what_was_and_says_why(rig):
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"7g.80gb": 1}})))
    rig.turn()
    rig.sim.set_fault("nvmlGpuInstanceCreateComputeInstance", error="INSUFFICIENT_RESOURCES", times=3)
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"1g.10gb": 2}})))
    rig.turn(10)
    assert rig.state().state == "Refused"
    assert rig.state().code == "DRA-NVML-INSUFFICIENT-RESOURCES"
    assert rig.partitions() == ["7g.80gb"]
    assert rig.tainted() == []
    assert "PolicyRefused" in {said[1] for said in rig.said}


STEPS = [
    ("policy:begun", 1), ("layout:written", 1), ("layout:destroyed", 1), ("layout:created", 1),
    ("layout:created", 3), ("layout:done", 1), ("policy:published", 1), ("policy:done", 1),
]  # fmt: skip


@pytest.mark.parametrize(("step", "count"), STEPS)
@pytest.mark.parametrize("policy_stays", [True, False])
def test_killed_at_any_step_it_goes_on_after_the_restart_and_nothing_is_given_out_meanwhile(
    rig, step, count, policy_stays
):
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"3g.40gb": 2}})))
    rig.turn()
    wanted = policy("p", only(rig, 0, **LAYOUT))
    rig.policies(wanted)
    rig.die_at = (step, count)
    with pytest.raises(Died):
        rig.turn()
    rig.begin()
    rig.keeper.step()
    assert (
        all(name in rig.tainted() for name in rig.devices if name.startswith("gpu-0"))
        or step == "policy:done"
    )
    rig.policies(*([wanted] if policy_stays else []))
    rig.turn(8)
    assert rig.partitions() == (["1g.10gb"] * 4 + ["3g.40gb"] if policy_stays else [])
    assert rig.tainted() == []
    assert rig.state().state == "Applied"


def test_after_a_restart_what_held_holds_until_the_policies_are_known(rig):
    rig.policies(policy("p", SHARES))
    rig.turn()
    rig.begin()
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]
    rig.keeper.step()
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]


def test_after_a_reboot_the_layout_is_made_again_although_claims_have_its_partitions(rig):
    rig.policies(policy("p", only(rig, 0, **LAYOUT)))
    rig.turn()
    names = sorted(rig.devices)
    rig.claims = [claim("infer", name) for name in names if name.startswith("gpu-0")]
    rig.sim.reboot()
    rig.session.refresh()
    rig.boot = "boot-2"
    rig.begin()
    rig.policies(policy("p", only(rig, 0, **LAYOUT)))
    rig.turn(2)
    assert sorted(rig.devices) == names
    assert rig.tainted() == []


def test_a_layout_that_somebody_changed_by_hand_is_made_again_when_idle(rig):
    rig.policies(policy("p", only(rig, 0, mig={"mode": "static", "layout": {"3g.40gb": 1}})))
    rig.turn()
    mig = rig.inventory.gpus[0].mig_devices[0]
    place = next(each for each in mig.profile.placements if each[0] != mig.start)
    rig.changer._control.create(rig.uuid(), profile_id=mig.profile.profile_id, start=place[0])
    rig.look()
    rig.turn()
    assert rig.partitions() == ["3g.40gb"]


def test_a_full_disk_stops_the_change_and_says_so(rig, monkeypatch):
    rig.policies(policy("p", SHARES))

    def full(_applied):
        raise HostError("DRA-HOST-NO-SPACE", "no space")

    monkeypatch.setattr(rig.keeper._file, "save", full)
    with pytest.raises(HostError):
        rig.turn()
    assert not rig.devices["gpu-0"].get("allowMultipleAllocations")


def test_a_gpu_that_waits_for_a_change_stays_held_back_over_a_restart(rig):
    rig.claims = [claim("train", "gpu-0")]
    wanted = policy("p", only(rig, 0, **SHARES))
    rig.policies(wanted)
    rig.turn(10)
    assert rig.tainted() == ["gpu-0"]
    rig.begin()
    rig.keeper.recall()
    # Nothing is known of the policies yet, and what is published first is held back already.
    assert rig.keeper.has_state
    assert rig.tainted() == ["gpu-0"]
    rig.keeper.step()
    assert rig.tainted() == ["gpu-0"]
    rig.policies(wanted)
    rig.turn()
    assert rig.tainted() == ["gpu-0"]
    rig.claims = []
    rig.turn()
    assert rig.tainted() == []
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]
    rig.begin()
    rig.keeper.recall()
    assert rig.tainted() == []


def test_a_gpu_that_is_found_late_is_published_held_back(rig):
    rig.claims = [claim("train", "gpu-0")]
    rig.policies(policy("p", only(rig, 0, **SHARES)))
    rig.turn()
    there = rig.inventory
    rig.begin()
    rig.pool = PoolSource("gpu.nvidia.com", "n1", feed=HealthFeed(), settings=rig.base)
    rig.pool.publish_to(lambda pool: rig.history.append({d["name"]: d for d in pool.devices}))
    rig.history.clear()
    rig.keeper.hold_back(there)
    rig.pool.inventory_changed(there, InventoryDiff())
    assert [device["taints"][0]["key"] for device in (each["gpu-0"] for each in rig.history)] == [DRAINING]


def test_the_instance_that_takes_over_publishes_what_the_other_wrote_down(rig):
    rig.claims = [claim("train", "gpu-3")]
    wanted = policy("p", SHARES)
    first = rig.keeper
    rig.begin()
    second, rig.keeper = rig.keeper, first
    rig.policies(wanted)
    rig.turn(10)
    rig.history.clear()
    second.recall()
    assert rig.tainted() == ["gpu-3"]
    assert rig.devices["gpu-0"]["allowMultipleAllocations"]
    assert not rig.devices["gpu-3"].get("allowMultipleAllocations")


def test_a_conflict_over_many_gpus_is_said_once_to_each_policy(rig):
    old = policy("old", {"timeSlice": "Long"}, created="2025-01-01T00:00:00Z")
    rig.policies(old, policy("new", {"timeSlice": "Short"}))
    rig.turn()
    said = [each for each in rig.said if each[1] == "PolicyConflict"]
    assert [name for name, _, _ in said] == ["old", "new"]
    assert "both set timeSlice of 8 GPUs" in said[0][2]
    assert len(rig.reports[-1].conflicts) == 1


def test_events_name_the_policy_that_wants_the_change_and_are_few(rig):
    rig.claims = [claim(f"job-{n}", "gpu-0") for n in range(6)]
    label = policy("label", {"attributes": {"rail": {"int": 3}}}, weight=9)
    rig.policies(label, policy("cards", SHARES))
    rig.turn()
    while rig.claims:
        rig.claims.pop()
        rig.turn(3)
    said = [(name, reason, text) for name, reason, text in rig.said if text.startswith("gpu-0")]
    assert [(name, reason) for name, reason, _ in said] == [
        ("cards", "PolicyWaiting"),
        ("cards", "PolicyApplied"),
    ]
    assert "team/job-0" in said[0][2]
    # Nobody had the others: what was over in a moment is told when it is over.
    assert {reason for _, reason, text in rig.said if text.startswith("gpu-1")} == {"PolicyApplied"}


def test_an_invalid_policy_keeps_no_gpu_waiting(rig):
    rig.claims = [claim("train", "gpu-0")]
    rig.policies(policy("p", only(rig, 0, **SHARES)))
    rig.turn()
    assert rig.tainted() == ["gpu-0"]
    rig.policies(policy("p", only(rig, 0, **SHARES)), policy("bad", {"timeSlice": "Forever"}))
    rig.keeper.step()
    assert rig.tainted() == []
    rig.begin()
    rig.keeper.recall()
    assert rig.tainted() == []
    rig.policies(policy("p", only(rig, 0, **SHARES)))
    rig.keeper.step()
    assert rig.tainted() == ["gpu-0"]
