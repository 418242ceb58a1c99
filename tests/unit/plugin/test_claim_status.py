"""What the API's claims say about the devices that they got."""

from __future__ import annotations

import copy
import time
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.health.feed import DeviceCondition, HealthFeed
from dra.inventory.live import LiveInventory
from dra.inventory.model import Inventory, VfioFunction
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.plugin.claim_status import ClaimStatusWriter, describe_device, reason_of
from dra.prepare.record import JournalEntry, Record
from dra.prepare.store import RecordStore
from dra.sim.apiserver import SimApiServer
from dra.values import PciAddress
from tests.unit.health.health_world import gpu, inventory, mig

DRIVER, NODE = "gpu.nvidia.com", "node-a"
BASE = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SHARE = "9c0f3b1a-0000-4000-8000-000000000001"


class Bench:
    """An API server with claims, and a writer whose clock the test turns."""

    def __init__(self, tmp_path, **options):
        self.api = SimApiServer(**options).start()
        self.client = KubeClient(
            Connection(KubeOptions(kubeconfig=str(self.api.write_kubeconfig(tmp_path / "kubeconfig")))),
            field_manager=DRIVER,
        )
        self.now = 1_767_225_600.0
        self.records, self.conditions = [], []
        self.inventory = inventory(gpu(0), gpu(1, mig_enabled=True, mig_devices=(mig(0, gi=3), mig(1, gi=4))))
        self.writer = self.new_writer()

    def new_writer(self):
        return ClaimStatusWriter(
            self.client, driver=DRIVER, boot_id="boot",
            records=lambda: self.records, conditions=lambda: self.conditions, inventory=lambda: self.inventory,
            wall=lambda: self.now, clock=lambda: self.now,
        )  # fmt: skip

    def close(self):
        self.client.close()
        self.api.stop()

    def claim(self, name, *devices, share="", others=()):
        """Create an allocated claim, and the record of it."""
        made = self.api.create(
            BASE,
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": [
                    {"name": f"r{index}", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
                    for index in range(len(devices) + len(others))
                ]}},
            },
        )  # fmt: skip
        extra = {"shareID": share} if share else {}
        results = [
            {"request": f"r{index}", "driver": DRIVER, "pool": NODE, "device": device, **extra}
            for index, device in enumerate(devices)
        ]
        results += [
            {"request": f"r{len(devices) + index}", "driver": driver, "pool": "p", "device": "d"}
            for index, driver in enumerate(others)
        ]
        made["status"] = {"allocation": {"devices": {"results": results}}}
        status, stored = self.api.request("PUT", f"{BASE}/{name}/status", made)
        assert status == 200, stored
        ref = ClaimRef("default", name, stored["metadata"]["uid"])
        record = Record(
            ref, "prepared", "boot",
            results=tuple(
                AllocatedDevice(f"r{index}", DRIVER, NODE, device, share_id=share or None)
                for index, device in enumerate(devices)
            ),
        )  # fmt: skip
        self.records.append(record)
        return record

    def step(self, times=2):
        for _ in range(times):
            self.now += 1
            self.writer.step()

    def stored(self, name):
        return self.api.request("GET", f"{BASE}/{name}")[1]

    def devices(self, name):
        return {entry["device"]: entry for entry in self.stored(name)["status"].get("devices") or ()}

    def writes(self, name):
        return int(self.stored(name)["metadata"]["resourceVersion"])


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def told(entry):
    """Conditions without messages: {type: (status, reason)}."""
    return {each["type"]: (each["status"], each["reason"]) for each in entry["conditions"]}


def test_a_claim_says_which_hardware_it_got_and_that_it_is_well(bench):
    bench.claim("c", "gpu-0", "gpu-1-mig-1g10gb-19-1")
    bench.conditions = [DeviceCondition(NODE, "gpu-0"), DeviceCondition(NODE, "gpu-1-mig-1g10gb-19-1")]
    bench.step(1)
    assert bench.devices("c") == {}  # the moment of the prepare belongs to the calls
    bench.step(1)
    found = bench.devices("c")
    assert found["gpu-0"]["data"] == {"uuid": "GPU-0", "pciBusID": "0000:10:00.0"}
    assert found["gpu-1-mig-1g10gb-19-1"]["data"] == {
        "uuid": "GPU-1", "pciBusID": "0000:11:00.0", "migUUID": "MIG-4",
    }  # fmt: skip
    assert told(found["gpu-0"]) == {"Ready": ("True", "Prepared"), "Healthy": ("True", "Healthy")}
    assert found["gpu-0"]["conditions"][0]["lastTransitionTime"] == "2026-01-01T00:00:02Z"
    managers = {entry["manager"]: entry for entry in bench.stored("c")["metadata"]["managedFields"]}
    assert (managers[DRIVER]["operation"], managers[DRIVER]["subresource"]) == ("Apply", "status")


def test_a_gpu_that_is_passed_through_is_told_by_its_place_and_its_group():
    function = VfioFunction(3, PciAddress(0, 0x13, 0, 0), "vfio-pci", 42, 0x10DE, 0x2330, "H100", 1 << 37)
    result = AllocatedDevice("r", DRIVER, NODE, "gpu-vfio-3")
    record = Record(ClaimRef("default", "c", "u"), "prepared", "boot", results=(result,))
    found = describe_device(result, record, Inventory(vfio=(function,)))
    assert found == {"pciBusID": "0000:13:00.0", "iommuGroup": 42}


def test_a_partition_that_was_just_made_is_named_as_the_record_has_it(bench):
    record = bench.claim("c", "gpu-1-mig-1g10gb-19-6")
    entry = JournalEntry("mig-device", {"device": "gpu-1-mig-1g10gb-19-6"}, "applied", {"uuid": "MIG-new"})
    bench.records = [Record(**{**{f: getattr(record, f) for f in record.__slots__}, "journal": (entry,)})]
    bench.step()
    assert bench.devices("c")["gpu-1-mig-1g10gb-19-6"]["data"]["migUUID"] == "MIG-new"


def test_illness_shows_with_its_reason_and_goes_and_only_that_condition_moves(bench):
    bench.claim("c", "gpu-0")
    bench.conditions = [DeviceCondition(NODE, "gpu-0")]
    bench.step()
    before = bench.devices("c")["gpu-0"]["conditions"]
    bench.conditions = [
        DeviceCondition(NODE, "gpu-0", "Unhealthy", "XID 79 (the GPU has fallen off the bus).")
    ]
    bench.now += 100
    bench.step()
    ready, healthy = bench.devices("c")["gpu-0"]["conditions"]
    assert ready == before[0]
    assert (healthy["status"], healthy["reason"]) == ("False", "Xid79")
    assert healthy["message"].startswith("XID 79")
    assert healthy["lastTransitionTime"] > before[1]["lastTransitionTime"]
    since = healthy["lastTransitionTime"]
    bench.conditions = [DeviceCondition(NODE, "gpu-0", "Unhealthy", "lost")]
    bench.step()
    healthy = bench.devices("c")["gpu-0"]["conditions"][1]
    assert (healthy["reason"], healthy["lastTransitionTime"]) == ("Unhealthy", since)
    bench.conditions = [DeviceCondition(NODE, "gpu-0", "Unknown", "nobody listens")]
    bench.step()
    assert told(bench.devices("c")["gpu-0"])["Healthy"] == ("Unknown", "Unknown")


def test_nothing_is_written_while_nothing_changes_also_after_a_restart(bench):
    bench.claim("c", "gpu-0")
    bench.conditions = [DeviceCondition(NODE, "gpu-0")]
    bench.step()
    before = bench.writes("c")
    bench.step(20)
    bench.writer = bench.new_writer()
    bench.now += 1000
    bench.step(5)
    assert bench.writes("c") == before


def test_shares_of_a_device_are_told_apart_and_entries_of_others_stay(bench):
    bench.claim("c", "gpu-0", share=SHARE, others=("net.example.com",))
    claim = bench.stored("c")
    claim["status"]["devices"] = [{"driver": "net.example.com", "pool": "p", "device": "d", "data": {"x": 1}}]
    assert bench.api.request("PUT", f"{BASE}/c/status", claim)[0] == 200
    bench.step()
    found = bench.devices("c")
    assert found["gpu-0"]["shareID"] == SHARE
    assert found["d"]["data"] == {"x": 1}


def test_entries_go_some_time_after_the_claim_was_unprepared(bench):
    bench.claim("c", "gpu-0")
    bench.step()
    assert bench.devices("c")
    bench.records = []
    bench.step(5)
    assert bench.devices("c")
    bench.step(10)
    assert bench.devices("c") == {}
    assert not bench.writer._claims


def test_entries_go_also_where_the_answer_to_their_write_was_lost(bench):
    bench.claim("c", "gpu-0")
    bench.api.faults.set("drop", method="PATCH", path="/status", times=1)
    bench.step()
    assert bench.devices("c")  # it arrived, but the writer does not know
    bench.records = []
    bench.step(20)
    assert bench.devices("c") == {}
    assert not bench.writer._claims


def test_a_claim_that_is_gone_or_was_replaced_is_left_alone(bench):
    record = bench.claim("c", "gpu-0")
    bench.claim("d", "gpu-0")
    assert bench.api.request("DELETE", f"{BASE}/c")[0] == 200
    bench.api.request("DELETE", f"{BASE}/d")
    bench.records = [bench.records[1], record]
    again = copy.copy(bench.records[0])
    bench.claim("d", "gpu-0")
    bench.records = [again, record]
    bench.step(5)
    assert bench.devices("d") == {}
    # Others are served.
    bench.claim("e", "gpu-0")
    bench.step()
    assert bench.devices("e")


def test_without_the_right_to_write_there_is_one_warning_and_peace(bench):
    fault = bench.api.faults.set("error", code=403, method="PATCH", path="/status")
    for name in "abc":
        bench.claim(name, "gpu-0")
    with capture_logs() as logs:
        bench.step(30)
        assert fault.hits == 1
        bench.now += 100
        bench.step()
        assert fault.hits == 2
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["claim_status_forbidden"]
    bench.api.faults.clear()
    bench.now += 200
    bench.step()
    assert all(bench.devices(name) for name in "abc")
    # The right is taken away once more: that is news.
    bench.api.faults.set("error", code=403, method="PATCH", path="/status")
    bench.conditions = [DeviceCondition(NODE, "gpu-0", "Unhealthy", "XID 48")]
    with capture_logs() as logs:
        bench.step()
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["claim_status_forbidden"]


def test_an_api_that_does_not_answer_is_tried_again_ever_later(bench):
    fault = bench.api.faults.set("error", code=500, method="PATCH", path="/status")
    bench.claim("c", "gpu-0")
    bench.step(100)
    assert 3 <= fault.hits <= 8
    bench.api.faults.clear()
    bench.now += 61
    bench.step()
    assert bench.devices("c")


def test_a_server_that_does_not_keep_device_status_is_left_in_peace(tmp_path):
    bench = Bench(tmp_path, version="1.34", features={"DRAResourceClaimDeviceStatus": False})
    try:
        fault = bench.api.faults.set("delay", seconds=0.0, method="PATCH", path="/status")
        bench.claim("c", "gpu-0")
        bench.claim("d", "gpu-0")
        bench.step(60)
        assert fault.hits == 1
        assert bench.devices("c") == {}
    finally:
        bench.close()


def test_a_refusal_is_not_repeated_until_something_changes(bench):
    fault = bench.api.faults.set(
        "error", code=422, method="PATCH", path="/claims/c/status|resourceclaims/c/status"
    )
    bench.claim("c", "gpu-0")
    bench.claim("d", "gpu-0")
    bench.step(10)
    assert fault.hits == 1
    assert bench.devices("d")
    bench.conditions = [DeviceCondition(NODE, "gpu-0", "Unhealthy", "XID 48")]
    bench.step()
    assert fault.hits == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [("XID 79 (x)", "Xid79"), ("XID 31; NVML asks", "Xid31"), ("XID", "Unhealthy"), ("too hot", "Unhealthy"), ("", "Unhealthy")],
)  # fmt: skip
def test_reasons_are_words_for_programs(message, reason):
    assert reason_of(message) == reason


class Followed:
    """What a writer follows: everything in it is real, and nothing of it is looked at without being told."""

    def __init__(self, bench, folder):
        self.bench = bench
        self.store = RecordStore(folder / "claims", report=lambda _damage: None, salvage=lambda _uid: ())
        self.store.open()
        self.feed = HealthFeed()
        self.feed.publish((DeviceCondition(NODE, "gpu-0"),))
        self.live = LiveInventory(lambda: bench.inventory, interval_seconds=3600)
        self.live.start()
        self.writer = ClaimStatusWriter(
            bench.client, driver=DRIVER, boot_id="boot",
            records=self.store.records, conditions=lambda: self.feed.current()[1],
            inventory=lambda: self.live.current,
            settle_seconds=0.02, fallback_seconds=3600, linger_seconds=0.2,
        )  # fmt: skip
        assert self.live.wait_for_first(timeout_seconds=60)
        self.writer.follow(inventory=self.live, feed=self.feed, store=self.store)
        self.writer.start()

    def close(self):
        self.writer.stop(timeout_seconds=60)
        self.live.stop()

    def until(self, holds):
        end = time.monotonic() + 60
        while not holds(self.bench.devices("c")):
            assert time.monotonic() < end, self.bench.devices("c")
            time.sleep(0.01)


@pytest.fixture
def followed(bench, tmp_path):
    made = Followed(bench, tmp_path)
    yield made
    made.close()


def test_each_change_is_written_soon_although_nothing_is_polled(bench, followed):
    record = bench.claim("c", "gpu-0")
    followed.store.put(record, fsync=False)
    followed.until(lambda devices: devices and told(devices["gpu-0"])["Healthy"] == ("True", "Healthy"))
    followed.feed.publish((DeviceCondition(NODE, "gpu-0", "Unhealthy", "XID 79, it has fallen off the bus"),))
    followed.until(lambda devices: told(devices["gpu-0"])["Healthy"] == ("False", "Xid79"))
    bench.inventory = inventory(replace(gpu(0), uuid="GPU-other"))
    followed.live.rescan()
    followed.until(lambda devices: devices["gpu-0"]["data"]["uuid"] == "GPU-other")
    # Released: its entries go when they have lingered, which nobody tells.
    followed.store.remove(record.ref.uid, fsync=False)
    followed.until(lambda devices: not devices)


def test_what_another_process_wrote_is_written_too(bench, followed, tmp_path):
    other = RecordStore(tmp_path / "claims", report=lambda _damage: None, salvage=lambda _uid: ())
    other.open()
    record = bench.claim("c", "gpu-0")
    other.put(record, fsync=False)
    followed.store.refresh()
    followed.until(lambda devices: "gpu-0" in devices)
    other.remove(record.ref.uid, fsync=False)
    followed.store.refresh(fully=True)
    followed.until(lambda devices: not devices)


def test_a_claim_of_which_nothing_was_told_is_found_by_the_regular_look(bench, followed):
    followed.writer.stop(timeout_seconds=60)
    record = bench.claim("c", "gpu-0")
    writer = ClaimStatusWriter(
        bench.client, driver=DRIVER, boot_id="boot",
        records=lambda: [record], conditions=lambda: (), inventory=lambda: bench.inventory,
        settle_seconds=0.02, fallback_seconds=0.05,
    )  # fmt: skip
    writer.start()
    try:
        followed.until(lambda devices: "gpu-0" in devices)
    finally:
        writer.stop(timeout_seconds=60)
