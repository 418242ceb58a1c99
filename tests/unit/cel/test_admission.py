"""What the API server would say of a new selector."""

from __future__ import annotations

from dra.cel import CelFeatures, check_selector

GPU = 'device.attributes["gpu.nvidia.com"]'


def test_a_usual_selector_is_accepted() -> None:
    assert check_selector(f'device.driver == "gpu.nvidia.com" && {GPU}.type == "gpu"') is None


def test_a_selector_that_does_not_compile_is_refused_with_the_reason() -> None:
    assert "undeclared reference to 'noSuchVar'" in (check_selector("noSuchVar") or "")


def test_a_selector_longer_than_10_kib_is_refused() -> None:
    text = '"' + "x" * 10_239 + '" != ""'
    assert "10240 bytes" in (check_selector(text) or "")
    assert check_selector('"' + "x" * 1000 + '" != ""') is None


def test_a_selector_that_could_cost_too_much_is_refused() -> None:
    nested = f'{GPU}.all(a, {GPU}.all(b, {GPU}.all(c, {GPU}.all(d, a != "zzz"))))'
    assert check_selector(nested) == "too complex, exceeds cost limit"


def test_gated_names_are_known_to_new_selectors_only_with_their_gate() -> None:
    assert "undefined field" in (
        check_selector("device.allowMultipleAllocations", features=CelFeatures(consumable_capacity=False))
        or ""
    )
    assert check_selector("device.allowMultipleAllocations") is None
    assert "undeclared reference to 'includes'" in (check_selector(f'{GPU}.name.includes("x")') or "")
    assert (
        check_selector(f'{GPU}.name.includes("x")', features=CelFeatures(list_type_attributes=True)) is None
    )
