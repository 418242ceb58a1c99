"""Parts that several kinds of resource.k8s.io share: selectors, opaque config, tolerations, taints, node selectors,
conditions.

Source: pkg/apis/resource/validation and pkg/apis/core/validation of Kubernetes 1.36.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dra.api.rules import names
from dra.api.rules.cause import Cause
from dra.api.rules.fields import (
    bad,
    duplicate,
    forbidden,
    required,
    too_long,
    too_many,
    unsupported,
)
from dra.api.rules.meta import label_value_errors, qualified_name_errors, validate_labels

Json = dict[str, Any]
CelCheck = Callable[[str], str | None]

MAX_EXPRESSION = 10 * 1024
MAX_OPAQUE = 10 * 1024
MAX_SELECTORS = 32
MAX_CONFIGS = 32
TOO_COMPLEX = "too complex, exceeds cost limit"


def limited(items: Sequence[Any], field: str, limit: int) -> list[Cause]:
    """Find a list that is too long."""
    return [too_many(field, len(items), limit)] if len(items) > limit else []


def selectors(items: Sequence[Json], field: str, cel_check: CelCheck | None) -> list[Cause]:
    """Find what is wrong with device selectors; expressions are checked where there is a checker."""
    found = limited(items, field, MAX_SELECTORS)
    if found:
        return found
    for i, item in enumerate(items):
        at = f"{field}[{i}].cel"
        cel = item.get("cel")
        if cel is None:
            found.append(required(at))
            continue
        found += expression(cel.get("expression") or "", f"{at}.expression", cel_check)
    return found


def expression(text: str, field: str, cel_check: CelCheck | None) -> list[Cause]:
    """Find what is wrong with one CEL expression."""
    if len(text.encode()) > MAX_EXPRESSION:
        return [too_long(field, MAX_EXPRESSION)]
    why = cel_check(text) if cel_check is not None else None
    if why is None:
        return []
    return [forbidden(field, TOO_COMPLEX)] if why == TOO_COMPLEX else [bad(field, text, why)]


def opaque_config(config: Json, field: str) -> list[Cause]:
    """Find what is wrong with the opaque part of a configuration."""
    opaque = config.get("opaque")
    if opaque is None:
        return [required(f"{field}.opaque")]
    found = names.driver(opaque.get("driver") or "", f"{field}.opaque.driver")
    return [*found, *raw_object(opaque.get("parameters"), f"{field}.opaque.parameters", wanted=True)]


def raw_object(value: Any, field: str, *, wanted: bool) -> list[Cause]:
    """Find what is wrong with raw JSON that must be an object of at most 10 KiB."""
    if value is None:
        return [required(field)] if wanted else []
    if len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()) > MAX_OPAQUE:
        return [too_long(field, MAX_OPAQUE)]
    if not isinstance(value, dict):
        return [bad(field, "<value omitted>", "must be a valid JSON object")]
    return []


def effects(minor: int) -> list[str]:
    """Give the taint effects a server knows."""
    return ["NoExecute", "NoSchedule", *(["None"] if minor >= 35 else [])]


def taint(item: Json, field: str, minor: int) -> list[Cause]:
    """Find what is wrong with a device taint."""
    found = [
        bad(f"{field}.key", item.get("key") or "", why)
        for why in qualified_name_errors(item.get("key") or "")
    ]
    found += [
        bad(f"{field}.value", item.get("value") or "", why)
        for why in label_value_errors(item.get("value") or "")
    ]
    effect = item.get("effect") or ""
    if not effect:
        found.append(required(f"{field}.effect"))
    elif effect not in effects(minor):
        found.append(unsupported(f"{field}.effect", effect, effects(minor)))
    return found


def toleration(item: Json, field: str, minor: int) -> list[Cause]:
    """Find what is wrong with a device toleration."""
    found: list[Cause] = []
    key, value = item.get("key") or "", item.get("value") or ""
    if key:
        found += [bad(f"{field}.key", key, why) for why in qualified_name_errors(key)]
    operator = item.get("operator") or ""
    if operator == "Exists":
        if value:
            found.append(bad(f"{field}.value", value, "must be empty for operator `Exists`"))
    elif operator == "Equal":
        found += [bad(f"{field}.value", value, why) for why in label_value_errors(value)]
    elif not operator:
        found.append(required(f"{field}.operator"))
    else:
        found.append(unsupported(f"{field}.operator", operator, ["Equal", "Exists"]))
    effect = item.get("effect") or ""
    if effect and effect not in effects(minor):
        found.append(unsupported(f"{field}.effect", effect, effects(minor)))
    return found


_OPERATORS = {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}


def node_selector(selector: Json, field: str) -> list[Cause]:
    """Find what is wrong with a node selector."""
    terms = selector.get("nodeSelectorTerms") or []
    at = f"{field}.nodeSelectorTerms"
    if not terms:
        return [required(at, "must have at least one node selector term")]
    found: list[Cause] = []
    for i, term in enumerate(terms):
        for j, requirement in enumerate(term.get("matchExpressions") or []):
            found += _requirement(requirement, f"{at}[{i}].matchExpressions[{j}]")
        for j, requirement in enumerate(term.get("matchFields") or []):
            found += _field_requirement(requirement, f"{at}[{i}].matchFields[{j}]")
    return found


def _requirement(requirement: Json, field: str) -> list[Cause]:
    operator, values = requirement.get("operator") or "", requirement.get("values") or []
    found: list[Cause] = []
    if operator in {"In", "NotIn"} and not values:
        found.append(required(f"{field}.values", "must be specified when `operator` is 'In' or 'NotIn'"))
    elif operator in {"Exists", "DoesNotExist"} and values:
        found.append(
            forbidden(f"{field}.values", "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")
        )
    elif operator in {"Gt", "Lt"} and len(values) != 1:
        found.append(
            required(f"{field}.values", "must be specified single value when `operator` is 'Lt' or 'Gt'")
        )
    elif operator not in _OPERATORS:
        found.append(bad(f"{field}.operator", operator, "not a valid selector operator"))
    key = requirement.get("key") or ""
    return [*found, *(bad(f"{field}.key", key, why) for why in qualified_name_errors(key))]


def _field_requirement(requirement: Json, field: str) -> list[Cause]:
    operator, values = requirement.get("operator") or "", requirement.get("values") or []
    found: list[Cause] = []
    if operator not in {"In", "NotIn"}:
        found.append(bad(f"{field}.operator", operator, "not a valid selector operator"))
    elif len(values) != 1:
        found.append(
            required(
                f"{field}.values",
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
            )
        )
    if requirement.get("key") != "metadata.name":
        found.append(bad(f"{field}.key", requirement.get("key") or "", "not a valid field selector key"))
    return found


def conditions(items: Sequence[Json], field: str, *, limit: int | None = None) -> list[Cause]:
    """Find what is wrong with conditions. Source: metav1 validation.ValidateConditions."""
    found = limited(items, field, limit) if limit is not None else []
    seen: set[str] = set()
    for i, item in enumerate(items):
        at = f"{field}[{i}]"
        kind = item.get("type") or ""
        if not kind:
            found.append(required(f"{at}.type"))
        elif kind in seen:
            found.append(duplicate(f"{at}.type", kind))
        else:
            found += [bad(f"{at}.type", kind, why) for why in qualified_name_errors(kind)]
        seen.add(kind)
        if item.get("status") not in {"True", "False", "Unknown"}:
            found.append(unsupported(f"{at}.status", item.get("status") or "", ["False", "True", "Unknown"]))
        if not item.get("lastTransitionTime"):
            found.append(required(f"{at}.lastTransitionTime"))
        if not item.get("reason"):
            found.append(required(f"{at}.reason"))
    return found


__all__ = [
    "conditions",
    "expression",
    "limited",
    "node_selector",
    "opaque_config",
    "raw_object",
    "selectors",
    "taint",
    "toleration",
    "validate_labels",
]
