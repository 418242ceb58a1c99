"""MIG devices: those that exist, and those that are made for a claim."""

from __future__ import annotations

import pytest
from mig_node import MigNode
from prepare_fakes import GROUP_VERSION, opaque, result

MIG_CONFIG = {"apiVersion": GROUP_VERSION, "kind": "MigDeviceConfig"}
GPU_CONFIG = {"apiVersion": GROUP_VERSION, "kind": "GpuConfig"}


@pytest.fixture
def made(tmp_path):
    node = MigNode(tmp_path)
    yield node
    node.close()


@pytest.fixture
def static(tmp_path):
    node = MigNode(tmp_path, dynamic=False)
    yield node
    node.close()


# -- partitions that exist


def test_a_static_mig_device_gets_its_gpu_and_two_capability_nodes_that_the_kernel_lists(static):
    static.sim.set_mig_layout(0, [("1g.10gb", 0), ("2g.20gb", 2)])
    static.look()
    device = static.name(0, "2g.20gb", 2)
    ref = static.claim(1, device)
    static.prepared(ref)
    mig = next(mig for gpu in static.inventory.gpus for mig in gpu.mig_devices if mig.start == 2)
    nodes = static.nodes(ref)[device]
    wanted = static.capabilities(0, mig.gpu_instance_id, mig.compute_instance_id)
    assert nodes[0] == "/dev/nvidia0"
    assert nodes[-2:] == wanted
    assert [effect["kind"] for effect in static.effects(ref)] == ["cdi-file"]
    assert static.unprepare(ref) is None
    assert len(static.partitions()) == 2
    assert static.mode(0) == 1


def test_capability_nodes_are_character_devices_with_numbers(static):
    import json

    static.sim.set_mig_layout(0, [("1g.10gb", 3)])
    static.look()
    ref = static.claim(1, static.name(0, "1g.10gb", 3))
    static.prepared(ref)
    spec = json.loads(static.cdi_file(ref).read_text())
    caps = [n for n in spec["devices"][0]["containerEdits"]["deviceNodes"] if "nvidia-cap" in n["path"]]
    assert [(node["type"], node["fileMode"], node["permissions"]) for node in caps] == [
        ("c", 0o444, "rw")
    ] * 2
    assert caps[0]["major"] == static.sim.state.majors["nvidia-caps"]


def test_a_layout_that_was_changed_by_hand_is_seen_though_the_inventory_is_old(static):
    """The instance's ids are others now; those of the inventory would open somebody else's partition."""
    static.sim.set_mig_layout(0, [("1g.10gb", 0), ("1g.10gb", 1)])
    static.look()
    old = {mig.start: mig for mig in static.inventory.gpus[0].mig_devices}
    static.sim.set_mig_layout(0, [("1g.10gb", 1), ("1g.10gb", 0)])
    device = static.name(0, "1g.10gb", 1)
    ref = static.claim(1, device)
    static.prepared(ref)
    static.look()
    new = next(mig for mig in static.inventory.gpus[0].mig_devices if mig.start == 1)
    assert new.gpu_instance_id != old[1].gpu_instance_id
    wanted = static.capabilities(0, new.gpu_instance_id, new.compute_instance_id)
    assert static.nodes(ref)[device][-2:] == wanted


def test_a_static_partition_that_is_gone_is_an_error_that_names_it_and_is_never_made(static):
    static.sim.set_mig_layout(0, [("1g.10gb", 0)])
    static.look()
    ref = static.claim(1, static.name(0, "1g.10gb", 1))
    error = static.refused(ref)
    assert error.code == "DRA-DEVICE-UNKNOWN"
    assert "gpu-0-mig-1g10gb-19-1" in str(error)
    assert "made on demand" in str(error)
    assert error.retryable
    assert static.files() == []
    assert static.partitions() == ["gpu-0-mig-1g10gb-19-0"]


@pytest.mark.parametrize("sharing", [None, {"strategy": "TimeSlicing"}])
def test_a_mig_device_config_is_accepted(static, sharing):
    static.sim.set_mig_layout(0, [("1g.10gb", 0)])
    static.look()
    config = MIG_CONFIG if sharing is None else {**MIG_CONFIG, "sharing": sharing}
    static.prepared(static.claim(1, static.name(0, "1g.10gb", 0), configs=[opaque(config)]))


def test_mps_on_a_mig_device_is_refused_by_name(static):
    static.sim.set_mig_layout(0, [("1g.10gb", 0)])
    static.look()
    config = {**MIG_CONFIG, "sharing": {"strategy": "MPS"}}
    error = static.refused(static.claim(1, static.name(0, "1g.10gb", 0), configs=[opaque(config)]))
    assert error.code == "DRA-CONFIG-UNSUPPORTED"
    assert "MPS" in str(error)


def test_a_gpu_config_that_names_the_request_of_a_mig_device_is_refused_and_nothing_is_made(made):
    device = made.name(0, "1g.10gb", 0)
    error = made.refused(made.claim(1, device, configs=[opaque(GPU_CONFIG, requests=["gpu"])]))
    assert error.code == "DRA-CONFIG-KIND-MISMATCH"
    assert made.partitions() == []
    assert made.mode(0) == 0


def test_a_gpu_config_for_all_requests_does_not_touch_a_mig_device(made):
    made.prepared(made.claim(1, made.name(0, "1g.10gb", 0), configs=[opaque(GPU_CONFIG)]))


def test_a_mig_device_config_does_not_fit_a_whole_gpu(made):
    error = made.refused(made.claim(1, "gpu-0", configs=[opaque(MIG_CONFIG, requests=["gpu"])]))
    assert error.code == "DRA-CONFIG-KIND-MISMATCH"


def test_a_whole_gpu_in_mig_mode_is_refused(static):
    static.sim.set_mig_mode(0, enabled=True)
    static.look()
    assert static.refused(static.claim(1, "gpu-0")).code == "DRA-DEVICE-MIG-MODE"


# -- partitions that are made


def test_a_partition_is_made_at_its_placement_and_destroyed_with_the_mode_that_was_off(made):
    device = made.name(2, "3g.40gb", 4)
    ref = made.claim(1, device)
    devices = made.prepared(ref)
    assert [each.device for each in devices] == [device]
    assert made.partitions() == [device]
    assert made.mode(2) == 1
    assert [effect["kind"] for effect in made.effects(ref)] == ["mig-mode", "mig-device", "cdi-file"]
    outcome = made.effects(ref)[1]["outcome"]
    made.look()
    mig = made.inventory.gpus[2].mig_devices[0]
    assert outcome == {"gi": mig.gpu_instance_id, "ci": mig.compute_instance_id, "uuid": mig.uuid}
    wanted = made.capabilities(2, outcome["gi"], outcome["ci"])
    assert made.nodes(ref)[device][-2:] == wanted
    assert [each.uuid for each in made.the_engine.partitions()] == [mig.uuid]
    assert made.unprepare(ref) is None
    assert made.partitions() == []
    assert made.mode(2) == 0
    assert made.files() == []
    assert made.changes == 2


def test_preparing_again_makes_nothing_and_says_the_same(made):
    ref = made.claim(1, made.name(0, "1g.10gb", 0))
    first = made.prepared(ref)
    made.sim.reset_calls()
    assert made.prepared(ref) == first
    made.restart()
    assert made.prepared(ref) == first
    assert not [name for name in made.sim.count_calls() if "Create" in name or "SetMigMode" in name]
    assert made.changes == 1


def test_the_mode_stays_on_until_the_last_claim_of_the_gpu_is_gone(made):
    one, two = made.claim(1, made.name(0, "1g.10gb", 0)), made.claim(2, made.name(0, "1g.10gb", 1))
    made.prepared(one)
    made.prepared(two)
    assert made.unprepare(one) is None
    assert made.mode(0) == 1
    made.prepared(two)
    assert made.unprepare(two) is None
    assert made.mode(0) == 0


def test_a_mode_that_was_switched_on_by_hand_stays_on(made):
    made.sim.set_mig_mode(0, enabled=True)
    ref = made.claim(1, made.name(0, "1g.10gb", 0))
    made.prepared(ref)
    assert made.unprepare(ref) is None
    assert made.partitions() == []
    assert made.mode(0) == 1


def test_a_partition_made_by_hand_beside_ours_stays_and_keeps_the_mode_on(made):
    ref = made.claim(1, made.name(0, "1g.10gb", 0))
    made.prepared(ref)
    made.sim.create_mig(0, "2g.20gb", 2)
    assert made.unprepare(ref) is None
    assert made.partitions() == [made.name(0, "2g.20gb", 2)]
    assert made.mode(0) == 1


def test_a_partition_made_by_hand_is_used_and_never_destroyed(made):
    device = made.name(0, "1g.10gb", 0)
    made.sim.set_mig_layout(0, [("1g.10gb", 0)])
    ref = made.claim(1, device)
    made.prepared(ref)
    assert [effect["kind"] for effect in made.effects(ref)] == ["cdi-file"]
    assert made.unprepare(ref) is None
    assert made.partitions() == [device]
    made.api.delete(ref)
    made.janitor().sweep()
    assert made.partitions() == [device]


def test_one_made_by_hand_where_ours_was_is_not_ours(made):
    """Ours was destroyed behind our back, and somebody made another: it is used, and left."""
    device = made.name(0, "1g.10gb", 0)
    ref = made.claim(1, device)
    made.prepared(ref)
    made.sim.create_mig(0, "1g.10gb", 3)
    made.sim.destroy_mig(made.effects(ref)[1]["outcome"]["uuid"])
    made.sim.create_mig(0, "1g.10gb", 5)
    uuid = made.sim.create_mig(0, "1g.10gb", 0)
    assert uuid != made.effects(ref)[1]["outcome"]["uuid"]
    assert made.unprepare(ref) is None
    assert device in made.partitions()


def test_one_made_by_hand_where_ours_was_is_used_by_the_next_prepare_and_still_not_ours(made):
    device = made.name(0, "1g.10gb", 0)
    ref = made.claim(1, device)
    made.prepared(ref)
    made.sim.destroy_mig(made.effects(ref)[1]["outcome"]["uuid"])
    made.sim.create_mig(0, "1g.10gb", 5)
    made.sim.create_mig(0, "1g.10gb", 0)
    made.prepared(ref)
    assert [effect["kind"] for effect in made.effects(ref)] == ["cdi-file"]
    assert made.unprepare(ref) is None
    assert device in made.partitions()
    assert made.mode(0) == 1


def test_one_that_was_destroyed_by_hand_is_made_again_with_its_new_uuid(made):
    device = made.name(0, "1g.10gb", 0)
    ref = made.claim(1, device)
    first = made.prepared(ref)
    before = made.effects(ref)[1]["outcome"]["uuid"]
    made.sim.destroy_mig(before)
    made.sim.create_mig(0, "1g.10gb", 4)
    assert made.prepared(ref) == first
    after = made.effects(ref)[1]["outcome"]
    made.look()
    mine = next(mig for mig in made.inventory.gpus[0].mig_devices if mig.start == 0)
    assert after["uuid"] == mine.uuid != before
    assert made.nodes(ref)[device][-2:] == made.capabilities(0, after["gi"], after["ci"])
    assert made.unprepare(ref) is None
    assert made.partitions() == [made.name(0, "1g.10gb", 4)]


@pytest.mark.fault("F38")
def test_a_foreign_partition_in_the_way_is_named_and_left_and_the_retry_after_it_is_gone_succeeds(made):
    uuid = made.sim.set_mig_layout(0, [("3g.40gb", 0)])[0]
    ref = made.claim(1, made.name(0, "1g.10gb", 2))
    error = made.refused(ref)
    assert error.code == "DRA-MIG-BLOCKED"
    assert "3g.40gb in memory slices 0 to 3" in str(error)
    assert "by hand" in str(error)
    assert error.retryable
    assert made.files() == []
    assert made.partitions() == [made.name(0, "3g.40gb", 0)]
    made.sim.destroy_mig(uuid)
    made.prepared(ref)


@pytest.mark.fault("F38")
def test_one_that_somebody_makes_at_the_placement_in_the_last_moment_is_not_destroyed(made):
    device = made.name(0, "1g.10gb", 0)
    made.sim.set_mig_mode(0, enabled=True)
    ref = made.claim(1, device)
    step, came = made._step, []

    def race(name):
        if name == "prepare:effect-applying:0" and not came:
            came.append(made.sim.create_mig(0, "1g.10gb", 0))
        step(name)

    made.ports["step"] = race
    made.restart()
    assert made.refused(ref).code == "DRA-MIG-BLOCKED"
    assert made.partitions() == [device]
    made.prepared(ref)
    assert made.unprepare(ref) is None
    assert made.partitions() == [device]


def test_two_partitions_and_a_whole_gpu_of_one_claim_go_together(made):
    one, two = made.name(0, "1g.10gb", 0), made.name(0, "2g.20gb", 2)
    ref = made.claim(1, one, two, "gpu-3")
    assert [each.device for each in made.prepared(ref)] == [one, two, "gpu-3"]
    kinds = [effect["kind"] for effect in made.effects(ref)]
    assert kinds == ["mig-mode", "mig-device", "mig-device", "cdi-file"]
    assert set(made.nodes(ref)) == {one, two, "gpu-3"}
    assert made.unprepare(ref) is None
    assert made.partitions() == []
    assert made.mode(0) == 0


@pytest.mark.fault("F40")
def test_an_ampere_gpu_is_never_switched_while_the_node_runs(tmp_path):
    node = MigNode(tmp_path, profile="dgx-a100")
    device = node.name(0, "1g.5gb", 0)
    ref = node.claim(1, device)
    error = node.refused(ref)
    assert error.code == "DRA-MIG-MODE-OFF"
    assert "reset" in str(error)
    assert "nvmlDeviceSetMigMode" not in node.sim.count_calls()
    node.sim.set_mig_mode(0, enabled=True)
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.mode(0) == 1
    assert "nvmlDeviceSetMigMode" not in node.sim.count_calls()
    node.close()


def test_a_placement_that_the_gpu_does_not_have_is_refused(made):
    error = made.refused(made.claim(1, "gpu-0-mig-2g20gb-14-1"))
    assert error.code == "DRA-DEVICE-UNKNOWN"
    assert "does not have this profile at this place" in str(error)
    assert made.mode(0) == 0


# -- sharing, monitoring, overlaps


def test_a_shared_partition_is_made_once_and_goes_with_the_last_of_its_claims(made):
    device = made.name(0, "1g.10gb", 0)
    refs = [
        made.claim(n, result(device, shareID=f"{n}" * 8 + "-1111-4111-8111-111111111111")) for n in (1, 2)
    ]
    for ref in refs:
        made.prepared(ref)
    assert made.partitions() == [device]
    outcomes = [made.effects(ref)[1]["outcome"] for ref in refs]
    assert outcomes[0] == outcomes[1]
    assert made.unprepare(refs[0]) is None
    assert made.partitions() == [device]
    assert made.unprepare(refs[1]) is None
    assert made.partitions() == []
    assert made.mode(0) == 0


def test_two_shares_of_one_partition_in_one_claim_are_one_partition(made):
    device = made.name(0, "1g.10gb", 0)
    shares = [result(device, shareID=f"{c * 8}-1111-4111-8111-111111111111") for c in "ab"]
    ref = made.claim(1, *shares)
    assert len(made.prepared(ref)) == 2
    assert set(made.nodes(ref)) == {f"{device}-aaaaaaaa", f"{device}-bbbbbbbb"}
    assert made.unprepare(ref) is None
    assert made.partitions() == []


def test_monitoring_needs_a_partition_that_exists_and_holds_nothing(made):
    device = made.name(0, "1g.10gb", 0)
    admin = made.claim(1, result(device, adminAccess=True))
    error = made.refused(admin)
    assert error.code == "DRA-DEVICE-UNKNOWN"
    assert "monitoring" in str(error)
    assert made.mode(0) == 0
    user = made.claim(2, device)
    made.prepared(user)
    made.prepared(admin)
    assert made.nodes(admin)[device] == made.nodes(user)[device]
    assert [effect["kind"] for effect in made.effects(admin)] == ["cdi-file"]
    assert made.unprepare(user) is None
    assert made.partitions() == []
    assert made.unprepare(admin) is None


@pytest.mark.fault("F26")
def test_a_placement_that_overlaps_a_held_one_is_refused_and_the_holder_named(made):
    holder = made.claim(1, made.name(0, "3g.40gb", 0), name="big")
    made.prepared(holder)
    for device in (made.name(0, "1g.10gb", 3), made.name(0, "7g.80gb", 0)):
        error = made.refused(made.claim(2, device))
        assert error.code == "DRA-DEVICE-HELD"
        assert "default/big" in str(error)
    made.prepared(made.claim(3, made.name(0, "3g.40gb", 4)))


def test_a_whole_gpu_and_a_partition_of_it_exclude_each_other_and_name_the_holder(made):
    part = made.claim(1, made.name(0, "1g.10gb", 0), name="part")
    made.prepared(part)
    made.look()
    error = made.refused(made.claim(2, "gpu-0"))
    assert error.code == "DRA-DEVICE-HELD"
    assert "default/part" in str(error)
    whole = made.claim(3, "gpu-1", name="whole")
    made.prepared(whole)
    error = made.refused(made.claim(4, made.name(1, "1g.10gb", 0)))
    assert error.code == "DRA-DEVICE-HELD"
    assert "default/whole" in str(error)
    assert made.mode(1) == 0


def test_a_gpu_whose_last_partition_went_a_moment_ago_is_whole_again(made):
    part = made.claim(1, made.name(0, "1g.10gb", 0))
    made.prepared(part)
    made.look()
    assert made.inventory.gpus[0].mig_enabled
    made.unprepare(part)
    made.prepared(made.claim(2, "gpu-0"))


# -- reboot


def test_after_a_reboot_partitions_of_live_claims_are_made_again_under_the_same_names(made):
    one, two = made.name(0, "1g.10gb", 0), made.name(0, "1g.10gb", 1)
    first, second = made.claim(1, one), made.claim(2, two)
    prepared = made.prepared(first)
    made.prepared(second)
    before = made.effects(second)[1]["outcome"]
    made.reboot()
    assert made.partitions() == []
    # In another order than before, so that ids and UUIDs move.
    made.prepared(second)
    assert made.prepared(first) == prepared
    assert made.partitions() == [one, two]
    after = made.effects(second)[1]["outcome"]
    assert after["uuid"] != before["uuid"]
    assert made.nodes(second)[two][-2:] == made.capabilities(0, after["gi"], after["ci"])
    assert made.unprepare(first) is None
    assert made.unprepare(second) is None
    assert made.partitions() == []
    assert made.mode(0) == 0


def test_after_a_reboot_unprepare_touches_no_partition_that_was_made_since(made):
    device = made.name(0, "1g.10gb", 0)
    ref = made.claim(1, device)
    made.prepared(ref)
    made.reboot()
    made.sim.set_mig_layout(0, [("1g.10gb", 0)])
    assert made.unprepare(ref) is None
    assert made.partitions() == [device]
    assert made.files() == []


def test_after_a_reboot_a_layout_made_by_hand_is_used_as_it_is(made):
    device = made.name(0, "1g.10gb", 0)
    ref = made.claim(1, device)
    made.prepared(ref)
    made.reboot()
    made.sim.set_mig_layout(0, [("1g.10gb", 0)])
    made.prepared(ref)
    assert [effect["kind"] for effect in made.effects(ref)] == ["cdi-file"]
    assert made.unprepare(ref) is None
    assert made.partitions() == [device]
