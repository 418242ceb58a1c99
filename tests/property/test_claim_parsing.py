"""Whatever JSON stands in a claim or a configuration: an answer or a DraError, nothing else."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra.api.claim import parse_claim
from dra.api.config import GROUP_VERSION, decode_config
from dra.errors import DraError

DRIVER = "gpu.nvidia.com"
KEYS = st.sampled_from(
    ["metadata", "uid", "status", "allocation", "devices", "results", "config", "driver", "opaque",
     "parameters", "requests", "source", "reservedFor", "adminAccess", "shareID", "consumedCapacity", "memory",
     "sharing", "strategy", "timeSlicingConfig", "interval", "mpsConfig", "defaultPerDevicePinnedMemoryLimit",
     "defaultPinnedDeviceMemoryLimit", "defaultActiveThreadPercentage", "iommu", "backendPolicy"]
)  # fmt: skip
WORDS = st.sampled_from([DRIVER, "FromClaim", "TimeSlicing", "MPS", "1Gi", "-1", "", "gpu"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)
OURS = st.fixed_dictionaries({}, optional={"driver": st.just(DRIVER) | JSON, "opaque": st.fixed_dictionaries(
    {"driver": st.just(DRIVER), "parameters": JSON}), "source": st.just("FromClass") | JSON, "device": JSON,
    "requests": JSON, "consumedCapacity": JSON, "adminAccess": JSON})  # fmt: skip
CLAIMS = JSON | st.fixed_dictionaries(
    {
        "metadata": JSON | st.fixed_dictionaries({"uid": LEAVES, "name": LEAVES}),
        "status": st.fixed_dictionaries(
            {
                "allocation": JSON
                | st.fixed_dictionaries(
                    {
                        "devices": st.fixed_dictionaries(
                            {
                                "results": st.lists(OURS, max_size=3) | JSON,
                                "config": st.lists(OURS, max_size=3),
                            }
                        ),
                        "nodeSelector": JSON,
                    }
                ),
                "reservedFor": JSON,
            }
        ),
    }
)
CONFIGS = st.fixed_dictionaries(
    {
        "apiVersion": st.just(GROUP_VERSION),
        "kind": st.sampled_from(["GpuConfig", "MigDeviceConfig", "VfioDeviceConfig"]) | JSON,
    },
    optional={
        "sharing": JSON
        | st.fixed_dictionaries(
            {"strategy": st.sampled_from(["MPS", "TimeSlicing"])},
            optional={"mpsConfig": st.dictionaries(KEYS, JSON, max_size=3), "timeSlicingConfig": JSON},
        ),
        "iommu": JSON,
    },
)


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(CLAIMS)
def test_any_json_is_a_claim_or_a_dra_error(claim):
    try:
        view = parse_claim(claim, driver=DRIVER)
    except DraError as error:
        assert str(error)
    else:
        assert all(result.driver == DRIVER for result in view.results)


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIGS | st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_any_json_is_a_configuration_or_a_dra_error(parameters):
    try:
        decode_config(parameters)
    except DraError as error:
        assert str(error)
