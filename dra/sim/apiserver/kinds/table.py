"""Which rules belong to which resource, admission, and the calls that are not plain verbs."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from dra.sim.apiserver.call import Call
from dra.sim.apiserver.exchange import Response
from dra.sim.apiserver.kinds import core, custom, dra, pods, policies, special, webhooks, workloads
from dra.sim.apiserver.kinds.base import Rules, Strategy
from dra.sim.apiserver.registry import DRA, Resource
from dra.sim.apiserver.status import ApiFailure

if TYPE_CHECKING:
    from dra.sim.apiserver.api import Api

Json = dict[str, Any]

_WITHOUT_GENERATION = {f"{DRA}/resourceclaims", f"{DRA}/resourceclaimtemplates"}
_WITH_GENERATION = {DRA, "apps", "batch", "policy", "apiextensions.k8s.io", "admissionregistration.k8s.io"}
_STRATEGIES: dict[str, type[Strategy]] = {
    "/namespaces": core.NamespaceStrategy,
    custom.DEFINITIONS: custom.DefinitionStrategy,
    "/nodes": core.NodeStrategy,
    "/pods": pods.PodStrategy,
    "/configmaps": core.ConfigMapStrategy,
    "/secrets": core.SecretStrategy,
    "admissionregistration.k8s.io/mutatingwebhookconfigurations": webhooks.WebhookStrategy,
    "admissionregistration.k8s.io/validatingwebhookconfigurations": webhooks.WebhookStrategy,
    "admissionregistration.k8s.io/validatingadmissionpolicies": policies.PolicyStrategy,
    "admissionregistration.k8s.io/validatingadmissionpolicybindings": policies.BindingStrategy,
    "coordination.k8s.io/leases": core.LeaseStrategy,
    "apps/deployments": workloads.WorkloadStrategy,
    "apps/replicasets": workloads.WorkloadStrategy,
    "apps/statefulsets": workloads.WorkloadStrategy,
    "apps/daemonsets": workloads.WorkloadStrategy,
    "batch/jobs": workloads.WorkloadStrategy,
    "batch/cronjobs": workloads.CronJobStrategy,
    "/events": core.EventStrategy,
    "resource.k8s.io/resourceslices": dra.SliceStrategy,
    "resource.k8s.io/resourceclaims": dra.ClaimStrategy,
    "resource.k8s.io/resourceclaimtemplates": dra.TemplateStrategy,
    "resource.k8s.io/deviceclasses": dra.ClassStrategy,
    "resource.k8s.io/devicetaintrules": dra.TaintRuleStrategy,
}


def strategy_for(resource: Resource, rules: Rules) -> Strategy:
    """Give the rules of a resource."""
    generation = resource.group in _WITH_GENERATION or resource.kind == "Pod" or resource.custom is not None
    generation = generation and resource.key not in _WITHOUT_GENERATION
    if resource.custom is not None:
        return custom.CustomStrategy(rules, generation=generation)
    return _STRATEGIES.get(resource.key, Strategy)(rules, generation=generation)


def created(api: Api, call: Call, obj: Json) -> None:
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


def answer_special(api: Api, call: Call, verb: str) -> Response:
    """Answer a subresource other than status, or a kind that is only ever created (reviews).

    Raises:
        ApiFailure: 501 where the simulator has nothing.
    """
    handler = special.HANDLERS.get((call.resource.plural, call.subresource))
    if call.subresource == "scale":
        handler = special.scale
    if handler is None:
        raise ApiFailure(501, "NotImplemented", f"{call.resource.plural}/{call.subresource} is not simulated")
    return handler(api, call, verb)
