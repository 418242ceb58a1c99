"""Quantities are exact and written as the API server writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.errors import ValueFormatError
from dra.values import Quantity


@pytest.mark.parametrize(
    ("text", "canonical", "value"),
    [
        ("8Gi", "8Gi", 8 << 30),
        ("1.5Gi", "1536Mi", 3 << 29),
        ("0.5Gi", "512Mi", 1 << 29),
        ("100m", "100m", 1),
        ("-1.5", "-1500m", -2),
        ("1e3", "1e3", 1000),
        ("12e6", "12e6", 12_000_000),
        ("1024", "1024", 1024),
        ("1Ki", "1Ki", 1024),
        ("1000", "1k", 1000),
        ("0.1n", "1n", 1),
        ("0", "0", 0),
        ("85520809984", "85520809984", 85_520_809_984),
    ],
)
def test_a_quantity_is_read_and_written_as_the_api_server_does(text: str, canonical: str, value: int) -> None:
    quantity = Quantity.parse(text)
    assert str(quantity) == canonical
    assert quantity.value == value


@pytest.mark.parametrize(
    "text", ["", "Gi", "1 Gi", "1gi", "1.2.3", "0x10", "1e", "--1", "NaN", "١", "1" * 5000, "1e" + "1" * 5000]
)
def test_text_that_is_no_quantity_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueFormatError, match="DRA-QUANTITY"):
        Quantity.parse(text)


@given(st.integers(min_value=-(2**62), max_value=2**62), st.booleans())
def test_writing_and_reading_lose_nothing(units: int, binary: bool) -> None:
    quantity = Quantity.of(units, binary=binary)
    assert Quantity.parse(str(quantity)) == quantity


@given(st.integers(min_value=0, max_value=2**70), st.integers(min_value=0, max_value=2**70))
def test_sums_and_differences_are_exact(a: int, b: int) -> None:
    left, right = Quantity(a), Quantity(b)
    assert (left + right) - right == left
    assert (left < right) == (a < b)
