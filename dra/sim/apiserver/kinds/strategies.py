"""Which rules belong to which resource."""

from __future__ import annotations

from dra.sim.apiserver.kinds import core, custom, dra, pods, policies, webhooks, workloads
from dra.sim.apiserver.kinds.base import Rules, Strategy
from dra.sim.apiserver.registry import DRA, Resource

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
