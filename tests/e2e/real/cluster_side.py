"""The cluster's side beside the node's driver: webhook and fleet as processes, installed as the manifests say."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from tests.e2e.real.cluster import MANIFESTS, PLUGIN_NAMESPACE, REPOSITORY, Cluster
from tests.e2e.real.processes import Program, wait_until
from tests.real_apiserver import free_port

TLS = REPOSITORY / "tests/data/tls"
_FLEET_ACCOUNT = "dra-driver-nvidia-gpu-service-account-fleet"


class ClusterSide:
    """The webhook next to the API server, and one replica of the fleet with the rights of its account."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._netns = cluster.network.name if cluster.network else ""
        self.port = free_port()
        self.webhook = self._program(
            "webhook", "--port", str(self.port), "--tls-cert-file", str(TLS / "server.crt"),
            "--tls-private-key-file", str(TLS / "server.key"),
        )  # fmt: skip
        self.fleet: Program | None = None

    def start(self) -> None:
        """Start both; returns when the API server asks the webhook."""
        self.webhook.start_and_wait(lambda: "webhook_started" in self.webhook.tail(), seconds=60)
        for document in configurations(self.port):
            self._apply(document)
        for document in yaml.safe_load_all((MANIFESTS / "fleet.yaml").read_text()):
            if document["kind"] != "Deployment":
                self._apply(document)
        token = self._cluster.kubectl("create", "token", "-n", PLUGIN_NAMESPACE, _FLEET_ACCOUNT).strip()
        kubeconfig = self._cluster.control_plane.kubeconfig("fleet", token=token)
        self.fleet = self._program(
            "fleet", "--namespace", PLUGIN_NAMESPACE, "--lease", "dra-driver-nvidia-gpu-fleet", "--identity", "a",
            "--kubeconfig", str(kubeconfig), "--healthcheck-port", "-1",
        )  # fmt: skip
        self.fleet.start()
        wait_until(self._asks, seconds=60, what="the API server asks the webhook")

    def stop(self) -> None:
        """End both and take their configurations away."""
        for document in configurations(self.port):
            kind, name = document["kind"].lower(), document["metadata"]["name"]
            self._cluster.kubectl("delete", kind, name, "--ignore-not-found")
        for program in (self.webhook, self.fleet):
            if program is not None:
                program.stop()

    def _asks(self) -> bool:
        wrong = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "no-such-field": 1}
        body = claim_with(wrong)
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims?dryRun=All"
        status, _ = self._cluster.control_plane.request("POST", path, body)
        return status == 403

    def _apply(self, document: dict[str, Any]) -> None:
        self._cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    def _program(self, name: str, *arguments: str) -> Program:
        return Program(
            name, [sys.executable, "-m", "dra.cli.main", name, *arguments],
            log=self._cluster.directory / f"{name}.log", netns=self._netns,
        )  # fmt: skip


def configurations(port: int) -> Iterator[dict[str, Any]]:
    """Give the shipped configurations; only where the webhook is, and whom to trust, are the tests'."""
    bundle = base64.b64encode((TLS / "server.crt").read_bytes()).decode()
    for document in yaml.safe_load_all((MANIFESTS / "webhook-configuration.yaml").read_text()):
        for hook in document["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
        yield document


def claim_with(parameters: dict[str, Any], name: str = "odd", version: str = "v1") -> dict[str, Any]:
    """Give a claim for a GPU with a configuration, in a version of the API."""
    exactly = {"deviceClassName": "gpu.nvidia.com"}
    request: dict[str, Any] = {"name": "gpu", **(exactly if version == "v1beta1" else {"exactly": exactly})}
    opaque = {"driver": "gpu.nvidia.com", "parameters": parameters}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [request], "config": [{"opaque": opaque}]}},
    }
