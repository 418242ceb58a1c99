"""Whatever JSON stands as opaque parameters: a valid configuration, or an error that says where and what to do."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.api.claim import AllocatedDevice, OpaqueConfig
from dra.api.config import GROUP_VERSION, KIND_OF_TYPE, decode_config, decode_configs, effective_config
from dra.api.config_models import FIELDS, KINDS
from dra.errors import ConfigError

WORDS = st.sampled_from(
    [*sorted(FIELDS), *KINDS, GROUP_VERSION, "TimeSlicing", "MPS", "Default", "Long", "LegacyOnly", "1Gi", "1k", "0", "GPU-a", ""]
) | st.text(max_size=8)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=True, allow_infinity=True)
    | WORDS
)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
NEARLY = st.fixed_dictionaries(
    {"apiVersion": st.just(GROUP_VERSION), "kind": st.sampled_from(sorted(KINDS))},
    optional={
        "sharing": ANY
        | st.fixed_dictionaries(
            {"strategy": st.sampled_from(["TimeSlicing", "MPS"])},
            optional={
                "timeSlicingConfig": ANY | st.fixed_dictionaries({"interval": WORDS | st.none()}),
                "mpsConfig": ANY
                | st.fixed_dictionaries(
                    {},
                    optional={
                        "defaultActiveThreadPercentage": LEAVES,
                        "defaultPinnedDeviceMemoryLimit": LEAVES,
                        "defaultPerDevicePinnedMemoryLimit": st.dictionaries(WORDS, LEAVES, max_size=3),
                        "multiUser": LEAVES,
                    },
                ),
            },
        ),
        "iommu": ANY,
        "domainID": ANY,
    },
)


def check(parameters):
    before = copy.deepcopy(parameters)
    try:
        model = decode_config(parameters)
    except ConfigError as error:
        assert error.code in (
            "DRA-CONFIG-API-VERSION", "DRA-CONFIG-KIND", "DRA-CONFIG-FIELD", "DRA-CONFIG-DEVICE",
        )  # fmt: skip
        assert error.message
        assert error.message.isprintable()
        assert error.remedy
        assert isinstance(error.fields["field"], str)
        assert not error.retryable
        return None
    finally:
        # NaN is not itself.
        assert repr(parameters) == repr(before)
    assert type(model).__name__ == parameters["kind"]
    return model


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(WORDS, ANY, max_size=5))
def test_any_object_is_a_configuration_or_an_error(parameters):
    check(parameters)


@settings(max_examples=500, deadline=None)
@given(NEARLY)
def test_any_object_that_looks_like_one_is_a_configuration_or_an_error(parameters):
    model = check(parameters)
    if model is None:
        return
    # What is valid has a meaning for some device, and the same one each time.
    configs = decode_configs([OpaqueConfig("FromClaim", (), "gpu.nvidia.com", parameters)])
    device = AllocatedDevice("gpu", "gpu.nvidia.com", "node", "gpu-0")
    for device_type, kind in KIND_OF_TYPE.items():
        found = effective_config(device, configs, device_type=device_type)
        assert (found is not None) is (kind == type(model).__name__)


@settings(max_examples=100, deadline=None)
@given(st.integers(50, 3000))
def test_however_deep_it_is(depth):
    parameters: object = "x"
    for _ in range(depth):
        parameters = {"sharing": parameters}
    try:
        decode_config({"apiVersion": GROUP_VERSION, "kind": "GpuConfig", **parameters})
    except ConfigError as error:
        assert error.code == "DRA-CONFIG-FIELD"
    else:
        raise AssertionError(json.dumps(parameters)[:80])


@pytest.mark.parametrize(
    "field", ["defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "multiUser"]
)
def test_a_number_that_python_does_not_print(field):
    number = 10**5000
    parameters = {"strategy": "MPS", "mpsConfig": {field: number}}
    with pytest.raises(ConfigError) as caught:
        decode_config({"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "sharing": parameters})
    assert caught.value.code == "DRA-CONFIG-FIELD"
