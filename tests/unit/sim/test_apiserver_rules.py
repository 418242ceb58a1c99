"""What the simulated API server refuses, drops and fills in, as the driver that writes to it meets it."""

from __future__ import annotations

from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"


def slice_of(*devices: dict[str, Any], **spec: Any) -> dict[str, Any]:
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
    content = {"driver": "d.example", "nodeName": "n", "pool": pool, "devices": list(devices), **spec}
    return {"metadata": {"name": "s"}, "spec": {k: v for k, v in content.items() if v is not None}}


def refused(server: SimApiServer, body: dict[str, Any]) -> list[str]:
    """Give the fields that the server finds fault with."""
    status, answer = server.request("POST", SLICES, body)
    assert status == 422, answer
    assert answer["reason"] == "Invalid"
    return [cause["field"] for cause in answer["details"]["causes"]]


def gpu(name: str = "gpu-0", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


TAINT = {"key": "k.example/x", "effect": "NoSchedule"}
COUNTERS = {"counterSet": "c", "counters": {"m": {"value": "1"}}}


@pytest.mark.parametrize(
    ("count", "more", "fits"),
    [
        (128, {}, True),
        (129, {}, False),
        (64, {"taints": [TAINT]}, True),
        (65, {"taints": [TAINT]}, False),
        (65, {"consumesCounters": [COUNTERS]}, False),
    ],
)
def test_a_slice_holds_128_devices_or_64_where_one_is_tainted_or_partitioned(
    count: int, more: dict[str, Any], fits: bool
) -> None:
    devices = [gpu(f"gpu-{i}") for i in range(count)]
    devices[0].update(more)
    body = slice_of(*devices)
    if fits:
        assert SimApiServer().request("POST", SLICES, body)[0] == 201
    else:
        assert refused(SimApiServer(), body) == ["spec.devices"]


@pytest.mark.parametrize(
    ("device", "field"),
    [
        (gpu("GPU-0"), "spec.devices[0].name"),
        (gpu(attributes={"v": {"version": "580.65.06"}}), "spec.devices[0].attributes[v].version"),
        (gpu(attributes={"s": {"string": "x" * 65}}), "spec.devices[0].attributes[s].string"),
        (gpu(attributes={"a-b": {"int": 1}}), "spec.devices[0].attributes"),
        (gpu(attributes={"n": {}}), "spec.devices[0].attributes[n]"),
        (gpu(attributes={f"a{i}": {"int": 1} for i in range(33)}), "spec.devices[0]"),
        (gpu(taints=[{"key": "k", "effect": "Never"}]), "spec.devices[0].taints[0].effect"),
        (gpu(taints=[TAINT] * 17), "spec.devices[0].taints"),
        (gpu(nodeName="n"), "spec.devices[0]"),
        (gpu(bindingConditions=["a.example/b"]), "spec.devices[0].bindingFailureConditions"),
    ],
)
def test_a_device_that_breaks_a_rule_is_refused_at_its_field(device: dict[str, Any], field: str) -> None:
    assert refused(SimApiServer(), slice_of(device)) == [field]


def test_counters_and_devices_share_no_slice_since_135() -> None:
    counters = [{"name": "c", "counters": {"m": {"value": "1"}}}]
    body = slice_of(gpu(), sharedCounters=counters)
    assert refused(SimApiServer(version="1.36"), body) == ["spec"]
    assert SimApiServer(version="1.34").request("POST", SLICES, body)[0] == 201


def test_driver_pool_and_node_of_a_slice_never_change() -> None:
    server = SimApiServer()
    server.create(SLICES, slice_of(gpu()))
    patch = {"spec": {"driver": "other.example", "nodeName": "m", "pool": {"name": "q"}}}
    status, answer = server.request("PATCH", f"{SLICES}/s", patch, content_type=MERGE)
    assert status == 422
    fields = [cause["field"] for cause in answer["details"]["causes"]]
    assert fields == ["spec.pool.name", "spec.driver", "spec.nodeName"]


@pytest.mark.parametrize(
    ("gate", "device", "field"),
    [
        ("DRADeviceTaints", gpu(taints=[TAINT]), "taints"),
        ("DRAPartitionableDevices", gpu(consumesCounters=[COUNTERS]), "consumesCounters"),
        ("DRAConsumableCapacity", gpu(allowMultipleAllocations=True), "allowMultipleAllocations"),
        ("DRADeviceBindingConditions", gpu(bindsToNode=True), "bindsToNode"),
    ],
)
def test_a_gate_that_is_off_drops_its_field_without_a_word(
    gate: str, device: dict[str, Any], field: str
) -> None:
    body = slice_of(device)
    kept = SimApiServer().create(SLICES, body)
    dropped = SimApiServer(features={gate: False}).create(SLICES, body)
    assert field in kept["spec"]["devices"][0]
    assert field not in dropped["spec"]["devices"][0]


def test_a_plain_134_cluster_knows_no_taints_although_it_could() -> None:
    body = slice_of(gpu(taints=[TAINT]))
    plain = SimApiServer(version="1.34", gates="default").create(SLICES, body)
    assert "taints" not in plain["spec"]["devices"][0]


def test_a_taint_gets_its_time_from_the_server() -> None:
    made = SimApiServer(clock=lambda: 1_700_000_000.0).create(SLICES, slice_of(gpu(taints=[TAINT])))
    assert made["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2023-11-14T22:13:20Z"


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("1.32", ["v1beta1"]),
        ("1.33", ["v1beta2", "v1beta1", "v1alpha3"]),
        ("1.34", ["v1", "v1beta2", "v1beta1", "v1alpha3"]),
        ("1.37", ["v1", "v1beta2", "v1beta1"]),
    ],
)
def test_each_kubernetes_version_serves_its_versions_of_the_group(version: str, served: list[str]) -> None:
    server = SimApiServer(version=version)
    group = server.request("GET", "/apis/resource.k8s.io")[1]
    found = [v["version"] for v in group["versions"]]
    expected = [v for v in served if v != "v1alpha3" or version in {"1.33", "1.34"}]
    assert found == expected
    assert server.request("GET", "/version")[1]["minor"] == version.split(".")[1]


def test_a_claim_is_defaulted_and_its_spec_never_changes() -> None:
    server = SimApiServer()
    request = {"name": "r", "exactly": {"deviceClassName": "c.example"}}
    claim = {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}
    made = server.create(CLAIMS, claim)
    assert made["spec"]["devices"]["requests"][0]["exactly"]["allocationMode"] == "ExactCount"
    assert made["spec"]["devices"]["requests"][0]["exactly"]["count"] == 1
    changed = {"spec": {"devices": {"requests": []}}}
    status, answer = server.request("PATCH", f"{CLAIMS}/c", changed, content_type=MERGE)
    assert (status, answer["details"]["causes"][0]["field"]) == (422, "spec")


def test_a_selector_that_does_not_compile_is_refused_with_a_caret() -> None:
    selector = {"cel": {"expression": "device.foo"}}
    request = {"name": "r", "exactly": {"deviceClassName": "c.example", "selectors": [selector]}}
    claim = {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}
    status, answer = SimApiServer().request("POST", CLAIMS, claim)
    assert status == 422
    assert "undefined field 'foo'" in answer["message"]
    assert answer["message"].rstrip().endswith("......^")
    assert SimApiServer(cel_check=None).request("POST", CLAIMS, claim)[0] == 201


def allocated(server: SimApiServer) -> None:
    request = {"name": "r", "exactly": {"deviceClassName": "c.example"}}
    server.create(CLAIMS, {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}})
    result = {"request": "r", "driver": "d.example", "pool": "p", "device": "gpu-0"}
    status = {"status": {"allocation": {"devices": {"results": [result]}}}}
    assert server.request("PATCH", f"{CLAIMS}/c/status", status, content_type=MERGE)[0] == 200


def test_an_allocation_cannot_be_changed_only_taken_back() -> None:
    server = SimApiServer()
    allocated(server)
    other = {"request": "r", "driver": "d.example", "pool": "p", "device": "gpu-1"}
    change = {"status": {"allocation": {"devices": {"results": [other]}}}}
    status, answer = server.request("PATCH", f"{CLAIMS}/c/status", change, content_type=MERGE)
    assert (status, answer["details"]["causes"][0]["field"]) == (422, "status.allocation")
    back = {"status": {"allocation": None}}
    assert server.request("PATCH", f"{CLAIMS}/c/status", back, content_type=MERGE)[0] == 200


def test_device_status_belongs_to_an_allocated_device() -> None:
    server = SimApiServer()
    allocated(server)
    wrong = {"status": {"devices": [{"driver": "d.example", "pool": "p", "device": "gpu-9"}]}}
    assert server.request("PATCH", f"{CLAIMS}/c/status", wrong, content_type=MERGE)[0] == 422


def test_the_main_path_of_a_claim_leaves_its_status_alone() -> None:
    server = SimApiServer()
    allocated(server)
    patch = {"metadata": {"labels": {"a": "b"}}, "status": {"allocation": None}}
    _, answer = server.request("PATCH", f"{CLAIMS}/c", patch, content_type=MERGE)
    assert answer["metadata"]["labels"] == {"a": "b"}
    assert answer["status"]["allocation"]


def pod(**resources: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "example.com/i:1", "resources": resources}
    return {"metadata": {"name": "p"}, "spec": {"containers": [container]}}


@pytest.mark.parametrize("limits", [{"nvidia.com/gpu": "0.5"}, {"nvidia.com/gpu": "500m"}])
def test_half_an_extended_resource_is_refused(limits: dict[str, str]) -> None:
    status, answer = SimApiServer().request("POST", PODS, pod(limits=limits))
    assert status == 422
    assert "must be an integer" in answer["message"]


def test_the_request_of_an_extended_resource_follows_its_limit() -> None:
    made = SimApiServer().create(PODS, pod(limits={"nvidia.com/gpu": 1}))
    assert made["spec"]["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "1"}


def test_a_container_cannot_use_a_claim_that_the_pod_does_not_name() -> None:
    status, answer = SimApiServer().request("POST", PODS, pod(claims=[{"name": "x"}]))
    assert status == 422
    assert answer["details"]["causes"][0]["field"] == "spec.containers[0].resources.claims[0]"


def test_a_pod_is_bound_once() -> None:
    server = SimApiServer()
    server.create(PODS, pod())
    binding = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}}
    assert server.request("POST", f"{PODS}/p/binding", binding)[0] == 201
    assert server.request("GET", f"{PODS}/p")[1]["spec"]["nodeName"] == "n"
    assert server.request("POST", f"{PODS}/p/binding", binding)[0] == 409


def test_a_bound_pod_waits_for_its_grace_period_and_an_unbound_one_does_not() -> None:
    server = SimApiServer()
    server.create(PODS, pod())
    server.request("DELETE", f"{PODS}/p")
    assert server.request("GET", f"{PODS}/p")[0] == 404
    bound = pod()
    bound["spec"]["nodeName"] = "n"
    server.create(PODS, bound)
    assert server.request("DELETE", f"{PODS}/p")[1]["metadata"]["deletionGracePeriodSeconds"] == 30
    assert server.request("GET", f"{PODS}/p")[0] == 200
    server.request("DELETE", f"{PODS}/p?gracePeriodSeconds=0")
    assert server.request("GET", f"{PODS}/p")[0] == 404


@pytest.mark.parametrize("selector", ["!!", "!", "!,a"])
def test_a_negation_of_nothing_is_no_label_selector(selector: str) -> None:
    status, answer = SimApiServer().request(
        "GET", f"/api/v1/namespaces/default/pods?labelSelector={selector}"
    )
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert "expected: identifier" in answer["message"]
