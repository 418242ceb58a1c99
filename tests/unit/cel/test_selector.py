"""What a user of a selector sees: matches, failures with their reason, compile errors with their place."""

from __future__ import annotations

import pytest

from dra.cel import CelCompileError, CelEvalError, CelFeatures, compile_selector

H100 = {
    "attributes": {
        "type": {"string": "gpu"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "index": {"int": 3},
        "healthy": {"bool": True},
        "driverVersion": {"version": "580.95.5"},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:17"},
    },
    "capacity": {"memory": {"value": "80Gi"}},
}
GPU = 'device.attributes["gpu.nvidia.com"]'


def evaluate(expression: str, device: dict | None = None, **features: bool) -> bool:
    selector = compile_selector(expression, features=CelFeatures(**features))
    return selector.evaluate(H100 if device is None else device, driver="gpu.nvidia.com")


@pytest.mark.parametrize(
    "expression",
    [
        'device.driver == "gpu.nvidia.com"',
        f'{GPU}.type == "gpu" && {GPU}.index < 4 && !({GPU}.index in [1, 2])',
        f'{GPU}.productName.lowerAscii().matches("^.*(h100|h200).*$")',
        'device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:17"',
        'device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("40Gi"))',
        'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("80Gi")) == 0',
        f'{GPU}.driverVersion.isGreaterThan(semver("570.0.0")) && {GPU}.driverVersion.major() == 580',
        f"{GPU}.healthy ? true : false",
        f'cel.bind(g, {GPU}, g.type == "gpu" && g.healthy)',
        f'has({GPU}.index) && !has({GPU}.nope) && {GPU}.?nope.orValue("x") == "x"',
        'device.attributes["other.example.com"] == {}',
    ],
)
def test_a_selector_that_describes_the_gpu_matches(expression: str) -> None:
    assert evaluate(expression) is True


def test_a_missing_attribute_is_an_error_that_names_it() -> None:
    with pytest.raises(CelEvalError, match="no such key: nope") as caught:
        evaluate(f"{GPU}.nope == 1")
    assert caught.value.error_class == "no_such_key"
    assert caught.value.code == "DRA-CEL-EVAL"
    assert "has(" in caught.value.remedy


def test_a_deciding_term_hides_the_failure_beside_it() -> None:
    assert evaluate(f'device.driver == "other" && {GPU}.nope > 3') is False
    assert evaluate(f'{GPU}.nope > 3 && device.driver == "other"') is False
    assert evaluate(f'{GPU}.nope > 3 || device.driver == "gpu.nvidia.com"') is True


def test_an_unknown_name_is_a_compile_error_with_its_place() -> None:
    with pytest.raises(CelCompileError) as caught:
        compile_selector("true &&\n  noSuchVar == 1")
    error = caught.value
    assert (
        "compilation failed: ERROR: <input>:2:3: undeclared reference to 'noSuchVar' (in container '')"
        in error.message
    )
    assert (error.line, error.column) == (2, 3)
    assert error.caret() == "  noSuchVar == 1\n  ^"


def test_columns_count_code_points() -> None:
    with pytest.raises(CelCompileError) as caught:
        compile_selector('"é😀" == x')
    assert caught.value.column == 9


def test_a_selector_must_be_a_condition() -> None:
    with pytest.raises(CelCompileError, match="must evaluate to bool or the unknown type, not string"):
        compile_selector("device.driver")


def test_an_attribute_alone_must_hold_a_bool() -> None:
    assert evaluate(f"{GPU}.healthy") is True
    with pytest.raises(CelEvalError, match="could not be converted to bool") as caught:
        evaluate(f"{GPU}.index")
    assert caught.value.error_class == "result_not_bool"


def test_a_broken_version_fails_every_selector_on_that_device() -> None:
    device = {"attributes": {"ver": {"version": "1.2"}}}
    with pytest.raises(CelEvalError, match="attribute ver: parse semantic version"):
        evaluate("true", device)


def test_list_attributes_need_their_gate() -> None:
    device = {"attributes": {"ids": {"ints": [1, 2]}}}
    with pytest.raises(CelEvalError, match="attribute ids: unsupported attribute value"):
        evaluate("true", device)
    assert evaluate(f"2 in {GPU}.ids", device, list_type_attributes=True) is True


def test_the_view_of_a_device_is_made_once() -> None:
    class Counting(dict):
        reads = 0

        def get(self, *args: object) -> object:
            Counting.reads += 1
            return super().get(*args)

    device = Counting(H100)
    for _ in range(3):
        evaluate(f"{GPU}.index == 3", device)
        evaluate('device.driver == "gpu.nvidia.com"', device)
    assert Counting.reads <= 3
