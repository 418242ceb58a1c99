"""What the server fills in where a pod (or a pod template) says nothing. Source: pkg/apis/core/v1/defaults of Kubernetes 1.36."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

FILE_MODE = 0o644


def containers(spec: Json) -> Iterator[Json]:
    """Give all init and ordinary containers."""
    yield from spec.get("initContainers") or []
    yield from spec.get("containers") or []


def default_container(container: Json) -> None:
    """Fill in one container."""
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    if not container.get("imagePullPolicy"):
        image = container.get("image") or ""
        tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
        latest = ("@" not in image and not tag) or tag == "latest"
        container["imagePullPolicy"] = "Always" if latest else "IfNotPresent"
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    for entry in container.get("env") or []:
        reference = (entry.get("valueFrom") or {}).get("fieldRef")
        if reference is not None:
            reference.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if container.get(name) is not None:
            _default_probe(container[name])
    resources = container.setdefault("resources", {})
    limits = resources.get("limits") or {}
    if limits:
        requests = resources.setdefault("requests", {})
        for key, value in limits.items():
            requests.setdefault(key, value)


def _default_probe(probe: Json) -> None:
    for key, value in {
        "timeoutSeconds": 1,
        "periodSeconds": 10,
        "successThreshold": 1,
        "failureThreshold": 3,
    }.items():
        if not probe.get(key):
            probe[key] = value
    if probe.get("httpGet") is not None:
        probe["httpGet"].setdefault("path", "/")
        probe["httpGet"].setdefault("scheme", "HTTP")
    if probe.get("grpc") is not None:
        probe["grpc"].setdefault("service", "")


def _default_volume(volume: Json) -> None:
    if set(volume) == {"name"}:
        volume["emptyDir"] = {}
    for kind in ("secret", "configMap", "downwardAPI", "projected"):
        if volume.get(kind) is not None:
            volume[kind].setdefault("defaultMode", FILE_MODE)
    if volume.get("hostPath") is not None:
        volume["hostPath"].setdefault("type", "")
    for item in [volume.get("downwardAPI") or {}, *((volume.get("projected") or {}).get("sources") or [])]:
        for entry in (item.get("downwardAPI") or item).get("items") or []:
            if entry.get("fieldRef") is not None:
                entry["fieldRef"].setdefault("apiVersion", "v1")
        if item.get("serviceAccountToken") is not None:
            item["serviceAccountToken"].setdefault("expirationSeconds", 3600)


def default_spec(spec: Json) -> None:
    """Fill in a pod's (or pod template's) spec."""
    for volume in spec.get("volumes") or []:
        _default_volume(volume)
    for container in containers(spec):
        default_container(container)
    for key, value in {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
    }.items():
        if spec.get(key) in (None, ""):
            spec[key] = value
    if spec.get("securityContext") is None:
        spec["securityContext"] = {}
    if not spec.get("serviceAccountName") and spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"]
    if spec.get("serviceAccountName"):
        spec["serviceAccount"] = spec["serviceAccountName"]
