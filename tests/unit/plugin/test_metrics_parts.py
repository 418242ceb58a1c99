"""The series of the node itself: calls, records, publisher, readiness, this process."""

from __future__ import annotations

import os

import pytest
from metrics_node import of, parse

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.controller.publisher import PublisherStatus
from dra.errors import HostError, KubeError
from dra.inventory.model import Inventory, ScanProblem
from dra.plugin.call_metrics import CallMetrics
from dra.plugin.metrics import (
    MetricsEndpoint,
    node_samples,
    pool_samples,
    process_samples,
    record_samples,
)
from dra.plugin.readiness import Readiness
from dra.prepare.allocations import allocations
from dra.prepare.record import Record
from dra.prepare.store import RecordStore
from dra.telemetry.metrics import Registry, render

DRIVER = "gpu.nvidia.com"


def page(*collectors) -> dict[str, float]:
    registry = Registry()
    registry.add(*collectors)
    return parse(render(registry.collect())[0].decode())


def test_nvidias_series_of_calls_are_there_from_the_start():
    calls = CallMetrics(DRIVER)
    found = page(*calls.recorders)
    for operation in ("prepare", "unprepare"):
        labels = f"driver={DRIVER},operation={operation}"
        assert of(found, "nvidia_dra_requests_total")[labels] == 0
        assert of(found, "nvidia_dra_requests_inflight")[labels] == 0
        assert of(found, "nvidia_dra_request_duration_seconds_count")[labels] == 0
    bounds = [key for key in of(found, "nvidia_dra_request_duration_seconds_bucket") if "=prepare" in key]
    assert [key.partition("le=")[2].partition(",")[0] for key in bounds] == [
        "0.05", "0.1", "0.2", "0.4", "0.8", "1.6", "3.2", "6.4", "12.8", "+Inf",
    ]  # fmt: skip


def test_a_call_that_fails_is_timed_and_counted_by_stage_and_code_and_is_no_success():
    calls = CallMetrics(DRIVER)
    with calls.call("prepare") as errors:
        assert (
            of(page(*calls.recorders), "nvidia_dra_requests_inflight")[f"driver={DRIVER},operation=prepare"]
            == 1
        )
        errors += [HostError("DRA-LOCK-TIMEOUT", "held"), KubeError("DRA-API-UNREACHABLE", "no")]
    with calls.call("unprepare") as errors:
        errors.append(HostError("DRA-HOST-IO", "no"))
    with calls.call("unprepare"):
        pass
    found = page(*calls.recorders)
    assert of(found, "nvidia_dra_requests_total") == {
        f"driver={DRIVER},operation=prepare": 0, f"driver={DRIVER},operation=unprepare": 1,
    }  # fmt: skip
    assert of(found, "nvidia_dra_node_prepare_errors_total") == {
        f"driver={DRIVER},error_type=lock_acquire": 1, f"driver={DRIVER},error_type=prepare_devices": 1,
    }  # fmt: skip
    assert of(found, "nvidia_dra_node_unprepare_errors_total") == {
        f"driver={DRIVER},error_type=unprepare_devices": 1
    }
    assert of(found, "dra_node_call_duration_seconds_count") == {
        "operation=prepare": 1,
        "operation=unprepare": 2,
    }
    assert of(found, "dra_node_claim_errors_total") == {
        "code=DRA-LOCK-TIMEOUT,operation=prepare": 1, "code=DRA-API-UNREACHABLE,operation=prepare": 1,
        "code=DRA-HOST-IO,operation=unprepare": 1,
    }  # fmt: skip


def test_a_call_that_breaks_is_not_in_flight_for_ever():
    calls = CallMetrics(DRIVER)
    with pytest.raises(RuntimeError), calls.call("prepare"):
        raise RuntimeError
    found = page(*calls.recorders)
    assert set(of(found, "nvidia_dra_requests_inflight").values()) == {0}


def test_the_publishers_state_is_shown_and_a_time_that_never_was_is_absent():
    status = PublisherStatus(state="publishing", ready=True, generation=4, slices=2, devices=16, writes=3)
    found = page(lambda: pool_samples(status))
    assert found == {
        "dra_node_pool_ready{}": 1, "dra_node_pool_publishing{}": 1, "dra_node_pool_devices{}": 16,
        "dra_node_pool_slices{}": 2, "dra_node_pool_generation{}": 4, "dra_node_pool_writes_total{}": 3,
        "dra_node_pool_restores_total{}": 0, "dra_node_pool_failures{}": 0,
    }  # fmt: skip


def test_a_node_shows_its_versions_what_is_not_ready_and_what_could_not_be_read():
    readiness = Readiness()
    readiness.set("registered", "the kubelet has not come by")
    readiness.ask("pool", lambda: "")
    inventory = Inventory(
        "580.1",
        (13, 0),
        (),
        (ScanProblem("0000:01:00.0", "DRA-NVML-HUNG", "x"), ScanProblem("y", "DRA-NVML-HUNG", "z")),
    )
    found = page(lambda: node_samples(inventory, readiness, node="n", driver=DRIVER))
    assert of(found, "dra_node_ready") == {"part=registered": 0, "part=pool": 1}
    assert of(found, "dra_node_problems") == {"code=DRA-NVML-HUNG": 2}
    (labels,) = of(found, "dra_node_info")
    assert "cuda_version=13.0,driver=gpu.nvidia.com,driver_version=580.1,node=n" in labels


def test_records_are_counted_by_state_and_devices_by_nvidias_types(tmp_path):
    store = RecordStore(tmp_path, report=lambda _damage: None, salvage=lambda _uid: ())
    store.open()
    for number, (state, device) in enumerate(
        (
            ("prepared", "gpu-0"),
            ("prepared", "gpu-1-mig-1g10gb-19-0"),
            ("preparing", "gpu-2"),
            ("prepared", "odd"),
            ("prepared", "gpu-vfio-3"),
        )
    ):
        results = (AllocatedDevice("gpu", DRIVER, "n", device),)
        store.put(Record(ClaimRef("a", f"c{number}", f"u{number}"), state, "boot", results), fsync=False)
    (tmp_path / "bad.json").write_text("{")
    store.refresh(fully=True)
    held = allocations(store.records(), Inventory(), boot_id="boot")
    found = page(lambda: record_samples(store, held, node="n", driver=DRIVER))
    assert of(found, "dra_node_claims") == {
        "state=prepared": 4, "state=preparing": 1, "state=unpreparing": 0, "state=damaged": 1,
    }  # fmt: skip
    assert {key.split(",")[0]: value for key, value in of(found, "nvidia_dra_prepared_devices").items()} == {
        "device_type=gpu": 1, "device_type=mig": 1, "device_type=vfio": 1, "device_type=unknown": 1,
    }  # fmt: skip


def test_this_process_is_what_proc_says():
    found = page(process_samples)
    assert found["process_open_fds{}"] > 2
    assert found["process_threads{}"] >= 1
    assert found["process_resident_memory_bytes{}"] > 10 << 20
    assert 1e9 < found["process_start_time_seconds{}"] < 1e11
    assert found["process_cpu_seconds_total{}"] <= sum(os.times()[:2]) + 1


def test_without_an_endpoint_nothing_is_served():
    endpoint = MetricsEndpoint("", "/metrics", Registry(), missing=dict)
    endpoint.start()
    assert endpoint.port == 0
    endpoint.stop()
