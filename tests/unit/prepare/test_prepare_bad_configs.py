"""The whole table of bad opaque configurations: refused when written, when validated and when prepared, in one voice.

Source: NVIDIA's DRA driver, resource.nvidia.com/v1beta1: what it refuses, what it accepts and fails on at prepare, and
what ends its process.
"""

from __future__ import annotations

import pytest
from prepare_fakes import GROUP_VERSION, opaque, result
from sharing_node import SharingNode

from dra.api.config import decode_config
from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_source import manifest_of
from dra.errors import ConfigError

FIELD, DEVICE = "DRA-CONFIG-FIELD", "DRA-CONFIG-DEVICE"
LIMIT, MAP = "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit"
MPS = "sharing.mpsConfig"


def kind(name="GpuConfig", **fields):
    return {"apiVersion": GROUP_VERSION, "kind": name, **fields}


def slicing(**fields):
    return kind(sharing={"strategy": "TimeSlicing", **fields})


def mps(name="GpuConfig", **fields):
    return kind(name, sharing={"strategy": "MPS", "mpsConfig": fields})


# name: (parameters, code, path of the field, part of the remedy)
TABLE = {
    # Decoding.
    "no version": ({"kind": "GpuConfig"}, "DRA-CONFIG-API-VERSION", "apiVersion", GROUP_VERSION),
    "other version": ({**kind(), "apiVersion": "resource.nvidia.com/v1"}, "DRA-CONFIG-API-VERSION", "apiVersion", GROUP_VERSION),
    "other group": ({**kind(), "apiVersion": "gpu.nvidia.com/v1beta1"}, "DRA-CONFIG-API-VERSION", "apiVersion", GROUP_VERSION),
    "no kind": ({"apiVersion": GROUP_VERSION}, "DRA-CONFIG-KIND", "kind", "spelling"),
    "kind in another case": (kind("gpuConfig"), "DRA-CONFIG-KIND", "kind", "spelling"),
    "kind is no text": (kind(["GpuConfig"]), "DRA-CONFIG-KIND", "kind", "spelling"),
    "unknown field": (kind(color="red"), FIELD, "color", "spells them"),
    "field in another case": (kind(Sharing={"strategy": "MPS"}), FIELD, "Sharing", "case-sensitive"),
    "unknown field deep inside": (mps(memory="1Gi"), FIELD, f"{MPS}.memory", "spells them"),
    # sharing
    "sharing without strategy": (kind(sharing={}), FIELD, "sharing.strategy", "Correct"),
    "strategy null": (kind(sharing={"strategy": None}), FIELD, "sharing.strategy", "Correct"),
    "strategy empty": (kind(sharing={"strategy": ""}), FIELD, "sharing.strategy", "Correct"),
    "strategy in another case": (kind(sharing={"strategy": "mps"}), FIELD, "sharing.strategy", "Correct"),
    "sharing is a list": (kind(sharing=[]), FIELD, "sharing", "Correct"),
    # TimeSlicing
    "interval empty": (slicing(timeSlicingConfig={"interval": ""}), FIELD, "sharing.timeSlicingConfig.interval", "Correct"),
    "interval in another case": (slicing(timeSlicingConfig={"interval": "long"}), FIELD, "sharing.timeSlicingConfig.interval", "Correct"),
    "interval is a number": (slicing(timeSlicingConfig={"interval": 3}), FIELD, "sharing.timeSlicingConfig.interval", "Correct"),
    "time-slice of a MIG device": (kind("MigDeviceConfig", sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}), FIELD, "sharing.timeSlicingConfig", "spells them"),
    # MPS: refused at once
    "percentage above 100": (mps(defaultActiveThreadPercentage=101), FIELD, f"{MPS}.defaultActiveThreadPercentage", "Correct"),
    "percentage below 0": (mps(defaultActiveThreadPercentage=-1), FIELD, f"{MPS}.defaultActiveThreadPercentage", "Correct"),
    "percentage is a text": (mps(defaultActiveThreadPercentage="50"), FIELD, f"{MPS}.defaultActiveThreadPercentage", "Correct"),
    "percentage is a fraction": (mps(defaultActiveThreadPercentage=50.5), FIELD, f"{MPS}.defaultActiveThreadPercentage", "Correct"),
    "percentage is a boolean": (mps(defaultActiveThreadPercentage=True), FIELD, f"{MPS}.defaultActiveThreadPercentage", "Correct"),
    "limit is no quantity": (mps(**{LIMIT: "much"}), FIELD, f"{MPS}.{LIMIT}", "Correct"),
    "limit is a boolean": (mps(**{LIMIT: True}), FIELD, f"{MPS}.{LIMIT}", "Correct"),
    "limits are a list": (mps(**{MAP: ["1Gi"]}), FIELD, f"{MPS}.{MAP}", "Correct"),
    "limit of a device is no quantity": (mps(**{MAP: {"0": "1 Gi"}}), FIELD, f"{MPS}.{MAP}[0]", "Correct"),
    "users is a text": (mps(multiUser="true"), FIELD, f"{MPS}.multiUser", "Correct"),
    # MPS: NVIDIA's driver accepts these and fails at prepare
    "time-slice with MPS": (kind(sharing={"strategy": "MPS", "timeSlicingConfig": {"interval": "Long"}}), FIELD, "sharing.timeSlicingConfig", "Remove timeSlicingConfig"),
    "limit below a MiB": (mps(**{LIMIT: "1023Ki"}), FIELD, f"{MPS}.{LIMIT}", "at least 1Mi"),
    "limit of zero": (mps(**{LIMIT: "0"}), FIELD, f"{MPS}.{LIMIT}", "at least 1Mi"),
    "negative limit": (mps(**{LIMIT: "-1Gi"}), FIELD, f"{MPS}.{LIMIT}", "at least 1Mi"),
    "limit of a device below a MiB": (mps(**{MAP: {"0": "1k"}}), FIELD, f"{MPS}.{MAP}[0]", "at least 1Mi"),
    "limit of a device null": (mps(**{MAP: {"0": None}}), FIELD, f"{MPS}.{MAP}[0]", "Correct"),
    "limit of a name": (mps(**{MAP: {"gpu-0": "1Gi"}}), DEVICE, f"{MPS}.{MAP}[gpu-0]", "index"),
    "limit of a negative index": (mps(**{MAP: {"-1": "1Gi"}}), DEVICE, f"{MPS}.{MAP}[-1]", "index"),
    "limit of nothing": (mps(**{MAP: {"": "1Gi"}}), DEVICE, f"{MPS}.{MAP}[]", "index"),
    "limit of a MIG device below a MiB": (mps("MigDeviceConfig", **{LIMIT: "1"}), FIELD, f"{MPS}.{LIMIT}", "at least 1Mi"),
    # VFIO
    "policy unknown": (kind("VfioDeviceConfig", iommu={"backendPolicy": "Any"}), FIELD, "iommu.backendPolicy", "Correct"),
    "policy empty": (kind("VfioDeviceConfig", iommu={"backendPolicy": ""}), FIELD, "iommu.backendPolicy", "Correct"),
    "device is a text": (kind("VfioDeviceConfig", iommu={"enableAPIDevice": "yes"}), FIELD, "iommu.enableAPIDevice", "Correct"),
    "sharing of a VFIO device": (kind("VfioDeviceConfig", sharing={"strategy": "MPS"}), FIELD, "sharing", "spells them"),
    # The other driver's
    "domain without id": (kind("ComputeDomainChannelConfig"), FIELD, "domainID", "Correct"),
    "domain with an empty id": (kind("ComputeDomainDaemonConfig", domainID=""), FIELD, "domainID", "Correct"),
}  # fmt: skip

# Only the devices of the claim tell: (parameters, code, path).
AT_PREPARE = {
    "index out of range": (mps(**{MAP: {"1": "1Gi"}}), DEVICE, f"{MPS}.{MAP}[1]"),
    "UUID of another device": (mps(**{MAP: {"GPU-00000000-0000-0000-0000-000000000000": "1Gi"}}), DEVICE, f"{MPS}.{MAP}[GPU-00000000-0000-0000-0000-000000000000]"),
    "kind of another device": (kind("MigDeviceConfig"), "DRA-CONFIG-KIND-MISMATCH", None),
    "kind of another driver": (kind("ComputeDomainChannelConfig", domainID="x"), "DRA-CONFIG-KIND-MISMATCH", None),
}  # fmt: skip

# Accepted and run by NVIDIA's driver, or such as it falls over: (parameters, part of the warning).
ACCEPTED = {
    "empty time-slice block": (slicing(timeSlicingConfig={}), ""),
    "interval null": (slicing(timeSlicingConfig={"interval": None}), ""),
    "block null": (slicing(timeSlicingConfig=None, mpsConfig=None), ""),
    "empty MPS block": (mps(), ""),
    "no MPS block": (kind(sharing={"strategy": "MPS"}), ""),
    "sharing null": (kind(sharing=None), ""),
    "limits for what is not used": (slicing(mpsConfig={LIMIT: "1"}), "mpsConfig does nothing"),
    "no threads": (mps(defaultActiveThreadPercentage=0), "clients get all of it"),
    "number for a quantity": (mps(**{LIMIT: 1 << 30}), ""),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = SharingNode(tmp_path_factory.mktemp("node"))
    yield made
    made.close()


def template(parameters, requests=()):
    entry = {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}
    if requests:
        entry["requests"] = list(requests)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t", "namespace": "team"},
        "spec": {
            "spec": {
                "devices": {
                    "requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}],
                    "config": [entry],
                }
            }
        },
    }


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.fault("F41")
def test_a_bad_configuration_is_refused_with_code_path_and_remedy(name):
    parameters, code, field, remedy = TABLE[name]
    with pytest.raises(ConfigError) as caught:
        decode_config(parameters)
    error = caught.value
    assert (error.code, error.fields["field"]) == (code, field)
    assert field.split(".")[-1] in error.message
    assert remedy in error.remedy
    assert not error.retryable


@pytest.mark.parametrize("name", TABLE)
def test_dra_validate_says_the_same_at_the_same_place(name):
    parameters, code, field, _ = TABLE[name]
    report = validate_manifests([manifest_of(template(parameters))], known_devices=list)
    errors = [(each.code, each.path) for each in report.findings if each.severity == "error"]
    assert errors == [(code, f"spec.spec.devices.config[0].opaque.parameters.{field}")]


@pytest.mark.parametrize("name", [*TABLE, *AT_PREPARE])
@pytest.mark.fault("F41")
def test_prepare_says_the_same_touches_nothing_and_goes_on(shared, name):
    parameters, code, field, *_ = {**TABLE, **AT_PREPARE}[name]
    shared.sim.reset_calls()
    ref = shared.claim(1, "gpu-0", configs=[opaque(parameters, requests=["gpu"])])
    error = shared.refused(ref)
    assert error.code == code
    assert error.fields.get("field") == field
    assert error.remedy
    assert not error.retryable
    assert shared.sim.count_calls().get("nvmlDeviceSetComputeMode", 0) == 0
    shared.clean()
    shared.prepared(shared.claim(2, "gpu-0"))
    shared.unprepare(shared.claim(2, "gpu-0"))


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_nvidias_driver_runs_or_falls_over_is_at_most_a_warning(shared, name):
    parameters, warning = ACCEPTED[name]
    report = validate_manifests([manifest_of(template(parameters))], known_devices=list)
    assert [each for each in report.findings if each.severity == "error"] == []
    idle = [each.message for each in report.findings if each.code == "DRA-CONFIG-IDLE"]
    assert bool(idle) is bool(warning)
    assert all(warning in text for text in idle)
    ref = shared.claim(3, "gpu-0", configs=[opaque(parameters)])
    shared.prepared(ref)
    assert shared.unprepare(ref) is None
    shared.clean()


def test_time_slices_of_mig_devices_are_warned_of():
    parameters = kind("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})
    manifest = template(parameters)
    manifest["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "mig.nvidia.com"
    report = validate_manifests([manifest_of(manifest)], known_devices=list)
    assert [(f.severity, f.code) for f in report.findings] == [("warning", "DRA-CONFIG-IDLE")]


def test_a_configuration_of_the_parent_is_that_of_the_chosen_subrequest(shared):
    """NVIDIA's driver silently ignores it."""
    from sharing_node import interval

    ref = shared.claim(
        4, result("gpu-0", request="gpu/big"), configs=[opaque(interval("Long"), requests=["gpu"])]
    )
    shared.prepared(ref)
    assert shared.time_slice(0) == 3
    shared.unprepare(ref)
    shared.clean()
