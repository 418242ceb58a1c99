"""`dra explain` never says of a node what the allocator does not: for any small cluster, fits or does not fit."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dra.allocator.allocate import Allocator, allocated_state
from dra.allocator.model import AllocatorError
from dra.cel import compile_selector
from dra.diagnose.explain.cluster import CLAIM, CLASS, SLICE
from dra.diagnose.explain.nodes import Surveyor, Wanted
from dra.diagnose.explain.summary import Summary
from tests.unit.diagnose.explain_world import DRIVER, cel, claim, cluster, held, node, request, slice_of

TAINT = {"key": "k", "effect": "NoSchedule"}
KINDS = st.sampled_from(["gpu", "mig"])


@st.composite
def devices(draw: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(draw(st.integers(0, 5))):
        device: dict[str, Any] = {
            "name": f"d{index}",
            "attributes": {"type": {"string": draw(KINDS)}, "group": {"int": draw(st.integers(0, 1))}},
            "capacity": {"memory": {"value": f"{draw(st.sampled_from([40, 80]))}Gi"}},
        }
        if draw(st.booleans()):
            device["attributes"]["rack"] = {"string": draw(st.sampled_from("ab"))}
        if draw(st.integers(0, 3)) == 0:
            device["taints"] = [TAINT]
        if draw(st.integers(0, 2)) == 0:
            device["allowMultipleAllocations"] = True
        elif draw(st.booleans()):
            counters = {"memory": {"value": str(draw(st.integers(1, 4)))}}
            device["consumesCounters"] = [
                {"counterSet": draw(st.sampled_from(["s0", "s1"])), "counters": counters}
            ]
        found.append(device)
    return found


@st.composite
def requests(draw: Any, name: str) -> dict[str, Any]:
    body: dict[str, Any] = {"deviceClassName": "gpu.nvidia.com"}
    if draw(st.integers(0, 3)) == 0:
        body["allocationMode"] = "All"
    else:
        body["count"] = draw(st.integers(1, 3))
    choice = draw(st.integers(0, 5))
    if choice == 0:
        body["selectors"] = cel(f"device.attributes['{DRIVER}'].rack == 'a'")  # fails where there is none
    elif choice == 1:
        body["selectors"] = cel(f"device.attributes['{DRIVER}'].group == 1")
    if draw(st.integers(0, 3)) == 0:
        body["tolerations"] = [{"operator": "Exists"}]
    if draw(st.integers(0, 3)) == 0:
        body["capacity"] = {"requests": {"memory": "30Gi"}}
    if draw(st.integers(0, 4)) == 0:
        body["adminAccess"] = True
    return request(name, **body)


@st.composite
def worlds(draw: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = draw(devices())
    sets = [{"name": name, "counters": {"memory": {"value": "5"}}} for name in ("s0", "s1")]
    whole = draw(st.integers(0, 5)) != 0
    objects = [
        node("n1"),
        slice_of("n1", found, name="a", count=2),
        *([slice_of("n1", [], name="b", count=2, sharedCounters=sets)] if whole else []),
    ]
    for number, device in enumerate(found):
        if draw(st.integers(0, 3)) == 0:
            shared = {"shareID": "s", "consumedCapacity": {"memory": "20Gi"}}
            more = shared if device.get("allowMultipleAllocations") else {}
            objects.append(held(f"h{number}", "n1", device["name"], **more))
    asks = [draw(requests(f"r{number}")) for number in range(draw(st.integers(1, 2)))]
    constraints = [{"matchAttribute": f"{DRIVER}/group"}] if draw(st.integers(0, 2)) == 0 else []
    return objects, [claim("want", *asks, constraints=constraints)]


@settings(max_examples=300)
@given(worlds())
def test_a_node_fits_exactly_when_the_allocator_finds_devices(world):
    objects, claims = world
    seen = cluster(*objects, *claims)
    surveyor = Surveyor(seen)
    survey = surveyor.look(Wanted(None, claims, []))
    allocator = Allocator(
        slices=seen.all(SLICE),
        classes=seen.all(CLASS),
        allocated=allocated_state(seen.all(CLAIM)),
        compile_selector=compile_selector,
    )
    try:
        found = allocator.allocate(objects[0], claims)
    except AllocatorError as error:
        assert survey.nodes[0].fits is False
        assert bool(survey.aborts) is not error.on_node_only
    else:
        assert survey.nodes[0].fits is (found is not None)
        assert not survey.aborts
    reasons = Summary(surveyor, survey).reasons()
    assert reasons
    assert all(reason.message for reason in reasons)
