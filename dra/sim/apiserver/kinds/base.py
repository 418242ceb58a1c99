"""The rules that hold for every kind unless its own module says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.api.rules.cause import Cause, CelCheck
from dra.api.rules.decode import Findings, decode
from dra.api.rules.dns import dns_label_error, dns_subdomain_error, path_segment_error
from dra.api.rules.meta import validate_meta
from dra.sim.apiserver.call import Call

Json = dict[str, Any]


@dataclass(slots=True)
class Rules:
    """What validation and defaulting need to know of the server."""

    gates: Mapping[str, bool]
    cel_check: CelCheck | None
    now: Callable[[], str]
    read: Callable[[str, tuple[str, str]], Json | None]
    minor: int = 36
    node_lifecycle: bool = False

    def on(self, gate: str) -> bool:
        """Whether a feature gate is on."""
        return bool(self.gates.get(gate, False))


@dataclass(slots=True)
class Strategy:
    """How objects of one kind are created, changed and checked. Methods get the storage version.

    `prepare_*` may change `new`, a private copy; `validate_*` give the findings in the server's order.
    """

    rules: Rules
    generation: bool = False
    create_on_put: bool = False
    name_check: str = "subdomain"
    ignore_for_generation: frozenset[str] = field(
        default_factory=lambda: frozenset({"metadata", "status", "kind", "apiVersion"})
    )

    def __post_init__(self) -> None:
        """Adjust the settings of a kind."""

    def default(self, new: Json, call: Call) -> None:
        """Fill in what decoding defaults, before webhooks see it. May be called again on its own outcome."""

    def prepare_create(self, new: Json, call: Call) -> None:
        """Default, and drop what a client may not set."""
        if "status" in call.resource.subresources:
            self.reset_status(new, call)

    def reset_status(self, new: Json, call: Call) -> None:
        """Forget the status of a new object."""
        if "status" in new:
            ref = call.resource.versions.get(call.resource.storage, "")
            new["status"] = decode({}, ref, Findings()).get("status") or {} if ref else {}

    def admit_create(self, new: Json, call: Call) -> bool:
        """Add what admission adds, which nobody owns; gives whether there is such."""
        return False

    def validate_meta(self, obj: Json, call: Call) -> list[Cause]:
        """Find what is wrong with the metadata."""
        return validate_meta(
            obj,
            namespaced=call.resource.namespaced,
            check_name=lambda name: self.check_name(name, prefix=False),
            check_prefix=lambda name: self.check_name(name, prefix=True),
        )

    def validate_create(self, new: Json, call: Call) -> list[Cause]:
        """Find what is wrong with a new object."""
        return []

    def prepare_update(self, new: Json, old: Json, call: Call) -> None:
        """Keep what the main resource may not change."""
        if "status" in call.resource.subresources:
            keep(new, old, "status")

    def validate_update(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Find what is wrong with a change."""
        return []

    def prepare_status(self, new: Json, old: Json, call: Call) -> None:
        """Keep what the status subresource may not change."""
        for key in [k for k in {*new, *old} if k not in {"metadata", "status", "kind", "apiVersion"}]:
            keep(new, old, key)
        meta = new["metadata"]
        for key in ("labels", "annotations", "ownerReferences", "finalizers"):
            keep(meta, old["metadata"], key)

    def validate_status(self, new: Json, old: Json, call: Call) -> list[Cause]:
        """Find what is wrong with a change of the status."""
        return []

    def warnings(self, new: Json, old: Json | None, call: Call) -> list[str]:
        """Give warnings for the client."""
        return []

    def spec_of(self, obj: Json) -> Json:
        """Give the part of an object whose changes move the generation."""
        return {k: v for k, v in obj.items() if k not in self.ignore_for_generation}

    def check_name(self, name: str, *, prefix: bool) -> str | None:
        """Give what is wrong with a name (`prefix`: with a generateName), None if nothing is."""
        text = name[:-1] + "a" if prefix and name.endswith("-") else name
        if self.name_check == "label":
            return dns_label_error(text)
        if self.name_check == "path":
            return path_segment_error(text)
        return dns_subdomain_error(text)


def keep(new: Json, old: Json, key: str) -> None:
    """Put back what `old` has under `key`."""
    if key in old:
        new[key] = old[key]
    else:
        new.pop(key, None)
