"""Files as people hand them in, for `dra validate` and `dra explain -f`: damaged, odd, huge, or made to hurt."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dra.cli.main import main
from dra.diagnose.validate import validate_paths
from dra.diagnose.validate_model import Report
from dra.diagnose.validate_source import Spot, _repeated, manifest_of
from dra.diagnose.yaml_text import MAX_ALIASED, YamlError, documents
from dra.webhook.check import check_object

CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: NAME, namespace: a}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
"""
# Each line stands for ten times as much as the one before.
BOMB = (
    "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\na: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
        for before, name in zip("abcde", "bcdef", strict=True)
    )
)
MERGE_BOMB = "a: &a {k1: 1, k2: 2, k3: 3, k4: 4}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in zip("abcde", "bcdef", strict=True)
)


def claim(name: str) -> str:
    return CLAIM.replace("NAME", name)


def checked(folder: Path, content: str | bytes, name: str = "one.yaml") -> Report:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return validate_paths([str(file)], known_devices=lambda: ())


def calls(work: Callable[[], object]) -> int:
    """Count the Python functions that a piece of work calls."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("text", [BOMB, MERGE_BOMB], ids=["lists", "merges"])
def test_aliases_that_stand_for_millions_are_refused_before_anything_is_built(tmp_path, capsys, text):
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    for words, code in (
        (["validate", str(file)], "DRA-MANIFEST-SYNTAX"),
        (["explain", "x", "-f", str(file)], "DRA-DUMP-FORMAT"),
    ):
        done = []
        assert calls(lambda words=words, done=done: done.append(main(words))) < 200_000
        assert done == [2]
        out, err = capsys.readouterr()
        assert code in out + err
        assert "its aliases (*name) make" in out + err
        assert f"aliases may add {MAX_ALIASED} values" in out + err


def test_aliases_within_bounds_are_read_and_what_is_written_out_has_no_bound(tmp_path):
    import yaml

    aliased = "a: &a [" + "x, " * 1000 + "]\n" + "".join(f"b{n}: *a\n" for n in range(MAX_ALIASED // 1001))
    (found,) = documents(aliased, yaml.CSafeLoader)
    assert not isinstance(found, YamlError)
    assert len(found.loader.construct_document(found.root)["b1"]) == 1000
    written = "&x apiVersion: v1\nkind: List\nitems:\n" + "".join(
        f"- {{apiVersion: v1, kind: ConfigMap, metadata: {{name: a{n}}}, data: {{a: b, c: d, e: f}}}}\n"
        for n in range(3000)
    )
    report = checked(tmp_path, written)
    assert (report.findings, report.skipped) == ([], 3000)


def test_a_value_that_holds_itself_is_named(tmp_path):
    (finding,) = checked(tmp_path, claim("one") + "---\na: 1\nb: &b\n  c: [*b]\n").findings
    assert finding.code == "DRA-MANIFEST-SYNTAX"
    assert finding.line == 6
    assert "holds itself" in finding.message


def test_an_error_in_the_middle_keeps_no_other_document_from_being_checked(tmp_path):
    text = "---\n".join(
        [claim("one"), "bad: [\n", claim("two"), "other: 'x\n", claim("Three"), "ctl: \x07\n", claim("four")]
    )
    report = checked(tmp_path, text)
    assert report.objects == 4
    assert report.exit_code() == 2
    lines = {(one.line, one.code) for one in report.findings}
    assert lines == {
        (6, "DRA-MANIFEST-SYNTAX"),
        (13, "DRA-MANIFEST-SYNTAX"),
        (17, "DRA-API-INVALID"),
        (20, "DRA-MANIFEST-SYNTAX"),
    }


@settings(max_examples=60)
@given(
    parts=st.lists(
        st.sampled_from(
            ["a: 1\n", "b: [\n", "c: 'x\n", "# only words\n", "d: {\n", "e: |\n  text\n", "", "f: \x01\n"]
        ),
        min_size=1,
        max_size=8,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_of_any_stream_every_good_document_is_read_with_its_line(parts, end):
    import yaml

    text = "---\n".join(parts).replace("\n", end)
    good: list[tuple[int, Any]] = []
    line = 0
    for part in parts:
        try:
            value = yaml.safe_load(part)
        except yaml.YAMLError:
            good.append((line, None))
        else:
            good += [(line, value)] if isinstance(value, dict) else []
        line += part.count("\n") + 1
    found = list(documents(text, yaml.CSafeLoader))
    read = [
        (item.before + item.root.start_mark.line, item.loader.construct_document(item.root))
        for item in found
        if not isinstance(item, YamlError) and item.root.id == "mapping"
    ]
    # The marker belongs to the document that it begins, and its content stands one line below.
    assert read == [(line, value) for line, value in good if value is not None]
    assert sum(isinstance(item, YamlError) for item in found) == len(good) - len(read)


def test_keys_that_stand_twice_are_found_with_one_look_at_each():
    compared = 0

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    keys = [Key(f"k{number}") for number in range(2000)]
    assert _repeated([*keys, Key("k7"), Key("k7"), Key("k9")]) == ("k7", "k7", "k9")
    assert compared < 100


def test_the_way_to_a_value_does_not_lead_past_its_neighbours():
    class Quiet(dict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all neighbours were looked at")

        items = keys = values = __iter__  # type: ignore[assignment]

    inner = Spot(3, children=Quiet({"a.b/c": Spot(4), "a": Spot(5), "exact[ly": Spot(6)}))
    spot = Spot(1, children=Quiet({"items": Spot(2, children=Quiet({0: inner, 12: Spot(9)}))}))
    for path, line, whole in [
        ("items[12]", 9, True),
        ("items[0].a.b/c", 4, True),
        ("items[0][a.b/c]", 4, True),
        ("items[0].a", 5, True),
        ("items[0].exactly.exact[ly", 6, True),
        ("items[0].b", 3, False),
        ("items[3].b", 2, False),
    ]:
        found, exactly = spot.find(path)
        assert (found.line, exactly) == (line, whole), path


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (claim("one").encode() + b"# \xff\n", 1, "it is not text in UTF-8 (line 5)"),
        (b"\x1b[1mapiVersion\x1b[0m: v1\n", 1, "the character #x001b may not stand in YAML"),
        (b"a:\n\tb: 1\n", 2, "cannot start any token"),
        (b"{{- if .Values.x }}\na: 1\n{{- end }}\n", 1, "Expecting property name"),
        (b'{"a": ' + b"9" * 5000 + b"}", 1, "a number has too many digits"),
        (b"a:\n  b: " + b"9" * 5000 + b"\n", 2, "a number has too many digits"),
        (b'{"apiVersion": "v1", "kind": "Pod", "spec": ' + b'{"a":' * 400 + b"1" + b"}" * 401, 1, "deeper than 200"),
        (b"a: " + b"{a: " * 300 + b"1" + b"}" * 300, 1, "deeper than 200"),
        (b"a: " + b"[" * 100_000, 1, "nest"),
        (b"a: *b\n", 1, "found undefined alias"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_text_is_said_where_it_stands(tmp_path, content, line, words):
    (finding,) = checked(tmp_path, content).findings
    assert (finding.line, finding.severity) == (line, "error")
    assert words in finding.message
    assert b"{{" not in content or "Templates must be rendered first" in finding.remedy


@pytest.mark.parametrize(
    "content",
    [
        claim("one").replace("\n", "\r\n").encode() + b"---\r\n" + claim("two").encode(),
        b"\xef\xbb\xbf" + claim("one").encode() + b"---\n\xef\xbb\xbf" + claim("two").encode(),
        (claim("one") + "---\n" + claim("two").replace("spec: {", "spec:\t{")).encode("utf-16"),
        claim("one").encode() + b"---\n---\n# nothing\n---\n" + claim("two").encode() + b"...\n",
    ],
    ids=["CRLF", "marks in the middle", "UTF-16, tab", "empty documents"],
)
def test_ways_to_write_two_claims(tmp_path, content):
    report = checked(tmp_path, content)
    assert (report.findings, report.objects) == ([], 2)


def test_json_before_an_error_is_checked(tmp_path):
    report = checked(tmp_path, '{"apiVersion": "v1", "kind": "ConfigMap"}\n\n{"kind": \n')
    assert report.skipped == 1
    assert [(one.code, one.line) for one in report.findings] == [("DRA-MANIFEST-SYNTAX", 4)]


def test_a_folder_with_pipes_loops_and_dead_links_ends_and_says_what_it_could_not_read(tmp_path, capsys):
    folder = tmp_path / "manifests"
    (folder / "sub.yaml").mkdir(parents=True)
    (folder / "sub.yaml" / "good.yaml").write_text(claim("one"))
    (folder / "sub.yaml" / "up").symlink_to("..")
    (folder / "dead.yaml").symlink_to("nowhere")
    (folder / "a.yaml").symlink_to("b.yaml")
    (folder / "b.yaml").symlink_to("a.yaml")
    os.mkfifo(folder / "pipe.yaml")
    report = validate_paths([str(folder)], known_devices=lambda: ())
    assert report.objects == 1
    assert [(Path(one.file).name, one.code) for one in report.findings] == [
        (name, "DRA-MANIFEST-UNREADABLE") for name in ("a.yaml", "b.yaml", "dead.yaml")
    ]
    for name in ("a.yaml", "b.yaml", "dead.yaml"):
        (folder / name).unlink()
    (folder / "claim.yaml").write_text(claim("one"))
    assert main(["explain", "claim/one", "-f", str(folder)]) == 1
    assert "claim a/one" in capsys.readouterr().out


def test_a_closed_standard_input_is_no_crash(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["validate", "-"]) == 2
    assert main(["explain", "x", "-f", "-"]) == 2
    out, err = capsys.readouterr()
    assert "DRA-MANIFEST-UNREADABLE: cannot read it: standard input is closed" in out
    assert "DRA-DUMP-UNREADABLE: cannot read -: standard input is closed" in err


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    file = tmp_path / "one.json"
    file.write_text('{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "\\ud800"}}')
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["validate", str(file)]) == 1
    assert b"\\ufffd" in raw.getvalue()


def test_an_object_of_any_depth_passes_through_admission():
    deep: dict[str, Any] = {}
    for _ in range(800):
        deep = {"a": deep}
    spec = {"devices": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": deep}}]}}
    obj = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "a"},
        "spec": spec,
    }
    assert check_object(obj).errors == ()
    assert manifest_of(obj).spot.find("spec.devices.config[0].opaque.driver")[1]


@pytest.mark.parametrize(
    ("escaped", "shown"),
    [
        (r"true \ud83d\ude00", "token recognition error at: '😀'"),
        # Half of a pair: kubectl sends U+FFFD in its place.
        (r"true \ud800", "token recognition error at: '\ufffd'"),
        (r"true \udc00\ud800", "token recognition error at: '\ufffd'"),
    ],
)
def test_characters_that_json_writes_with_two_escapes_hide_no_error_and_no_line(
    tmp_path, capsys, escaped, shown
):
    """As `json.dumps` of Python and `jq -a` write them."""
    text = (
        '{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "one", "namespace": "a",\n'
        '"annotations": {"a\\ud83d\\ude00": "\\ud83d\\ude00", "half": "\\ud83d"}},\n'
        '"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com",\n'
        '"selectors": [{"cel":\n{"expression": "EXPRESSION"}}]}}]}}}'
    ).replace("EXPRESSION", escaped)
    found = [each for each in checked(tmp_path, text, "one.json").findings if each.code == "DRA-CEL-COMPILE"]
    assert shown in found[0].message and found[0].line == 5
    assert main(["explain", "claim/one", "-n", "a", "-f", str(tmp_path / "one.json")]) == 1
    assert capsys.readouterr().out.startswith("claim a/one is pending")


def test_where_lines_cannot_be_told_the_rules_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("dra.diagnose.validate_source._yaml", lambda *_: iter(()))
    text = (
        '{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "one"}, "spec": {"devices": '
        '{"requests": [{"name": "gpu", "exactly": {"deviceClassName": "a", "selectors": [{"cel": {"expression": "x"}}]}}]}}}'
    )
    (finding,) = checked(tmp_path, "\n" + text, "one.json").findings
    assert (finding.code, finding.line) == ("DRA-CEL-COMPILE", 2)
