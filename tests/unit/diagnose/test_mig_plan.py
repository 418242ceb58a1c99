"""Plans of MIG layouts: what fits, what is stranded, what would have to move."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.cel import compile_selector
from dra.diagnose.mig_plan import (
    Piece,
    Wanted,
    gpus_in_cluster,
    gpus_of_inventory,
    make_plan,
    parse_mix,
    wanted_in,
)
from dra.diagnose.mig_plan.layouts import layouts
from dra.diagnose.mig_plan.render import as_json, picture, rows, summary
from dra.errors import ConfigError
from dra.inventory.model import MigDevice
from dra.sim.nvml.functions.mig_changes import add_gpu_instance
from dra.sim.nvml.memory import Status
from dra.sim.nvml.mig_tables import mig_table
from dra.sim.nvml.state import first_state
from dra.sim.profiles import machine_profile
from tests.unit.slices.mig_machines import WITH_MIG, machine, partitioned, pool_of, slices_of


def gpus(profile="dgx-h100", count=1):
    return gpus_of_inventory(partitioned(profile), node="node-1")[:count]


def plan(text, on, **options):
    return make_plan(on, [parse_mix(text, on)], **options)


def places(layout):
    return [(piece.profile, piece.start) for piece in layout.pieces]


def can_be_made(profile, pieces):
    """Ask the simulated driver."""
    hardware = machine_profile(profile)
    slot = next(slot for slot in hardware.gpus if slot.model.mig_table)
    table = mig_table(slot.model.mig_table, hardware.driver_version)
    state = first_state(hardware, salt="", layout="host")
    state.gpu(slot.uuid).mig_current = 1
    try:
        for piece in pieces:
            kind = table.by_name(piece.profile)
            add_gpu_instance(
                state, table, slot.uuid, profile_id=kind.profile_id, place=(piece.start, kind.size)
            )
    except Status:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(profile=st.sampled_from(WITH_MIG), data=st.data())
def test_every_layout_can_be_made_and_none_means_that_the_driver_has_none_either(profile, data):
    (gpu, *_) = gpus(profile)
    names = data.draw(st.lists(st.sampled_from([p.name for p in gpu.profiles]), min_size=1, max_size=5))
    found = list(layouts(gpu, (), Counter(names)))
    assert all(can_be_made(profile, layout.pieces) for layout in found[:20])
    assert len({layout.pieces for layout in found}) == len(found)
    # In any order, at any place: the driver takes none.
    if not found:
        assert not _somehow(profile, gpu, sorted(names), [])


def _somehow(profile, gpu, names, pieces):
    if not names:
        return True
    kind = gpu.by_name[names[0]]
    return any(
        can_be_made(profile, more) and _somehow(profile, gpu, names[1:], more)
        for start, size in kind.places
        for more in [[*pieces, Piece(kind.name, start, size)]]
    )


def test_the_best_layout_strands_nothing_where_that_can_be():
    found = plan("3g.40gb=1,1g.10gb=4", gpus())
    (layout,) = found.layouts
    assert found.fits
    assert places(layout) == [("1g.10gb", n) for n in range(4)] + [("3g.40gb", 4)]
    assert (layout.free, layout.stranded) == ((), ())


def test_what_is_stranded_is_named_and_what_still_fits_counted():
    (layout,) = plan("2g.20gb=3", gpus()).layouts
    assert layout.free == (6, 7)
    assert layout.stranded == ()
    assert layout.room == {"1g.10gb": 1, "1g.10gb+me": 1, "1g.20gb": 1}
    (layout,) = plan("2g.20gb=3,1g.10gb=1", gpus()).layouts
    assert (layout.free, layout.stranded, layout.room) == ((7,), (7,), {})


def test_other_layouts_come_after_the_best():
    found = plan("3g.40gb=1,1g.10gb=2", gpus())
    assert found.others
    every = [layout.pieces for layout in (*found.layouts, *found.others)]
    assert len(set(every)) == len(every)
    assert all(len(found.layouts[0].stranded) <= len(layout.stranded) for layout in found.others)


def test_several_gpus_the_cut_ones_first_and_whole_ones_beside():
    one, two, three = gpus(count=3)
    cut = replace(two, pieces=(Piece("1g.10gb", 6, 1, "ns/a", exists=True),))
    found = plan("gpu=1,2g.20gb=2,7g.80gb=1", [one, cut, three])
    assert {layout.gpu.name: layout.whole or places(layout) for layout in found.layouts} == {
        "gpu-0": "(this plan)",
        "gpu-1": [("2g.20gb", 2), ("2g.20gb", 4), ("1g.10gb", 6)],
        "gpu-2": [("7g.80gb", 0)],
    }


def test_a_partition_in_the_way_is_named_with_where_it_could_go():
    (gpu,) = gpus()
    held = replace(gpu, pieces=(Piece("1g.10gb", 1, 1, "team/job", exists=True),))
    found = plan("4g.40gb=1", [held])
    assert found.fits
    (move,) = found.moves
    assert (move.gpu, move.piece.profile, move.piece.start, move.piece.holder) == (
        "gpu-0",
        "1g.10gb",
        1,
        "team/job",
    )
    assert move.to_gpu == "gpu-0"
    assert move.to_start >= 4
    assert "It fits once 1 partition has moved" in summary(found)
    assert "team/job" in summary(found)
    assert not plan("4g.40gb=1", [held], most_moves=0).fits


def test_what_hands_made_stays_and_serves_while_it_is_free():
    (gpu,) = gpus()
    static = replace(
        gpu, recut=False,
        pieces=(Piece("3g.40gb", 0, 4, fixed=True, exists=True), Piece("3g.40gb", 4, 4, "ns/x", fixed=True, exists=True)),
    )  # fmt: skip
    assert plan("3g.40gb=1", [static]).fits
    found = plan("3g.40gb=2", [static])
    assert (found.fits, found.missing, found.moves) == (False, {"3g.40gb": 1}, ())
    assert not plan("1g.10gb=1", [static]).fits


def test_what_cannot_be_is_said_with_what_is_missing():
    found = plan("7g.80gb=1,1g.10gb=1", gpus())
    assert (found.fits, found.missing, found.complete) == (False, {"1g.10gb": 1}, True)
    assert summary(found) == "It does not fit: no place for 1 x 1g.10gb."
    assert not plan("gpu=2", gpus()).fits


def test_many_gpus_and_many_partitions_take_a_moment():
    found = plan("1g.10gb=56", gpus(count=8))
    assert found.fits
    assert len(found.layouts) == 8
    assert not plan("1g.10gb=57", gpus(count=8)).fits


@pytest.mark.parametrize("text", ["", "9g.99gb=1", "1g.10gb=0", "1g.10gb=x", "1g.10gb=99999", "=3"])
def test_a_mix_that_says_nothing_of_these_gpus_is_refused_with_what_there_is(text):
    with pytest.raises(ConfigError) as caught:
        parse_mix(text, gpus())
    assert caught.value.code == "DRA-MIG-WANT"


# -- claims


def claim(*requests, kind="ResourceClaimTemplate", constraints=(), **status):
    spec = {"devices": {"requests": list(requests), "constraints": list(constraints)}}
    body = {"spec": {"spec": spec} if kind == "ResourceClaimTemplate" else spec}
    return {"kind": kind, "metadata": {"name": "c", "namespace": "ns"}, **body, **status}


def request(name="r", expression="true", *, cls="mig.nvidia.com", **more):
    return {
        "name": name,
        "exactly": {"deviceClassName": cls, "selectors": [{"cel": {"expression": expression}}], **more},
    }


def asked(*objects, on=None, classes=()):
    return wanted_in(objects, on or gpus(), compile_selector=compile_selector, classes=classes)


def test_a_request_takes_the_smallest_profile_that_its_selectors_allow():
    memory = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('15Gi')) >= 0"
    (wanted,) = asked(claim(request(expression=memory, count=2)))
    assert wanted == Wanted("ResourceClaimTemplate c", {"1g.20gb": 2})
    (small,) = asked(claim(request()))
    assert small.mix == {"1g.10gb": 1}
    (whole,) = asked(claim(request(cls="gpu.nvidia.com")))
    assert whole.mix == {"gpu": 1}
    (generated,) = asked(claim(request(cls="mig-2g.20gb.nvidia.com")))
    assert generated.mix == {"2g.20gb": 1}


def test_requests_that_have_to_be_on_one_gpu_stay_together():
    bound = {"requests": ["a", "b"], "matchAttribute": "gpu.nvidia.com/parentUUID"}
    profile = "device.attributes['gpu.nvidia.com'].profile == '{}'"
    wanted = asked(
        claim(
            request("a", profile.format("3g.40gb")), request("b", profile.format("1g.10gb"), count=2), request("c"),
            constraints=[bound],
        )
    )  # fmt: skip
    assert sorted((each.same_gpu, dict(each.mix)) for each in wanted) == [
        (False, {"1g.10gb": 1}),
        (True, {"3g.40gb": 1, "1g.10gb": 2}),
    ]


def test_claims_that_need_no_place_are_left_out():
    done = claim(request(), kind="ResourceClaim", status={"allocation": {"devices": {}}})
    other = claim(request(cls="nic.example.com"))
    monitor = claim(request(adminAccess=True))
    assert asked(done, other, monitor, {"kind": "Pod", "metadata": {"name": "p"}}) == []


def test_of_alternatives_the_first_that_can_be_had_counts():
    never = {"name": "big", "deviceClassName": "mig-9g.9gb.nvidia.com"}
    small = {"name": "small", "deviceClassName": "mig.nvidia.com"}
    (wanted,) = asked(claim({"name": "r", "firstAvailable": [never, small]}))
    assert wanted.mix == {"1g.10gb": 1}


@pytest.mark.parametrize("wrong", [request(expression="false"), request(allocationMode="All")])
def test_a_request_that_can_never_be_met_is_named(wrong):
    with pytest.raises(ConfigError, match="ResourceClaimTemplate c, request r"):
        asked(claim(wrong))


# -- a cluster


def test_the_gpus_of_a_cluster_are_those_of_its_slices_and_claims_take_their_places():
    slices = slices_of(pool_of(partitioned("dgx-h100")))
    allocated = {
        "kind": "ResourceClaim",
        "metadata": {"name": "job", "namespace": "team"},
        "spec": {},
        "status": {"allocation": {"devices": {"results": [
            {"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-0-mig-1g10gb-19-1"},
            {"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-1"},
            {"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-2", "adminAccess": True},
        ]}}},
    }  # fmt: skip
    found = gpus_in_cluster(slices, [allocated])
    bare = gpus_of_inventory(partitioned("dgx-h100"), node="node-1")
    assert [(gpu.name, gpu.product, gpu.slices) for gpu in found] == [
        (g.name, g.product, g.slices) for g in bare
    ]
    for mine, theirs in zip(found, bare, strict=True):
        assert {p.name: (p.profile_id, p.places, dict(p.amounts)) for p in mine.profiles} == {
            p.name: (p.profile_id, p.places, dict(p.amounts)) for p in theirs.profiles
        }
    assert found[0].pieces == (Piece("1g.10gb", 1, 1, "team/job", exists=True),)
    assert [gpu.whole_holder for gpu in found[:3]] == ["", "team/job", ""]
    assert plan("7g.80gb=6", found).fits
    moved = plan("4g.40gb=1,7g.80gb=6", found)
    assert [move.piece.holder for move in moved.moves] == ["team/job"]


def test_a_gpu_that_a_claim_has_passed_through_has_no_room():
    slices = slices_of(pool_of(partitioned("dgx-h100")))
    of_pool = [device for each in slices for device in each["spec"].get("devices") or ()]
    attributes = next(device for device in of_pool if device["name"] == "gpu-3")["attributes"]
    place = {name: value for name, value in attributes.items() if name.endswith("/pciBusID")}
    slices[-1]["spec"]["devices"].append({"name": "gpu-vfio-0", "attributes": place})
    result = {"driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-vfio-0"}
    machine_has_it = {
        "metadata": {"name": "machine", "namespace": "team"},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }
    assert plan("7g.80gb=8", gpus_in_cluster(slices, [])).fits
    found = gpus_in_cluster(slices, [machine_has_it])
    assert {gpu.name: gpu.whole_holder for gpu in found if gpu.whole_holder} == {"gpu-3": "team/machine"}
    assert not plan("7g.80gb=8", found).fits


def test_partitions_by_hand_in_a_cluster_are_used_as_they_are():
    inventory = machine("h100-nvl-x2")
    first, *rest = inventory.gpus
    kind = next(p for p in first.mig_profiles if p.name == "3g.47gb")
    by_hand = replace(first, mig_enabled=True, mig_devices=(MigDevice("MIG-1", kind, 1, 0, 4, 4),))
    found = gpus_in_cluster(slices_of(pool_of(replace(inventory, gpus=(by_hand, *rest)))), [])
    assert found[0].pieces == (Piece("3g.47gb", 4, 4, fixed=True, exists=True),)
    assert not found[0].recut
    assert plan("3g.47gb=1", found[:1]).fits


# -- what is shown


def test_json_has_everything_and_the_picture_every_slice():
    on = gpus()
    found = plan("2g.20gb=3,1g.10gb=1", on)
    shown = as_json(found, [parse_mix("2g.20gb=3,1g.10gb=1", on)])
    assert (shown["fits"], shown["strandedSlices"], shown["missing"], shown["moves"]) == (True, 1, {}, [])
    (layout,) = shown["layouts"]
    assert [p["placement"] for p in layout["partitions"]] == [
        {"start": 0, "size": 2}, {"start": 2, "size": 2}, {"start": 4, "size": 2}, {"start": 6, "size": 1},
    ]  # fmt: skip
    title, ruler, drawing = picture(found.layouts)
    assert "NVIDIA H100" in title
    assert ruler.split() == ["slice", *map(str, range(8))]
    assert drawing.count("2g.20gb*") == 3
    assert drawing.count("1g.10gb*") == 1
    assert drawing.rstrip().endswith("x")
    assert ("node-1/gpu-0", "free", "7", "1 stranded", "-") in rows(found.layouts)
