"""A scrape of a node, series by series, against lists that were written by hand."""

from __future__ import annotations

import time

import pytest
from metrics_node import MetricsNode, of

from dra.health.feed import DeviceCondition
from dra.prepare.record import JournalEntry

MIB = 1 << 20


@pytest.fixture
def new_node(tmp_path):
    made = []

    def make(profile="dgx-h100", **options):
        made.append(MetricsNode(profile, tmp_path / f"n{len(made)}", **options))
        return made[-1]

    yield make
    for node in made:
        node.close()


def wait_until(condition, *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def idle_h100(device: str, uuid: str, pci: str) -> dict[str, float]:
    """What an H100 that nobody uses and nobody holds shows."""
    own = f"device={device}"
    rest = f"uuid={uuid}"
    series = {
        f"dra_gpu_info{{architecture=Hopper,{own},pci_address={pci},product=NVIDIA H100 80GB HBM3,{rest}}}": 1,
        f"dra_gpu_temperature_celsius{{{own},sensor=gpu,{rest}}}": 34,
        f"dra_gpu_temperature_celsius{{{own},sensor=memory,{rest}}}": 40,
        f"dra_gpu_nvlink_links{{{own},state=up,{rest}}}": 18,
        f"dra_gpu_nvlink_links{{{own},state=down,{rest}}}": 0,
    }
    for name, value in {
        "healthy": 1, "utilization_ratio": 0, "memory_utilization_ratio": 0, "encoder_utilization_ratio": 0,
        "decoder_utilization_ratio": 0, "memory_total_bytes": 81559 * MIB, "memory_used_bytes": 0,
        "memory_free_bytes": 80921 * MIB, "memory_reserved_bytes": 638 * MIB, "power_watts": 68, "power_limit_watts": 700,
        "energy_joules_total": 0, "row_remap_pending": 0, "row_remap_failed": 0, "pcie_replays_total": 0,
        "pcie_link_generation": 5, "pcie_link_width": 16, "mps_clients": 0, "foreign_processes": 0, "allocations": 0,
        "mig_enabled": 0,
    }.items():  # fmt: skip
        series[f"dra_gpu_{name}{{{own},{rest}}}"] = value
    for name, label, values in (
        ("processes", "kind", {"compute": 0, "graphics": 0}),
        ("engine_activity_ratio", "engine", {"graphics": 0, "sm": 0, "tensor": 0, "dram": 0}),
        ("remapped_rows_total", "type", {"corrected": 0, "uncorrected": 0}),
        ("nvlink_errors_total", "type", {"crc_flit": 0, "crc_data": 0, "replay": 0, "recovery": 0}),
        ("nvlink_bytes_total", "direction", {"sent": 0, "received": 0}),
        ("clock_hertz", "clock", {"graphics": 345e6, "sm": 345e6, "memory": 1593e6, "video": 301e6}),
        (
            "clock_reduced",
            "reason",
            {
                "gpu_idle": 1, "applications_clocks": 0, "sw_power_cap": 0, "hw_slowdown": 0, "sync_boost": 0,
                "sw_thermal": 0, "hw_thermal": 0, "hw_power_brake": 0, "display_clocks": 0,
            },
        ),
    ):  # fmt: skip
        for value, number in values.items():
            pair = sorted((own, rest, f"{label}={value}"))
            series[f"dra_gpu_{name}{{{','.join(pair)}}}"] = number
    for kind in ("corrected", "uncorrected"):
        for scope in ("volatile", "aggregate"):
            series[f"dra_gpu_ecc_errors_total{{{own},scope={scope},type={kind},{rest}}}"] = 0
    return series


def mig_device(device: str, uuid: str, profile: str, parent: str, pci: str) -> dict[str, float]:
    """What a MIG device shows whatever it does."""
    own, rest = f"device={device}", f"profile={profile},uuid={uuid}"
    info = f"architecture=Hopper,{own},parent={parent},pci_address={pci},product=NVIDIA H100 80GB HBM3,{rest}"
    series = {f"dra_gpu_info{{{info}}}": 1, f"dra_gpu_healthy{{{own},{rest}}}": 1}
    for kind in ("compute", "graphics"):
        series[f"dra_gpu_processes{{{own},kind={kind},{rest}}}"] = 0
    for name in ("mps_clients", "foreign_processes", "allocations"):
        series[f"dra_gpu_{name}{{{own},{rest}}}"] = 0
    return series


def test_a_scrape_equals_a_list_made_by_hand(new_node):
    """One whole GPU at work, one in MIG mode, one that two claims share, and five that idle."""
    node = new_node()
    small, large = node.control.set_mig_layout(1, [("1g.10gb", 6), ("3g.40gb", 0)])
    node.rescan()
    pci = {gpu.minor: str(gpu.pci_address) for gpu in node.inventory.gpus}
    uuid = {gpu.minor: gpu.uuid for gpu in node.inventory.gpus}
    small_name, large_name = "gpu-1-mig-1g10gb-19-6", "gpu-1-mig-3g40gb-9-0"
    for name in [f"gpu-{minor}" for minor in range(8)] + [small_name, large_name]:
        node.conditions.append(DeviceCondition("node-a", name))
    node.control.set_gpu(
        0, utilization_gpu=75, utilization_memory=40, utilization_encoder=5, utilization_decoder=6, temperature=61,
        memory_temperature=70, power_mw=512_500, energy_mj=9_000_500, graphics_mhz=1980, memory_mhz=2619,
        clock_reasons=0x4, ecc_corrected=3, ecc_uncorrected_total=2, remapped_corrected=1, remap_pending=1,
        pcie_replays=7, pcie_generation=4, pcie_width=8, nvlink_crc_flit=1, nvlink_replays=2, nvlink_tx_kib=4,
        nvlink_rx_kib=8, nvlinks_down=[17],
    )  # fmt: skip
    node.run(0, 100, pod="pod-1", memory_bytes=1000 * MIB)
    node.control.set_mig(small, utilization=50, utilization_memory=20)
    node.control.set_gpu(2, utilization_gpu=60)
    node.run(2, 200, pod="pod-a", memory_bytes=300 * MIB, utilization=45)
    node.run(2, 201, pod="pod-b", memory_bytes=500 * MIB, utilization=15)
    node.hold("whole", "gpu-0")
    node.hold("part", small_name)
    node.hold("one", "gpu-2", share="aaaa", memory="2Gi", pods=("pod-a",))
    node.hold("two", "gpu-2", share="bbbb", memory="4Gi", pods=("pod-b",))

    expected: dict[str, float] = {}
    for minor in range(8):
        expected |= idle_h100(f"gpu-{minor}", uuid[minor], pci[minor])

    def change(name: str, value: float | None, device: str, rest: str, **more: str) -> None:
        labels = ",".join(
            sorted([f"device={device}", *rest.split(","), *(f"{k}={v}" for k, v in more.items())])
        )
        key = f"dra_gpu_{name}{{{labels}}}"
        if value is None:
            del expected[key]
        else:
            expected[key] = value

    zero = ("gpu-0", f"uuid={uuid[0]}")
    for name, value in {
        "utilization_ratio": 0.75, "memory_utilization_ratio": 0.4, "encoder_utilization_ratio": 0.05,
        "decoder_utilization_ratio": 0.06, "power_watts": 512.5, "energy_joules_total": 9000.5, "pcie_replays_total": 7,
        "pcie_link_generation": 4, "pcie_link_width": 8, "row_remap_pending": 1, "memory_used_bytes": 1000 * MIB,
        "memory_free_bytes": 79921 * MIB, "allocations": 1,
    }.items():  # fmt: skip
        change(name, value, *zero)
    for name, value, more in (
        ("temperature_celsius", 61, {"sensor": "gpu"}),
        ("temperature_celsius", 70, {"sensor": "memory"}),
        ("clock_hertz", 1980e6, {"clock": "graphics"}),
        ("clock_hertz", 1980e6, {"clock": "sm"}),
        ("clock_hertz", 2619e6, {"clock": "memory"}),
        ("clock_hertz", 1732e6, {"clock": "video"}),
        ("clock_reduced", 0, {"reason": "gpu_idle"}),
        ("clock_reduced", 1, {"reason": "sw_power_cap"}),
        ("ecc_errors_total", 3, {"type": "corrected", "scope": "volatile"}),
        ("ecc_errors_total", 3, {"type": "corrected", "scope": "aggregate"}),
        ("ecc_errors_total", 2, {"type": "uncorrected", "scope": "aggregate"}),
        ("remapped_rows_total", 1, {"type": "corrected"}),
        ("nvlink_errors_total", 1, {"type": "crc_flit"}),
        ("nvlink_errors_total", 2, {"type": "replay"}),
        ("nvlink_errors_total", 1, {"type": "recovery"}),
        ("nvlink_bytes_total", 4096, {"direction": "sent"}),
        ("nvlink_bytes_total", 8192, {"direction": "received"}),
        ("nvlink_links", 17, {"state": "up"}),
        ("nvlink_links", 1, {"state": "down"}),
        ("processes", 1, {"kind": "compute"}),
        ("engine_activity_ratio", 0.75, {"engine": "graphics"}),
        ("engine_activity_ratio", 0.75, {"engine": "sm"}),
        ("engine_activity_ratio", 0.375, {"engine": "tensor"}),
        ("engine_activity_ratio", 0.4, {"engine": "dram"}),
    ):
        change(name, value, *zero, **more)

    # In MIG mode the GPU itself has no load: its devices do, and only as far as GPM tells it.
    one = ("gpu-1", f"uuid={uuid[1]}")
    change("mig_enabled", 1, *one)
    for name in (
        "utilization_ratio",
        "memory_utilization_ratio",
        "encoder_utilization_ratio",
        "decoder_utilization_ratio",
    ):
        change(name, None, *one)
    for engine in ("graphics", "sm", "tensor", "dram"):
        change("engine_activity_ratio", None, *one, engine=engine)
    change("mig_devices", 2, *one)
    for state, slices in (("used", 5), ("free", 3), ("largest_hole", 2)):
        change("mig_memory_slices", slices, *one, state=state)
    for name, mig, profile, total in (
        (small_name, small, "1g.10gb", 9984),
        (large_name, large, "3g.40gb", 40448),
    ):
        expected |= mig_device(name, mig, profile, uuid[1], pci[1])
        own = (name, f"profile={profile},uuid={mig}")
        change("memory_total_bytes", total * MIB, *own)
        change("memory_used_bytes", 12 * MIB, *own)
        change("memory_free_bytes", (total - 12) * MIB, *own)
        change("memory_reserved_bytes", 0, *own)
        load, dram = (0.5, 0.2) if name == small_name else (0, 0)
        change("utilization_ratio", load, *own)
        for engine, value in (("graphics", load), ("sm", load), ("tensor", load / 2), ("dram", dram)):
            change("engine_activity_ratio", value, *own, engine=engine)
    change("allocations", 1, small_name, f"profile=1g.10gb,uuid={small}")

    # Two claims on one GPU: one series of the device, two of allocations.
    two = ("gpu-2", f"uuid={uuid[2]}")
    change("utilization_ratio", 0.6, *two)
    change("memory_used_bytes", 800 * MIB, *two)
    change("memory_free_bytes", 80121 * MIB, *two)
    change("allocations", 2, *two)
    change("processes", 2, *two, kind="compute")
    for engine, value in (("graphics", 0.6), ("sm", 0.6), ("tensor", 0.3)):
        change("engine_activity_ratio", value, *two, engine=engine)

    for claim, device, pod, more, values in (
        ("whole", "gpu-0", "pod-1", {"uuid": uuid[0]}, (0.75, 1000 * MIB, 81559 * MIB, 1, 0)),
        (
            "part",
            small_name,
            "pod-1",
            {"uuid": small, "profile": "1g.10gb"},
            (0.5, 12 * MIB, 9984 * MIB, 0, None),
        ),
        ("one", "gpu-2", "pod-a", {"uuid": uuid[2], "share": "aaaa"}, (0.45, 300 * MIB, 2048 * MIB, 1, None)),
        ("two", "gpu-2", "pod-b", {"uuid": uuid[2], "share": "bbbb"}, (0.15, 500 * MIB, 4096 * MIB, 1, None)),
    ):
        labels = {"namespace": "team", "claim": claim, "pod": pod, "request": "gpu", "device": device, **more}
        names = (
            "utilization_ratio",
            "memory_used_bytes",
            "memory_limit_bytes",
            "processes",
            "energy_joules_total",
        )
        for name, value in zip(names, values, strict=True):
            if value is not None:
                text = ",".join(sorted(f"{key}={label}" for key, label in labels.items()))
                expected[f"dra_claim_{name}{{{text}}}"] = value
        info = {**labels, "claim_uid": f"uid-{claim}", "admin_access": "false"}
        text = ",".join(sorted(f"{key}={label}" for key, label in info.items()))
        expected[f"dra_claim_device_info{{{text}}}"] = 1
        expected[f"dra_claim_prepared_timestamp_seconds{{claim={claim},namespace=team}}"] = 1_000_000
        expected[f"dra_claim_consumers{{claim={claim},namespace=team}}"] = 1

    found = node.scrape()
    found.pop("dra_node_sample_duration_seconds{}")
    assert found == pytest.approx(expected)
    # And the next one, whose performance samples are compared with those of the first.
    again = node.scrape()
    again.pop("dra_node_sample_duration_seconds{}")
    assert again == pytest.approx(expected)


def test_claim_labels_are_there_with_the_record_and_gone_with_it(new_node):
    node = new_node("l40s-x4")
    assert not [key for key in node.scrape() if key.startswith("dra_claim")]
    uid = node.hold("c", "gpu-3")
    found = node.scrape()
    assert len(of(found, "dra_claim_device_info")) == 1
    assert of(found, "dra_gpu_allocations")[f"device=gpu-3,uuid={node.uuid(3)}"] == 1
    del node.records[uid]
    found = node.scrape()
    assert not [key for key in found if key.startswith("dra_claim")]
    assert set(of(found, "dra_gpu_allocations").values()) == {0}


def test_before_hopper_the_load_of_a_partition_is_absent_and_never_zero(new_node):
    node = new_node("dgx-a100")
    (mig,) = node.control.set_mig_layout(0, [("1g.5gb", 0)])
    node.rescan()
    node.hold("c", "gpu-0-mig-1g5gb-19-0")
    found = node.scrape()
    assert not [key for key in found if mig in key and ("utilization" in key or "activity" in key)]
    assert [key for key in found if mig in key and key.startswith("dra_gpu_memory_used_bytes")]
    assert not [key for key in found if "utilization" in key and "device=gpu-0," in key]
    assert len(of(found, "dra_gpu_utilization_ratio")) == 7


def test_a_partition_that_was_made_for_a_claim_is_known_by_its_record(new_node):
    node = new_node()
    (mig,) = node.control.set_mig_layout(0, [("1g.10gb", 2)])
    node.rescan()
    name = "gpu-0-mig-1g10gb-19-2"
    made = JournalEntry(
        "mig-device", {"device": name, "gpu": node.uuid(0)}, "applied", {"gi": 9, "ci": 0, "uuid": mig}
    )
    node.hold("c", name, journal=(made,))
    (labels,) = of(node.scrape(), "dra_claim_utilization_ratio")
    assert f"uuid={mig}" in labels
    assert "profile=1g.10gb" in labels


def test_a_gpu_that_hangs_costs_its_own_series_only(new_node):
    node = new_node("l40s-x4")
    node.scrape()
    fault = node.control.set_fault("nvmlDeviceGetPowerUsage", gpu=2, hang=True)
    others = {node.uuid(minor) for minor in (0, 1, 3)}
    wait_until(lambda: set(node.sampler.sample(wait_seconds=0.05).readings) == others)
    wait_until(lambda: node.sampling_threads() == 1)  # however often it was asked
    node.control.clear(fault)
    wait_until(lambda: len(of(node.scrape(), "dra_gpu_power_watts")) == 4)


def test_a_gpu_that_is_lost_is_unreadable_with_the_code(new_node):
    node = new_node("l40s-x4")
    node.control.lose_gpu(1)
    found = node.scrape()
    assert of(found, "dra_gpu_unreadable") == {f"code=DRA-NVML-GPU-LOST,device=gpu-1,uuid={node.uuid(1)}": 1}
    assert len(of(found, "dra_gpu_power_watts")) == 3
    assert len(of(found, "dra_gpu_info")) == 4


def test_a_node_without_a_driver_has_its_claims_all_the_same(new_node):
    node = new_node("l40s-x4")
    node.hold("c", "gpu-0")
    node.session.close()
    node.control.unload_driver(force=True)
    found = node.scrape()
    assert len(of(found, "dra_gpu_unreadable")) == 4
    assert len(of(found, "dra_claim_device_info")) == 1
    assert not of(found, "dra_claim_utilization_ratio")


def test_sleeping_gpus_are_not_woken_unless_a_claim_holds_them(new_node):
    node = new_node("l40s-x4")
    for minor in range(4):
        node.control.set_gpu(minor, persistence=False)
    node.rescan()
    node.session.close()
    node.rescan()
    node.control.reset_calls()
    found = node.scrape()
    assert node.control.count_wake_ups() == 0
    assert set(of(found, "dra_gpu_asleep").values()) == {1}
    assert len(of(found, "dra_gpu_asleep")) == 4
    assert not of(found, "dra_gpu_power_watts")
    node.hold("c", "gpu-1")
    found = node.scrape()
    assert node.control.count_wake_ups() == 1
    assert len(of(found, "dra_gpu_power_watts")) == 1
    assert len(of(found, "dra_gpu_asleep")) == 3


def test_gpus_are_asked_at_most_once_in_the_interval_and_never_without_a_scrape(new_node):
    node = new_node("l40s-x4", min_interval_seconds=3600)
    node.control.reset_calls()
    assert "nvmlDeviceGetPowerUsage" not in node.control.count_calls()
    for _ in range(3):
        node.scrape()
    assert node.control.count_calls()["nvmlDeviceGetPowerUsage"] == 4


def test_what_a_reading_asks_does_not_grow_and_frees_what_it_takes(new_node):
    node = new_node("dgx-h100")
    node.control.set_mig_layout(0, [("1g.10gb", 0), ("2g.20gb", 2)])
    node.rescan()
    node.scrape()
    counts = []
    for _ in range(3):
        node.control.reset_calls()
        node.scrape()
        counts.append(node.control.count_calls())
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["nvmlGpmSampleAlloc"] == counts[0]["nvmlGpmSampleFree"] == 9
    # Seven whole GPUs with 18 links, and one in MIG mode: whoever adds a call to a reading, adds it here.
    assert counts[0]["nvmlDeviceGetFieldValues"] == 8
    assert sum(counts[0].values()) < 8 * 55
    node.session.close()
    node.scrape()
    # A scrape does not wait for a GPU that is slow to read; its reading goes on.
    wait_until(lambda: len(node.node.library().gpm_samples) == 9)


def test_processes_of_nobody_are_foreign_and_what_cannot_be_seen_is_not_accused(new_node):
    node = new_node("l40s-x4")
    node.hold("c", "gpu-0", pods=("pod-1",))
    node.run(0, 10, pod="pod-1")
    node.run(0, 11, pod="pod-2")
    node.run(0, 12, pod="")
    node.run(0, 13, pod=None)
    node.run(0, 14, pod="", command="nvidia-cuda-mps-server")
    node.run(1, 20, pod=None)  # nobody holds this one: whoever it is has no claim
    found = node.scrape()
    foreign = of(found, "dra_gpu_foreign_processes")
    assert foreign == {
        f"device=gpu-{minor},uuid={node.uuid(minor)}": n for minor, n in enumerate((2, 1, 0, 0))
    }
    assert list(of(found, "dra_claim_processes").values()) == [3]


def test_shares_without_a_view_of_processes_have_no_use_rather_than_a_wrong_one(new_node):
    node = new_node("l40s-x4")
    node.control.set_gpu(0, utilization_gpu=80)
    node.hold("a", "gpu-0", share="s1", pods=("pod-a",))
    node.hold("b", "gpu-0", share="s2", pods=("pod-b",))
    node.run(0, 10, pod="pod-a")
    node.run(0, 11, pod=None)
    found = node.scrape()
    assert len(of(found, "dra_claim_device_info")) == 2
    assert not of(found, "dra_claim_utilization_ratio")
    assert not of(found, "dra_claim_memory_used_bytes")


def test_mps_clients_are_counted(new_node):
    node = new_node("l40s-x4")
    for pid in (10, 11, 12):
        node.run(0, pid, pod="pod-1", kind="mps")
    assert of(node.scrape(), "dra_gpu_mps_clients")[f"device=gpu-0,uuid={node.uuid(0)}"] == 3


def test_the_energy_of_a_claim_counts_from_when_it_was_first_seen(new_node):
    node = new_node("l40s-x4")
    node.control.set_gpu(0, energy_mj=5_000_000)
    node.hold("c", "gpu-0")

    def energy():
        return list(of(node.scrape(), "dra_claim_energy_joules_total").values())

    assert energy() == [0]
    node.control.set_gpu(0, energy_mj=5_250_000)
    assert energy() == [250]
    node.control.lose_gpu(0)
    assert energy() == []
    node.control.recover_gpu(0)
    node.control.set_gpu(0, energy_mj=6_000_000)
    assert energy() == [1000]
    node.control.set_gpu(0, energy_mj=10_000)  # the driver was loaded anew
    assert energy() == [10]


def test_a_claim_of_many_pods_names_none_and_one_for_monitoring_uses_nothing(new_node):
    node = new_node("l40s-x4")
    node.hold("many", "gpu-0", pods=tuple(f"pod-{n}" for n in range(30)))
    node.hold("three", "gpu-1", pods=("x", "y", "z"))
    node.hold("watcher", "gpu-0", admin=True)
    found = node.scrape()
    infos = of(found, "dra_claim_device_info")
    assert sorted("pod=" in labels for labels in infos) == [False, True, True, True, True]
    assert of(found, "dra_claim_consumers")["claim=many,namespace=team"] == 30
    assert all("claim=watcher" not in labels for labels in of(found, "dra_claim_utilization_ratio"))
    assert of(found, "dra_gpu_allocations")[f"device=gpu-0,uuid={node.uuid(0)}"] == 1


def test_health_is_shown_where_it_is_known(new_node):
    node = new_node("l40s-x4")
    node.conditions = [
        DeviceCondition("node-a", "gpu-0"),
        DeviceCondition("node-a", "gpu-1", "Unhealthy", "XID 79"),
        DeviceCondition("node-a", "gpu-2", "Unknown"),
    ]
    found = of(node.scrape(), "dra_gpu_healthy")
    assert found == {f"device=gpu-0,uuid={node.uuid(0)}": 1, f"device=gpu-1,uuid={node.uuid(1)}": 0}


def test_old_boards_show_retired_pages_and_boards_without_ecc_show_no_errors(new_node):
    node = new_node("t4-x1")
    node.control.set_gpu(0, retired_double=[1, 2])
    found = node.scrape()
    assert of(found, "dra_gpu_retired_pages_total")[f"device=gpu-0,type=uncorrected,uuid={node.uuid(0)}"] == 2
    assert not of(found, "dra_gpu_remapped_rows_total")
    assert not of(found, "dra_gpu_nvlink_links")
    assert not of(found, "dra_gpu_mig_enabled")


def test_series_are_bounded_by_devices_and_claims(new_node):
    node = new_node("dgx-h100")
    empty = len(node.scrape())
    for minor in range(8):
        node.hold(f"c{minor}", f"gpu-{minor}")
    full = len(node.scrape())
    assert empty < 8 * 80
    assert full - empty <= 8 * 10
