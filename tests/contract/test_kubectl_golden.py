"""What kubectl 1.36 was recorded to send to a real API server, and what it printed: the same against the simulated one.

The recorded requests are replayed always. Where a kubectl of 1.36 or later is at hand (`KUBECTL`, `KUBEBUILDER_ASSETS` or the path),
it runs every recorded command against the simulated server, and must send the same requests, print the same and end with
the same status. What differs stands in `DIFFERENT` with the reason.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.exchange import Request
from tests.contract.kubectl_manifests import MANIFESTS, body_of
from tests.contract.test_apiserver_golden import GOLDEN, seed

Json = dict[str, Any]
FILE = GOLDEN / "kubectl.json"
RUNS: list[Json] = json.loads(FILE.read_text(encoding="utf-8"))["runs"] if FILE.is_file() else []

pytestmark = pytest.mark.skipif(not RUNS, reason=f"no recordings at {FILE}")

FEWER = "the simulated server serves fewer groups"
NO_TEXTS = "field descriptions are not served"
# Commands whose requests or output differ, and why. `""`: whole command.
DIFFERENT = {
    "kubectl api-resources --api-group=resource.k8s.io": "ResourcePoolStatusRequest is not served",
    "kubectl api-versions": FEWER,
    "kubectl get all -n golden": "autoscalers are not served",
    "kubectl describe node node-1": "what a real kubelet reports, and its lease",
    "kubectl auth whoami": "another user",
    "kubectl apply -f @claim2.yaml": "a value is shown as JSON, not as the server's Go struct",
    "kubectl explain resourceslice.spec": NO_TEXTS,
    "kubectl explain resourceclaim.spec.devices.requests --api-version=resource.k8s.io/v1": NO_TEXTS,
    "kubectl explain pods.spec.resourceClaims": NO_TEXTS,
    "kubectl logs kp0 -n golden": "an empty log is 200 here, not 204",
}
# What the simulated server has done before kubectl looks again, so that it does not wait.
QUICKER = {"kubectl delete ns golden-k --timeout=30s"}


def prepared(**options: Any) -> SimApiServer:
    server = SimApiServer(node_lifecycle=True, **options)
    seed(server)
    finished = {
        "phase": "Succeeded",
        "podIP": "10.0.0.2",
        "podIPs": [{"ip": "10.0.0.2"}],
        "containerStatuses": [
            {"name": "c", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
             "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
        ],
    }  # fmt: skip
    pods = "/api/v1/namespaces/default/pods"
    spec = {"nodeName": "node-1", "containers": [{"name": "c", "image": "x"}]}
    made = server.create(
        pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hello"}, "spec": spec}
    )
    assert server.request("PUT", f"{pods}/hello/status", {**made, "status": finished})[0] == 200
    return server


# -- the recorded requests, without kubectl


def needs_manifest(request: Json) -> bool:
    return "body" not in request and request["method"] in {"POST", "PUT"}


def filled(text: str, server: SimApiServer) -> str:
    """Put values in for placeholders: of the slice that most runs are about."""
    found = server.storage.get("resource.k8s.io/resourceslices", ("", "ks0"))
    meta = found["metadata"] if found else {}
    text = text.replace("<rv>", meta.get("resourceVersion", "1")).replace("<uid-1>", meta.get("uid", "x"))
    return text.replace("<time>", "2026-11-30T00:00:00Z").replace("<n>", "1").replace("<hash>", "X")


def test_every_recorded_request_of_kubectl_gets_the_recorded_status() -> None:
    server = prepared(time_scale=0.01, watch_seconds=20)
    server.collector.start()
    wrong: list[str] = []
    try:
        for number, run in enumerate(RUNS):
            manifests = 0
            for request in run["requests"]:
                body = body_of(run["cmd"], request, manifests)
                manifests += needs_manifest(request)
                headers = {"accept": request["accept"], "user-agent": "kubectl/v1.36.4 (linux/amd64)"}
                if request.get("content_type"):
                    headers["content-type"] = request["content_type"]
                path, text = filled(request["path"], server), filled(body.decode("latin-1"), server)
                answer = server.api.handle(Request(request["method"], path, headers, text.encode("latin-1")))
                if answer.stream is not None:
                    list(answer.stream)
                wrong += differences(run, number, request, answer)
    finally:
        server.collector.stop()
    assert not wrong, "\n".join(wrong)


def differences(run: Json, number: int, request: Json, answer: Any) -> list[str]:
    what = f"run {number}: {run['cmd']}: {request['method']} {request['path']}"
    if run["cmd"] in DIFFERENT and answer.status != request["status"]:
        return []
    if answer.status != request["status"]:
        return [f"{what}: {answer.status}, recorded {request['status']}: {answer.body[:300]!r}"]
    if (
        answer.stream is None
        and answer.status == 200
        and "as=Table" in request["accept"]
        and b'"kind":"Table"' not in answer.body
    ):
        return [f"{what}: no Table: {answer.body[:200]!r}"]
    return []


# -- kubectl itself


def kubectl() -> str | None:
    given = os.environ.get("KUBECTL")
    beside = Path(os.environ.get("KUBEBUILDER_ASSETS", "/nonexistent"), "kubectl")
    found = given or (str(beside) if beside.is_file() else shutil.which("kubectl"))
    if found is None:
        return None
    text = subprocess.run(
        [found, "version", "--client", "-o", "json"], capture_output=True, text=True, timeout=60
    ).stdout
    minor = re.search(r'"minor": "(\d+)', text)
    return found if minor and int(minor[1]) >= 36 else None


_TOKENS = re.compile(r"<(?:uid|rand)-\d+>|<(?:rv|age|time|server|hash|n|redacted|LIVE|MERGED)>")
# A revision that the recording shows as it was.
_PLAIN_VERSION = re.compile(r"(Resource Version:\s+)\d+")


def pattern_of(line: str) -> re.Pattern[str]:
    """Turn a recorded line into an expression: placeholders fit anything, and columns may be wider."""
    line = _PLAIN_VERSION.sub(r"\1<rv>", line.rstrip())
    words = [".+?".join(map(re.escape, _TOKENS.split(word))) for word in line.split()]
    return re.compile(r"\s*" + r"\s+".join(words) + r"\s*")


def same_text(got: str, recorded: str) -> bool:
    lines, wanted = got.rstrip().splitlines(), recorded.rstrip().splitlines()
    return len(lines) == len(wanted) and all(
        pattern_of(line).fullmatch(shown) for shown, line in zip(lines, wanted, strict=True)
    )


def says(got: str, recorded: str) -> bool:
    """Whether the recorded lines stand there in this order: of errors only the lines that name them were recorded."""
    lines = iter(got.splitlines())
    return all(
        any(pattern_of(line).fullmatch(shown) for shown in lines) for line in recorded.rstrip().splitlines()
    )


def sent(method: str, target: str, status: int) -> str:
    """Give a request without what changes from run to run: hashes, UIDs, time-outs, the order of selectors."""
    target = re.sub(r"hash=[^&]*", "hash=", target)
    target = re.sub(r"timeoutSeconds=[^&]*", "timeoutSeconds=", target)
    target = re.sub(r"resourceVersion=(?:<rv>|\d+)", "resourceVersion=", target)
    target = re.sub(r"uid%3D(?:<uid-\d+>|[0-9a-f-]{36})", "uid%3D", target)
    path, _, query = target.partition("?")
    parts = sorted(
        "fieldSelector=" + "%2C".join(sorted(part.removeprefix("fieldSelector=").split("%2C")))
        if part.startswith("fieldSelector=")
        else part
        for part in query.split("&")
    )
    return f"{method} {path}?{'&'.join(parts)} {status}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SimApiServer]:
    with prepared() as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        for name, objects in MANIFESTS.items():
            (tmp_path / name).write_text("\n---\n".join(map(json.dumps, objects)), encoding="utf-8")
        yield server


@pytest.mark.timeout(400)
def test_kubectl_does_and_prints_what_it_did_and_printed_against_a_real_server(
    cluster: SimApiServer, tmp_path: Path
) -> None:
    program = kubectl()
    if program is None:
        pytest.skip("no kubectl of 1.36 or later: set KUBECTL or KUBEBUILDER_ASSETS")
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path)}
    wrong: list[str] = []
    for number, run in enumerate(RUNS):
        if run["cmd"] in DIFFERENT:
            continue
        if run.get("cold"):
            shutil.rmtree(tmp_path / ".kube", ignore_errors=True)
        cluster.requests.clear()
        words = [word.removeprefix("@") for word in shlex.split(run["cmd"])[1:]]
        done = subprocess.run(
            [program, *words], env={**environment, **(run.get("env") or {})},
            cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        about = f"run {number}: {run['cmd']}"
        if done.returncode != run["exit"]:
            wrong.append(f"{about}: exit {done.returncode}, recorded {run['exit']}: {done.stderr}")
        if not same_text(done.stdout, run["stdout"]):
            wrong.append(f"{about}: printed\n{done.stdout}\nrecorded\n{run['stdout']}")
        if run.get("stderr") and not says(done.stderr, run["stderr"]):
            wrong.append(f"{about}: said\n{done.stderr}\nrecorded\n{run['stderr']}")
        got = [sent(entry.method, entry.target, entry.status) for entry in cluster.requests.all()]
        wanted = [sent(request["method"], request["path"], request["status"]) for request in run["requests"]]
        if run["cmd"] not in QUICKER and sorted(got) != sorted(wanted):
            wrong.append(f"{about}: sent\n  " + "\n  ".join(got) + "\nrecorded\n  " + "\n  ".join(wanted))
    assert not wrong, "\n".join(wrong)


def test_the_list_of_differences_names_recorded_commands_only() -> None:
    assert {run["cmd"] for run in RUNS} >= set(DIFFERENT)
