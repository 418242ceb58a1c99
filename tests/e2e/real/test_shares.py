"""Shares of cards, allocated by the real scheduler and prepared for the real kubelet."""

from __future__ import annotations

import pytest

from dra.api.fractions import Ask
from tests.e2e.real.driver import SHARED
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real

FIFTH = Ask(20, 100)


@pytest.fixture
def shared(node_cluster):
    node_cluster.use_driver(SHARED)
    yield node_cluster
    node_cluster.leave_nothing()


def fraction(cluster, namespace, name, ask=FIFTH):
    """Create what webhook and fleet make of a fraction: the template, and a pod that names it."""
    exactly = ask.claim_spec()["devices"]["requests"][0]["exactly"]
    cluster.template(namespace, ask.template_name, **exactly)
    cluster.pod(namespace, name, ask.template_name, by="resourceClaimTemplateName")


def results(cluster, namespace):
    return [
        result
        for claim in cluster.claims_of(namespace).values()
        for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
    ]


def test_five_fifths_of_five_namespaces_fill_one_card_and_the_sixth_lies_on_the_next(shared):
    spaces = [shared.namespace() for _ in range(5)]
    for space in spaces:
        fraction(shared, space, "fifth")
    for space in spaces:
        shared.wait_phase(space, "fifth")
    held = [result for space in spaces for result in results(shared, space)]
    (card,) = {result["device"] for result in held}
    assert len({result["shareID"] for result in held}) == 5
    assert sum(int(result["consumedCapacity"]["shares"]) for result in held) == 100
    total = shared.devices()[card]["attributes"]["gpudra.dev/memoryPerShare"]["int"] * 100 >> 20
    for space in spaces:
        told = shared.run_in(space, "fifth", "echo $GPUDRA_SHARE_PERCENT $GPUDRA_SHARE_MEMORY_MIB")
        percent, mib = (int(word) for word in told.split())
        assert percent == 20
        assert 0 <= total // 5 - mib <= 1
        assert shared.gpu_nodes(space, "fifth") == {int(card.removeprefix("gpu-"))}
    late = shared.namespace()
    fraction(shared, late, "sixth")
    shared.wait_phase(late, "sixth")
    (other,) = {result["device"] for result in results(shared, late)}
    assert other != card
    # No card is whole: who wants one waits.
    resources = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "main", "image": "ubuntu:22.04", "command": ["bash"], "resources": resources}
    shared.pod(late, "whole", containers=[container])
    wait_until(
        lambda: shared.messages(late, "whole"), seconds=60, what="the scheduler says why the pod waits"
    )
    shared.wait_phase(late, "whole", "Pending")
