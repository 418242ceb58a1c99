"""The publisher against a small API server: what ends up in the API, and how it gets there under faults."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dra.controller.dropped import DroppedFields
from dra.controller.lock import PublisherLock
from dra.controller.publisher import Publisher
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.kube.reflector import ReflectorOptions
from tests.unit.controller.pools import DRIVER, NODE, gpu, pool, pools, visible, with_counters
from tests.unit.kube.fake_clock import FakeClock
from tests.unit.kube.tiny_api import (
    Answer,
    Hang,
    Request,
    Reset,
    Stall,
    TinyApi,
    kubeconfig_text,
    status_body,
)

SLICES = "resourceslices"
FIRST = "00000-gpu.nvidia.com-node-1"


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the expected state did not come"
        time.sleep(0.005)


def published(api: TinyApi) -> tuple[int, list[str]] | None:
    return visible(api.all(SLICES))


def writes(api: TinyApi) -> list[Request]:
    return [
        r for r in list(api.requests) if r.plural == SLICES and r.method in ("POST", "PUT", "DELETE", "PATCH")
    ]


def of_slices(method: str, fault: object, times: int = 10**9) -> Callable[[Request], object]:
    left = [times]

    def rule(request: Request) -> object:
        if request.is_(method, SLICES) and left[0] > 0:
            left[0] -= 1
            return fault
        return None

    return rule


class TestPublishing:
    def test_the_pool_is_published_with_owner_generation_and_count_and_then_ready(
        self, api, publishing
    ) -> None:
        publisher = publishing(pools([gpu("gpu-0")], [gpu("gpu-1")]))
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-0", "gpu-1"])
        first = api.all(SLICES)[0]
        assert first["metadata"]["name"] == FIRST
        assert first["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid-1", "controller": True}
        ]
        assert first["spec"]["nodeName"] == NODE
        status = publisher.status()
        assert (status.state, status.generation, status.slices, status.devices, status.writes) == (
            "publishing",
            1,
            2,
            2,
            2,
        )
        assert status.ready_since is not None
        assert status.last_error is None

    def test_a_pool_that_is_there_already_is_left_alone_after_a_restart(self, api, publishing) -> None:
        first = publishing(pool("gpu-0"))
        until(lambda: first.ready)
        assert first.stop()
        assert published(api) == (1, ["gpu-0"]), "stopping deletes nothing"
        assert not first.ready
        before = len(writes(api))
        second = publishing(pool("gpu-0"))
        until(lambda: second.ready)
        assert len(writes(api)) == before
        assert second.status().generation == 1

    def test_a_change_of_one_slice_keeps_the_generation_and_the_same_content_again_does_nothing(
        self, api, publishing
    ) -> None:
        publisher = publishing(pools([gpu("gpu-0")], [gpu("gpu-1")]))
        until(lambda: publisher.ready)
        publisher.set_desired(pools([gpu("gpu-0")], [gpu("gpu-2")]))
        assert not publisher.ready
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-0", "gpu-2"])
        done = len(writes(api))
        publisher.set_desired(pools([gpu("gpu-0")], [gpu("gpu-2")]))
        assert publisher.ready
        assert len(writes(api)) == done

    def test_a_pool_of_other_slices_is_deleted_updated_and_created_in_this_order(
        self, api, publishing
    ) -> None:
        publisher = publishing(pools([gpu("gpu-0")], [gpu("gpu-1")], [gpu("gpu-2")]))
        until(lambda: publisher.ready)
        done = len(writes(api))
        publisher.set_desired(pools([gpu("gpu-5")]))
        until(lambda: publisher.ready)
        assert [r.method for r in writes(api)[done:]] == ["DELETE", "DELETE", "PUT"]
        assert published(api) == (2, ["gpu-5"])
        deletion = writes(api)[done].body
        assert set(deletion["preconditions"]) == {"uid", "resourceVersion"}

    def test_a_node_without_gpus_publishes_one_empty_slice(self, api, publishing) -> None:
        publisher = publishing(pools(None))
        until(lambda: publisher.ready)
        (only,) = api.all(SLICES)
        assert "devices" not in only["spec"]

    def test_own_writes_seen_by_the_watch_cause_no_further_writes(self, api, publishing) -> None:
        publisher = publishing(pools(*[[gpu(f"gpu-{n}")] for n in range(4)]))
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        for n in range(5, 8):
            publisher.set_desired(pools(*[[gpu(f"gpu-{n * 10 + m}")] for m in range(4)]))
            until(lambda: publisher.ready)
        time.sleep(0.4)
        assert len(writes(api)) == 16
        assert publisher.status().restores == 0

    def test_a_storm_of_changes_is_published_at_most_twice_a_second(self, api, publishing) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        began, done = time.monotonic(), len(writes(api))
        for number in range(300):
            publisher.set_desired(pool(f"gpu-{number + 1}"))
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-300"])
        assert len(writes(api)) - done <= 2 * (time.monotonic() - began) + 1

    def test_the_slices_of_other_nodes_and_drivers_are_not_touched(self, api, publishing) -> None:
        for name, driver, node in (("00000-a", DRIVER, "node-2"), ("00000-b", "nic.example.com", NODE)):
            spec = {
                "driver": driver,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            }
            api.put(SLICES, {"metadata": {"name": name}, "spec": spec})
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        assert [obj["metadata"]["name"] for obj in api.all(SLICES)] == ["00000-a", "00000-b", FIRST]

    def test_an_old_server_gets_its_own_shape_and_the_content_is_not_seen_as_changed(
        self, api, publishing
    ) -> None:
        api.versions = ("v1beta1",)
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        posted = next(r for r in api.requests if r.is_("POST", SLICES))
        assert "basic" in posted.body["spec"]["devices"][0]
        api.edit(SLICES, FIRST, lambda obj: obj["metadata"].update(labels={"a": "b"}))
        time.sleep(0.5)
        assert len(writes(api)) == 1

    def test_the_name_of_the_pool_is_free(self, api, publishing) -> None:
        publisher = publishing(pool("gpu-0"), pool_name="node-1/gpu")
        until(lambda: publisher.ready)
        assert api.all(SLICES)[0]["spec"]["pool"]["name"] == "node-1/gpu"


class TestRestoring:
    def test_a_wipe_by_the_kubelet_is_undone_within_two_seconds_with_the_same_content(
        self, api, publishing
    ) -> None:
        publisher = publishing(pools([gpu("gpu-0")], [gpu("gpu-1")]))
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        began = time.monotonic()
        api.wipe(SLICES)
        api.until(lambda: published(api) is not None)
        assert time.monotonic() - began < 20
        assert published(api) == (1, ["gpu-0", "gpu-1"])
        until(lambda: publisher.status().restores == 1)
        assert publisher.ready

    def test_a_wipe_in_the_middle_of_our_own_writes_is_undone(self, api, publishing) -> None:
        wiped = threading.Event()

        def wipe_after_the_second(request: Request) -> None:
            if request.is_("POST", SLICES) and api.count("POST", SLICES) == 3 and not wiped.is_set():
                wiped.set()
                api.wipe(SLICES)

        api.faults.append(wipe_after_the_second)
        publisher = publishing(pools(*[[gpu(f"gpu-{n}")] for n in range(4)]))
        names = [f"gpu-{n}" for n in range(4)]
        api.until(lambda: wiped.is_set() and published(api) is not None)
        assert published(api)[1] == names
        until(lambda: publisher.ready)

    def test_a_wipe_that_no_watch_showed_is_found_by_the_first_list(self, api, publishing) -> None:
        """The kubelet can wipe between our first write and the start of the watch."""
        api.faults.append(lambda r: Answer(503, status_body(503, "", "wait")) if r.is_watch else None)
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        api.wipe(SLICES)
        api.faults.clear()
        api.until(lambda: published(api) == (1, ["gpu-0"]))
        until(lambda: publisher.ready)

    @pytest.mark.parametrize(
        "change",
        [
            lambda obj: obj["spec"]["devices"].append(gpu("gpu-99")),
            lambda obj: obj["spec"].pop("devices"),
            lambda obj: obj["spec"]["pool"].update(resourceSliceCount=2),
            lambda obj: obj["metadata"].pop("ownerReferences"),
            lambda obj: obj["spec"]["devices"][0].update(taints=[{"key": "a", "effect": "NoSchedule"}]),
        ],
        ids=["device added", "devices removed", "count", "owner", "taint"],
    )
    def test_an_edit_by_hand_is_undone(self, api, publishing, change) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        api.edit(SLICES, FIRST, change)
        until(lambda: publisher.status().restores == 1)
        (only,) = api.all(SLICES)
        assert only["spec"]["devices"] == [gpu("gpu-0")]
        assert only["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
        assert only["metadata"]["ownerReferences"][0]["uid"] == "node-uid-1"

    def test_an_edit_that_a_silent_watch_hides_is_undone_after_the_watch_is_given_up(
        self, api, publishing
    ) -> None:
        api.faults.append(lambda r: Stall() if r.is_watch else None)
        publisher = publishing(
            pool("gpu-0"), watch_options=ReflectorOptions(watch_seconds=0, slack_seconds=0.4)
        )
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        api.edit(SLICES, FIRST, lambda obj: obj["spec"].pop("devices"))
        api.until(lambda: published(api) == (1, ["gpu-0"]))

    def test_without_the_right_to_watch_an_edit_is_undone_within_a_minute(self, api, publishing) -> None:
        api.faults.append(lambda r: Answer(403, status_body(403, "Forbidden", "no")) if r.is_watch else None)
        clock = FakeClock()
        publisher = publishing(pool("gpu-0"), clock=clock)
        until(lambda: publisher.ready and publisher.status().watch_error)
        edited = clock.now()
        seen: list[float] = []

        def note(request: Request) -> None:
            if request.is_("PUT", SLICES) and not seen:
                seen.append(clock.now())

        api.faults.insert(0, note)
        api.edit(SLICES, FIRST, lambda obj: obj["spec"].pop("devices"))
        until(lambda: seen)
        assert seen[0] - edited <= 60.0
        assert publisher.status().watch_error.code == "DRA-API-FORBIDDEN"

    def test_another_writer_is_not_fought_and_is_named(self, api, publishing) -> None:
        clock = FakeClock()
        publisher = publishing(pool("gpu-0"), clock=clock)
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))

        def theirs(obj: dict) -> None:
            obj["spec"]["devices"] = [gpu("gpu-77")]
            obj["metadata"]["managedFields"] = [{"manager": "other-driver", "time": "2026-01-01T00:00:00Z"}]

        began = clock.now()
        # A change that a regular look finds before its event comes is undone too, and not counted as somebody's.
        while publisher.status().restores < 8:
            api.edit(SLICES, FIRST, theirs)
            until(lambda: (published(api) or (0, []))[1] == ["gpu-0"])
        assert clock.now() - began > 60, "eight rounds take more than a minute"
        until(lambda: publisher.status().contested_by)
        status = publisher.status()
        assert status.contested_by == "other-driver"
        assert status.last_error.code == "DRA-POOL-CONTESTED"
        assert "other-driver" in str(status.last_error)

    def test_a_node_that_is_made_again_owns_the_slices_anew(self, api, publishing) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        api.remove("nodes", NODE)
        api.put("nodes", {"metadata": {"name": NODE, "uid": "node-uid-2"}})
        api.wipe(SLICES)  # as the garbage collector does
        api.until(lambda: bool(api.all(SLICES)))
        assert api.all(SLICES)[0]["metadata"]["ownerReferences"][0]["uid"] == "node-uid-2"
        until(lambda: publisher.ready)

    def test_the_time_of_a_taint_survives_updates_and_wipes(self, api, publishing) -> None:
        taint = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute"}
        publisher = publishing(pools([gpu("gpu-0", taints=[taint])]))
        until(lambda: publisher.ready)
        api.edit(
            SLICES,
            FIRST,
            lambda obj: obj["spec"]["devices"][0]["taints"][0].update(timeAdded="2001-01-01T00:00:00Z"),
        )
        publisher.set_desired(pools([gpu("gpu-0", taints=[taint]), gpu("gpu-1")]))
        until(lambda: published(api) == (1, ["gpu-0", "gpu-1"]))
        assert api.all(SLICES)[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2001-01-01T00:00:00Z"
        api.wipe(SLICES)
        api.until(lambda: bool(api.all(SLICES)))
        assert api.all(SLICES)[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2001-01-01T00:00:00Z"


class TestFaults:
    def test_an_api_server_that_comes_later_gets_the_pool_within_three_seconds(self, tmp_path) -> None:
        first = TinyApi()
        port = first.port
        first.stop()
        path = tmp_path / "k"
        path.write_text(kubeconfig_text(f"http://127.0.0.1:{port}"))
        client = KubeClient(Connection(KubeOptions(kubeconfig=str(path))))
        publisher = Publisher(client, NODE, DRIVER)
        publisher.set_desired(pool("gpu-0"))
        publisher.start()
        try:
            until(lambda: publisher.status().failures >= 3)
            status = publisher.status()
            assert not status.ready
            assert status.last_error.code == "DRA-API-UNREACHABLE"
            late = TinyApi(port=port)
            late.put("nodes", {"metadata": {"name": NODE, "uid": "u"}})
            began = time.monotonic()
            until(lambda: publisher.ready)
            assert time.monotonic() - began < 20
            assert published(late) == (1, ["gpu-0"])
            assert publisher.status().last_error is None
        finally:
            assert publisher.stop()
            late.stop()

    def test_during_a_long_outage_the_server_is_tried_every_few_seconds_at_most(self, tmp_path) -> None:
        gone = TinyApi()
        gone.stop()
        path = tmp_path / "k"
        path.write_text(kubeconfig_text(gone.url))
        clock = FakeClock()
        publisher = Publisher(
            KubeClient(Connection(KubeOptions(kubeconfig=str(path)))), NODE, DRIVER, clock=clock
        )
        publisher.set_desired(pool("gpu-0"))
        publisher.start()
        until(lambda: publisher.status().failures >= 40)
        assert publisher.stop()
        assert max(clock.waits) <= 2.5
        # However fast this test's time runs: it waits before each further attempt.
        assert len(clock.waits) >= publisher.status().failures - 1

    @pytest.mark.parametrize("method", ["GET", "POST"])
    @pytest.mark.parametrize(
        "fault",
        [
            Answer(500, status_body(500, "InternalError", "etcdserver: leader changed")),
            Answer(409, status_body(409, "Conflict", "modified")),
            Answer(410, status_body(410, "Expired", "too old")),
            Reset(),
            Answer(200, {"metadata": {"name": "x" * 300}}, cut_after=120),
            Answer(200, "<html>"),
        ],
        ids=["500", "409", "410", "reset", "cut", "html"],
    )
    def test_ten_failures_in_a_row_end_with_the_pool_published(self, api, publishing, method, fault) -> None:
        api.faults.append(of_slices(method, fault, 10))
        clock = FakeClock()
        publisher = publishing(pools([gpu("gpu-0")], [gpu("gpu-1")]), clock=clock)
        until(lambda: publisher.ready)
        assert published(api)[1] == ["gpu-0", "gpu-1"]
        asked = [r for r in api.requests if r.plural == SLICES and not r.is_watch]
        assert len(asked) < 80

    def test_a_write_that_arrived_although_its_answer_was_lost_is_not_made_twice(
        self, api, publishing
    ) -> None:
        lost = []

        def lose_the_answer(request: Request) -> object:
            if request.is_("POST", SLICES) and not lost:
                lost.append(api.act(request))
                return Reset()
            return None

        api.faults.append(lose_the_answer)
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-0"])
        assert api.count("POST", SLICES) == 1

    def test_a_server_that_asks_for_patience_gets_it(self, api, publishing) -> None:
        body = status_body(429, "TooManyRequests", "slow")
        api.faults.append(of_slices("POST", Answer(429, body, {"Retry-After": "23"}), 2))
        clock = FakeClock()
        began = clock.now()
        publisher = publishing(pool("gpu-0"), clock=clock)
        until(lambda: publisher.ready)
        assert clock.now() - began >= 46
        assert api.count("POST", SLICES) == 3

    def test_a_server_that_hangs_does_not_keep_the_publisher_from_stopping(self, api, publishing) -> None:
        api.faults.append(lambda r: Hang() if r.is_("GET", "nodes") else None)
        publisher = publishing(pool("gpu-0"))
        api.until(lambda: api.count("GET", "nodes") >= 1)
        began = time.monotonic()
        publisher.stop(timeout_seconds=0.2)
        assert time.monotonic() - began < 10
        api.closing.set()

    def test_a_conflict_with_a_change_in_between_is_solved_at_once(self, api, publishing) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        once = []

        def sneak(request: Request) -> None:
            if request.is_("PUT", SLICES) and not once:
                once.append(api.edit(SLICES, FIRST, lambda obj: obj["metadata"].update(labels={"x": "y"})))

        api.faults.append(sneak)
        publisher.set_desired(pool("gpu-1"))
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-1"])
        assert api.count("PUT", SLICES) == 2
        assert publisher.status().failures == 0

    def test_a_node_that_does_not_exist_yet_is_waited_for_and_named(self, api, publishing) -> None:
        api.remove("nodes", NODE)
        publisher = publishing(pool("gpu-0"), clock=FakeClock())
        until(lambda: publisher.status().last_error is not None)
        assert publisher.status().last_error.code == "DRA-NODE-NOT-FOUND"
        assert "--node-name" in publisher.status().last_error.remedy
        api.put("nodes", {"metadata": {"name": NODE, "uid": "late"}})
        until(lambda: publisher.ready)
        assert api.all(SLICES)[0]["metadata"]["ownerReferences"][0]["uid"] == "late"

    @pytest.mark.parametrize("body", [{}, {"message": "welcome"}, status_body(200, "", "hello")], ids=repr)
    def test_a_stranger_in_place_of_the_server_is_an_error_with_a_name_and_no_bug(
        self, api, publishing, body
    ) -> None:
        api.faults.append(lambda request: Answer(200, body) if request.plural else None)
        publisher = publishing(pool("gpu-0"), clock=FakeClock())
        until(lambda: publisher.status().failures > 2)
        assert publisher.status().last_error.code == "DRA-API-BAD-ANSWER"
        api.faults.clear()
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-0"])

    def test_a_name_that_somebody_else_uses_is_given_up(self, api, publishing) -> None:
        spec = {
            "driver": "x.example.com",
            "nodeName": "n9",
            "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
        }
        api.put(SLICES, {"metadata": {"name": FIRST}, "spec": spec})
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        ours = [obj for obj in api.all(SLICES) if obj["spec"]["driver"] == DRIVER]
        assert [d["name"] for d in ours[0]["spec"]["devices"]] == ["gpu-0"]
        assert len(api.all(SLICES)) == 2

    def test_a_missing_right_is_told_with_its_remedy(self, api, publishing) -> None:
        text = 'nodes "node-1" is forbidden: User "system:serviceaccount:a:b" cannot get resource "nodes" in API group ""'
        api.faults.append(
            lambda r: Answer(403, status_body(403, "Forbidden", text)) if r.is_("GET", "nodes") else None
        )
        publisher = publishing(pool("gpu-0"), clock=FakeClock())
        until(lambda: publisher.status().last_error is not None)
        assert 'the verb "get" on "nodes"' in publisher.status().last_error.remedy


class TestRefusals:
    def test_a_bad_attribute_is_left_out_and_reported_and_all_devices_are_published(
        self, api, publishing
    ) -> None:
        def validate(obj: dict) -> list[dict]:
            return [
                {"field": f"spec.devices[{i}].attributes[{name}].string", "reason": "FieldValueTooLong", "message": "Too long"}
                for i, device in enumerate(obj["spec"].get("devices", []))
                for name, value in device["attributes"].items()
                if len(value.get("string", "")) > 64
            ]  # fmt: skip

        api.validate = validate
        bad = {"uuid": {"string": "x" * 65}, "type": {"string": "gpu"}}
        publisher = publishing(pools([gpu("gpu-0"), gpu("gpu-1", attributes=bad), gpu("gpu-2")]))
        until(lambda: publisher.ready)
        stored = api.all(SLICES)[0]["spec"]["devices"]
        assert [d["name"] for d in stored] == ["gpu-0", "gpu-1", "gpu-2"]
        assert stored[1]["attributes"] == {"type": {"string": "gpu"}}
        status = publisher.status()
        assert [(r.device, r.name) for r in status.refused] == [("gpu-1", "uuid")]
        assert status.last_error.code == "DRA-SLICE-REFUSED"
        # A better value is tried as soon as it is there.
        publisher.set_desired(
            pools([gpu("gpu-0"), gpu("gpu-1", attributes={**bad, "uuid": {"string": "ok"}}), gpu("gpu-2")])
        )
        until(lambda: publisher.ready)
        assert api.all(SLICES)[0]["spec"]["devices"][1]["attributes"]["uuid"] == {"string": "ok"}
        assert publisher.status().refused == ()

    def test_too_many_devices_for_this_server_are_split_over_more_slices(self, api, publishing) -> None:
        def validate(obj: dict) -> list[dict]:
            count = len(obj["spec"].get("devices", []))
            message = f"Too many: {count}: must have at most 3 items"
            return (
                [{"field": "spec.devices", "reason": "FieldValueTooMany", "message": message}]
                if count > 3
                else []
            )

        api.validate = validate
        publisher = publishing(pool(*(f"gpu-{n}" for n in range(8))))
        until(lambda: publisher.ready)
        assert published(api) == (1, [f"gpu-{n}" for n in range(8)])
        assert len(api.all(SLICES)) == 3

    def test_a_refusal_that_points_nowhere_is_reported_and_tried_slowly(self, api, publishing) -> None:
        api.validate = lambda _obj: [{"field": "spec.driver", "reason": "FieldValueInvalid", "message": "no"}]
        clock = FakeClock()
        publisher = publishing(pool("gpu-0"), clock=clock)
        until(lambda: publisher.status().failures >= 8)
        assert publisher.status().last_error.code == "DRA-API-INVALID"
        assert max(clock.waits) > 10


class TestDroppedFields:
    @staticmethod
    def drop(*fields: str) -> Callable[[dict], None]:
        def act(obj: dict) -> None:
            for device in obj.get("spec", {}).get("devices") or []:
                for name in fields:
                    device.pop(name, None)

        return act

    def test_a_gate_that_is_off_is_reported_once_and_causes_no_loop(self, api, publishing) -> None:
        told: list[DroppedFields] = []
        api.on_store = self.drop("taints")
        tainted = pools([gpu("gpu-0", taints=[{"key": "k", "effect": "NoSchedule"}])])
        publisher = publishing(tainted, on_dropped=told.append)
        until(lambda: publisher.ready)
        publisher.set_desired(pools([gpu("gpu-1", taints=[{"key": "k", "effect": "NoSchedule"}])]))
        until(lambda: publisher.ready and told)
        time.sleep(0.4)
        assert len(writes(api)) == 2
        assert [(d.fields, d.gates) for d in told] == [(("devices[].taints",), ("DRADeviceTaints",))]
        assert publisher.status().dropped == told[0]

    def test_the_pool_can_be_shaped_anew_when_fields_are_dropped(self, api, publishing) -> None:
        def drop(obj: dict) -> None:
            self.drop("consumesCounters")(obj)
            obj.get("spec", {}).pop("sharedCounters", None)

        api.on_store = drop
        holder: list[Publisher] = []
        publisher = publishing(on_dropped=lambda _dropped: holder[0].set_desired(pool("gpu-0")))
        holder.append(publisher)
        publisher.set_desired(with_counters())
        until(lambda: publisher.ready and published(api) == (2, ["gpu-0"]))
        assert len(api.all(SLICES)) == 1

    def test_an_edit_by_hand_is_undone_also_where_fields_were_dropped(self, api, publishing) -> None:
        api.on_store = self.drop("taints")
        publisher = publishing(pools([gpu("gpu-0", taints=[{"key": "k", "effect": "NoSchedule"}])]))
        until(lambda: publisher.ready)
        api.until(lambda: bool(api.watches(SLICES)))
        api.edit(SLICES, FIRST, lambda obj: obj["spec"].pop("devices"))
        api.until(lambda: published(api) == (1, ["gpu-0"]))
        until(lambda: publisher.status().restores == 1)

    def test_a_webhook_that_changes_values_is_reported_and_not_fought(self, api, publishing) -> None:
        def mutate(obj: dict) -> None:
            for device in obj.get("spec", {}).get("devices") or []:
                device["attributes"]["index"] = {"int": 99}

        api.on_store = mutate
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready and publisher.status().last_error is not None)
        time.sleep(0.4)
        assert len(writes(api)) == 1
        assert publisher.status().last_error.code == "DRA-SLICE-ALTERED"

    def test_the_version_of_the_server_is_told_before_the_first_publication(self, api, publishing) -> None:
        holder: list[Publisher] = []
        seen: list[tuple[int, int]] = []

        def shape(version: tuple[int, int]) -> None:
            seen.append(version)
            holder[0].set_desired(pool("gpu-7"))

        api.faults.append(lambda r: time.sleep(0.05) if r.path == "/version" else None)
        publisher = publishing(on_server_version=shape)
        holder.append(publisher)
        until(lambda: publisher.ready)
        assert seen == [(1, 36)]
        assert published(api) == (1, ["gpu-7"])


class TestTwoInstances:
    def test_a_listener_that_fails_when_this_instance_leads_keeps_nothing_back(self, api, publishing) -> None:
        asked = []

        def fail() -> None:
            asked.append(published(api))
            raise ValueError("a bug")

        publisher = publishing(pool("gpu-0"), on_lead=fail)
        until(lambda: publisher.ready)
        assert asked == [None]
        assert published(api) == (1, ["gpu-0"])

    def test_only_the_holder_publishes_and_the_other_takes_over_at_once(
        self, api, publishing, tmp_path
    ) -> None:
        lock = tmp_path / "state" / "publisher.lock"
        old = publishing(pool("gpu-0"), lock_path=lock)
        until(lambda: old.ready)
        new = publishing(pool("gpu-1"), lock_path=lock)
        until(lambda: new.status().state == "waiting")
        time.sleep(0.3)
        assert published(api) == (1, ["gpu-0"])
        assert not new.ready
        began = time.monotonic()
        assert old.stop()
        until(lambda: new.ready)
        assert time.monotonic() - began < 15
        assert published(api) == (1, ["gpu-1"])
        assert old.status().state == "stopped"

    def test_a_lock_whose_holder_was_killed_is_free(self, tmp_path) -> None:
        path = tmp_path / "publisher.lock"
        path.write_text("4711\n")
        lock = PublisherLock(path)
        assert lock.try_acquire()
        assert path.read_text() == f"{os.getpid()}\n"
        other = PublisherLock(path)
        assert not other.try_acquire()
        lock.release()
        assert other.try_acquire()
        other.release()

    def test_a_state_directory_that_cannot_be_written_does_not_keep_the_pool_back(
        self, api, publishing, tmp_path
    ) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        publisher = publishing(pool("gpu-0"), lock_path=blocked / "state" / "publisher.lock")
        until(lambda: publisher.ready)
        assert published(api) == (1, ["gpu-0"])

    def test_waiting_for_the_lock_ends_when_asked_to(self, api, publishing, tmp_path) -> None:
        lock = PublisherLock(tmp_path / "publisher.lock")
        assert lock.try_acquire()
        publisher = publishing(pool("gpu-0"), lock_path=Path(lock.path))
        until(lambda: publisher.status().state == "waiting")
        assert publisher.stop(timeout_seconds=2)
        assert api.all(SLICES) == []
        lock.release()


def test_a_fleet_that_starts_together_does_not_write_together(api: TinyApi, publishing) -> None:
    clock = FakeClock()
    publisher = publishing(pool("gpu-0"), clock=clock, start_jitter_seconds=120.0)
    until(lambda: publisher.ready)
    assert 0 < clock.waits[0] <= 120.0
