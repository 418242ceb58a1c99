"""Discovery: `/api`, `/apis`, their aggregated form, `/version`, health, `/openapi/v2` and `/openapi/v3`."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from dra.sim.apiserver import openapi, openapi_v2
from dra.sim.apiserver.encoding import encode
from dra.sim.apiserver.exchange import Request, Response, dump, text
from dra.sim.apiserver.negotiate import clauses, negotiate, not_acceptable, router_not_acceptable
from dra.sim.apiserver.registry import Resource
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import method_not_allowed, no_such_resource

Json = dict[str, Any]

_AGGREGATED = "APIGroupDiscoveryList"
_HEALTH = ("/healthz", "/livez", "/readyz")


def answer(api: ServerState, request: Request) -> Response | None:
    """Answer a path that belongs to no resource, None where it does not."""
    path = request.path.rstrip("/") or "/"
    if path.startswith(_HEALTH) and path.split("/")[1] in {"healthz", "livez", "readyz"}:
        return _health(path)
    if path == "/version":
        if request.method != "GET":
            raise method_not_allowed()
        return Response(200, dump(version(api.options.minor), pretty=True))
    if path in {"/api", "/apis"}:
        aggregated = _wanted_version(request)
        if aggregated:
            return _aggregated(api, path, aggregated)
        return _encoded(request, _versions(api, request) if path == "/api" else _group_list(api))
    if path == "/openapi/v3":
        return Response(200, dump(openapi.index(api.registry)), "text/plain; charset=utf-8")
    if path.startswith("/openapi/v3/"):
        return _openapi(api, path.removeprefix("/openapi/v3/"))
    if path == "/openapi/v2":
        return _openapi_v2(api, request)
    if path.startswith("/openapi"):
        raise no_such_resource()
    parts = path.strip("/").split("/")
    if parts[0] == "apis" and len(parts) in {2, 3} and parts[1] not in api.registry.group_versions():
        return text(404, "404 page not found\n")
    if parts[0] == "api" and len(parts) == 2:
        return _encoded(request, _resource_list(api, "", parts[1]))
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in api.registry.group_versions():
        return _encoded(request, {"kind": "APIGroup", "apiVersion": "v1", **_group(api, parts[1])})
    if parts[0] == "apis" and len(parts) == 3 and parts[1] in api.registry.group_versions():
        return _encoded(request, _resource_list(api, parts[1], parts[2]))
    return None


def _health(path: str) -> Response:
    name = path.strip("/").partition("/")[2]
    return text(200, "ok") if name in {"", "ping", "log", "etcd"} else text(404, "404 page not found\n")


def _encoded(request: Request, body: Json) -> Response:
    """Answer in the encoding the client wants.

    Raises:
        ApiFailure: 406.
    """
    wanted = negotiate(request.headers.get("accept"), pretty=request.query.get("pretty", ""))
    if wanted.shape:
        raise not_acceptable()
    return encode(wanted, 200, body)


def version(minor: int) -> Json:
    """Give what `/version` says."""
    return {
        "major": "1",
        "minor": str(minor),
        "emulationMajor": "1",
        "emulationMinor": str(minor),
        "minCompatibilityMajor": "1",
        "minCompatibilityMinor": str(minor - 1),
        "gitVersion": f"v1.{minor}.2",
        "gitCommit": "simulated",
        "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z",
        "goVersion": "go1.26",
        "compiler": "gc",
        "platform": "linux/amd64",
    }


def _versions(api: ServerState, request: Request) -> Json:
    host = request.headers.get("host", "127.0.0.1")
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": host}],
    }


def _group(api: ServerState, group: str) -> Json:
    versions = [{"groupVersion": f"{group}/{v}", "version": v} for v in api.registry.group_versions()[group]]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def _group_list(api: ServerState) -> Json:
    groups = [_group(api, group) for group in api.registry.group_versions() if group]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def storage_hash(resource: Resource) -> str:
    """Give the hash of the storage version. Source: discovery.StorageVersionHash (sha256 of group/version/kind)."""
    raw = resource.hashed or f"{resource.group}/{resource.storage}/{resource.kind}"
    return base64.b64encode(hashlib.sha256(raw.encode()).digest()[:8]).decode()


def _resource_list(api: ServerState, group: str, version: str) -> Json:
    resources: list[Json] = []
    found = list(api.registry.in_version(group, version))
    if not found:
        raise no_such_resource()
    for resource in found:
        entry: Json = {
            "name": resource.plural,
            "singularName": resource.singular_name,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(resource.verbs),
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        if "list" in resource.verbs:
            entry["storageVersionHash"] = storage_hash(resource)
        resources.append(entry)
        for name, verbs in _listed(resource):
            resources.append(_subresource(resource, name, verbs))
    body: Json = {"kind": "APIResourceList"}
    if group:
        body["apiVersion"] = "v1"
    body["groupVersion"] = f"{group}/{version}" if group else version
    return {**body, "resources": resources}


def _listed(resource: Resource) -> list[tuple[str, tuple[str, ...]]]:
    """Give the subresources in the order of discovery: by name, of custom resources the status first."""
    items = sorted(resource.subresources.items())
    return items[::-1] if resource.custom is not None else items


_SUBRESOURCE_KINDS = {
    "binding": {"kind": "Binding"},
    "eviction": {"group": "policy", "version": "v1", "kind": "Eviction"},
    "scale": {"group": "autoscaling", "version": "v1", "kind": "Scale"},
    "token": {"group": "authentication.k8s.io", "version": "v1", "kind": "TokenRequest"},
}


def _subresource(resource: Resource, name: str, verbs: tuple[str, ...]) -> Json:
    entry: Json = {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(verbs),
    }
    return {**entry, **_SUBRESOURCE_KINDS.get(name, {})}


def _wanted_version(request: Request) -> str:
    for media, parameters in clauses(request.headers.get("accept", "")):
        fits = parameters.get("as") == _AGGREGATED and parameters.get("g") == "apidiscovery.k8s.io"
        if media == "application/json" and fits and parameters.get("v") == "v2":
            return "v2"
    return ""


def _aggregated(api: ServerState, path: str, wanted: str) -> Response:
    items: list[Json] = []
    for group, versions in api.registry.group_versions().items():
        if (group == "") != (path == "/api"):
            continue
        listed = [
            {
                "version": version,
                "resources": [_aggregated_resource(r) for r in api.registry.in_version(group, version)],
                "freshness": "Current",
            }
            for version in versions
        ]
        meta = {"name": group} if group else {}
        items.append({"metadata": meta, "versions": listed})
    body = {
        "kind": _AGGREGATED,
        "apiVersion": f"apidiscovery.k8s.io/{wanted}",
        "metadata": {},
        "items": items,
    }
    content = f"application/json;g=apidiscovery.k8s.io;v={wanted};as={_AGGREGATED}"
    response = Response(200, dump(body), content)
    response.headers["Vary"] = "Accept"
    return response


def _aggregated_resource(resource: Resource) -> Json:
    # Empty group and version stand for those of the list.
    kind = {"group": "", "version": "", "kind": resource.kind}
    entry: Json = {
        "resource": resource.plural,
        "responseKind": kind,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular_name,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    if resource.subresources:
        entry["subresources"] = [
            {
                "subresource": name,
                "responseKind": {**kind, **_SUBRESOURCE_KINDS.get(name, {})},
                "verbs": list(verbs),
            }
            for name, verbs in _listed(resource)
        ]
    return entry


def _openapi(api: ServerState, path: str) -> Response:
    parts = path.split("/")
    if parts[0] == "api" and len(parts) == 2:
        group, version = "", parts[1]
    elif parts[0] == "apis" and len(parts) == 3:
        group, version = parts[1], parts[2]
    else:
        raise no_such_resource()
    if version not in api.registry.group_versions().get(group, []):
        raise no_such_resource()
    return Response(200, dump(openapi.document(api.registry, group, version)), headers={"Vary": "Accept"})


def _openapi_v2(api: ServerState, request: Request) -> Response:
    made = openapi_v2.document(api.registry)
    vary = {"Vary": "Accept-Encoding"}
    for media, _ in clauses(request.headers.get("accept") or "*/*"):
        if media in openapi_v2.ASKED:
            return Response(200, openapi_v2.encode(made), openapi_v2.PROTOBUF, vary)
        if media in {"application/json", "application/*", "*/*"}:
            return Response(200, dump(made), headers=vary)
    raise router_not_acceptable()
