"""Claims of GPUs that are passed through are judged when they are written as prepare would judge them later."""

from __future__ import annotations

import pytest

from dra.api.passthrough import mixed_error
from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_source import manifest_of

VM, CUDA, SLICE = "vfio.gpu.nvidia.com", "gpu.nvidia.com", "mig.nvidia.com"


def config(*requests, kind="VfioDeviceConfig", **iommu):
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind}
    if iommu:
        parameters["iommu"] = iommu
    entry = {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}
    return {**entry, "requests": list(requests)} if requests else entry


def exactly(name, device_class, **more):
    return {"name": name, "exactly": {"deviceClassName": device_class, **more}}


def one_of(name, *classes):
    alternatives = [{"name": f"a{n}", "deviceClassName": each} for n, each in enumerate(classes)]
    return {"name": name, "firstAvailable": alternatives}


def judged(*requests, configs=(), kind="ResourceClaimTemplate"):
    spec = {"devices": {"requests": list(requests), "config": list(configs)}}
    manifest = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "c", "namespace": "team"},
        "spec": {"spec": spec} if kind == "ResourceClaimTemplate" else spec,
    }
    found = validate_manifests([manifest_of(manifest)], known_devices=list).findings
    return [
        (each.severity, each.code, each.message)
        for each in found
        if each.severity != "info" and not each.code.startswith("DRA-REQUEST")
    ]


@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
@pytest.mark.parametrize(
    "other", [exactly("cuda", CUDA), exactly("cuda", SLICE), one_of("cuda", SLICE, CUDA)]
)
def test_a_claim_of_both_kinds_is_an_error_with_the_words_that_prepare_uses(kind, other):
    ((severity, code, message),) = judged(exactly("vm", VM), other, kind=kind)
    assert (severity, code) == ("error", "DRA-VFIO-MIXED")
    assert message == mixed_error(["vm"], ["cuda"]).message


@pytest.mark.parametrize(
    "requests",
    [
        (exactly("a", VM), exactly("b", VM)),
        # What is chosen is not known, or not ours.
        (exactly("vm", VM), one_of("b", VM, CUDA)),
        (exactly("vm", VM), exactly("nic", "nic.example.com")),
        (exactly("vm", VM), exactly("watch", CUDA, adminAccess=True, allocationMode="All")),
    ],
)
def test_claims_that_may_be_prepared_are_clean(requests):
    assert judged(*requests) == []


def test_two_interfaces_in_one_claim_are_an_error():
    two = (exactly("a", VM), exactly("b", VM))
    configs = [config("a", backendPolicy="PreferIommuFD"), config("b", enableAPIDevice=True)]
    ((severity, code, message),) = judged(*two, configs=configs)
    assert (severity, code) == ("error", "DRA-VFIO-BACKENDS")
    assert "LegacyOnly for b and PreferIommuFD for a" in message
    assert judged(*two, configs=[config(backendPolicy="PreferIommuFD")]) == []
    # Without a word it is the class's affair, which is not known here.
    assert judged(*two, configs=[config("a", backendPolicy="PreferIommuFD")]) == []


def test_a_configuration_of_passthrough_for_other_devices_is_an_error_by_name_and_idle_without():
    """NVIDIA's driver refuses the one and ignores the other, in silence."""
    ((severity, code, _),) = judged(exactly("cuda", CUDA), configs=[config("cuda")])
    assert (severity, code) == ("error", "DRA-CONFIG-KIND-MISMATCH")
    ((severity, code, message),) = judged(exactly("cuda", CUDA), configs=[config()])
    assert (severity, code) == ("warning", "DRA-CONFIG-IDLE")
    assert "VfioDeviceConfig" in message
