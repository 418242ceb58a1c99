"""An explanation names the term that decided and the value it saw."""

from __future__ import annotations

from dra.cel import SubTerm, compile_selector

DEVICE = {
    "attributes": {
        "type": {"string": "gpu"},
        "productName": {"string": "NVIDIA L4"},
        "index": {"int": 3},
        "driverVersion": {"version": "580.95.5"},
    },
    "capacity": {"memory": {"value": "24Gi"}},
}
GPU = 'device.attributes["gpu.nvidia.com"]'
MEMORY = 'device.capacity["gpu.nvidia.com"].memory'


def explain(expression: str) -> list[SubTerm]:
    return compile_selector(expression).explain(DEVICE, driver="gpu.nvidia.com")


def test_the_false_term_of_a_conjunction_decided_and_shows_what_the_device_has() -> None:
    terms = explain(
        f'device.driver == "gpu.nvidia.com" && {MEMORY}.compareTo(quantity("40Gi")) >= 0 && {GPU}.nope == 1'
    )
    assert [(term.value, term.decided, term.reached) for term in terms] == [
        (True, False, True),
        (False, True, True),
        (None, False, False),
    ]
    assert terms[1].text == f'{MEMORY}.compareTo(quantity("40Gi")) >= 0'
    assert terms[1].saw == ((MEMORY, 'quantity("24Gi")'),)


def test_all_terms_of_a_true_conjunction_decided() -> None:
    terms = explain(f'{GPU}.type == "gpu" && {GPU}.index == 3')
    assert [term.decided for term in terms] == [True, True]
    assert terms[1].saw == ((f"{GPU}.index", "3"),)


def test_a_missing_attribute_is_the_term_that_failed() -> None:
    terms = explain(f'{GPU}.type == "gpu" && {GPU}.nope == "x"')
    assert terms[1].failure == "no such key: nope"
    assert terms[1].decided
    assert terms[1].saw == ((f"{GPU}.nope", "no such key: nope"),)


def test_nested_terms_come_below_their_whole() -> None:
    terms = explain(f'{GPU}.type == "gpu" && ({GPU}.index > 5 || {GPU}.productName.contains("H100"))')
    assert [term.depth for term in terms] == [1, 1, 2, 2]
    assert [term.decided for term in terms] == [False, True, True, True]
    assert terms[3].saw == ((f"{GPU}.productName", '"NVIDIA L4"'),)


def test_a_bound_name_shows_its_value() -> None:
    terms = explain(f'cel.bind(g, {GPU}, g.type == "mig" && g.index == 3)')
    assert terms[0].text == 'g.type == "mig"'
    assert terms[0].saw == (("g.type", '"gpu"'),)
    assert terms[0].decided


def test_a_single_comparison_is_one_term() -> None:
    (term,) = explain(f'{GPU}.driverVersion.isGreaterThan(semver("590.0.0"))')
    assert (term.value, term.decided, term.depth) == (False, True, 0)
    assert term.saw == ((f"{GPU}.driverVersion", "580.95.5"),)


def test_a_device_that_cannot_be_read_has_no_terms() -> None:
    selector = compile_selector("true")
    assert selector.explain({"attributes": {"v": {"version": "x"}}}, driver="d") == []
