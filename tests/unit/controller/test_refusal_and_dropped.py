"""Reading the server's refusals and omissions: what to leave out, what to tell. No I/O."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dra.controller.dropped import dropped_fields
from dra.controller.refusal import device_limit, plan_refusals, split, without_refused
from dra.controller.restores import FREE, LONGEST_SECONDS, SETTLE_SECONDS, Restores
from dra.controller.shape import normal_form
from dra.kube.failures import Cause
from tests.unit.controller.pools import gpu

GOLDEN = Path(os.environ.get("DRA_GOLDEN", "../shared/golden")) / "apiserver" / "resourceslices.json"


def left_of(content: dict, *causes: tuple[str, str]) -> list[dict]:
    found = plan_refusals([Cause(field, "FieldValueInvalid", message) for field, message in causes], content)
    (rest,) = without_refused([content], found)
    return rest.get("devices", [])


def devices(*items: dict) -> dict:
    return {"devices": list(items)}


class TestRefusals:
    def test_an_attribute_that_is_named_is_left_out_and_its_device_stays(self) -> None:
        content = devices(
            gpu("gpu-0"), gpu("gpu-1", attributes={"uuid": {"string": "x" * 65}, "type": {"string": "gpu"}})
        )
        kept = left_of(
            content, ("spec.devices[1].attributes[uuid].string", "Too long: may not be more than 64 bytes")
        )
        assert kept[0] == gpu("gpu-0")
        assert kept[1]["attributes"] == {"type": {"string": "gpu"}}

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "bad name!",
                'Invalid value: "bad name!": a valid C identifier must start with alphabetic character',
            ),
            ("dom_ain/x", 'Invalid value: "dom_ain": a lowercase RFC 1123 subdomain must consist of'),
            ("x" * 33, "Too long: may not be more than 32 bytes"),
            ("fine", 'Invalid value: "fine": not on this server'),
        ],
    )
    def test_an_attribute_whose_name_is_refused_is_found_although_the_path_does_not_say_it(
        self, name, message
    ) -> None:
        content = devices(gpu("gpu-0", attributes={name: {"int": 1}, "type": {"string": "gpu"}}))
        assert left_of(content, ("spec.devices[0].attributes", message))[0]["attributes"] == {
            "type": {"string": "gpu"}
        }

    def test_of_too_many_attributes_the_last_are_left_out(self) -> None:
        content = devices(
            gpu("gpu-0", attributes={f"a{n}": {"int": n} for n in range(33)}, capacity={"m": {"value": "1"}})
        )
        message = "Invalid value: 34: the total number of attributes and capacities must not exceed 32"
        (kept,) = left_of(content, ("spec.devices[0]", message))
        assert list(kept["attributes"]) == [f"a{n}" for n in range(31)]

    def test_a_capacity_is_left_out_like_an_attribute(self) -> None:
        content = devices(gpu("gpu-0"))
        (kept,) = left_of(content, ("spec.devices[0].capacity[memory].requestPolicy", "Forbidden"))
        assert kept["capacity"] == {}

    def test_a_remark_taint_is_left_out_but_a_device_is_not_published_without_a_real_one(self) -> None:
        remark, real = {"key": "a", "effect": "None"}, {"key": "b", "effect": "NoSchedule"}
        content = devices(gpu("gpu-0", taints=[remark, real]), gpu("gpu-1", taints=[real]))
        kept = left_of(
            content,
            ("spec.devices[0].taints[0].effect", "Unsupported value"),
            ("spec.devices[1].taints[0].key", "bad"),
        )
        assert [(device["name"], device["taints"]) for device in kept] == [("gpu-0", [real])]

    def test_a_device_with_a_bad_name_goes_and_the_others_stay(self) -> None:
        content = devices({"name": "GPU_0"}, gpu("gpu-1"))
        assert left_of(content, ("spec.devices[0].name", "Invalid value")) == [gpu("gpu-1")]

    def test_a_bad_counter_set_takes_along_the_devices_that_use_it_in_whatever_slice(self) -> None:
        counters = {"sharedCounters": [{"name": "A_b", "counters": {}}, {"name": "ok", "counters": {}}]}
        users = devices(
            gpu("gpu-0", consumesCounters=[{"counterSet": "A_b"}]),
            gpu("gpu-1", consumesCounters=[{"counterSet": "ok"}]),
        )
        found = plan_refusals([Cause("spec.sharedCounters[0].name", "", "bad")], counters)
        first, second = without_refused([counters, users], found)
        assert [entry["name"] for entry in first["sharedCounters"]] == ["ok"]
        assert [device["name"] for device in second["devices"]] == ["gpu-1"]

    def test_another_value_of_a_refused_attribute_is_tried_again(self) -> None:
        bad, good = (
            gpu("gpu-0", attributes={"v": {"version": "1.2"}}),
            gpu("gpu-0", attributes={"v": {"version": "1.2.0"}}),
        )
        found = plan_refusals([Cause("spec.devices[0].attributes[v].version", "", "semver")], devices(bad))
        assert without_refused([devices(good)], found) == (devices(good),)

    def test_too_many_devices_in_a_slice_are_split(self) -> None:
        assert (
            device_limit(
                [Cause("spec.devices", "FieldValueTooMany", "Too many: 65: must have at most 64 items")]
            )
            == 64
        )
        content = devices(*(gpu(f"gpu-{n}") for n in range(5)))
        parts = split([content, {"sharedCounters": []}], 2)
        assert [[d["name"] for d in part.get("devices", [])] for part in parts] == [
            ["gpu-0", "gpu-1"], ["gpu-2", "gpu-3"], ["gpu-4"], [],
        ]  # fmt: skip

    def test_the_message_names_device_attribute_and_reason(self) -> None:
        (refusal,) = plan_refusals(
            [Cause("spec.devices[0].attributes[type].string", "", "Too long")], devices(gpu("gpu-0"))
        )
        assert str(refusal.error).startswith(
            "DRA-SLICE-REFUSED: attribute type of device gpu-0 is not published: spec.devices[0].attributes[type].string: Too long"
        )

    @pytest.mark.skipif(not GOLDEN.exists(), reason="no recorded answers: set DRA_GOLDEN")
    def test_every_refusal_that_a_real_server_gave_about_a_device_leads_to_something_left_out(self) -> None:
        tried = 0
        for scenario in json.loads(GOLDEN.read_text())["scenarios"]:
            for step in scenario["steps"]:
                if (
                    step["status"] != 422
                    or step["method"] != "POST"
                    or not isinstance(step.get("body"), dict)
                ):
                    continue
                causes = [
                    Cause(c["field"], c["reason"], c["message"])
                    for c in step["response"]["details"]["causes"]
                ]
                spec = step["body"].get("spec") or {}
                content = {key: spec[key] for key in ("devices", "sharedCounters") if key in spec}
                if not any(
                    cause.field.startswith(("spec.devices[", "spec.sharedCounters[")) for cause in causes
                ):
                    continue
                found = plan_refusals(causes, content)
                assert found, step["do"]
                assert without_refused([content], found) != (content,), step["do"]
                tried += 1
        assert tried > 50


class TestDropped:
    def test_nothing_is_dropped_if_all_came_back_however_written(self) -> None:
        sent = normal_form(devices(gpu("gpu-0", taints=[{"key": "k", "value": "", "effect": "None"}])))
        stored = normal_form(
            devices(
                gpu(
                    "gpu-0",
                    capacity={"memory": {"value": "80Gi"}},
                    taints=[{"key": "k", "effect": "None", "timeAdded": "t"}],
                )
            )
        )
        assert not dropped_fields(sent, stored)

    def test_each_gate_is_found_by_its_field(self) -> None:
        policy = {"value": "8", "requestPolicy": {"default": "1"}}
        sent = normal_form(
            {
                "sharedCounters": [{"name": "c", "counters": {"m": {"value": "1"}}}],
                "devices": [
                    gpu(
                        "gpu-0", taints=[{"key": "k", "effect": "NoSchedule"}], allowMultipleAllocations=True,
                        consumesCounters=[{"counterSet": "c", "counters": {"m": {"value": "1"}}}],
                        capacity={"memory": policy}, attributes={"list": {"strings": ["a"], "string": "a"}},
                        bindingConditions=["a"], bindingFailureConditions=["b"],
                    )
                ],
            }
        )  # fmt: skip
        stored = normal_form(
            devices(gpu("gpu-0", capacity={"memory": {"value": "8"}}, attributes={"list": {"string": "a"}}))
        )
        found = dropped_fields(sent, stored)
        assert found.gates == (
            "DRAConsumableCapacity", "DRADeviceBindingConditions", "DRADeviceTaints", "DRAListTypeAttributes", "DRAPartitionableDevices",
        )  # fmt: skip
        assert "devices[].capacity.*.requestPolicy" in found.fields
        assert "DRADeviceTaints" in found.error.remedy

    def test_a_changed_value_is_not_a_dropped_field(self) -> None:
        assert not dropped_fields(normal_form(devices(gpu("gpu-0"))), normal_form(devices(gpu("gpu-1"))))


class TestRestores:
    def test_the_first_are_undone_at_once_and_a_fight_gets_slower_up_to_a_limit(self) -> None:
        restores = Restores()
        delays = []
        now = 0.0
        for _ in range(FREE + 8):
            delays.append(restores.delay_seconds(now))
            now += delays[-1]
            restores.record(now)
        assert delays[:FREE] == [SETTLE_SECONDS] * FREE
        assert delays[FREE:] == [1, 2, 4, 8, 16, 32, LONGEST_SECONDS, LONGEST_SECONDS]
        assert restores.is_contested(now)

    def test_after_ten_quiet_minutes_all_is_forgotten(self) -> None:
        restores = Restores()
        for _ in range(FREE + 1):
            restores.record(0.0)
        assert restores.is_contested(1.0)
        assert not restores.is_contested(601.0)
        assert restores.delay_seconds(601.0) == SETTLE_SECONDS
