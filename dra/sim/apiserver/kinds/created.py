"""What the controllers of a real cluster do at once after a creation."""

from __future__ import annotations

import uuid
from typing import Any

from dra.sim.apiserver.call import Call
from dra.sim.apiserver.kinds import custom
from dra.sim.apiserver.state import ServerState

Json = dict[str, Any]


def created(api: ServerState, call: Call, obj: Json) -> None:
    """Do what the controllers of the real cluster do shortly after a creation.

    A namespace gets its default service account and the root certificate, a node its TTL annotation (where that is asked for).
    """
    name = obj["metadata"]["name"]
    if call.resource.key == "/namespaces":
        content = {"data": {"ca.crt": ""}}
        for plural, kind, what, more in (
            ("configmaps", "ConfigMap", "kube-root-ca.crt", content),
            ("serviceaccounts", "ServiceAccount", "default", {}),
        ):
            meta = {
                "name": what,
                "namespace": name,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": api.now(),
            }
            made = {"kind": kind, "apiVersion": "v1", "metadata": meta, **more}
            api.storage.put(f"/{plural}", (name, what), made)
    if call.resource.key == custom.DEFINITIONS:
        api.storage.put(custom.DEFINITIONS, call_key(obj), custom.established(obj, api.now()))
    if call.resource.key == "/nodes" and api.options.node_lifecycle:
        meta = obj["metadata"]
        annotations = {**(meta.get("annotations") or {}), "node.alpha.kubernetes.io/ttl": "0"}
        api.storage.put("/nodes", call_key(obj), {**obj, "metadata": {**meta, "annotations": annotations}})


def call_key(obj: Json) -> tuple[str, str]:
    """Give where an object is kept."""
    return (obj["metadata"].get("namespace") or "", obj["metadata"]["name"])
