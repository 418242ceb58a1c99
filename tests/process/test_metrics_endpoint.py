"""The metrics of a daemon that runs: over HTTP, while claims come and go."""

from __future__ import annotations

import os
import socket
import threading
import urllib.error
import urllib.request

import pytest

from tests.process.harness import DRIVER, Node, ref_of, wait_until

CYCLES = 500 if os.environ.get("DRA_TEST_SLOW") else 15
# What the process may have more of after the cycles: a page of metrics grows by the series of what was done.
MORE_MEMORY = 1.05 if os.environ.get("DRA_TEST_SLOW") else 1.2


class Scraped:
    """A node whose daemon serves metrics on a port of its own choice."""

    def __init__(self) -> None:
        self.node = Node()
        self.kubelet = self.node.kubelet()
        self.daemon = self.node.daemon(
            "--http-endpoint=127.0.0.1:0",
            "--metrics-interval=0",
            # It asks the API by itself every half minute.
            periods={"dra.prepare.janitor:Janitor.interval_seconds": 3600.0},
        )
        self.connection = self.kubelet.wait_registered(DRIVER, timeout_seconds=60)
        self.node.wait_published()
        (bound,) = wait_until(lambda: self.daemon.logged("http_endpoint_bound"), what="the endpoint is bound")
        self.port = bound["port"]

    def get(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def values(self, family: str) -> dict[str, float]:
        """The series of one family by their labels."""
        lines = (line for line in self.get().splitlines() if line.startswith((family + "{", family + " ")))
        return {
            line.rpartition(" ")[0].removeprefix(family): float(line.rpartition(" ")[2]) for line in lines
        }


@pytest.fixture(scope="module")
def scraped():
    made = Scraped()
    yield made
    assert made.daemon.terminate(within_seconds=10) == 0
    made.node.close()


def test_the_labels_of_a_claim_are_there_right_after_prepare_and_gone_after_unprepare(scraped):
    claim = scraped.node.claim("labelled", "gpu-3", pods=("trainer",))
    assert not scraped.values("dra_claim_device_info")
    before = scraped.values("nvidia_dra_requests_total")
    scraped.connection.prepare([ref_of(claim)])
    (labels,) = scraped.values("dra_claim_device_info")
    uuid = next(slot.uuid for slot in scraped.node.machine.profile.gpus if slot.minor == 3)
    for pair in (
        'namespace="default"', 'claim="labelled"', 'pod="trainer"', 'request="r0"', 'device="gpu-3"', f'uuid="{uuid}"',
        f'claim_uid="{claim["metadata"]["uid"]}"',
    ):  # fmt: skip
        assert pair in labels
    assert len(scraped.values("dra_claim_utilization_ratio")) == 1
    prepared = f'{{device_type="gpu",driver="{DRIVER}",node="node-a"}}'
    assert scraped.values("nvidia_dra_prepared_devices")[prepared] == 1
    scraped.connection.unprepare([ref_of(claim)])
    assert not scraped.values("dra_claim_device_info")
    assert not scraped.values("dra_claim_utilization_ratio")
    assert scraped.values("nvidia_dra_prepared_devices")[prepared] == 0
    after = scraped.values("nvidia_dra_requests_total")
    assert {key: after[key] - before[key] for key in after} == dict.fromkeys(after, 1)
    steps = scraped.values("dra_node_prepare_step_seconds_count")
    assert {key.split('"')[1] for key in steps} == {"api", "lock", "plan", "render", "apply"}


def test_a_claim_that_fails_is_counted_by_code_and_is_no_request_that_succeeded(scraped):
    claim = scraped.node.claim("nowhere", "gpu-77")
    before = scraped.values("nvidia_dra_requests_total")
    entry = scraped.connection.prepare([ref_of(claim)]).claims[claim["metadata"]["uid"]]
    code = entry.error.partition(":")[0]
    assert code.startswith("DRA-")
    assert scraped.values("dra_node_claim_errors_total") == {f'{{code="{code}",operation="prepare"}}': 1}
    assert scraped.values("nvidia_dra_node_prepare_errors_total") == {
        f'{{driver="{DRIVER}",error_type="prepare_devices"}}': 1
    }
    assert scraped.values("nvidia_dra_requests_total") == before


def test_health_pages_say_whether_it_lives_and_is_ready(scraped):
    assert scraped.get("/healthz") == "ok\n"
    wait_until(lambda: scraped.values("dra_node_pool_ready")[""] == 1, what="the pool is ready")
    assert scraped.get("/readyz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as found:
        scraped.get("/debug/pprof/heap")
    assert found.value.code == 404


def test_scrapes_ask_the_api_nothing(scraped):
    claim = scraped.node.claim("quiet", "gpu-0")
    scraped.connection.prepare([ref_of(claim)])
    # What the claim got is written into its status a moment later, in the background.
    wait_until(
        lambda: [e for e in scraped.daemon.logged("claim_status_written") if e["claim"] == "default/quiet"],
        what="the claim's status is written",
    )
    requests = scraped.node.api.requests
    requests.clear()
    for _ in range(3):
        scraped.get()
    asked = [each.target for kind in ("resourceclaims", "pods") for each in requests.find("GET", kind)]
    scraped.connection.unprepare([ref_of(claim)])
    assert asked == []


def test_cycles_of_claims_with_scrapes_and_slow_clients_leave_nothing_behind(scraped):
    """No growth of descriptors, threads or memory; DRA_TEST_SLOW=1 makes 500 cycles and asks for 5 %."""
    slow = [socket.create_connection(("127.0.0.1", scraped.port), timeout=60) for _ in range(5)]
    claims = [scraped.node.claim(f"cycle-{n}", f"gpu-{n}") for n in range(4)]

    def cycle(number: int) -> None:
        ref = ref_of(claims[number % 4])
        for call in (scraped.connection.prepare, scraped.connection.unprepare):
            assert call([ref]).claims[ref.uid].error == ""
            scraped.get()

    def vitals() -> dict[str, float]:
        names = ("process_open_fds", "process_threads", "process_resident_memory_bytes")
        page = scraped.get().splitlines()
        return {
            name: float(next(line for line in page if line.startswith(name)).split()[1]) for name in names
        }

    for number in range(20 if CYCLES > 100 else 8):
        cycle(number)
    for client in slow:
        client.close()
    before = vitals()
    for number in range(CYCLES):
        cycle(number)
    askers = [threading.Thread(target=scraped.get) for _ in range(6)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    # A few come and go with the kubelet's connections; a leak would be one a cycle.
    wait_until(lambda: vitals()["process_threads"] <= before["process_threads"] + 3, what="threads went")
    wait_until(
        lambda: vitals()["process_open_fds"] <= before["process_open_fds"] + 3, what="descriptors went"
    )
    after = vitals()["process_resident_memory_bytes"]
    assert after <= before["process_resident_memory_bytes"] * MORE_MEMORY


@pytest.mark.fault("F33")
def test_xids_and_what_they_mean_for_the_device_are_series(scraped):
    control, slot = scraped.node.machine.control, scraped.node.machine.profile.gpus[6]
    name = f'device="gpu-{slot.minor}",'
    watched = scraped.values("dra_gpu_health_watched")
    assert len(watched) == 8
    wait_until(lambda: set(scraped.values("dra_gpu_health_watched").values()) == {1}, what="GPUs are watched")
    control.push_xid(slot.minor, 48)
    found = wait_until(
        lambda: {k: v for k, v in scraped.values("dra_gpu_xid_errors_total").items() if name in k},
        what="the XID",
    )
    ((labels, count),) = found.items()
    assert 'xid="48"' in labels
    assert count == 1
    wait_until(
        lambda: any(name in key and 'key="xid"' in key for key in scraped.values("dra_gpu_condition")),
        what="the condition",
    )
    wait_until(
        lambda: [v for key, v in scraped.values("dra_gpu_healthy").items() if name in key] == [0],
        what="the device is shown as ill",
    )
