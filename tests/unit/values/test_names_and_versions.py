"""Names, PCI addresses and versions follow the grammars of Kubernetes and of the PCI bus."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.errors import ValueFormatError
from dra.values import (
    PciAddress,
    Semver,
    is_dns_label,
    is_dns_subdomain,
    is_qualified_name,
    is_uid,
    normalise_version,
    split_qualified_name,
)


def test_dns_labels_and_subdomains() -> None:
    assert is_dns_label("gpu-0") and is_dns_label("a" * 63)
    assert not any(map(is_dns_label, ["", "GPU", "a" * 64, "-a", "a-", "a.b", "a\n"]))
    assert is_dns_subdomain("gpu.nvidia.com")
    assert not any(map(is_dns_subdomain, ["", ".", "a..b", "A.b", "a" * 254]))


def test_qualified_names_have_a_domain_of_63_and_an_identifier_of_32() -> None:
    assert is_qualified_name("uuid") and is_qualified_name("resource.kubernetes.io/pcieRoot")
    assert is_qualified_name("a" * 63 + "/" + "b" * 32)
    assert not any(map(is_qualified_name, ["a/b/c", "a-b", "1a", "b" * 33, "a" * 64 + "/b", "/b", "a/"]))
    assert split_qualified_name("uuid", default_domain="gpu.nvidia.com") == ("gpu.nvidia.com", "uuid")


def test_uids_are_lower_case_uuids() -> None:
    assert is_uid("01234567-89ab-cdef-0123-456789abcdef")
    assert not is_uid("01234567-89AB-cdef-0123-456789abcdef")
    assert not is_uid("../../etc/passwd")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("0000:65:00.0", "0000:65:00.0"),
        ("1A:00.1", "0000:1a:00.1"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0001:01:00.0", "0001:01:00.0"),
    ],
)
def test_both_spellings_of_a_pci_address_give_the_one_of_sysfs(text: str, written: str) -> None:
    assert str(PciAddress.parse(text)) == written


@pytest.mark.parametrize("text", ["", "zz:00.0", "0000:1a:00", "0000:1a:00.9", "0000:1a:00.0/.."])
def test_other_text_is_no_pci_address(text: str) -> None:
    with pytest.raises(ValueFormatError, match="DRA-PCI-ADDRESS"):
        PciAddress.parse(text)


def test_versions_order_as_semver_says() -> None:
    ordered = [
        "1.0.0-alpha",
        "1.0.0-alpha.1",
        "1.0.0-alpha.beta",
        "1.0.0-beta.2",
        "1.0.0-beta.11",
        "1.0.0",
        "1.0.1",
    ]
    versions = [Semver.parse(text) for text in ordered]
    assert sorted(versions) == versions
    assert Semver.parse("1.0.0+a") == Semver.parse("1.0.0+b")
    assert str(Semver.parse("1.2.3-rc.1+build.5")) == "1.2.3-rc.1+build.5"


@pytest.mark.parametrize("text", ["580.65.06", "1.2", "v1.2.3", "1.2.3-01", "1.2.3-", "1.2.3+", " 1.2.3"])
def test_loose_versions_are_refused_where_strict_ones_are_asked_for(text: str) -> None:
    with pytest.raises(ValueFormatError, match="DRA-SEMVER"):
        Semver.parse(text)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("535.104.05", "535.104.5"),
        ("580.126.20", "580.126.20"),
        ("13.0", "13.0.0"),
        ("550", "550.0.0"),
        ("x", None),
    ],
)
def test_driver_versions_become_strict_ones(text: str, version: str | None) -> None:
    found = normalise_version(text)
    assert (str(found) if found else None) == version


@given(st.text())
def test_any_text_normalises_to_a_strict_version_or_to_none(text: str) -> None:
    found = normalise_version(text)
    assert found is None or Semver.parse(str(found)) == found


def test_a_number_that_is_too_long_for_any_version_is_refused_like_other_text() -> None:
    with pytest.raises(ValueFormatError, match="DRA-SEMVER"):
        Semver.parse("1.2." + "9" * 5000)
    assert normalise_version("9" * 5000 + ".1") is not None
