"""`dra webhook` and `dra fleet` as processes: they start, are ready, do their work, and end on a signal."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dra.api.fraction_pods import rewrite_pod
from dra.api.fractions import FractionRules
from dra.cli.main import main
from dra.sim.apiserver import SimApiServer

TLS = Path(__file__).parents[1] / "data" / "tls"


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
    return value


@pytest.fixture
def command(tmp_path):
    running = []

    def start(*words, **env):
        log = tmp_path / f"log-{len(running)}"
        plain = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "dra.cli.main", *words], stdout=out, stderr=out, env={**plain, **env}
            )
        running.append(process)
        return process, log

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_the_webhook_serves_until_it_is_told_to_stop(command):
    process, log = command(
        "webhook", "--tls-cert-file", str(TLS / "server.crt"), "--tls-private-key-file", str(TLS / "server.key"),
        PORT="0",
    )  # fmt: skip
    found = until(lambda: re.search(r'"port": ?(\d+)', log.read_text()))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", int(found[1]), context=context, timeout=60)
    connection.request("GET", "/readyz")
    assert connection.getresponse().read() == b"ok\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_the_fleet_makes_a_template_and_gives_the_lease_up_at_its_end(command, tmp_path):
    api = SimApiServer()
    api.start()
    try:
        api.write_kubeconfig(tmp_path / "kubeconfig")
        process, _ = command(
            "fleet",
            "--namespace",
            "default",
            "--lease",
            "fleet",
            KUBECONFIG=str(tmp_path / "kubeconfig"),
            POD_NAME="me",
        )
        plain = {
            "metadata": {"name": "a"},
            "spec": {
                "containers": [
                    {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "0.2"}}}
                ]
            },
        }
        pod = {"apiVersion": "v1", "kind": "Pod", **rewrite_pod(plain, FractionRules())}
        api.create("/api/v1/namespaces/default/pods", pod)
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
        until(lambda: api.request("GET", path)[1]["items"])
        lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/fleet"
        assert api.request("GET", lease)[1]["spec"]["holderIdentity"] == "me"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not api.request("GET", lease)[1]["spec"].get("holderIdentity")
    finally:
        api.stop()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("webhook", "--gpu-resources", "gpu"), "no name of an extended resource"),
        (("webhook", "--memory-resources", "nvidia.com/gpu"), "cannot be both"),
        (("webhook", "--shares-per-card", "0"), "--shares-per-card"),
        (("fleet", "--collect-after", "-1"), "--collect-after"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(words, says, capsys, monkeypatch):
    monkeypatch.setattr("dra.plugin.signals.SignalQueue", lambda: pytest.fail("started"))
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert json.dumps(error)
