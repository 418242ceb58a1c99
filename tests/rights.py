"""Rights as RBAC has them: what manifests grant to an account, and what requests needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.yaml_text import read_all

ROOT = Path(__file__).parents[1]
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
# Asked by everybody who talks to an API server; the default roles of Kubernetes grant it to all.
_DISCOVERY = ("/api", "/apis", "/version", "/openapi", "/healthz", "/readyz")

# (verb, API group, resource or resource/subresource)
Right = tuple[str, str, str]


def granted(manifest: str) -> set[Right]:
    """What the roles of a file of deploy/manifests grant."""
    documents = read_all((ROOT / "deploy/manifests" / manifest).read_text())
    return {
        (verb, group, resource)
        for each in documents
        if each["kind"] in ("ClusterRole", "Role")
        for rule in each["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def used(requests: Iterable, agent: str) -> set[Right]:
    """What the requests of a program needed; `agent` is how its user agent begins."""
    found = set()
    for each in requests:
        if not each.user_agent.startswith(agent):
            continue
        parts = each.path.strip("/").split("/")
        group, rest = (
            ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
        )
        if not rest:
            assert each.path.startswith(_DISCOVERY), each.path
            continue
        if rest[0] == "namespaces" and len(rest) > 2:
            rest = rest[2:]
        resource = "/".join(rest[::2][:2])
        if each.method == "GET":
            verb = "watch" if each.watch else "get" if len(rest) > 1 else "list"
        else:
            verb = _VERBS[each.method]
        found.add((verb, group, resource))
    return found
