"""Reading a ResourceClaim as one driver sees it."""

from __future__ import annotations

import pytest

from dra.api.claim import (
    AllocatedDevice,
    ClaimRef,
    Consumer,
    OpaqueConfig,
    admit_claim,
    claim_not_found,
    parse_claim,
)
from dra.errors import ClaimError, ConfigError
from dra.values import Quantity

DRIVER = "gpu.nvidia.com"
UID = "11111111-1111-4111-8111-111111111111"
REF = ClaimRef("default", "one", UID)


def make(*, results=None, config=None, reserved=None, **status):
    allocation = {"devices": {"results": results, "config": config}}
    return {
        "metadata": {"namespace": "default", "name": "one", "uid": UID},
        "status": {"allocation": allocation, "reservedFor": reserved, **status},
    }


def entry(**changes):
    return {"request": "gpu", "driver": DRIVER, "pool": "node-a", "device": "gpu-0", **changes}


def config(**changes):
    opaque = {"driver": DRIVER, "parameters": {"kind": "GpuConfig"}}
    return {"source": "FromClaim", "requests": ["gpu"], "opaque": opaque, **changes}


def test_results_and_configs_of_other_drivers_are_left_out():
    other = {"driver": "nic.example.com", "parameters": {}}
    view = parse_claim(
        make(
            results=[entry(), entry(driver="nic.example.com"), entry(device="gpu-1")],
            config=[config(), config(opaque=other, source="Strange")],
            reserved=[{"resource": "pods", "name": "a", "uid": "u"}],
        ),
        driver=DRIVER,
    )
    assert view.ref == REF
    assert [r.device for r in view.results] == ["gpu-0", "gpu-1"]
    assert view.configs == (OpaqueConfig("FromClaim", ("gpu",), DRIVER, {"kind": "GpuConfig"}),)
    assert view.reserved_for == (Consumer("pods", "a", "u"),)


def test_all_fields_of_a_result_are_read():
    full = entry(
        request="gpu/h100", shareID="s", adminAccess=True, consumedCapacity={"memory": "8Gi", "shares": 1}
    )
    view = parse_claim(make(results=[full]), driver=DRIVER)
    assert view.results == (
        AllocatedDevice(
            "gpu/h100", DRIVER, "node-a", "gpu-0", "s", True,
            {"memory": Quantity.parse("8Gi"), "shares": Quantity.of(1)},
        ),
    )  # fmt: skip
    assert view.results[0].request_name == "gpu"


def test_null_and_missing_mean_the_same():
    nulls = entry(shareID=None, adminAccess=None, consumedCapacity=None)
    assert parse_claim(make(results=[nulls]), driver=DRIVER).results == (
        AllocatedDevice("gpu", DRIVER, "node-a", "gpu-0"),
    )
    view = parse_claim({"metadata": None, "status": None}, driver=DRIVER)
    assert not view.allocated
    assert view.results == ()


def test_an_allocation_without_devices_is_an_allocation():
    view = parse_claim({"status": {"allocation": {}}}, driver=DRIVER)
    assert view.allocated


def test_a_claim_being_deleted_and_its_node_selector_are_seen():
    claim = make()
    claim["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    claim["status"]["allocation"]["nodeSelector"] = {"nodeSelectorTerms": []}
    view = parse_claim(claim, driver=DRIVER)
    assert view.deleting
    assert view.node_selector == {"nodeSelectorTerms": []}


@pytest.mark.parametrize(
    ("claim", "path"),
    [
        ([], "the claim"),
        ({"metadata": 3}, "metadata"),
        ({"metadata": {"uid": 3}}, "metadata.uid"),
        ({"status": "x"}, "status"),
        ({"status": {"allocation": []}}, "status.allocation"),
        (make(results={}), "status.allocation.devices.results"),
        (make(results=[None, 4]), "status.allocation.devices.results[1]"),
        (make(results=[entry(device=7)]), "status.allocation.devices.results[0].device"),
        (make(results=[entry(adminAccess="yes")]), "status.allocation.devices.results[0].adminAccess"),
        (
            make(results=[entry(consumedCapacity={"memory": "much"})]),
            "status.allocation.devices.results[0].consumedCapacity[memory]",
        ),
        (make(config=[config(requests=[1])]), "status.allocation.devices.config[0].requests[0]"),
        (make(reserved=["pod"]), "status.reservedFor[0]"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(claim, path):
    with pytest.raises(ClaimError) as caught:
        parse_claim(claim, driver=DRIVER)
    assert caught.value.code == "DRA-CLAIM-MALFORMED"
    assert caught.value.message.startswith(f"{path} is not ")


def test_a_configuration_that_is_not_opaque_is_refused():
    with pytest.raises(ConfigError) as caught:
        parse_claim(make(config=[{"source": "FromClass"}]), driver=DRIVER)
    assert caught.value.code == "DRA-CONFIG-NOT-OPAQUE"


def test_a_configuration_of_unknown_source_is_refused():
    with pytest.raises(ConfigError) as caught:
        parse_claim(make(config=[config(source="FromAbove")]), driver=DRIVER)
    assert "FromAbove" in str(caught.value)


RESERVED = [{"resource": "pods", "name": "a", "uid": "u"}]


@pytest.mark.parametrize(
    ("claim", "ref", "code"),
    [
        (make(results=[entry()], reserved=RESERVED), REF, None),
        (make(results=[], reserved=[{"resource": "podgroups", "name": "g", "uid": "u"}]), REF, None),
        (
            make(results=[entry()], reserved=RESERVED),
            ClaimRef("default", "one", "other"),
            "DRA-CLAIM-UID-MISMATCH",
        ),
        (
            {"metadata": make()["metadata"], "status": {"reservedFor": RESERVED}},
            REF,
            "DRA-CLAIM-NOT-ALLOCATED",
        ),
        (make(results=[entry()]), REF, "DRA-CLAIM-NOT-RESERVED"),
        (make(results=[entry(pool="node-b")], reserved=RESERVED), REF, "DRA-CLAIM-POOL-FOREIGN"),
    ],
)
def test_a_claim_is_admitted_or_refused_with_its_code(claim, ref, code):
    view = parse_claim(claim, driver=DRIVER)
    if code is None:
        admit_claim(view, ref, pool="node-a")
        return
    with pytest.raises(ClaimError) as caught:
        admit_claim(view, ref, pool="node-a")
    assert caught.value.code == code
    assert "default/one" in str(caught.value)
    assert caught.value.remedy


def test_a_claim_that_is_gone_is_named_with_its_uid():
    assert UID in str(claim_not_found(REF))
