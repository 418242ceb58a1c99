"""The framework of effects: order, undoing, counting by claim, boots, versions."""

from __future__ import annotations

import pytest
from prepare_fakes import GROUP_VERSION, Killed, opaque

from dra.errors import DeviceError, DraError
from dra.prepare import steps
from dra.prepare.sharing.model import SharingPlan

TIME_SLICING = {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}}


class Hardware:
    """What effects change, and what happened to it in order."""

    def __init__(self) -> None:
        self.set: dict[str, str] = {}
        self.log: list[str] = []
        self.fail_apply: str = ""
        self.fail_undo: str = ""


class Setting:
    """A setting of a GPU: of one claim, or shared by those that use the GPU."""

    def __init__(
        self, hardware: Hardware, kind: str, gpu: str, *, shared: bool, ends_with_boot: bool
    ) -> None:
        self.hardware, self.kind, self.gpu, self.shared = hardware, kind, gpu, shared
        self.ends_with_boot = ends_with_boot

    @property
    def shared_resource(self):
        return f"{self.kind} {self.gpu}" if self.shared else None

    def args(self):
        return {"gpu": self.gpu}

    def apply(self):
        self.hardware.log.append(f"apply {self.kind} {self.gpu}")
        self.hardware.set[f"{self.kind} {self.gpu}"] = "on"
        if self.hardware.fail_apply == self.kind:
            raise DeviceError("DRA-TEST", "the GPU refused", retryable=True)

    def verify(self):
        return f"{self.kind} {self.gpu}" in self.hardware.set

    def undo(self):
        if self.hardware.fail_undo == self.kind:
            raise DeviceError("DRA-TEST", "the GPU is in use", retryable=True)
        self.hardware.log.append(f"undo {self.kind} {self.gpu}")
        self.hardware.set.pop(f"{self.kind} {self.gpu}", None)


@pytest.fixture
def hardware(node):
    """A strategy with two effects a GPU: a partition of the claim's own, and a time-slice that is shared."""
    made = Hardware()

    def planner(group, _context):
        found = []
        for gpu in group.gpus:
            name = f"gpu-{gpu.minor}"
            found.append(Setting(made, "partition", name, shared=False, ends_with_boot=True))
            found.append(Setting(made, "time-slice", name, shared=True, ends_with_boot=True))
        return SharingPlan(tuple(found))

    node.ports = {
        "strategies": {"TimeSlicing": planner},
        "effects": {
            "partition": lambda a: Setting(made, "partition", a["gpu"], shared=False, ends_with_boot=True),
            "time-slice": lambda a: Setting(made, "time-slice", a["gpu"], shared=True, ends_with_boot=True),
        },
    }
    node.restart()
    return made


def shares(node, number, letter):
    from prepare_fakes import result

    share = f"{letter * 8}-1111-4111-8111-111111111111"
    return node.claim(number, result("gpu-0", shareID=share), configs=[opaque(TIME_SLICING)])


def test_effects_are_undone_in_reverse_order_with_the_spec_gone_first(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    assert [e["kind"] for e in node.record(ref)["effects"]] == ["partition", "time-slice", "cdi-file"]
    node.steps.clear()
    node.unprepare(ref)
    assert hardware.log[2:] == ["undo time-slice gpu-0", "undo partition gpu-0"]
    assert node.steps == steps.unprepare_steps(effects=3)


def test_what_several_claims_share_is_undone_by_the_last_of_them(node, hardware):
    one, two = shares(node, 1, "a"), shares(node, 2, "b")
    node.prepared(one)
    node.prepared(two)
    node.unprepare(one)
    assert "time-slice gpu-0" in hardware.set
    node.unprepare(two)
    assert hardware.set == {}
    assert hardware.log.count("undo time-slice gpu-0") == 1


def test_an_effect_that_is_gone_is_brought_back_by_the_next_prepare(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    first = node.prepared(ref)
    hardware.set.clear()
    assert node.prepared(ref) == first
    assert set(hardware.set) == {"partition gpu-0", "time-slice gpu-0"}


def test_a_prepare_that_fails_half_way_undoes_all_of_it(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    hardware.fail_apply = "time-slice"
    assert node.refused(ref).code == "DRA-TEST"
    assert hardware.set == {}
    assert node.files() == []


def test_an_effect_that_cannot_be_undone_stays_in_the_record_until_it_can(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    hardware.fail_undo = "partition"
    error = node.unprepare(ref)
    assert isinstance(error, DraError)
    assert "in use" in str(error)
    assert node.record(ref)["state"] == "unpreparing"
    assert [e["kind"] for e in node.record(ref)["effects"]] == ["partition"]
    assert not node.cdi_file(ref).exists()
    assert node.refused(node.claim(2, "gpu-0")).code == "DRA-DEVICE-HELD"
    hardware.fail_undo = ""
    assert node.unprepare(ref) is None
    assert hardware.set == {}
    assert node.files() == []


def test_a_rollback_that_fails_keeps_the_record_so_that_unprepare_can_finish(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    hardware.fail_apply, hardware.fail_undo = "time-slice", "partition"
    assert node.refused(ref).code == "DRA-TEST"
    assert node.record(ref)["state"] == "preparing"
    hardware.fail_apply = hardware.fail_undo = ""
    assert node.unprepare(ref) is None
    assert hardware.set == {}
    assert node.files() == []


def test_what_a_reboot_undid_is_not_undone_again(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    node.reboot()
    hardware.log.clear()
    assert node.unprepare(ref) is None
    assert hardware.log == []
    assert node.files() == []


def test_after_a_reboot_everything_is_applied_again(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    node.reboot()
    hardware.set.clear()
    node.prepared(ref)
    assert set(hardware.set) == {"partition gpu-0", "time-slice gpu-0"}


def test_an_effect_that_the_claim_no_longer_asks_for_is_undone(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    node.claim(1, "gpu-0")
    node.prepared(ref)
    assert hardware.set == {}
    assert [e["kind"] for e in node.record(ref)["effects"]] == ["cdi-file"]


def test_an_effect_of_a_newer_version_is_named_and_the_claim_kept(node, hardware):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.prepared(ref)
    node.ports = {}
    node.restart()
    error = node.unprepare(ref)
    assert error.code == "DRA-EFFECT-UNKNOWN"
    assert "time-slice" in str(error)
    assert "Upgrade" in str(error)
    assert node.record_file(ref).exists()


@pytest.mark.parametrize("step", steps.prepare_steps(effects=3))
def test_a_kill_anywhere_among_several_effects_leaves_nothing_after_unprepare(node, hardware, step):
    ref = node.claim(1, "gpu-0", configs=[opaque(TIME_SLICING)])
    node.kill_at = step
    with pytest.raises(Killed):
        node.prepare(ref)
    node.restart()
    assert node.unprepare(ref) is None
    assert hardware.set == {}
    assert node.files() == []


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=3))
def test_a_kill_anywhere_in_undoing_several_effects_is_finished_by_the_next_call(node, hardware, step):
    one, two = shares(node, 1, "a"), shares(node, 2, "b")
    node.prepared(one)
    node.prepared(two)
    node.kill_at = step
    with pytest.raises(Killed):
        node.unprepare(one)
    node.restart()
    assert node.unprepare(one) is None
    assert "time-slice gpu-0" in hardware.set
    node.prepared(two)
    assert node.unprepare(two) is None
    assert hardware.set == {}
    assert node.files() == []


def test_a_time_slice_of_a_claim_that_died_before_applying_it_counts(node, hardware):
    """Pending means that it may have happened: it is undone by whoever is last."""
    one, two = shares(node, 1, "a"), shares(node, 2, "b")
    node.prepared(two)
    node.kill_at = "prepare:record-written"
    with pytest.raises(Killed):
        node.prepare(one)
    node.restart()
    node.unprepare(two)
    assert "time-slice gpu-0" in hardware.set
    node.unprepare(one)
    assert hardware.set == {}
