"""What holds for one GPU: the flag, the layers over it, and who is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.gpu_settings import (
    GpuIdentity,
    GpuSelector,
    GpuSettings,
    NodeSettings,
    ReservedSettings,
    SettingsLayer,
    SharingSettings,
    parse_sharing,
)
from dra.errors import ConfigError
from dra.values import PciAddress

L40S = GpuIdentity("GPU-aaaa", "NVIDIA L40S", PciAddress.parse("0000:65:00.0"))
A100 = GpuIdentity("GPU-bbbb", "NVIDIA A100-SXM4-40GB", PciAddress.parse("0000:07:00.0"))


@pytest.mark.parametrize(
    ("text", "strategy", "shares", "enforcement"),
    [
        ("", "exclusive", 0, "auto"),
        ("disabled", "exclusive", 0, "auto"),
        ("exclusive", "exclusive", 0, "auto"),
        ("memory", "memory", 0, "auto"),
        ("unlimited", "unlimited", 0, "auto"),
        ("4", "shares", 4, "auto"),
        ("100/none", "shares", 100, "none"),
        (" memory / required ", "memory", 0, "required"),
    ],
)
def test_a_kind_of_sharing_reads_as_nvidias_flag_does(text, strategy, shares, enforcement):
    read = SharingSettings.parse(text)
    assert (read.strategy, read.shares, read.enforcement) == (strategy, shares, enforcement)
    assert SharingSettings.parse(str(read)) == read


@pytest.mark.parametrize("text", ["0", "-1", "1001", "2.5", "Memory", "mps", "4/often", "４", "=4", ",=4"])
def test_nonsense_is_refused_with_what_is_right(text):
    with pytest.raises(ConfigError) as caught:
        parse_sharing(text)
    assert caught.value.code == "DRA-SHARING-KIND"
    assert caught.value.remedy


def test_the_most_exact_selector_wins_whatever_the_order():
    node = parse_sharing("GPU-AAAA=2,0000:65:00.0=3,nvidia-l40s=4,unlimited,NVIDIA A100*=memory/none")
    assert node.of(L40S).sharing.shares == 2
    assert node.of(GpuIdentity("GPU-x", L40S.product, L40S.pci_address)).sharing.shares == 3
    assert node.of(GpuIdentity("GPU-x", L40S.product)).sharing.shares == 4
    assert node.of(A100).sharing == SharingSettings("memory", 0, "none")
    assert node.of(GpuIdentity("GPU-z", "Tesla T4")).sharing.strategy == "unlimited"


def test_a_later_layer_replaces_whole_blocks_and_leaves_the_others():
    node = parse_sharing("10/required").over(
        [
            SettingsLayer(GpuSelector(product="*A100*"), {"sharing": SharingSettings("memory")}, "policy/a"),
            SettingsLayer(GpuSelector(), {"reserved": ReservedSettings("batch")}, "policy/a"),
        ]
    )
    assert node.of(A100).sharing == SharingSettings("memory", 0, "auto")
    assert node.of(L40S).sharing == SharingSettings("shares", 10, "required")
    assert node.of(A100).reserved == node.of(L40S).reserved == ReservedSettings("batch")
    assert node.source_of(A100, "sharing") == "policy/a"
    assert node.source_of(L40S, "sharing") == ""


def test_what_says_nothing_is_what_is_built_in():
    assert parse_sharing("") == NodeSettings()
    assert NodeSettings().of(L40S) == GpuSettings()
    assert not NodeSettings().of(L40S).sharing.shared


@pytest.mark.parametrize(
    ("pattern", "product", "fits"),
    [
        ("NVIDIA-L40S", "NVIDIA L40S", True),
        ("*l40*", "NVIDIA L40S", True),
        ("L40S", "NVIDIA L40S", False),
        ("NVIDIA [A]100*", "NVIDIA A100-SXM4-40GB", False),
        ("NVIDIA GB200 [x]", "NVIDIA GB200 [x]", True),
    ],
)
def test_products_are_chosen_by_a_pattern_of_the_whole_name(pattern, product, fits):
    assert GpuSelector.parse(pattern).fits(GpuIdentity("GPU-1", product)) is fits


@given(st.text(max_size=40))
def test_any_text_is_settings_or_an_error_with_a_remedy(text):
    try:
        node = parse_sharing(text)
    except ConfigError as error:
        assert error.remedy
    else:
        assert node.of(L40S).sharing.strategy in {"exclusive", "memory", "shares", "unlimited"}
