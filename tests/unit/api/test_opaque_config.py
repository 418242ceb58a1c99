"""Strict decoding of opaque configuration, and which entry applies to which device."""

from __future__ import annotations

import pytest

from dra.api.claim import AllocatedDevice, OpaqueConfig
from dra.api.config import GROUP_VERSION, KNOWN_KINDS, decode_config, decode_configs, effective_config
from dra.api.config_models import KINDS
from dra.errors import ConfigError
from dra.values import Quantity

DRIVER = "gpu.nvidia.com"


def kind(name="GpuConfig", **fields):
    return {"apiVersion": GROUP_VERSION, "kind": name, **fields}


def sharing(name="GpuConfig", **fields):
    return kind(name, sharing=fields)


def mps(**fields):
    return sharing(strategy="MPS", mpsConfig=fields)


def entry(parameters, *requests, source="FromClaim"):
    return OpaqueConfig(source, requests, DRIVER, parameters)


def device(request="gpu", name="gpu-0"):
    return AllocatedDevice(request, DRIVER, "node-a", name)


def test_the_kinds_named_in_errors_are_those_that_decode():
    assert set(KNOWN_KINDS) == set(KINDS)


@pytest.mark.parametrize(
    "parameters",
    [
        kind(),
        kind(sharing=None),
        sharing(strategy="TimeSlicing"),
        sharing(strategy="TimeSlicing", timeSlicingConfig=None),
        sharing(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"}),
        sharing(strategy="MPS"),
        mps(),
        mps(defaultActiveThreadPercentage=0, multiUser=True),
        mps(defaultActiveThreadPercentage=100, multiUser=None),
        mps(defaultPinnedDeviceMemoryLimit="10Gi", defaultPerDevicePinnedMemoryLimit={"0": "1Gi"}),
        mps(defaultPinnedDeviceMemoryLimit=1 << 30),
        kind("MigDeviceConfig"),
        sharing("MigDeviceConfig", strategy="TimeSlicing"),
        sharing("MigDeviceConfig", strategy="MPS", mpsConfig={}),
        kind("VfioDeviceConfig"),
        kind("VfioDeviceConfig", iommu={}),
        kind("VfioDeviceConfig", iommu={"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}),
        kind("ComputeDomainChannelConfig", domainID="x", allocationMode="All"),
        kind("ComputeDomainDaemonConfig", domainID="x"),
    ],
)
def test_what_nvidias_driver_accepts_is_accepted(parameters):
    decode_config(parameters)


@pytest.mark.parametrize("block", [{}, {"interval": None}])
def test_a_time_slicing_block_without_interval_means_the_default(block):
    model = decode_config(sharing(strategy="TimeSlicing", timeSlicingConfig=block))
    assert model.sharing.timeSlicingConfig.interval == "Default"


@pytest.mark.parametrize(
    ("parameters", "code", "text"),
    [
        ({}, "DRA-CONFIG-API-VERSION", "apiVersion nothing"),
        (
            {"kind": "GpuConfig", "apiVersion": "resource.nvidia.com/v1"},
            "DRA-CONFIG-API-VERSION",
            "resource.nvidia.com/v1'",
        ),
        (
            {"kind": "GpuConfig", "apiVersion": "gpu.nvidia.com/v1beta1"},
            "DRA-CONFIG-API-VERSION",
            "gpu.nvidia.com",
        ),
        ({"apiVersion": GROUP_VERSION}, "DRA-CONFIG-KIND", "kind nothing"),
        (kind("gpuConfig"), "DRA-CONFIG-KIND", "'gpuConfig'"),
        ({"apiVersion": GROUP_VERSION, "kind": ["GpuConfig"]}, "DRA-CONFIG-KIND", "GpuConfig"),
        (kind(extra=1), "DRA-CONFIG-FIELD", "extra is an unknown field"),
        (kind(Sharing={}), "DRA-CONFIG-FIELD", "Sharing is an unknown field"),
        (kind(sharing={}), "DRA-CONFIG-FIELD", "sharing.strategy is required"),
        (kind(sharing=[]), "DRA-CONFIG-FIELD", "sharing"),
        (sharing(strategy="timeSlicing"), "DRA-CONFIG-FIELD", "sharing.strategy"),
        (
            sharing(strategy="TimeSlicing", timeSlicingConfig={"interval": ""}),
            "DRA-CONFIG-FIELD",
            "sharing.timeSlicingConfig.interval",
        ),
        (
            sharing(strategy="TimeSlicing", timeSlicingConfig={"Interval": "Long"}),
            "DRA-CONFIG-FIELD",
            "sharing.timeSlicingConfig.Interval is an unknown field",
        ),
        (
            sharing("MigDeviceConfig", strategy="TimeSlicing", timeSlicingConfig={}),
            "DRA-CONFIG-FIELD",
            "sharing.timeSlicingConfig is an unknown field",
        ),
        (
            sharing(strategy="MPS", timeSlicingConfig={}),
            "DRA-CONFIG-FIELD",
            "does not go with strategy MPS",
        ),
        (mps(defaultActiveThreadPercentage=101), "DRA-CONFIG-FIELD", "defaultActiveThreadPercentage"),
        (mps(defaultActiveThreadPercentage=-1), "DRA-CONFIG-FIELD", "defaultActiveThreadPercentage"),
        (mps(defaultActiveThreadPercentage="50"), "DRA-CONFIG-FIELD", "defaultActiveThreadPercentage"),
        (mps(defaultActiveThreadPercentage=True), "DRA-CONFIG-FIELD", "defaultActiveThreadPercentage"),
        (mps(defaultPinnedDeviceMemoryLimit="much"), "DRA-CONFIG-FIELD", "'much' is not a quantity"),
        (mps(defaultPinnedDeviceMemoryLimit="1023Ki"), "DRA-CONFIG-FIELD", "less than 1Mi"),
        (mps(defaultPinnedDeviceMemoryLimit="-1Gi"), "DRA-CONFIG-FIELD", "less than 1Mi"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": "1k"}), "DRA-CONFIG-FIELD", "Limit[0] is 1k"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": None}), "DRA-CONFIG-FIELD", "is not a quantity"),
        (mps(multiUser="true"), "DRA-CONFIG-FIELD", "multiUser"),
        (
            kind("VfioDeviceConfig", iommu={"backendPolicy": "Any"}),
            "DRA-CONFIG-FIELD",
            "iommu.backendPolicy",
        ),
        (kind("ComputeDomainChannelConfig"), "DRA-CONFIG-FIELD", "domainID is required"),
    ],
)
def test_what_is_wrong_is_refused_with_the_path_of_the_field(parameters, code, text):
    with pytest.raises(ConfigError) as caught:
        decode_config(parameters)
    assert caught.value.code == code
    assert text in caught.value.message
    assert not caught.value.retryable
    assert caught.value.remedy


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        decode_config(kind(one=1, two=2))
    assert "one is an unknown field; two is an unknown field" in caught.value.message


def test_quantities_are_exact():
    model = decode_config(mps(defaultPinnedDeviceMemoryLimit="1.5Gi"))
    assert model.sharing.mpsConfig.defaultPinnedDeviceMemoryLimit == Quantity.parse("1536Mi")


def test_a_block_that_does_nothing_is_a_warning():
    (decoded,) = decode_configs([entry(sharing(strategy="TimeSlicing", mpsConfig={}))])
    assert decoded.warnings == ("sharing.mpsConfig does nothing with strategy TimeSlicing",)
    assert decoded.strategy == "TimeSlicing"


# -- precedence ---------------------------------------------------------------------------------------------

LONG = sharing(strategy="TimeSlicing", timeSlicingConfig={"interval": "Long"})
SHORT = sharing(strategy="TimeSlicing", timeSlicingConfig={"interval": "Short"})


def chosen(result, *entries, device_type="gpu"):
    found = effective_config(result, decode_configs(entries), device_type=device_type)
    return None if found is None else found.index


def test_without_configuration_the_default_applies():
    assert chosen(device()) is None


def test_the_last_that_matches_wins():
    assert chosen(device(), entry(LONG), entry(SHORT)) == 1


def test_a_claims_entry_beats_a_classes_wherever_it_stands():
    assert chosen(device(), entry(LONG), entry(SHORT, source="FromClass")) == 0


def test_an_entry_for_another_request_does_not_apply():
    assert chosen(device(), entry(LONG, "other"), entry(SHORT, "third")) is None


def test_a_later_entry_for_all_requests_beats_an_earlier_one_for_this():
    assert chosen(device(), entry(LONG, "gpu"), entry(SHORT)) == 1


@pytest.mark.parametrize("listed", ["gpu", "gpu/h100"])
def test_an_entry_for_the_parent_or_the_subrequest_applies_to_the_chosen_subrequest(listed):
    assert chosen(device("gpu/h100"), entry(LONG, listed)) == 0


def test_an_entry_for_another_subrequest_does_not_apply():
    assert chosen(device("gpu/h100"), entry(LONG, "gpu/a100")) is None


def test_a_kind_that_does_not_fit_is_passed_over_unless_it_names_the_request():
    assert chosen(device(), entry(LONG), entry(kind("MigDeviceConfig"))) == 0
    with pytest.raises(ConfigError) as caught:
        chosen(device(), entry(kind("MigDeviceConfig"), "gpu"))
    assert caught.value.code == "DRA-CONFIG-KIND-MISMATCH"
    assert "cannot apply MigDeviceConfig to device gpu-0" in caught.value.message


def test_the_kind_of_another_driver_of_the_group_is_ignored_unless_it_names_the_request():
    domain = kind("ComputeDomainChannelConfig", domainID="x")
    assert chosen(device(), entry(domain)) is None
    with pytest.raises(ConfigError):
        chosen(device(), entry(domain, "gpu"))


def test_an_entry_that_no_device_uses_is_checked_too():
    with pytest.raises(ConfigError):
        decode_configs([entry(kind(bad=1), "other")])
