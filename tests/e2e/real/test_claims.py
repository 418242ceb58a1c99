"""Claims of many kinds on a real cluster, beyond the examples."""

from __future__ import annotations

import pytest

from tests.e2e.real.cluster import devices_of
from tests.e2e.real.driver import DRIVER
from tests.e2e.real.processes import wait_until

pytestmark = pytest.mark.real


def test_a_claim_that_cannot_be_met_stays_pending_and_the_next_is_served(on):
    ns = on.namespace()
    on.claim(ns, "too-many", count=len(on.devices()) + 1)
    on.pod(ns, "greedy", "too-many")
    on.claim(ns, "one")
    on.pod(ns, "modest", "one")
    on.wait_phase(ns, "modest")
    on.wait_phase(ns, "greedy", "Pending")
    wait_until(
        lambda: any("cannot allocate all claims" in text for text in on.messages(ns, "greedy")),
        seconds=60, what="the scheduler says why",
    )  # fmt: skip
    assert devices_of(on.claims_of(ns)["too-many"]) == set()


def test_a_gpu_in_use_is_given_to_the_waiting_pod_as_soon_as_it_is_free(on):
    ns = on.namespace()
    for name in ("now", "later"):
        on.template(ns, f"all-{name}", allocationMode="All")
        on.pod(ns, name, f"all-{name}", by="resourceClaimTemplateName")
        if name == "now":
            on.wait_phase(ns, "now")
    wait_until(lambda: on.messages(ns, "later"), seconds=60, what="the scheduler says why the pod waits")
    on.wait_phase(ns, "later", "Pending")
    on.delete_pod(ns, "now")
    on.wait_phase(ns, "later")
    assert on.gpu_nodes(ns, "later") == set(range(len(on.devices())))


def test_a_gpu_chosen_by_its_uuid_is_that_gpu(on):
    ns = on.namespace()
    name, device = max(on.devices().items())
    uuid = device["attributes"]["uuid"]["string"]
    on.claim(
        ns, "that-one", selectors=[{"cel": {"expression": f"device.attributes['{DRIVER}'].uuid == '{uuid}'"}}]
    )
    on.pod(ns, "picky", "that-one")
    on.wait_phase(ns, "picky")
    assert on.allocated(ns, "picky") == {name}
    assert on.gpu_nodes(ns, "picky") == {int(name.removeprefix("gpu-"))}


def test_two_claims_of_one_pod_reach_the_containers_that_name_them(on):
    ns = on.namespace()
    on.claim(ns, "one")
    on.claim(ns, "three", count=3)
    container = {"image": "ubuntu:22.04", "command": ["bash", "-c", "trap 'exit 0' TERM; sleep 9999 & wait"]}
    on.pod(
        ns, "both", "one", "three",
        containers=[
            {"name": "small", **container, "resources": {"claims": [{"name": "one"}]}},
            {"name": "large", **container, "resources": {"claims": [{"name": "three"}]}},
            {"name": "none", **container},
        ],
    )  # fmt: skip
    on.wait_phase(ns, "both")
    small = on.gpu_nodes(ns, "both", container="small")
    large = on.gpu_nodes(ns, "both", container="large")
    assert (len(small), len(large)) == (1, 3)
    assert not small & large
    listed = on.run_in(ns, "both", "ls /dev", container="none")
    assert "nvidia" not in listed


def test_the_pods_status_tells_that_its_gpu_is_healthy(on):
    ns = on.namespace()
    on.claim(ns, "one")
    on.pod(ns, "patient", "one")
    on.wait_phase(ns, "patient")

    def health() -> list[str]:
        (container,) = on.read_pod(ns, "patient")["status"]["containerStatuses"]
        listed = container.get("allocatedResourcesStatus", ())
        return [resource.get("health", "") for entry in listed for resource in entry.get("resources", ())]

    wait_until(lambda: health() == ["Healthy"], seconds=60, what="the GPU is healthy in the pod's status")


def test_a_container_that_is_restarted_in_its_pod_has_its_gpu_again(on):
    ns = on.namespace()
    on.claim(ns, "one")
    on.pod(ns, "phoenix", "one", restartPolicy="Always")
    on.wait_phase(ns, "phoenix")
    before = on.gpu_nodes(ns, "phoenix")
    on.run_in(ns, "phoenix", "kill -TERM 1", check=False)

    def restarted() -> bool:
        (container,) = on.read_pod(ns, "phoenix")["status"]["containerStatuses"]
        return container["restartCount"] == 1 and "running" in container["state"]

    wait_until(restarted, seconds=60, what="the container runs again")
    assert on.gpu_nodes(ns, "phoenix") == before


def test_a_wrong_configuration_fails_the_pod_with_an_event_that_says_what_is_wrong(on):
    ns = on.namespace()
    on.create(
        f"/apis/resource.k8s.io/v1/namespaces/{ns}/resourceclaims",
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "odd"},
            "spec": {
                "devices": {
                    "requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}],
                    "config": [
                        {
                            "opaque": {
                                "driver": DRIVER,
                                "parameters": {
                                    "apiVersion": "resource.nvidia.com/v1beta1",
                                    "kind": "GpuConfig",
                                    "shering": {"strategy": "TimeSlicing"},
                                },
                            }
                        }
                    ],
                }
            },
        },
    )
    on.pod(ns, "misled", "odd")
    wait_until(
        lambda: any("shering" in text for text in on.messages(ns, "misled")), seconds=60,
        what="an event of the pod names the unknown field",
    )  # fmt: skip
    assert on.read_pod(ns, "misled")["status"]["phase"] == "Pending"
    # The driver's own event, on the claim, may be written: its role allows that.
    wait_until(
        lambda: any("shering" in text for text in on.messages(ns, "odd")),
        seconds=60,
        what="the claim's event",
    )
