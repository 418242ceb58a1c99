import copy

import pytest

from dra.slices.validate import validate_slices


def spec(*devices, **fields):
    return {
        "driver": "gpu.nvidia.com",
        "nodeName": "node-1",
        "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
        "devices": list(devices),
        **fields,
    }


def of_two(*specs):
    for each in specs:
        each["pool"]["resourceSliceCount"] = len(specs)
    return validate_slices(specs)


def counters(name, *keys):
    return {"name": name, "counters": {key: {"value": "1"} for key in keys}}


def consuming(name, counter_set, *keys):
    return {
        "name": name,
        "consumesCounters": [{"counterSet": counter_set, "counters": counters("", *keys)["counters"]}],
    }


def test_names_must_be_unique_over_the_whole_pool():
    assert of_two(spec({"name": "a"}), spec({"name": "b"})) == []
    (found,) = of_two(spec({"name": "a"}), spec({"name": "a"}))
    assert "'a'" in found.message


def test_the_count_must_be_the_number_of_slices():
    one = spec({"name": "a"})
    one["pool"]["resourceSliceCount"] = 2
    assert "resourceSliceCount" in validate_slices([one])[0].message


def test_slices_of_one_pool_share_a_generation():
    one, two = spec({"name": "a"}), spec({"name": "b"})
    two["pool"]["generation"] = 2
    assert any(found.path == "pool" for found in of_two(one, two))


def test_a_device_may_use_counters_of_another_slice_but_only_those_that_exist():
    sets = spec(sharedCounters=[counters("gpu-0-counter-set", "memory")])
    del sets["devices"]
    assert of_two(copy.deepcopy(sets), spec(consuming("a", "gpu-0-counter-set", "memory"))) == []
    for device in (consuming("a", "gpu-0-counter-set", "memory", "more"), consuming("a", "other", "memory")):
        (found,) = of_two(copy.deepcopy(sets), spec(device))
        assert "are not in set" in found.message


def test_a_fault_names_the_slice_the_device_and_the_field():
    broken = {"name": "gpu-0", "attributes": {"uuid": {"string": "x" * 65}}}
    (found,) = validate_slices([spec({"name": "ok"}, broken)])
    assert found.path == "slices[0].spec.devices[1].attributes[uuid]"
    assert found.attribute == "uuid"


@pytest.mark.parametrize(
    "values", [{"strings": ["a"] * 49}, {"ints": []}, {"versions": ["1.0"]}, {"bools": [1]}, {"ints": [True]}]
)
def test_list_attributes_have_rules_of_their_own(values):
    assert validate_slices([spec({"name": "a", "attributes": {"x": values}})])


def test_list_attributes_are_counted_item_by_item_and_halve_the_room():
    device = {"name": "a", "attributes": {"x": {"strings": ["a"] * 40}, "y": {"ints": list(range(8))}}}
    assert validate_slices([spec(device)]) == []
    device["attributes"]["z"] = {"bool": True}
    assert "49 values" in validate_slices([spec(device)])[0].message
    crowd = [{"name": f"d{n}"} for n in range(64)]
    listed = {"name": "a", "attributes": {"x": {"ints": [1]}}}
    assert validate_slices([spec(*crowd[:63], listed)]) == []
    assert "65 devices, at most 64" in validate_slices([spec(*crowd, listed)])[0].message


def test_a_step_of_zero_is_refused_although_an_old_server_crashes_on_it():
    policy = {"default": "0", "validRange": {"min": "0", "step": "0"}}
    device = {
        "name": "a",
        "allowMultipleAllocations": True,
        "capacity": {"m": {"value": "1", "requestPolicy": policy}},
    }
    assert "greater than zero" in validate_slices([spec(device)])[0].message
