"""Replays recorded requests of a real API server against another one and says where the answers differ.

Not a test: `test_apiserver_golden.py` uses it. Placeholders of the recordings (`<uid-1>`, `<rv-2>`, `<time>` …) are
learnt from the first answer that shows them and must hold from then on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.yaml_text import read

Json = dict[str, Any]

PLACEHOLDER = re.compile(r"<(uid|rv|rand|continue)-(\d+)>|<(time|microtime|age|server|hash|redacted)>")
_SHAPES = {
    "uid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "rv": r"\d+",
    "rand": r"[bcdfghjklmnpqrstvwxz2456789]{5}",
    "continue": r"[A-Za-z0-9_-]+",
    "time": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    "microtime": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z",
    "age": r"(?:\d+(?:s|m|h|d|y)|\d+[mhdy]\d+[smhd]|<unknown>)",
    "server": r"[^\"]+",
    "hash": r"[A-Za-z0-9]+",
    "redacted": r"[^\"]*",
}


@dataclass(frozen=True)
class Answer:
    """What came back: `lines` for a stream, else `body` (JSON where it was JSON, else text)."""

    status: int
    body: Any
    content_type: str | None
    headers: Mapping[str, Any]
    lines: list[Any] | None = None


Send = Callable[[str, str, dict[str, str], bytes], Answer]


@dataclass
class Bindings:
    """What the placeholders of one scenario stand for."""

    now: str
    known: dict[str, str] = field(default_factory=dict)
    floor: int = 0

    def fill(self, text: str) -> str:
        """Put values in for the placeholders of a request."""
        return PLACEHOLDER.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        token = match[0]
        if token in self.known:
            return self.known[token]
        if match[3] == "time":
            return self.now
        if match[3] == "microtime":
            return self.now.replace("Z", ".000000Z")
        if match[1] == "rv":
            older = [
                int(v) for k, v in self.known.items() if k.startswith("<rv-") and number(k) < int(match[2])
            ]
            return str(max(older, default=1))
        return token

    def text(self, expected: str, actual: str, *, loose_version: bool = False) -> bool:
        """Whether `actual` reads as `expected` with its placeholders; learns those that are new."""
        if "<" not in expected:
            return expected == actual
        pattern, names, at = "", [], 0
        for match in PLACEHOLDER.finditer(expected):
            pattern += re.escape(expected[at : match.start()]) + f"({_SHAPES[match[1] or match[3]]})"
            names.append(match[0])
            at = match.end()
        found = re.fullmatch(pattern + re.escape(expected[at:]), actual, re.DOTALL)
        if found is None:
            return False
        return all(self._learn(n, v, loose=loose_version) for n, v in zip(names, found.groups(), strict=True))

    def _learn(self, name: str, value: str, *, loose: bool) -> bool:
        if not name.startswith(("<uid-", "<rv-", "<rand-", "<continue-")):
            return True
        if name in self.known and not name.startswith("<continue-"):
            return self.known[name] == value or (loose and name.startswith("<rv-"))
        if name.startswith("<rv-"):
            for other, known in self.known.items():
                if other.startswith("<rv-") and (number(other) < number(name)) != (int(known) <= int(value)):
                    # What stood before the scenario began has no order that counts.
                    if int(known) == int(value) or min(int(known), int(value)) <= self.floor:
                        continue
                    return loose
        self.known[name] = value
        return True


def number(placeholder: str) -> int:
    """Give the number of a placeholder."""
    return int(placeholder.strip("<>").rpartition("-")[2])


# Parts of messages that say nothing about meaning: where in Go's source a scheme stands, snippets of the body.
_NOISE = [
    (re.compile(r"invalid character '\\xcf'"), "invalid character 'Ï'"),
    (re.compile(r"(mismatched input '[^']*' expecting) [^\n]*"), r"\1 …"),
    (re.compile(r"Object 'Kind' is missing in .*", re.DOTALL), "Object 'Kind' is missing"),
    (re.compile(r"\n@@ .*\n", re.DOTALL), ""),
    (re.compile(r' in scheme "[^"]*"'), ""),
    (re.compile(r"parse error: (.*?) \([^()]*\)$", re.DOTALL), r"parse error: \1"),
    (re.compile(r'Invalid value: "\{(?!`).*\}": ', re.DOTALL), "Invalid value: {…}: "),
    (re.compile(r"Invalid value: \{.*?\}: ", re.DOTALL), "Invalid value: {…}: "),
    (re.compile(r"Invalid value: \[\{.*?\}\]: ", re.DOTALL), "Invalid value: […]: "),
    (re.compile(r"expected prefix \[107 56 115 0\].*", re.DOTALL), "expected prefix"),
    (re.compile(r"Go value of type struct \{.*?\}", re.DOTALL), "Go value of type struct"),
    (re.compile(r'Invalid value: "null"'), "Invalid value: null"),
]


def meaning(message: str) -> str:
    """Give a message without the parts that carry no meaning."""
    for pattern, replacement in _NOISE:
        message = pattern.sub(replacement, message)
    return message


def without_managed_fields(value: Any) -> Any:
    """Give JSON without managedFields, wherever they stand."""
    if isinstance(value, dict):
        return {k: without_managed_fields(v) for k, v in value.items() if k != "managedFields"}
    return [without_managed_fields(v) for v in value] if isinstance(value, list) else value


def served(expected: Any, actual: Any) -> Any:
    """Give a discovery document (or index of OpenAPI) without the groups and resources that the other server does not have at all.

    What it has must be described in the same way; any other document is given back as it is.
    """
    if (
        not isinstance(expected, dict)
        or not isinstance(actual, dict)
        or not (expected.get("kind") in _DISCOVERY or set(expected) == {"paths"})
    ):
        return expected
    result = dict(expected)
    if isinstance(result.get("paths"), dict):
        result["paths"] = {k: v for k, v in result["paths"].items() if k in actual["paths"]}
    for key, name in (
        ("groups", "name"),
        ("resources", "name"),
        ("items", "metadata"),
        ("versions", "version"),
    ):
        if isinstance(result.get(key), list) and isinstance(actual.get(key), list):
            result[key] = _common(result[key], actual[key], name)
    return result


_DISCOVERY = {"APIGroupList", "APIResourceList", "APIGroupDiscoveryList"}


def _common(expected: list[Any], actual: list[Any], name: str) -> list[Any]:
    def identity(item: Any) -> Any:
        return item.get(name, {}).get("name") if name == "metadata" else item.get(name)

    others = {identity(item): item for item in actual}
    kept = [item for item in expected if identity(item) in others]
    if name == "metadata":
        kept = [{**item, "versions": _versions(item, others[identity(item)])} for item in kept]
    # The order of groups is theirs, not ours: compare as sets.
    actual.sort(key=lambda item: str(identity(item)))
    return sorted(kept, key=lambda item: str(identity(item)))


def _versions(group: Json, other: Json) -> list[Json]:
    known = {v["version"]: {r["resource"] for r in v["resources"]} for v in other["versions"]}
    return [
        {**v, "resources": [r for r in v["resources"] if r["resource"] in known[v["version"]]]}
        for v in group["versions"]
        if v["version"] in known
    ]


class Comparison:
    """Compares one answer with the recorded one and collects differences as text."""

    def __init__(self, bindings: Bindings, *, keep_managed_fields: bool) -> None:
        self.bindings = bindings
        self.keep = keep_managed_fields
        self.differences: list[str] = []

    def same(self, expected: Any, actual: Any) -> None:
        """Compare two JSON values."""
        if not self.keep:
            expected, actual = without_managed_fields(expected), without_managed_fields(actual)
        self._walk(served(expected, actual), actual, "")

    def _walk(self, expected: Any, actual: Any, path: str) -> None:
        if isinstance(expected, dict) and isinstance(actual, dict):
            # Names and UIDs first: they explain the rest of an object.
            for key in sorted({*expected, *actual}, key=lambda k: (k != "metadata", k != "details", k)):
                where = f"{path}.{key}"
                if key == "description" and "columnDefinitions" in path:
                    continue
                if key not in actual:
                    self.differences.append(f"{where}: missing, wanted {short(expected[key])}")
                elif key not in expected:
                    self.differences.append(f"{where}: not wanted, is {short(actual[key])}")
                else:
                    self._walk(expected[key], actual[key], where)
        elif isinstance(expected, list) and isinstance(actual, list):
            if len(expected) != len(actual):
                self.differences.append(
                    f"{path}: {len(actual)} items, wanted {len(expected)}: {short(actual)}"
                )
            for i, (one, other) in enumerate(zip(expected, actual, strict=False)):
                self._walk(one, other, f"{path}[{i}]")
        elif isinstance(expected, str) and isinstance(actual, str):
            self._text(expected, actual, path)
        elif expected != actual or isinstance(expected, bool) != isinstance(actual, bool):
            self.differences.append(f"{path}: is {short(actual)}, wanted {short(expected)}")

    def _text(self, expected: str, actual: str, path: str) -> None:
        loose = path in {".metadata.resourceVersion", ".object.metadata.resourceVersion"} or "message" in path
        if path.endswith(".message"):
            expected, actual = meaning(expected), meaning(actual)
        if not self.bindings.text(expected, actual, loose_version=loose):
            self.differences.append(f"{path}: is {short(actual, 600)}, wanted {short(expected, 600)}")


def short(value: Any, limit: int = 200) -> str:
    """Give a value for a report."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[:limit] + "…"


@dataclass
class StepResult:
    """What differed in one step."""

    index: int
    label: str
    differences: list[str]


def load(folder: Path) -> Iterator[tuple[str, Json]]:
    """Give each scenario as `group/name`."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for scenario in content.get("scenarios", []):
            yield f"{content['group']}/{scenario['name']}", scenario


def replay(
    scenario: Json, send: Send, *, now: str, floor: int = 0, patience: float = 5.0
) -> list[StepResult]:
    """Run a scenario and give the steps whose answers differ."""
    bindings = Bindings(now, floor=floor)
    kept = scenario.get("managedFields") == "kept"
    results: list[StepResult] = []
    for index, step in enumerate(scenario["steps"]):
        differences = run_step(step, send, bindings, kept=kept, patience=patience)
        if differences and not step.get("cleanup"):
            label = f"{step['method']} {step['path']} {step.get('do', '')}"
            results.append(StepResult(index, label, differences))
    return results


def run_step(step: Json, send: Send, bindings: Bindings, *, kept: bool, patience: float) -> list[str]:
    """Run one step and give what differed."""
    if "during" in step:
        return _run_watch(step, send, bindings, kept=kept, patience=patience)
    deadline = time.monotonic() + (patience if step.get("poll") else 0)
    while True:
        saved = dict(bindings.known)
        answer = _send(step, send, bindings)
        differences = compare(step, answer, bindings, kept=kept)
        if not differences or time.monotonic() >= deadline:
            return differences
        bindings.known = saved
        time.sleep(0.01)


def _run_watch(step: Json, send: Send, bindings: Bindings, *, kept: bool, patience: float) -> list[str]:
    answers: list[Answer] = []
    watcher = threading.Thread(target=lambda: answers.append(_send(step, send, bindings)))
    watcher.start()
    time.sleep(0.05)
    inner: list[str] = []
    for number_, part in enumerate(step["during"]):
        found = run_step(part, send, bindings, kept=kept, patience=patience)
        inner += [f"during[{number_}] {part['method']} {part['path']}: {text}" for text in found]
    watcher.join()
    return [*inner, *compare(step, answers[0], bindings, kept=kept)]


def _send(step: Json, send: Send, bindings: Bindings) -> Answer:
    headers: dict[str, str] = {"Accept": "application/json"}
    body = b""
    if "body" in step:
        body = bindings.fill(json.dumps(step["body"], separators=(",", ":"))).encode()
        headers["Content-Type"] = "application/json"
    if "body_text" in step:
        body = bindings.fill(step["body_text"]).encode()
        headers["Content-Type"] = "application/json"
    for name, value in (step.get("headers") or {}).items():
        if value is None:
            headers.pop(name, None)
        else:
            headers[name] = value
    if step.get("client_cert") is False:
        headers["X-No-Client-Certificate"] = "1"
    return send(step["method"], bindings.fill(step["path"]), headers, body)


def compare(step: Json, answer: Answer, bindings: Bindings, *, kept: bool) -> list[str]:
    """Give what differs between an answer and the recorded one."""
    comparison = Comparison(bindings, keep_managed_fields=kept)
    if answer.status != step["status"]:
        message = answer.body.get("message", "") if isinstance(answer.body, dict) else short(answer.body)
        return [
            f"status: is {answer.status} ({message}), wanted {step['status']}: {short(step.get('response'), 500)}"
        ]
    if step.get("cleanup") or answer.status == 0:
        return []
    recorded = step.get("response_headers") or {}
    wanted_type = recorded.get("Content-Type", "application/json" if "response" in step else None)
    if wanted_type and answer.content_type != wanted_type:
        comparison.differences.append(f"Content-Type: is {answer.content_type}, wanted {wanted_type}")
    if list(recorded.get("Warning") or []) != list(answer.headers.get("Warning") or []):
        comparison.differences.append(
            f"Warning: is {answer.headers.get('Warning')}, wanted {recorded.get('Warning')}"
        )
    if recorded.get("Retry-After") != answer.headers.get("Retry-After"):
        comparison.differences.append(f"Retry-After: is {answer.headers.get('Retry-After')}")
    if "response" in step:
        comparison.same(step["response"], answer.body)
    if "response_events" in step:
        comparison.same(step["response_events"], answer.lines if answer.lines is not None else [answer.body])
    if "response_text" in step:
        _compare_text(step["response_text"], answer, comparison)
    return comparison.differences


def _compare_text(expected: str, answer: Answer, comparison: Comparison) -> None:
    if answer.content_type == "application/yaml":
        comparison.same(read(expected), read(answer.body))
    elif not isinstance(answer.body, str) or expected.strip() != answer.body.strip():
        comparison.differences.append(f"text: is {short(answer.body)}, wanted {short(expected)}")
