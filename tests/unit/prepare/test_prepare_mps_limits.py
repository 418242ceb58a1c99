"""Pinned memory limits in whole MiB, by UUID. Source: the cases of NVIDIA's own tests of the normalisation."""

from __future__ import annotations

import pytest

from dra.errors import ConfigError
from dra.prepare.sharing.limits import in_words, pinned_memory_mib
from dra.values import Quantity

ONE, TWO = "GPU-b", "GPU-a"  # in the order of the API; sorted, TWO is the first


def limits(default=None, uuids=(ONE, TWO), **per_device):
    parsed = {key.replace("_", "-"): Quantity.parse(text) for key, text in per_device.items()}
    found = pinned_memory_mib(
        uuids, None if default is None else Quantity.parse(default), parsed if per_device else None
    )
    return in_words(found)


@pytest.mark.parametrize(
    ("default", "words"),
    [
        ("1G", "953M"),
        ("10M", "9M"),
        ("10Mi", "10M"),
        ("1Gi", "1024M"),
        ("1Mi", "1M"),
        ("1048577", "1M"),
        ("1.5Gi", "1536M"),
    ],
)
def test_a_default_is_each_devices_limit_in_whole_mib(default, words):
    assert limits(default) == {TWO: words, ONE: words}


def test_without_limits_there_are_none():
    assert limits() == {}
    assert limits(uuids=()) == {}
    assert limits("1Gi", uuids=()) == {}


def test_a_device_has_its_own_by_uuid_or_by_its_place_among_the_sorted_uuids():
    assert limits("1Gi", GPU_b="2Gi") == {TWO: "1024M", ONE: "2048M"}
    assert pinned_memory_mib((ONE, TWO), None, {"0": Quantity.parse("3Mi")}) == {TWO: 3}
    assert pinned_memory_mib((ONE, TWO), None, {"+1": Quantity.parse("3Mi")}) == {ONE: 3}
    both = {"1": Quantity.parse("3Mi"), ONE: Quantity.parse("5Mi")}
    assert pinned_memory_mib((ONE, TWO), Quantity.parse("1Mi"), both) == {TWO: 1, ONE: 5}


@pytest.mark.parametrize(
    "key", ["2", "-1", "99999999999999999999", "GPU-c", "MIG-a", "x", "", "1.0", " 1", "1_0", "٣"]
)
def test_what_is_no_device_of_the_group_is_refused(key):
    with pytest.raises(ConfigError) as caught:
        pinned_memory_mib((ONE, TWO), None, {key: Quantity.parse("1Gi")})
    assert caught.value.code == "DRA-CONFIG-DEVICE"
    assert caught.value.fields["field"] == f"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit[{key}]"
    assert "GPU-a" in caught.value.message


def test_a_group_without_devices_has_none_to_limit():
    with pytest.raises(ConfigError, match="known: none"):
        pinned_memory_mib((), None, {"0": Quantity.parse("1Gi")})


@pytest.mark.parametrize("size", ["0", "1", "1023Ki", "-5Gi"])
def test_less_than_a_mib_is_no_limit(size):
    for default, per_device in ((Quantity.parse(size), None), (None, {"0": Quantity.parse(size)})):
        with pytest.raises(ConfigError) as caught:
            pinned_memory_mib((ONE,), default, per_device)
        assert caught.value.code == "DRA-CONFIG-FIELD"
