"""Which calls bring a pool in order: generations, order, names, owners. No I/O."""

from __future__ import annotations

import copy
import random

import pytest

from dra.controller.plan import Memory, PoolPlan, plan_pool
from dra.controller.shape import (
    PoolIdentity,
    contents_of,
    index_of,
    normal_form,
    slice_body,
    slice_name,
    slice_spec,
    taint_times,
)
from dra.values import is_dns_subdomain
from tests.unit.controller.pools import DRIVER, NODE, Part, Pool, gpu, pool, pools, visible, with_counters

ME = PoolIdentity(DRIVER, NODE, NODE, "node-uid-1")


def stored_as(content: Pool, *, generation: int = 1, identity: PoolIdentity = ME) -> list[dict]:
    contents = contents_of(content)
    found = []
    for index, part in enumerate(contents):
        spec = slice_spec(identity, copy.deepcopy(part), generation=generation, count=len(contents))
        body = slice_body(identity, slice_name(identity, index), spec)
        body["metadata"] |= {
            "uid": f"uid-{index}-{generation}",
            "resourceVersion": f"{10 * generation + index}",
        }
        found.append(body)
    return found


def planned(
    content: Pool, stored: list[dict], memory: Memory | None = None, identity: PoolIdentity = ME
) -> PoolPlan:
    contents = contents_of(content)
    forms = [normal_form(each) for each in contents]
    return plan_pool(contents, stored, identity=identity, memory=memory or Memory(), forms=forms)


def generations(plan: PoolPlan) -> set[int]:
    return {body["spec"]["pool"]["generation"] for _, body in (*plan.update, *plan.create)}


TWO = pools([gpu("gpu-0")], [gpu("gpu-1")])
TWO_OTHER_SECOND = pools([gpu("gpu-0")], [gpu("gpu-9")])
TWO_OTHER = pools([gpu("gpu-8")], [gpu("gpu-9")])
THREE = pools([gpu("gpu-0")], [gpu("gpu-1")], [gpu("gpu-2")])


class TestGenerations:
    def test_the_first_publication_has_generation_one_and_the_count(self) -> None:
        plan = planned(TWO, [])
        assert [body["spec"]["pool"] for _, body in plan.create] == [
            {"name": NODE, "generation": 1, "resourceSliceCount": 2}
        ] * 2
        assert not plan.update
        assert not plan.delete

    def test_what_is_stored_already_needs_no_call(self) -> None:
        assert planned(TWO, stored_as(TWO, generation=7)).is_empty
        assert planned(TWO, stored_as(TWO, generation=7)).generation == 7

    def test_one_changed_slice_is_updated_in_its_generation(self) -> None:
        plan = planned(TWO_OTHER_SECOND, stored_as(TWO, generation=7))
        assert [index for index, _ in plan.update] == [1]
        assert generations(plan) == {7}
        assert not plan.create
        assert not plan.delete

    def test_taints_in_several_slices_keep_the_generation(self) -> None:
        taint = [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}]
        ill = pools([gpu("gpu-0", taints=taint)], [gpu("gpu-1", taints=taint)])
        for before, after in ((TWO, ill), (ill, TWO)):
            plan = planned(after, stored_as(before, generation=7))
            assert [index for index, _ in plan.update] == [0, 1]
            assert generations(plan) == {7}
        # With anything else it is a new pool.
        other = pools([gpu("gpu-0", taints=taint)], [gpu("gpu-9", taints=taint)])
        assert generations(planned(other, stored_as(TWO, generation=7))) == {8}
        # And a slice of an older generation is brought up to the newest with the others.
        mixed = [*stored_as(TWO, generation=6)[:1], *stored_as(TWO, generation=7)[1:]]
        assert generations(planned(ill, mixed)) == {8}

    def test_two_changed_slices_move_all_to_the_next_generation(self) -> None:
        plan = planned(TWO_OTHER, stored_as(TWO, generation=7))
        assert [index for index, _ in plan.update] == [0, 1]
        assert generations(plan) == {8}

    def test_a_slice_more_moves_all_and_is_created_last(self) -> None:
        plan = planned(THREE, stored_as(TWO, generation=7))
        assert [index for index, _ in plan.update] == [0, 1]
        assert [index for index, _ in plan.create] == [2]
        assert generations(plan) == {8}

    def test_a_slice_less_is_deleted_first_and_the_rest_moves(self) -> None:
        plan = planned(TWO, stored_as(THREE, generation=7))
        assert [obj["metadata"]["name"] for obj in plan.delete] == [slice_name(ME, 2)]
        assert generations(plan) == {8}
        assert len(plan.update) == 2

    def test_a_wiped_pool_comes_back_as_it_was(self) -> None:
        memory = Memory(generation=7, contents=tuple(normal_form(c) for c in contents_of(TWO)))
        plan = planned(TWO, [], memory)
        assert generations(plan) == {7}
        assert plan.only_creates

    def test_a_wiped_pool_that_changed_meanwhile_gets_a_new_generation(self) -> None:
        memory = Memory(generation=7, contents=tuple(normal_form(c) for c in contents_of(TWO)))
        assert generations(planned(TWO_OTHER_SECOND, [], memory)) == {8}

    def test_one_lost_slice_is_created_beside_the_others(self) -> None:
        plan = planned(THREE, stored_as(THREE, generation=7)[:2])
        assert [index for index, _ in plan.create] == [2]
        assert generations(plan) == {7}
        assert not plan.update

    def test_a_generation_that_somebody_raised_is_kept(self) -> None:
        stored = stored_as(TWO, generation=7)
        stored[0]["spec"]["pool"]["generation"] = 40
        plan = planned(TWO, stored)
        assert plan.generation == 40
        assert [index for index, _ in plan.update] == [1]

    def test_a_generation_that_somebody_lowered_is_restored(self) -> None:
        memory = Memory(generation=7, contents=tuple(normal_form(c) for c in contents_of(TWO)))
        stored = stored_as(TWO, generation=7)
        stored[0]["spec"]["pool"]["generation"] = 3
        plan = planned(TWO, stored, memory)
        assert [index for index, _ in plan.update] == [0]
        assert generations(plan) == {7}

    def test_a_wrong_count_is_restored(self) -> None:
        stored = stored_as(TWO, generation=7)
        stored[1]["spec"]["pool"]["resourceSliceCount"] = 5
        plan = planned(TWO, stored)
        assert [index for index, _ in plan.update] == [1]
        assert plan.generation == 7

    def test_a_pool_without_slices_is_one_empty_slice_without_the_key_devices(self) -> None:
        plan = planned(Pool(()), stored_as(TWO, generation=3))
        (_, body), *rest = plan.update
        assert not rest
        assert "devices" not in body["spec"]
        assert body["spec"]["pool"]["resourceSliceCount"] == 1

    def test_counters_and_devices_stand_in_slices_of_their_own_without_the_other_key(self) -> None:
        bodies = [body["spec"] for _, body in planned(with_counters(), []).create]
        assert [("devices" in spec, "sharedCounters" in spec) for spec in bodies] == [
            (False, True),
            (True, False),
        ]


class TestStrangers:
    def test_slices_of_another_pool_name_of_this_node_are_deleted(self) -> None:
        old = stored_as(pool("gpu-0"), identity=PoolIdentity(DRIVER, NODE, "old-name", "node-uid-1"))
        plan = planned(TWO, old)
        assert len(plan.delete) == 1
        assert generations(plan) == {1}

    def test_a_slice_with_a_name_of_no_position_is_deleted_and_all_move_on(self) -> None:
        stored = stored_as(TWO, generation=4)
        stray = copy.deepcopy(stored[0])
        stray["metadata"] |= {"name": "made-by-hand", "uid": "x"}
        plan = planned(TWO, [*stored, stray])
        assert [obj["metadata"]["name"] for obj in plan.delete] == ["made-by-hand"]
        assert generations(plan) == {5}

    def test_slices_that_the_other_driver_left_are_taken_over_in_place(self) -> None:
        stored = stored_as(pool("gpu-0", "gpu-1"), generation=4)
        stored[0]["metadata"]["name"] = "00000-gpu.nvidia.com-node-1-x7k2p"
        assert planned(pool("gpu-0", "gpu-1"), stored).is_empty
        plan = planned(pool("gpu-0"), stored)
        assert [body["metadata"]["name"] for _, body in plan.update] == ["00000-gpu.nvidia.com-node-1-x7k2p"]
        assert not plan.create
        assert not plan.delete

    def test_of_two_slices_for_one_position_our_own_name_stays(self) -> None:
        stored = stored_as(pool("gpu-0"), generation=4)
        double = copy.deepcopy(stored[0])
        double["metadata"] |= {"name": "00000-gpu.nvidia.com-node-1-aaaaa", "uid": "x"}
        plan = planned(pool("gpu-0"), [double, *stored])
        assert [obj["metadata"]["name"] for obj in plan.delete] == ["00000-gpu.nvidia.com-node-1-aaaaa"]

    def test_slices_of_a_node_that_was_made_again_are_deleted_and_created(self) -> None:
        stored = stored_as(TWO, generation=4, identity=PoolIdentity(DRIVER, NODE, NODE, "old-uid"))
        plan = planned(TWO, stored)
        assert len(plan.delete) == 2
        assert {body["metadata"]["ownerReferences"][0]["uid"] for _, body in plan.create} == {"node-uid-1"}
        assert generations(plan) == {5}

    def test_a_lost_owner_is_put_back(self) -> None:
        stored = stored_as(pool("gpu-0"), generation=4)
        del stored[0]["metadata"]["ownerReferences"]
        ((_, body),) = planned(pool("gpu-0"), stored).update
        assert body["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid-1", "controller": True}
        ]
        assert body["metadata"]["resourceVersion"] == stored[0]["metadata"]["resourceVersion"]


class TestSameness:
    def test_the_way_a_quantity_is_written_is_no_difference_but_in_a_string_it_is(self) -> None:
        stored = stored_as(pool("gpu-0"))
        stored[0]["spec"]["devices"][0]["capacity"]["memory"]["value"] = "80Gi"
        assert planned(pool("gpu-0"), stored).is_empty
        one, other = (
            gpu("gpu-0", attributes={"x": {"string": "1024Mi"}}),
            gpu("gpu-0", attributes={"x": {"string": "1Gi"}}),
        )
        assert not planned(pools([one]), stored_as(pools([other]))).is_empty

    def test_the_order_of_devices_is_a_difference(self) -> None:
        assert not planned(pool("gpu-1", "gpu-0"), stored_as(pool("gpu-0", "gpu-1"))).is_empty

    @pytest.mark.parametrize("empty", [{"taints": []}, {"capacity": {}}, {"bindsToNode": None}])
    def test_empty_fields_are_no_difference(self, empty: dict) -> None:
        plain = {"name": "gpu-0", "attributes": {"a": {"bool": False}, "b": {"string": ""}, "c": {"int": 0}}}
        assert planned(pools([{**plain, **empty}]), stored_as(pools([plain]))).is_empty

    def test_an_attribute_that_is_false_or_empty_is_not_the_same_as_none(self) -> None:
        plain = {"name": "gpu-0", "attributes": {"a": {"bool": False}}}
        assert not planned(pools([plain]), stored_as(pools([{"name": "gpu-0"}]))).is_empty

    def test_a_field_that_somebody_added_is_a_difference(self) -> None:
        stored = stored_as(pool("gpu-0"))
        stored[0]["spec"]["devices"][0]["bindsToNode"] = True
        ((_, body),) = planned(pool("gpu-0"), stored).update
        assert "bindsToNode" not in body["spec"]["devices"][0]

    def test_what_the_server_makes_of_our_content_counts_as_ours_until_we_want_something_else(self) -> None:
        wanted = pools([gpu("gpu-0", taints=[{"key": "k", "effect": "NoSchedule"}])])
        stored = stored_as(pool("gpu-0"))
        form, kept = normal_form(contents_of(wanted)[0]), normal_form(stored[0]["spec"])
        memory = Memory(generation=1, accepted={0: (form, kept)})
        assert planned(wanted, stored, memory).is_empty
        stored[0]["spec"]["devices"][0]["attributes"]["index"]["int"] = 9
        assert not planned(wanted, stored, memory).is_empty, "an edit by hand of the rest is still seen"


class TestTaints:
    TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute"}

    def test_the_time_of_a_taint_is_no_difference_and_is_sent_again_as_it_was(self) -> None:
        tainted = pools([gpu("gpu-0", taints=[self.TAINT])])
        stored = stored_as(
            pools([gpu("gpu-0", taints=[{**self.TAINT, "timeAdded": "2026-01-02T03:04:05Z"}])])
        )
        assert planned(tainted, stored).is_empty
        more = pools([gpu("gpu-0", taints=[self.TAINT]), gpu("gpu-1")])
        memory = Memory(times=taint_times(stored))
        ((_, body),) = planned(more, stored, memory).update
        assert body["spec"]["devices"][0]["taints"] == [{**self.TAINT, "timeAdded": "2026-01-02T03:04:05Z"}]

    def test_a_taint_that_changed_gets_a_new_time(self) -> None:
        stored = stored_as(
            pools([gpu("gpu-0", taints=[{**self.TAINT, "timeAdded": "2026-01-02T03:04:05Z"}])])
        )
        other = pools([gpu("gpu-0", taints=[{**self.TAINT, "value": "48"}])])
        ((_, body),) = planned(other, stored, Memory(times=taint_times(stored))).update
        assert body["spec"]["devices"][0]["taints"] == [{**self.TAINT, "value": "48"}]


class TestNames:
    def test_a_name_starts_with_the_position_and_is_plain_for_usual_nodes(self) -> None:
        assert slice_name(ME, 0) == "00000-gpu.nvidia.com-node-1"
        assert slice_name(ME, 255) == "000ff-gpu.nvidia.com-node-1"
        assert index_of(slice_name(ME, 255)) == 255
        assert index_of("made-by-hand") is None

    def test_names_sort_by_position(self) -> None:
        names = [slice_name(ME, index) for index in range(300)]
        assert names == sorted(names)

    @pytest.mark.parametrize("length", [200, 230, 231, 232, 240, 253])
    def test_a_long_node_name_is_cut_and_stays_different_from_others(self, length: int) -> None:
        node = ("worker." * 40)[: length - 1] + "a"
        one = slice_name(PoolIdentity(DRIVER, node, node), 3)
        other = slice_name(PoolIdentity(DRIVER, node[:-1] + "b", node[:-1] + "b"), 3)
        assert one != other
        for name in (one, other):
            assert is_dns_subdomain(name)
            assert index_of(name) == 3

    def test_another_pool_of_the_node_and_another_try_have_other_names(self) -> None:
        names = {
            slice_name(ME, 0),
            slice_name(PoolIdentity(DRIVER, NODE, "p"), 0),
            slice_name(ME, 0, salt="+"),
        }
        assert len(names) == 3


def _apply(state: dict[str, dict], call: tuple[str, dict]) -> None:
    verb, obj = call
    if verb == "delete":
        del state[obj["metadata"]["name"]]
    else:
        state[obj["metadata"]["name"]] = {**obj, "ours": True}


def _a_part(rng: random.Random) -> Part:
    return Part([gpu(f"gpu-{rng.randrange(6)}")]) if rng.random() < 0.9 else Part()


@pytest.mark.parametrize("seed", range(40))
def test_after_every_single_call_the_pool_is_incomplete_or_wanted_or_still_untouched(seed: int) -> None:
    """From any stored state, also a half-written one, no scheduler ever sees a mixture."""
    rng = random.Random(seed)
    for _ in range(25):
        wanted = Pool(tuple(_a_part(rng) for _ in range(rng.randrange(1, 5))))
        state: dict[str, dict] = {}
        for index in range(rng.randrange(0, 5)):
            spec = slice_spec(
                ME,
                dict(contents_of(Pool((_a_part(rng),)))[0]),
                generation=rng.randrange(1, 4),
                count=rng.randrange(1, 5),
            )
            name = slice_name(ME, index) if rng.random() < 0.8 else f"stray-{index}"
            body = slice_body(ME, name, spec)
            body["metadata"] |= {"uid": name, "resourceVersion": "1"}
            state[name] = body
        highest = max([obj["spec"]["pool"]["generation"] for obj in state.values()], default=0)
        plan = planned(wanted, [state[name] for name in sorted(state)])
        names = [device["name"] for part in contents_of(wanted) for device in part.get("devices") or []]
        calls = [("delete", obj) for obj in plan.delete]
        calls += [("write", body) for _, body in (*plan.update, *plan.create)]
        for call in calls:
            _apply(state, call)
            seen = visible(list(state.values()))
            if seen is not None and seen[1] != names:
                newest = [o for o in state.values() if o["spec"]["pool"]["generation"] == seen[0]]
                assert not any(obj.get("ours") for obj in newest), f"a mixture at generation {seen[0]}"
        seen = visible(list(state.values()))
        assert seen is not None
        assert seen[1] == names
        assert seen[0] >= highest
        again = planned(wanted, [state[name] for name in sorted(state)])
        assert again.is_empty
