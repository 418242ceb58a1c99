"""Make values.schema.json from values.yaml: types from the defaults, what else is allowed from here (`make manifests`).

A key that the chart does not know is an error: a typing mistake in a values file would otherwise install a default.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "helm/dra-driver-nvidia-gpu"

_TRI = {"enum": [True, False, "auto", "true", "false"]}
_NUMBER_TEXT = {"type": ["string", "integer"]}
# path -> schema, in place of what the default says.
SPECIAL: dict[str, Any] = {
    "nvidiaDriverRoot": {"type": "string", "pattern": "^/"},
    "consumableShares": {
        "anyOf": [
            {"enum": ["", "disabled", "unlimited", "memory"]},
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": "^[1-9][0-9]*$"},
        ]
    },
    "resourceApiVersion": {
        "enum": [
            "",
            "v1",
            "v1beta2",
            "v1beta1",
            "resource.k8s.io/v1",
            "resource.k8s.io/v1beta2",
            "resource.k8s.io/v1beta1",
        ]
    },
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digest": {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"},
    "featureGates": {"type": "object", "additionalProperties": {"type": ["boolean", "string"]}},
    "logVerbosity": _NUMBER_TEXT,
    "loggingFormat": {"enum": ["json", "text"]},
    "openshift.enabled": _TRI,
    "imagePullSecrets": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
    "kubeletPlugin.nvmlHold": {"enum": ["auto", "always", "never"]},
    "kubeletPlugin.migMode": {"enum": ["", "dynamic", "static", "none"]},
    "kubeletPlugin.cdiExposure": {"enum": ["auto", "hooks", "soname", "ld-library-path"]},
    "kubeletPlugin.cdiRoot": {"type": "string", "pattern": "^/"},
    "kubeletPlugin.nodeLabels": {"enum": ["none", "nfd", "api"]},
    "kubeletPlugin.additionalXidsToIgnore": _NUMBER_TEXT,
    "kubeletPlugin.startJitterSeconds": {"type": "number", "minimum": 0},
    "kubeletPlugin.kubeApiQPS": {"type": "number", "minimum": 0},
    "kubeletPlugin.kubeApiBurst": {"type": "integer", "minimum": 1},
    "kubeletPlugin.kubeletRegistrarDirectoryPath": {"type": "string", "pattern": "^/.*/plugins_registry/?$"},
    "kubeletPlugin.kubeletPluginsDirectoryPath": {"type": "string", "pattern": "^/.*/plugins/?$"},
    "kubeletPlugin.containers.gpus.healthcheckPort": {"type": "integer", "maximum": 65535},
    "kubeletPlugin.containers.computeDomains.healthcheckPort": {"type": "integer"},
    "fleet.replicas": {"type": "integer", "minimum": 0},
    "webhook.replicas": {"type": "integer", "minimum": 0},
    "webhook.servicePort": {"type": "integer", "minimum": 1, "maximum": 65535},
    "webhook.containerPort": {"type": "integer", "minimum": 1, "maximum": 65535},
    "webhook.failurePolicy": {"enum": ["Fail", "Ignore"]},
    "webhook.sharesPerCard": {"type": "integer", "minimum": 1, "maximum": 1000},
    "webhook.tls.mode": {"enum": ["cert-manager", "secret", "self-signed"]},
    "webhook.tls.certManager.issuerType": {"enum": ["selfsigned", "issuer", "clusterissuer"]},
    "priorityClassQuota.pods": _NUMBER_TEXT,
    # NVIDIA's, without effect here: whatever is in them.
    "controller": {"type": "object"},
    "resources.computeDomains.imex": {"type": "object"},
}
# Objects of Kubernetes: its API says what may be in them.
FREE = {
    "selectorLabelsOverride", "serviceAccount.annotations", "namespace.labels", "kubeletPlugin.updateStrategy",
    "kubeletPlugin.podAnnotations", "kubeletPlugin.podSecurityContext", "kubeletPlugin.nodeSelector",
    "kubeletPlugin.affinity", "kubeletPlugin.containers.init.securityContext", "kubeletPlugin.containers.init.resources",
    "kubeletPlugin.containers.computeDomains.securityContext", "kubeletPlugin.containers.computeDomains.resources",
    "kubeletPlugin.containers.gpus.securityContext", "kubeletPlugin.containers.gpus.resources", "mpsKeeper.resources",
    "mpsKeeper.podAnnotations", "mpsKeeper.updateStrategy", "fleet.resources", "fleet.podAnnotations",
    "fleet.nodeSelector", "fleet.affinity", "webhook.strategy", "webhook.podAnnotations", "webhook.podSecurityContext",
    "webhook.nodeSelector", "webhook.affinity", "webhook.containers.webhook.securityContext",
    "webhook.containers.webhook.resources", "serviceMonitor.labels", "grafanaDashboard.labels",
}  # fmt: skip


def schema_of(value: Any, path: str = "") -> dict[str, Any]:
    """Give the schema of a value by its default."""
    if path in SPECIAL:
        return dict(SPECIAL[path])
    if isinstance(value, dict):
        if path in FREE:
            return {"type": "object"}
        inner = {key: schema_of(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": inner}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, list):
        return {"type": "array"}
    return {"type": "string"}


def text() -> str:
    """Give the schema's text."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = schema_of(values)
    # What Helm itself puts in, for charts that have this one as a part.
    found["properties"]["global"] = {"type": "object"}
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **found}, indent=1) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(text())
    sys.exit(0)
