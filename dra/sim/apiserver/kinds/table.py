"""Which rules belong to which resource, admission, and the calls that are not plain verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.sim.apiserver.call import Call
from dra.sim.apiserver.exchange import Response
from dra.sim.apiserver.kinds import core, dra, special
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
    return _STRATEGIES.get(resource.key, Strategy)(rules, generation=generation)


def admit(api: Api, call: Call, new: Json, old: Json | None) -> None:
    """Run what the real server's admission plug-ins do."""


def answer_special(api: Api, call: Call, verb: str) -> Response:
    """Answer a subresource other than status, or a kind that is only ever created (reviews).

    Raises:
        ApiFailure: 501 where the simulator has nothing.
    """
    handler = special.HANDLERS.get((call.resource.plural, call.subresource))
    if handler is None:
        raise ApiFailure(501, "NotImplemented", f"{call.resource.plural}/{call.subresource} is not simulated")
    return handler(api, call, verb)
