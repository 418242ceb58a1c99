"""Words of YAML are read as kubectl reads them: what kubectl 1.36 sent to an API server for each of them is written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dra.cli.main import main
from dra.diagnose.explain.files import _values
from dra.diagnose.validate import validate_paths
from dra.diagnose.validate_model import Report
from dra.diagnose.validate_source import read_manifests

AS_KUBECTL: dict[str, Any] = {
    "1": 1, "+5": 5, "-0": 0, "00": 0, "010": 8, "08": 8, "0o10": 8, "-0o10": -8, "0x10": 16, "0X1F": 31, "0xbB": 187, "+0x10": 16,
    "0b11": 3, "-0b11": -3, "0b102": "0b102", "0x": "0x", "1_000": 1000, "1__0": 10, "1_": 1, "0x_1": 1, "_1": "_1",
    "1e2": 100, "1E2": 100, "1e+2": 100, "1e-2": 0.01, "1.5e3": 1500, "3.0e0": 3, "1e": "1e", "1e400": "1e400",
    "1.0": 1, "1.": 1, "1.5": 1.5, ".5": 0.5, "-.5": -0.5, "+.5": 0.5, "._5": "._5", "1._5": 1.5, "1_000.5": 1000.5,
    "-.": "-.", "0x1p4": "0x1p4", "1:30": "1:30", "190:20:30": "190:20:30", "2001-01-01": "2001-01-01",
    "9223372036854775807": 2**63 - 1, "99999999999999999999": 99999999999999999999,
    "y": True, "Y": True, "yes": True, "on": True, "TRUE": True, "n": False, "N": False, "No": False, "off": False,
    "tRue": "tRue", "yE": "yE", "~": None, "null": None, "nULL": "nULL", "=": "=", "inf": "inf",
    "'y'": "y", '"1e2"': "1e2", "!!str y": "y", "!!str 1e2": "1e2", "!!float 1": 1,
}  # fmt: skip


@pytest.mark.parametrize("word", AS_KUBECTL)
def test_a_word_is_what_kubectl_makes_of_it(tmp_path: Path, word: str) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\nx: {word}\n")
    manifests, findings, _ = read_manifests([str(file)])
    assert not findings
    dumped = next(iter(_values("one.yaml", file.read_text())))
    for found in (manifests[0].value["x"], dumped["x"]):
        assert (type(found), found) == (type(AS_KUBECTL[word]), AS_KUBECTL[word])


@pytest.mark.parametrize("word", [".inf", "-.inf", "+.Inf", ".nan", "!!int many"])
def test_what_no_json_can_say_is_an_error_of_syntax(
    tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\nx: {word}\n")
    assert main(["validate", str(file)]) == 2
    assert "one.yaml:3: error DRA-MANIFEST-SYNTAX" in capsys.readouterr().out
    assert main(["explain", "x", "-f", str(file)]) == 2
    assert "DRA-DUMP-FORMAT" in capsys.readouterr().err


def _template(folder: Path, *, name: str = "gpu", count: str = "1", form: str = "yaml") -> Report:
    text = (
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: one}\n"
        f"spec: {{spec: {{devices: {{requests: [{{name: {name}, exactly: {{deviceClassName: gpu.nvidia.com, count: {count}}}}}]}}}}}}\n"
    )
    if form == "json":
        request = {"name": name, "exactly": {"deviceClassName": "gpu.nvidia.com", "count": "COUNT"}}
        text = json.dumps(
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "one"},
                "spec": {"spec": {"devices": {"requests": [request]}}},
            }
        ).replace('"COUNT"', count)  # fmt: skip
    file = folder / f"one.{form}"
    file.write_text(text)
    return validate_paths([str(file)], known_devices=lambda: ())


@pytest.mark.parametrize(
    ("count", "form"), [("1.0", "yaml"), ("1e0", "yaml"), ("0x1", "yaml"), ("1.0", "json"), ("1e0", "json")]
)
def test_a_whole_number_may_be_written_with_a_point_or_an_exponent(
    tmp_path: Path, count: str, form: str
) -> None:
    assert not _template(tmp_path, count=count, form=form).findings


@pytest.mark.parametrize(
    ("count", "form", "shown"),
    [
        ("99999999999999999999", "yaml", "99999999999999999999"),
        ("-99999999999999999999", "json", "-99999999999999999999"),
        ("1e20", "json", "1e+20"),
    ],
)
def test_a_number_beyond_64_bits_is_told_from_what_is_no_number(
    tmp_path: Path, count: str, form: str, shown: str
) -> None:
    (finding,) = _template(tmp_path, count=count, form=form).findings
    assert finding.code == "DRA-SCHEMA-TYPE"
    assert finding.message == (
        f"must be a whole number from -9223372036854775808 to 9223372036854775807, is {shown}"
    )


def test_a_part_is_still_no_whole_number(tmp_path: Path) -> None:
    (finding,) = _template(tmp_path, count="1.5").findings
    assert finding.message == "must be a whole number, is 1.5"


def test_a_name_that_yaml_takes_for_no_is_found(tmp_path: Path) -> None:
    (finding,) = _template(tmp_path, name="n").findings
    assert (finding.code, finding.message) == ("DRA-SCHEMA-TYPE", "must be a text, is false")
    assert "in quotes" in finding.remedy
