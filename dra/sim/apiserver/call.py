"""One API call after routing: which resource, which object, how the answer should look."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dra.api.rules.cause import Cause
from dra.sim.apiserver.exchange import Request
from dra.sim.apiserver.identity import User
from dra.sim.apiserver.negotiate import Wanted
from dra.sim.apiserver.registry import Resource
from dra.sim.apiserver.status import ApiFailure, bad_request, invalid, not_found

Json = dict[str, Any]


@dataclass(slots=True)
class Call:
    """A routed request. `warnings` are sent with the answer."""

    request: Request
    resource: Resource
    version: str
    namespace: str
    name: str
    subresource: str
    wanted: Wanted
    user: User
    warnings: list[str]
    version_given: bool = True

    @property
    def group_version(self) -> str:
        """The apiVersion of the path."""
        return self.resource.api_version(self.version)

    @property
    def key(self) -> tuple[str, str]:
        """Where the object is kept."""
        return (self.namespace if self.resource.namespaced else "", self.name)

    @property
    def query(self) -> dict[str, str]:
        """The query parameters."""
        return self.request.query

    @property
    def manager(self) -> str:
        """The field manager: the parameter, else the first part of the user agent."""
        named = self.query.get("fieldManager", "")
        if named:
            return named
        agent = self.request.headers.get("user-agent", "")
        return agent.partition("/")[0][:128] or "unknown"

    def warn(self, text: str) -> None:
        """Add a warning header."""
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        self.warnings.append(f'299 - "{escaped}"')

    def not_found(self) -> ApiFailure:
        """404 for this call's object."""
        return not_found(self.resource.plural, self.resource.group, self.name)

    @property
    def invalid_group(self) -> str:
        """The group that 422 names: events of both groups are checked as core ones."""
        return "" if self.resource.store_as else self.resource.group


def parse_int(text: str) -> int:
    """Read a number of the query as the server does.

    Raises:
        ApiFailure: 400.
    """
    if re.fullmatch(r"[+-]?\d+", text, re.ASCII) is None:
        raise bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    return int(text)


def options_invalid(kind: str, *causes: Cause) -> ApiFailure:
    """422 for query or body options (`ListOptions`, `DeleteOptions` …)."""
    return invalid(kind, "meta.k8s.io", "", list(causes))


def dry_run(call: Call, body: Json | None = None, *, kind: str) -> bool:
    """Whether the call must not store anything.

    Raises:
        ApiFailure: 422 for a value other than `All`.
    """
    values = [call.query["dryRun"]] if "dryRun" in call.query else list((body or {}).get("dryRun") or [])
    for value in values:
        if value != "All":
            detail = f'Unsupported value: ["{value}"]: supported values: "All"'
            raise options_invalid(kind, Cause("FieldValueNotSupported", "dryRun", detail))
    return bool(values)


def check_write_options(call: Call, kind: str) -> None:
    """Check the query of a write.

    Raises:
        ApiFailure: 422.
    """
    causes: list[Cause] = []
    manager = call.query.get("fieldManager", "")
    if len(manager) > 128:
        causes.append(Cause("FieldValueTooLong", "fieldManager", "Too long: may not be more than 128 bytes"))
    for position, character in enumerate(manager):
        if not character.isprintable():
            shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in manager)
            why = f"invalid character U+{ord(character):04X} (at position {position})"
            causes.append(Cause("FieldValueInvalid", "fieldManager", f'Invalid value: "{shown}": {why}'))
    validation = call.query.get("fieldValidation", "")
    if validation not in {"", "Ignore", "Strict", "Warn"}:
        detail = f'Unsupported value: "{validation}": supported values: "", "Ignore", "Strict", "Warn"'
        causes.append(Cause("FieldValueNotSupported", "fieldValidation", detail))
    if causes:
        raise options_invalid(kind, *causes)
