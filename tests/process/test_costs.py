"""What the daemon takes of the node and of the API server: counts that hold on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.harness import DRIVER, NODE, RESOURCE_API, Node, ref_of
from tests.process.invariants import Vitals

# Twenty-five of its own (four watch the GPUs and the claims' status, one asks for policies) and of gRPC's; a pool's thread goes after ten idle
# seconds.
MOST_THREADS_AFTER_ONE_CLAIM_AT_A_TIME = 31
# Discovery, the version, policies, the Node, and the slices for the publisher and its watch.
MOST_READS_OF_A_START = 14


@pytest.fixture(scope="module")
def worked():
    """A daemon that prepared five claims one after the other and unprepared them; with the requests of its start, how many
    slices it published, and the requests of each call.
    """
    node = Node()
    kubelet, daemon = node.kubelet(), node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    published = len(node.wait_published())
    requests, costs = node.api.requests, []
    started = [entry for entry in requests.all() if entry.user_agent == f"dra/{DRIVER}"]

    def asked(call, claim):
        requests.clear()
        (entry,) = call([ref_of(claim)]).claims.values()
        assert entry.error == ""
        return [(entry.method, entry.target) for entry in requests.find("*", "resourceclaims")]

    for number in range(5):
        claim = node.claim(f"c{number}", f"gpu-{number}")
        costs.append((asked(connection.prepare, claim), asked(connection.unprepare, claim)))
    yield daemon, costs, (started, published)
    node.close()


def test_a_start_is_one_write_a_slice_one_trial_and_few_reads_of_this_node(worked):
    _, _, (started, published) = worked
    writes = [entry for entry in started if entry.method != "GET"]
    assert len(writes) == published + 1
    assert {(entry.method, entry.path) for entry in writes} == {("POST", f"{RESOURCE_API}/resourceslices")}
    assert [entry for entry in writes if "dryRun=All" in entry.target] == writes[:1]
    reads = [entry for entry in started if entry.method == "GET" and not entry.watch]
    assert len(reads) <= MOST_READS_OF_A_START
    # Nothing of it grows with the cluster.
    of_all = [entry.target for entry in reads if entry.path.endswith(("/nodes", "/resourceslices", "/pods"))]
    assert [target for target in of_all if f"spec.nodeName%3D{NODE}" not in target] == []


def test_a_prepare_is_one_request_for_its_claim_and_an_unprepare_none(worked):
    _, costs, _ = worked
    base = f"{RESOURCE_API}/namespaces/default/resourceclaims"
    assert costs == [([("GET", f"{base}/c{number}")], []) for number in range(5)]


def test_what_only_configurations_and_the_command_line_need_is_not_loaded(worked):
    """Seen in the process itself: the shared objects that it has mapped."""
    daemon, _, _ = worked
    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "cygrpc" in mapped
    assert "_pydantic_core" not in mapped


def test_one_claim_at_a_time_needs_few_threads(worked):
    daemon, _, _ = worked
    assert Vitals.of(daemon.process.pid).threads <= MOST_THREADS_AFTER_ONE_CLAIM_AT_A_TIME
