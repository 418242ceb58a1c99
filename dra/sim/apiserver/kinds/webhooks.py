"""Configurations of admission webhooks.

Source: pkg/apis/admissionregistration (defaults, validation) of Kubernetes 1.36.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from dra.api.rules.cause import Cause
from dra.api.rules.dns import dns_subdomain_error
from dra.api.rules.fields import bad, duplicate, required, unsupported
from dra.cel import CelCompileError
from dra.cel.expression import compile_untyped
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.cel import explain
from dra.sim.apiserver.kinds.base import Strategy

Json = dict[str, Any]
_OPERATIONS = ("*", "CONNECT", "CREATE", "DELETE", "UPDATE")
_SIDE_EFFECTS = ("None", "NoneOnDryRun")
_CHOICES = {
    "failurePolicy": ("Fail", "Ignore"),
    "matchPolicy": ("Equivalent", "Exact"),
    "reinvocationPolicy": ("IfNeeded", "Never"),
}


class WebhookStrategy(Strategy):
    """Mutating and validating configurations."""

    def default(self, new: Json, call: Call) -> None:
        """Default each webhook."""
        for hook in new.get("webhooks") or []:
            for key, value in (
                ("failurePolicy", "Fail"),
                ("matchPolicy", "Equivalent"),
                ("timeoutSeconds", 10),
            ):
                if hook.get(key) is None:
                    hook[key] = value
            for key in ("namespaceSelector", "objectSelector"):
                if hook.get(key) is None:
                    hook[key] = {}
            if call.resource.kind.startswith("Mutating") and hook.get("reinvocationPolicy") is None:
                hook["reinvocationPolicy"] = "Never"
            for rule in hook.get("rules") or []:
                rule["scope"] = rule.get("scope") or "*"
            service = (hook.get("clientConfig") or {}).get("service")
            if service is not None and service.get("port") is None:
                service["port"] = 443

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default."""
        self.default(new, call)

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Default."""
        self.default(new, call)

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Check each webhook."""
        found: list[Cause] = []
        seen: set[str] = set()
        for i, hook in enumerate(new.get("webhooks") or []):
            at, name = f"webhooks[{i}]", hook.get("name") or ""
            found += _webhook(hook, at)
            if name in seen:
                found.append(duplicate(f"{at}.name", name))
            seen.add(name)
        return found

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Check again."""
        return self.validate_create(new, call)


def _webhook(hook: Json, at: str) -> Iterator[Cause]:
    name = hook.get("name") or ""
    if not name:
        yield required(f"{at}.name")
    elif dns_subdomain_error(name):
        yield bad(f"{at}.name", name, str(dns_subdomain_error(name)))
    elif name.count(".") < 2:
        yield bad(f"{at}.name", name, "should be a domain with at least three segments separated by dots")
    for i, rule in enumerate(hook.get("rules") or []):
        yield from _rule(rule, f"{at}.rules[{i}]")
    for key, known in _CHOICES.items():
        if hook.get(key) not in (None, *known):
            yield unsupported(f"{at}.{key}", hook[key], known)
    if not hook.get("sideEffects"):
        yield required(f"{at}.sideEffects", "must specify one of None, NoneOnDryRun")
    elif hook["sideEffects"] not in _SIDE_EFFECTS:
        yield unsupported(f"{at}.sideEffects", hook["sideEffects"], _SIDE_EFFECTS)
    versions = hook.get("admissionReviewVersions") or []
    if not versions:
        yield required(f"{at}.admissionReviewVersions", "must specify one of v1, v1beta1")
    elif not {"v1", "v1beta1"} & set(versions):
        yield bad(f"{at}.admissionReviewVersions", versions, "must include at least one of v1, v1beta1")
    if not 1 <= int(hook.get("timeoutSeconds") or 0) <= 30:
        yield bad(
            f"{at}.timeoutSeconds",
            hook.get("timeoutSeconds"),
            "the timeout value must be between 1 and 30 seconds",
        )
    yield from _client(hook.get("clientConfig") or {}, f"{at}.clientConfig")
    for i, condition in enumerate(hook.get("matchConditions") or []):
        yield from _condition(condition, f"{at}.matchConditions[{i}]")


def _rule(rule: Json, at: str) -> Iterator[Cause]:
    for key in ("operations", "apiGroups", "apiVersions", "resources"):
        values = rule.get(key) or []
        if not values:
            yield required(f"{at}.{key}")
        elif "*" in values and len(values) > 1 and key != "resources":
            yield bad(f"{at}.{key}", values, "if '*' is present, must not specify other " + key)
    for i, operation in enumerate(rule.get("operations") or []):
        if operation not in _OPERATIONS:
            yield unsupported(f"{at}.operations[{i}]", operation, _OPERATIONS)
    if rule.get("scope") not in {"*", "Cluster", "Namespaced"}:
        yield unsupported(f"{at}.scope", rule.get("scope"), ("*", "Cluster", "Namespaced"))


def _client(client: Json, at: str) -> Iterator[Cause]:
    url, service = client.get("url"), client.get("service")
    if bool(url) == bool(service):
        yield required(at, "exactly one of url or service is required")
    if url:
        parts = urlsplit(url)
        if parts.scheme != "https":
            yield bad(
                f"{at}.url",
                url,
                "'https' is the only allowed URL scheme; desired format: https://host[/path]",
            )
        if not parts.hostname:
            yield bad(f"{at}.url", url, "host must be specified; desired format: https://host[/path]")
        for what, given in (
            ("user information", parts.username),
            ("fragments", parts.fragment),
            ("query parameters", parts.query),
        ):
            if given:
                yield bad(f"{at}.url", url, f"{what} are not permitted in the URL")
    if service:
        for key in ("name", "namespace"):
            if not service.get(key):
                yield required(f"{at}.service.{key}", f"service {key} is required")
        if service.get("path") and not str(service["path"]).startswith("/"):
            yield bad(f"{at}.service.path", service["path"], "must start with a '/'")
        if not 1 <= int(service.get("port") or 443) <= 65535:
            yield bad(
                f"{at}.service.port",
                service["port"],
                "port is not valid: must be between 1 and 65535, inclusive",
            )


def _condition(condition: Json, at: str) -> Iterator[Cause]:
    if not condition.get("name"):
        yield required(f"{at}.name")
    expression = str(condition.get("expression") or "").strip()
    if not expression:
        yield required(f"{at}.expression")
        return
    try:
        compile_untyped(expression, ("object", "oldObject", "request"))
    except CelCompileError as error:
        yield bad(f"{at}.expression", expression, explain(error))
