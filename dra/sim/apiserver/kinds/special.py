"""Calls that are no plain verbs on an object: binding a pod, eviction, finalize, reviews."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dra.api.rules.decode import parse_json
from dra.sim.apiserver import bodies, deletion, tables, write
from dra.sim.apiserver.call import Call, parse_int
from dra.sim.apiserver.encoding import encode
from dra.sim.apiserver.exchange import Response, text
from dra.sim.apiserver.patch import merge_patch
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, bad_request, conflict, internal, not_found

Json = dict[str, Any]
Handler = Callable[[ServerState, Call, str], Response]


def _body(call: Call) -> Json:
    value = bodies.parse_body(call)
    return value if isinstance(value, dict) else {}


def _success(api: ServerState, call: Call, code: int = 201) -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}
    return encode(call.wanted, code, body)


def bind_pod(api: ServerState, call: Call, verb: str) -> Response:
    """Put a pod on a node (what a scheduler does), unless it is on one.

    Raises:
        ApiFailure: 404, 409.
    """
    binding = _body(call)
    target = binding.get("target") or {}
    node = target.get("name") or ""
    if not call.subresource:
        # The old resource `bindings` names the pod in the body.
        call.name = (binding.get("metadata") or {}).get("name") or ""
        pods = api.registry.find("", "v1", "pods")
        assert pods is not None
        call.resource = pods
    if target.get("kind") not in (None, "", "Node"):
        kind = target["kind"]
        raise internal(f'target.kind: Unsupported value: "{kind}": supported values: "Node", "<empty>"')
    if not node:
        raise internal("target.name: Required value")
    with api.storage.lock:
        pod = api.storage.get(call.resource.key, call.key)
        if pod is None:
            raise call.not_found()
        uid = (binding.get("metadata") or {}).get("uid")
        if uid and uid != pod["metadata"]["uid"]:
            why = (
                f"StorageError: invalid object, Code: 4, Key: /registry/pods/{call.namespace}/{call.name}, "
                "ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: "
                f"{uid}, UID in object meta: {pod['metadata']['uid']}"
            )
            raise conflict("pods", "", call.name, why)
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
        api.storage.put(call.resource.key, call.key, bound)
    return _success(api, call)


def evict_pod(api: ServerState, call: Call, verb: str) -> Response:
    """Delete a pod on behalf of an eviction (disruption budgets are not looked at)."""
    eviction = _body(call)
    deletion.delete(api, call, eviction.get("deleteOptions") or {})
    return _success(api, call)


def finalize_namespace(api: ServerState, call: Call, verb: str) -> Response:
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
            return tables.reply(api, call, api.storage.delete(call.resource.key, call.key, new))
        return tables.reply(api, call, api.storage.put(call.resource.key, call.key, new))


def pod_log(api: ServerState, call: Call, verb: str) -> Response:
    """Give what a container printed, as far as its program is played.

    Raises:
        ApiFailure: 404; 400 for a container that is not there, or not named where there are several.
    """
    pod = api.storage.get(call.resource.key, call.key)
    if pod is None:
        raise call.not_found()
    spec = pod.get("spec") or {}
    node = spec.get("nodeName") or ""
    if node and api.storage.get("/nodes", ("", node)) is None:
        # The real server looks the node up to reach its kubelet, and words the failure so.
        raise not_found("pods", "", node)
    content = api.log_of(pod, _log_container(call, spec)) or ""
    lines = content.splitlines(keepends=True)
    if call.query.get("tailLines"):
        lines = lines[-count:] if (count := parse_int(call.query["tailLines"])) > 0 else []
    return text(200, "".join(lines))


def _log_container(call: Call, spec: Json) -> str:
    main = [container["name"] for container in spec.get("containers") or []]
    every = [*main, *(container["name"] for container in spec.get("initContainers") or [])]
    wanted = call.query.get("container", "")
    if wanted and wanted not in every:
        raise bad_request(f"container {wanted} is not valid for pod {call.name}")
    if not wanted and len(main) > 1:
        listed = " ".join(main)
        raise bad_request(
            f"a container name must be specified for pod {call.name}, choose one of: [{listed}]"
        )
    return wanted or (main[0] if main else "")


def access_review(api: ServerState, call: Call, verb: str) -> Response:
    """Everybody may do everything."""
    body = {k: v for k, v in bodies.shape_body(call, _body(call)).items() if k != "status"}
    return encode(call.wanted, 201, {**body, "metadata": {}, "status": {"allowed": True}})


def rules_review(api: ServerState, call: Call, verb: str) -> Response:
    """Give rules that allow everything."""
    every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
    urls = {"verbs": ["*"], "nonResourceURLs": ["*"]}
    status = {"resourceRules": [every], "nonResourceRules": [urls], "incomplete": False}
    body = bodies.shape_body(call, _body(call))
    return encode(call.wanted, 201, {**body, "metadata": {}, "status": status})


def self_review(api: ServerState, call: Call, verb: str) -> Response:
    """Say who the client is."""
    status = {"userInfo": call.user.to_json()}
    body = {"kind": call.resource.kind, "apiVersion": call.group_version}
    return encode(call.wanted, 201, {**body, "metadata": {"creationTimestamp": api.now()}, "status": status})


def token_review(api: ServerState, call: Call, verb: str) -> Response:
    """Check a token against the server's one."""
    body = bodies.shape_body(call, _body(call))
    token = (body.get("spec") or {}).get("token", "")
    status: Json
    if api.options.token is not None and token == api.options.token:
        status = {"authenticated": True, "user": {"username": "system:admin", "groups": ["system:masters"]}}
    else:
        status = {"user": {}, "error": "invalid bearer token"}
    return encode(call.wanted, 201, {**body, "metadata": {}, "status": status})


def _at(obj: Json, path: str) -> int:
    value: Any = obj
    for part in path.strip(".").split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, int) else 0


def _scale_paths(call: Call) -> tuple[str, str]:
    scales = getattr(call.resource.custom, "scales", {}).get(call.version) or {}
    return (
        scales.get("specReplicasPath") or ".spec.replicas",
        scales.get("statusReplicasPath") or ".status.replicas",
    )


def scale(api: ServerState, call: Call, verb: str) -> Response:
    """Show or change the number of replicas as a Scale object.

    Raises:
        ApiFailure: 404, and what changing the object may give.
    """
    wanted, actual = _scale_paths(call)
    outer = api.storage.get(call.resource.key, call.key)
    if outer is None:
        raise call.not_found()
    if verb != "get":
        body = parse_json(call.request.body.decode())
        replicas = (
            body[0].get("value") if isinstance(body, list) else (body.get("spec") or {}).get("replicas")
        )
        parts = wanted.strip(".").split(".")

        def changed(current: Json) -> Json:
            patch: Any = replicas
            for part in reversed(parts):
                patch = {part: patch}
            return dict(merge_patch(current, patch))

        inner = replace(call, subresource="")
        outer, _ = write.update(api, inner, changed, kind="PatchOptions")
    meta = outer["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: Json = {"replicas": _at(outer, actual)}
    selector = ((outer.get("spec") or {}).get("selector") or {}).get("matchLabels") or {}
    if selector:
        status["selector"] = ",".join(f"{k}={v}" for k, v in sorted(selector.items()))
    shown = {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: meta[key] for key in kept if key in meta},
        "spec": {"replicas": _at(outer, wanted)},
        "status": status,
    }
    return encode(call.wanted, 200, shown)


def not_simulated(api: ServerState, call: Call, verb: str) -> Response:
    """Say that there is no such thing here.

    Raises:
        ApiFailure: 501, always.
    """
    raise ApiFailure(501, "NotImplemented", f"{call.resource.plural}/{call.subresource} is not simulated")


HANDLERS: dict[tuple[str, str], Handler] = {
    ("pods", "binding"): bind_pod,
    ("bindings", ""): bind_pod,
    ("pods", "eviction"): evict_pod,
    ("pods", "log"): pod_log,
    ("namespaces", "finalize"): finalize_namespace,
    ("selfsubjectaccessreviews", ""): access_review,
    ("subjectaccessreviews", ""): access_review,
    ("selfsubjectrulesreviews", ""): rules_review,
    ("selfsubjectreviews", ""): self_review,
    ("tokenreviews", ""): token_review,
}


def answer(api: ServerState, call: Call, verb: str) -> Response:
    """Answer a subresource other than status, or a kind that is only ever created (reviews).

    Raises:
        ApiFailure: 501 where the simulator has nothing.
    """
    handler = HANDLERS.get((call.resource.plural, call.subresource))
    if call.subresource == "scale":
        handler = scale
    if handler is None:
        raise ApiFailure(501, "NotImplemented", f"{call.resource.plural}/{call.subresource} is not simulated")
    return handler(api, call, verb)
