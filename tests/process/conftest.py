"""Nodes for the process tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dra.api.claim import ClaimRef
from tests.process.harness import DRIVER, DaemonProcess, Node, ref_of


@pytest.fixture
def node():
    made = Node()
    yield made
    made.close()


@dataclass(frozen=True, slots=True)
class Running:
    """A node whose daemon runs and is registered; several tests use it, each with claims of its own names."""

    node: Node
    daemon: DaemonProcess
    kubelet: object

    @property
    def connection(self):
        """What the kubelet calls."""
        return self.kubelet.wait_registered(DRIVER, timeout_seconds=60)

    def prepare(self, *claims):
        """Call the driver as the kubelet does; gives the entry of each claim, in order."""
        return call(self.connection.prepare, claims)

    def unprepare(self, *claims):
        """The same for unprepare; gives the errors."""
        return [entry.error for entry in call(self.connection.unprepare, claims)]


def call(method, claims):
    """Make one call for claims of the API; gives the entries of the answer."""
    answer = method([ref_of(claim) for claim in claims]).claims
    assert len(answer) == len(claims)
    return [answer[claim["metadata"]["uid"]] for claim in claims]


# What happens every half minute or later happens soon.
SOON = {
    "dra.prepare.janitor:Janitor.interval_seconds": 0.5,
    "dra.prepare.janitor:Janitor.confirm_seconds": 0.5,
}


@pytest.fixture(scope="module")
def running():
    """One node for the tests of a module."""
    node = Node()
    kubelet = node.kubelet()
    daemon = node.daemon("--inventory-interval=1", periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    yield Running(node, daemon, kubelet)
    assert daemon.terminate(within_seconds=45) == 0
    node.close()


@pytest.fixture
def clean(running):
    """The shared node. What a test leaves behind is its own error, and not the next one's."""
    yield running
    node = running.node
    node.api.faults.clear()
    node.machine.control.clear()
    left = (node.records(), node.cdi_files(), node.leftovers())
    refs = [ClaimRef("default", "left", uid) for uid in left[0] | left[1]]
    if refs:
        running.connection.unprepare(refs)
    assert left == (set(), set(), [])
