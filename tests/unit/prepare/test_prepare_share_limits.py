"""Shares that are held to their amounts by MPS: which daemon, which limits, what the containers and the claim are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dra.api.gpu_settings import parse_sharing
from dra.errors import HostError
from dra.prepare.sharing import compute_mode, mps
from dra.prepare.sharing.enforce import ShareEnforcer
from dra.prepare.sharing.mps import DaemonStatus, MpsDaemon, MpsPlanner, card_daemon_id
from tests.unit.prepare.prepare_fakes import FakeRenderer, Killed, Node, make_gpu, opaque, result
from tests.unit.prepare.sharing_node import SharingNode
from tests.unit.prepare.test_prepare_costs import Disk

# 80 GiB in the fakes.
TOTAL_MIB = 80 * 1024


class Keeper:
    """Daemons by id; `down` as if no keeper answered."""

    def __init__(self):
        self.daemons, self.down, self.stopped = {}, False, []

    def _ask(self):
        if self.down:
            raise HostError("DRA-MPS-KEEPER-ABSENT", "no keeper", retryable=True)

    def ensure(self, spec):
        self._ask()
        self.daemons[spec.id] = spec

    def status(self, daemon_id):
        self._ask()
        spec = self.daemons.get(daemon_id)
        return None if spec is None else DaemonStatus(spec, ready=True)

    def stop(self, daemon_id):
        self._ask()
        self.stopped.append(daemon_id)
        self.daemons.pop(daemon_id, None)


class Modes:
    def __init__(self):
        self.modes = {}

    def get(self, gpu_uuid):
        return self.modes.get(gpu_uuid, "EXCLUSIVE_PROCESS")

    def set(self, gpu_uuid, mode):
        self.modes[gpu_uuid] = mode


class Renderer(FakeRenderer):
    """Keeps what each device of a claim was given."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def render(self, claim_uid, devices, *, driver_version):
        spec = super().render(claim_uid, devices, driver_version=driver_version)
        for entry, device in zip(spec["devices"], devices, strict=True):
            entry["containerEdits"]["env"] = list(device.extra_env)
            mounts = {mount.container_path: mount.host_path for mount in device.extra_mounts}
            self.given[claim_uid] = (dict(each.split("=", 1) for each in device.extra_env), mounts)
        return spec


class Rig:
    def __init__(self, root, sharing, *, keeper=True, gpu=None):
        self.node, self.keeper, self.modes, self.renderer = Node(root), Keeper(), Modes(), Renderer()
        self.sharing, self.has_keeper, self.said = parse_sharing(sharing), keeper, []
        node = self.node
        node.renderer = self.renderer
        if gpu is not None:
            node.inventory = node.inventory.__class__(node.inventory.driver_version, (13, 0), (gpu,))
        self.planner = planner = MpsPlanner(
            self.keeper, self.modes, state_dir=node.state_dir, tell=lambda _context: self._say
        )
        node.ports.update(
            settings=lambda: self.sharing,
            shares=ShareEnforcer(
                planner, self.modes, available=lambda: self.has_keeper and not self.keeper.down,
                tell=lambda _context: self._say,
            ),
            effects={
                mps.KIND: lambda args: MpsDaemon.revive(args, keeper=self.keeper),
                compute_mode.KIND: lambda args: compute_mode.ComputeMode.revive(args, modes=self.modes),
            },
        )  # fmt: skip
        node.restart()

    def _say(self, reason, message):
        self.said.append((reason, message))

    def claim(self, number, *devices, **more):
        return self.node.claim(number, *(devices or (part(number, shares="20", memory="0"),)), **more)

    def env(self, ref):
        return self.renderer.given[ref.uid][0]

    def mounts(self, ref):
        return self.renderer.given[ref.uid][1]


def part(number, device="gpu-0", request="gpu", **consumed):
    share_id = f"{number:08x}-1111-4111-8111-111111111111"
    return result(device, request=request, shareID=share_id, consumedCapacity=consumed)


@pytest.fixture
def rig(tmp_path):
    return lambda sharing="100", **more: Rig(tmp_path, sharing, **more)


def test_each_claim_has_a_daemon_of_its_own_with_exactly_its_limits(rig):
    made = rig()
    refs = [made.claim(number) for number in range(1, 6)]
    for ref in refs:
        made.node.prepared(ref)
    assert len(made.keeper.daemons) == 5
    for spec in made.keeper.daemons.values():
        assert spec.active_thread_percentage == 20
        assert list(spec.pinned_memory_mib.values()) == [TOTAL_MIB // 5]
        assert spec.devices == (make_gpu(0).uuid,)
        assert spec.multi_user
    assert made.modes.get(make_gpu(0).uuid) == "DEFAULT"
    assert sum(sum(spec.pinned_memory_mib.values()) for spec in made.keeper.daemons.values()) <= TOTAL_MIB


def test_containers_see_their_amounts_and_their_own_daemon_only(rig):
    made = rig()
    one, two = made.claim(1), made.claim(2, part(2, shares="50", memory="6Gi"))
    made.node.prepared(one)
    made.node.prepared(two)
    env = made.env(one)
    assert env["GPUDRA_SHARE_MEMORY_MIB"] == str(TOTAL_MIB // 5)
    assert env["GPUDRA_SHARE_PERCENT"] == "20"
    assert env["GPUDRA_SHARE_ENFORCEMENT"] == "per-process"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={TOTAL_MIB // 5}M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "20"
    assert (made.env(two)["GPUDRA_SHARE_MEMORY_MIB"], made.env(two)["GPUDRA_SHARE_PERCENT"]) == ("6144", "50")
    assert set(made.mounts(one)) == {"/dev/shm", env["CUDA_MPS_PIPE_DIRECTORY"]}
    assert not set(made.mounts(one).values()) & set(made.mounts(two).values())


def test_a_share_on_a_card_in_use_costs_one_sync_three_files_and_one_question_to_the_keeper(rig, monkeypatch):
    made = rig()
    made.node.prepared(made.claim(1))
    ref = made.claim(2)
    asked, modes = [], []
    for name in ("ensure", "status", "stop"):
        real = getattr(made.keeper, name)
        monkeypatch.setattr(
            made.keeper, name, lambda what, name=name, real=real: (asked.append(name), real(what))[1]
        )
    real_get = made.modes.get
    monkeypatch.setattr(made.modes, "get", lambda uuid: (modes.append(uuid), real_get(uuid))[1])
    disk = Disk(monkeypatch)
    made.node.prepared(ref)
    # The record before and after, and the spec. What the GPU had before is in the other claim's record.
    assert disk.taken() == {"new": 3, "rename": 3, "fsync": 1, "lock": 3}
    assert (asked, len(modes)) == (["ensure"], 1)
    made.node.unprepare(ref)
    # The record says that it ends; then it and the spec go.
    assert disk.taken() == {"new": 1, "rename": 1, "unlink": 2, "lock": 3}
    assert (asked, len(modes)) == (["ensure", "stop"], 1)


def test_the_claim_is_told_what_holds(rig):
    made = rig()
    made.node.prepared(made.claim(1))
    ((reason, message),) = made.said
    assert reason == "ShareEnforced"
    assert "16384 MiB of memory and 20 % of the multiprocessors" in message
    assert "each process's, not the container's" in message
    made.node.prepared(made.claim(1))
    assert len(made.said) == 1


def test_the_last_unprepare_ends_the_daemon_and_gives_the_compute_mode_back(rig):
    made = rig()
    one, two = made.claim(1), made.claim(2)
    for ref in (one, two):
        made.node.prepared(ref)
    made.node.unprepare(one)
    assert len(made.keeper.daemons) == 1
    assert made.modes.get(make_gpu(0).uuid) == "DEFAULT"
    made.node.unprepare(two)
    assert made.keeper.daemons == {}
    assert made.modes.get(make_gpu(0).uuid) == "EXCLUSIVE_PROCESS"
    assert made.node.files() == []


def test_without_a_keeper_nothing_holds_and_that_is_said(rig):
    made = rig(keeper=False)
    ref = made.claim(1)
    made.node.prepared(ref)
    assert made.keeper.daemons == {}
    assert made.env(ref) == {
        "GPUDRA_SHARE_MEMORY_MIB": str(TOTAL_MIB // 5), "GPUDRA_SHARE_PERCENT": "20", "GPUDRA_SHARE_ENFORCEMENT": "none",
    }  # fmt: skip
    assert made.mounts(ref) == {}
    assert [reason for reason, _ in made.said] == ["ShareNotEnforced"]
    assert "no MPS keeper" in made.said[0][1]


def test_where_it_is_required_no_claim_is_prepared_without(rig):
    made = rig("100/required", keeper=False)
    ref = made.claim(1)
    error = made.node.refused(ref)
    assert (error.code, error.retryable) == ("DRA-SHARE-ENFORCEMENT", True)
    assert made.node.files() == []
    made.has_keeper = True
    made.node.prepared(ref)
    assert len(made.keeper.daemons) == 1


def test_where_nothing_is_wanted_the_keeper_is_not_asked(rig):
    made = rig("100/none")
    made.keeper.down = True
    ref = made.claim(1)
    made.node.prepared(ref)
    assert made.env(ref)["GPUDRA_SHARE_ENFORCEMENT"] == "none"
    assert made.said == []


def test_a_gpu_whose_mps_knows_no_limits_has_none(rig):
    made = rig(gpu=make_gpu(0, compute_capability=(6, 1)))
    made.node.prepared(made.claim(1))
    assert made.keeper.daemons == {}
    assert "7.0" in made.said[0][1]
    made.sharing = parse_sharing("100/required")
    assert made.node.refused(made.claim(2)).code == "DRA-SHARE-ENFORCEMENT"


def test_cooperative_claims_have_the_cards_daemon_and_their_limits_in_the_environment(rig):
    made = rig("memory/cooperative")
    refs = [made.claim(number, part(number, memory=f"{number}Gi")) for number in (1, 2)]
    for ref in refs:
        made.node.prepared(ref)
    (spec,) = made.keeper.daemons.values()
    assert spec.id == card_daemon_id(make_gpu(0).uuid)
    assert (spec.pinned_memory_mib, spec.active_thread_percentage) == ({}, None)
    assert [made.env(ref)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for ref in refs] == ["0=1024M", "0=2048M"]
    assert made.env(refs[0])["GPUDRA_SHARE_ENFORCEMENT"] == "cooperative"
    assert {reason for reason, _ in made.said} == {"ShareCooperative"}
    assert "one /dev/shm" in made.said[0][1]
    made.node.unprepare(refs[0])
    assert len(made.keeper.daemons) == 1
    made.node.unprepare(refs[1])
    assert made.keeper.daemons == {}


@pytest.mark.parametrize(("cuda", "clients"), [((13, 0), 48), ((13, 1), 60), (None, 48)])
def test_a_cards_daemon_serves_no_more_claims_than_mps_has_clients(rig, cuda, clients):
    made = rig("unlimited/cooperative")
    made.node.inventory = replace(made.node.inventory, cuda_version=cuda)
    refs = [made.claim(number, part(number, memory="1Mi")) for number in range(clients + 1)]
    for ref in refs[:-1]:
        made.node.prepared(ref)
    error = made.node.refused(refs[-1])
    assert (error.code, error.retryable) == ("DRA-SHARE-CLIENTS", True)
    assert f"room for {clients} clients" in error.message
    made.node.unprepare(refs[0])
    made.node.prepared(refs[-1])
    # A driver that serves fewer takes nothing from who is there.
    made.node.inventory = replace(made.node.inventory, cuda_version=(12, 0))
    made.node.prepared(refs[-1])


def test_more_daemons_on_a_card_than_one_server_has_clients_are_told_of(rig):
    made = rig()
    for number in range(48):
        made.node.prepared(made.claim(number, part(number, shares="1", memory="1Mi")))
    assert {reason for reason, _ in made.said} == {"ShareEnforced"}
    made.node.prepared(made.claim(48, part(48, "gpu-1", shares="1", memory="1Mi")))
    assert {reason for reason, _ in made.said} == {"ShareEnforced"}
    ref = made.claim(49, part(49, shares="1", memory="1Mi"))
    made.node.prepared(ref)
    (text,) = [text for reason, text in made.said if reason == "ShareManyDaemons"]
    assert "49 claims" in text
    assert "48 clients" in text
    assert made.env(ref)["GPUDRA_SHARE_ENFORCEMENT"] == "per-process"


def test_a_share_without_any_amount_has_nothing_to_be_held_to(rig):
    made = rig("unlimited")
    ref = made.claim(1, part(1, memory="0"))
    made.node.prepared(ref)
    assert made.env(ref) == {"GPUDRA_SHARE_ENFORCEMENT": "none"}
    assert made.said == []


def test_a_prepared_claim_keeps_its_daemon_while_the_keeper_is_replaced_and_gets_none_later(rig):
    made = rig()
    ref = made.claim(1)
    made.node.prepared(ref)
    made.keeper.down = True
    assert made.node.refused(ref).code == "DRA-MPS-KEEPER-ABSENT"
    assert len(made.keeper.daemons) == 1
    made.keeper.down = False
    made.node.prepared(ref)
    assert made.keeper.stopped == []
    made.has_keeper = False
    late = made.claim(2)
    made.node.prepared(late)
    made.has_keeper = True
    made.node.prepared(late)
    assert made.env(late)["GPUDRA_SHARE_ENFORCEMENT"] == "none"


def test_two_cards_of_one_claim_have_one_daemon_with_a_limit_for_each(rig):
    made = rig()
    ref = made.claim(
        1, part(1, "gpu-0", shares="20", memory="0"), part(2, "gpu-1", shares="20", memory="2Gi")
    )
    made.node.prepared(ref)
    (spec,) = made.keeper.daemons.values()
    assert spec.pinned_memory_mib == {make_gpu(0).uuid: TOTAL_MIB // 5, make_gpu(1).uuid: 2048}
    assert spec.active_thread_percentage == 20


def test_two_shares_of_one_card_in_one_claim_have_a_daemon_for_each_request(rig):
    made = rig()
    ref = made.claim(
        1,
        part(1, request="small", shares="10", memory="0"),
        part(2, request="large", shares="30", memory="0"),
    )
    made.node.prepared(ref)
    assert sorted(spec.active_thread_percentage for spec in made.keeper.daemons.values()) == [10, 30]


def test_mps_of_a_configuration_is_refused_on_a_share(rig):
    made = rig()
    config = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": "MPS"},
    }
    error = made.node.refused(made.claim(1, configs=[opaque(config)]))
    assert error.code == "DRA-SHARE-MPS"
    assert error.remedy


def test_mps_of_a_configuration_serves_a_share_that_is_a_whole_card(rig):
    made = rig("memory")
    made.node.ports["strategies"] = {"MPS": made.planner}
    made.node.restart()
    config = {
        "apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig",
        "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 30}},
    }  # fmt: skip
    whole = made.claim(1, part(1, memory="80Gi"), configs=[opaque(config)])
    made.node.prepared(whole)
    (spec,) = made.keeper.daemons.values()
    assert spec.active_thread_percentage == 30
    assert (
        made.node.refused(made.claim(2, part(2, "gpu-1", memory="40Gi"), configs=[opaque(config)])).code
        == "DRA-SHARE-MPS"
    )


def test_a_kill_at_any_step_leaves_nothing_once_the_claim_is_unprepared(tmp_path):
    made = Rig(tmp_path / "first", "100")
    made.node.prepared(made.claim(1))
    steps = [step for step in made.node.steps if step.startswith("prepare:")]
    assert len(steps) > 5
    for index, step in enumerate(steps):
        again = Rig(tmp_path / str(index), "100")
        again.modes.set(make_gpu(0).uuid, "DEFAULT")
        ref = again.claim(1)
        again.node.kill_at = step
        with pytest.raises(Killed):
            again.node.prepare(ref)
        again.node.restart()
        assert again.node.unprepare(ref) is None
        assert again.keeper.daemons == {}, step
        assert again.modes.get(make_gpu(0).uuid) == "DEFAULT", step
        assert again.node.files() == [], step


def test_shares_of_a_partition_on_demand_make_it_once_and_the_last_destroys_it(tmp_path):
    node = SharingNode(tmp_path, profile="h100-nvl-x2", dynamic=True)
    try:
        node.ports |= {
            "settings": lambda: parse_sharing("4"),
            "shares": ShareEnforcer(node.sharing.mps, Modes(), available=lambda: True),
        }
        node.restart()
        (profile,) = {
            each.name
            for each in node.inventory.gpus[0].mig_profiles
            if each.name.startswith("1g") and "+" not in each.name and len(each.placements) > 4
        }
        device = node.name(0, profile, 0)
        refs = [node.claim(number, part(number, device, shares="1")) for number in (1, 2)]
        for ref in refs:
            node.prepared(ref)
        assert node.partitions() == [device]
        (made,) = {uuid for spec in node.keeper.daemons.values() for uuid in spec.devices}
        assert made.startswith("MIG-")
        for spec in node.keeper.daemons.values():
            assert spec.active_thread_percentage == 25
            assert 0 < spec.pinned_memory_mib[made] <= 12 * 1024 // 4
        assert len(node.keeper.daemons) == 2
        assert node.unprepare(refs[0]) is None
        assert node.partitions() == [device]
        assert node.unprepare(refs[1]) is None
        assert node.partitions() == []
        node.clean()
    finally:
        node.close()
