"""Calls that are no plain verbs on an object: binding a pod, eviction, finalize, reviews."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dra.sim.apiserver import bodies, deletion
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.exchange import Response, text
from dra.sim.apiserver.status import ApiFailure, conflict

if TYPE_CHECKING:
    from dra.sim.apiserver.api import Api

Json = dict[str, Any]
Handler = Callable[["Api", Call, str], Response]


def _body(call: Call) -> Json:
    value = bodies.parse_body(call)
    return value if isinstance(value, dict) else {}


def _success(api: Api, call: Call, code: int = 201) -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}
    return api.encode(call, code, body)


def bind_pod(api: Api, call: Call, verb: str) -> Response:
    """Put a pod on a node (what a scheduler does), unless it is on one.

    Raises:
        ApiFailure: 404, 409.
    """
    binding = _body(call)
    node = (binding.get("target") or {}).get("name") or ""
    with api.storage.lock:
        pod = api.storage.get(call.resource.key, call.key)
        if pod is None:
            raise call.not_found()
        if pod["metadata"].get("deletionTimestamp"):
            raise conflict(
                "pods/binding",
                "",
                call.name,
                f"pod {call.name} is being deleted, cannot be assigned to a host",
            )
        if pod["spec"].get("nodeName"):
            why = f'pod {call.name} is already assigned to node "{pod["spec"]["nodeName"]}"'
            raise conflict("pods/binding", "", call.name, why)
        bound = copy.deepcopy(pod)
        bound["spec"]["nodeName"] = node
        meta = bound["metadata"]
        annotations = (binding.get("metadata") or {}).get("annotations")
        if annotations:
            meta["annotations"] = {**(meta.get("annotations") or {}), **annotations}
        status = bound.setdefault("status", {})
        conditions = [c for c in status.get("conditions") or [] if c.get("type") != "PodScheduled"]
        scheduled = {
            "type": "PodScheduled",
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": api.now(),
        }
        status["conditions"] = [*conditions, scheduled]
        if meta.get("generation"):
            status["conditions"][-1]["observedGeneration"] = meta["generation"]
        api.storage.put(call.resource.key, call.key, bound)
    return _success(api, call)


def evict_pod(api: Api, call: Call, verb: str) -> Response:
    """Delete a pod on behalf of an eviction (disruption budgets are not looked at)."""
    eviction = _body(call)
    deletion.delete(api, call, eviction.get("deleteOptions") or {})
    return _success(api, call)


def finalize_namespace(api: Api, call: Call, verb: str) -> Response:
    """Change the finalizers of a namespace.

    Raises:
        ApiFailure: 404.
    """
    body = _body(call)
    with api.storage.lock:
        old = api.storage.get(call.resource.key, call.key)
        if old is None:
            raise call.not_found()
        spec = {k: v for k, v in (old.get("spec") or {}).items() if k != "finalizers"}
        finalizers = (body.get("spec") or {}).get("finalizers")
        if finalizers:
            spec["finalizers"] = finalizers
        new = {**old, "spec": spec}
        if deletion.finished(new):
            return api.reply(call, api.storage.delete(call.resource.key, call.key, new))
        return api.reply(call, api.storage.put(call.resource.key, call.key, new))


def pod_log(api: Api, call: Call, verb: str) -> Response:
    """Give an empty log: nothing runs here.

    Raises:
        ApiFailure: 404.
    """
    if api.storage.get(call.resource.key, call.key) is None:
        raise call.not_found()
    return text(200, "")


def access_review(api: Api, call: Call, verb: str) -> Response:
    """Everybody may do everything."""
    body = {k: v for k, v in bodies.shape_body(call, _body(call)).items() if k != "status"}
    return api.encode(call, 201, {**body, "metadata": {}, "status": {"allowed": True}})


def rules_review(api: Api, call: Call, verb: str) -> Response:
    """Give rules that allow everything."""
    every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
    urls = {"verbs": ["*"], "nonResourceURLs": ["*"]}
    status = {"resourceRules": [every], "nonResourceRules": [urls], "incomplete": False}
    body = bodies.shape_body(call, _body(call))
    return api.encode(call, 201, {**body, "metadata": {}, "status": status})


def self_review(api: Api, call: Call, verb: str) -> Response:
    """Say who the client is."""
    groups = ["system:authenticated"]
    if call.user == "system:admin":
        groups.insert(0, "system:masters")
    status = {"userInfo": {"username": call.user, "groups": groups}}
    body = {"kind": call.resource.kind, "apiVersion": call.group_version}
    return api.encode(call, 201, {**body, "metadata": {"creationTimestamp": api.now()}, "status": status})


def token_review(api: Api, call: Call, verb: str) -> Response:
    """Check a token against the server's one."""
    body = bodies.shape_body(call, _body(call))
    token = (body.get("spec") or {}).get("token", "")
    status: Json
    if api.options.token is not None and token == api.options.token:
        status = {"authenticated": True, "user": {"username": "system:admin", "groups": ["system:masters"]}}
    else:
        status = {"user": {}, "error": "invalid bearer token"}
    return api.encode(call, 201, {**body, "metadata": {}, "status": status})


def not_simulated(api: Api, call: Call, verb: str) -> Response:
    """Say that there is no such thing here.

    Raises:
        ApiFailure: 501, always.
    """
    raise ApiFailure(501, "NotImplemented", f"{call.resource.plural}/{call.subresource} is not simulated")


HANDLERS: dict[tuple[str, str], Handler] = {
    ("pods", "binding"): bind_pod,
    ("pods", "eviction"): evict_pod,
    ("pods", "log"): pod_log,
    ("namespaces", "finalize"): finalize_namespace,
    ("selfsubjectaccessreviews", ""): access_review,
    ("subjectaccessreviews", ""): access_review,
    ("selfsubjectrulesreviews", ""): rules_review,
    ("selfsubjectreviews", ""): self_review,
    ("tokenreviews", ""): token_review,
}
