"""Two replicas of `dra fleet` before a real kube-apiserver, of which the leader is stopped and wakes (F44).

Who wrote what is read from the server's audit log. Runs where `KUBEBUILDER_ASSETS` names a directory with etcd and
kube-apiserver (about 15 s), else skips.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.apiserver import RealApi
from tests.contract.holding_proxy import HoldingProxy
from tests.process.fleet_leaders import holder, install_policies, reason, replica, say_of_the_node
from tests.process.harness import Node, wait_until
from tests.real_apiserver import needs_real_apiserver

pytestmark = [pytest.mark.real, needs_real_apiserver]

LEASES = {"group": "coordination.k8s.io", "resources": ["leases"]}
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Request", "resources": [LEASES]}, {"level": "Metadata"}],
}


class AuditedNode(Node):
    """A node whose API server is a real one that writes down every request."""

    def api_server(self, version: str) -> RealApi:
        """Start the API server."""
        policy = self.root / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        return RealApi(
            self.root, f"--audit-policy-file={policy}", f"--audit-log-path={self.root / 'audit.log'}"
        )

    def proxy(self) -> HoldingProxy:
        """Start a way to the server on which requests can be held up."""
        server = self.api.server
        return HoldingProxy(server.port, ca_file=server.ca_file, token=server.token_of("admin"))

    def writes(self) -> list[tuple[str, str, str, int]]:
        """Give who wrote, who had the lease then, the resource and the status, of each write by a replica but of the lease.

        In the order in which the server was done with them.
        """
        leader, found = "", []
        for line in (self.root / "audit.log").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            agent, resource = entry.get("userAgent", ""), entry.get("objectRef", {}).get("resource", "")
            if entry["verb"] in ("get", "list", "watch") or not agent.startswith("dra-fleet"):
                continue
            status = entry["responseStatus"]["code"]
            if resource != "leases":
                found.append((agent.partition("(")[2].rstrip(")"), leader, resource, status))
            elif status < 300:
                leader = entry["requestObject"]["spec"].get("holderIdentity") or ""
        return found

    def stale(self) -> list[tuple[str, str, str, int]]:
        """Give the writes of replicas that did not have the lease."""
        return [write for write in self.writes() if write[0] != write[1]]


@pytest.fixture
def node():
    made = AuditedNode()
    yield made
    made.close()


@pytest.mark.fault("F44")
def test_a_leader_that_is_stopped_and_wakes_changes_nothing_that_another_leader_has_written(node):
    install_policies(node, Path(__file__).parents[2])
    say_of_the_node(node, "Waiting")
    way = node.proxy()
    first = replica(node, "a", f"--kubeconfig={way.write_kubeconfig(node.root / 'held-kubeconfig')}")
    wait_until(lambda: reason(node) == "Waiting", what="a counts the node")
    second = replica(node, "b")
    # It has left the process, but not arrived.
    way.hold(lambda line: line.startswith(("PATCH ", "PUT ")) and "/gpunodepolicies/p/status" in line)
    say_of_the_node(node, "Refused")
    wait_until(way.held.is_set, what="a writes")
    first.pause()
    wait_until(lambda: reason(node) == "Refused", what="b takes over and writes")
    say_of_the_node(node, "Applied")
    wait_until(lambda: reason(node) == "Applied", what="b writes what is new")
    assert holder(node) == "b"
    way.release()
    wait_until(node.stale, what="the held write is answered")
    refused = [("a", "b", "gpunodepolicies", 409)]
    assert node.stale() == refused
    first.resume()
    wait_until(lambda: first.logged("not_leading"), what="a notices")
    say_of_the_node(node, "Refused")
    wait_until(lambda: reason(node) == "Refused", what="b goes on")
    assert node.stale() == refused
    assert len(second.logged("leading")) == 1
    # It sees the change too, and would write, had it the lease.
    assert second.terminate(within_seconds=60) == 0
    wait_until(lambda: holder(node) == "a", what="a takes over again")
    say_of_the_node(node, "Applied")
    wait_until(lambda: reason(node) == "Applied", what="a works again")
    assert node.stale() == refused
    way.close()
