"""What `nvidia.com/gpu: 0.2` stands for: an amount, the claim template that asks for it, and the template's name. Pure.

A template's name follows from its content, so that the webhook may write the name without anything being there yet:
whoever makes the template later (`dra fleet`) makes that one, and whoever needs the same amount shares it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dra.errors import ClaimError, ValueFormatError
from dra.values import Quantity

GROUP = "gpudra.dev"
# On pods that use templates: marks them, and says what each template holds.
LABEL = f"{GROUP}/shares"
ANNOTATION = f"{GROUP}/claim-templates"
# On templates that are made and collected.
MANAGED_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "dra-fleet"
# Entries of `resourceClaims` that are ours begin with this.
CLAIM_PREFIX = "gpudra-"

GPU_CLASS = "gpu.nvidia.com"
# Into how many shares a card is cut, all over the fleet.
SHARES_PER_CARD = 100
MIB = 1 << 20
_NANO = 10**9
# A plain number below is MiB; no GPU has a terabyte.
_MOST_MIB = 1_000_000
_PREFIX = "gpu-share"
_AT = f"device.attributes['{GROUP}']"


@dataclass(frozen=True, slots=True)
class Ask:
    """An amount of one card: `shares` of `of` equal ones, or `memory_mib` of a card shared by memory, or both.

    With both, the memory counts in place of the part of it that the shares stand for.
    """

    shares: int = 0
    of: int = 0
    memory_mib: int = 0

    def content(self) -> dict[str, int]:
        """Give it as it stands in the pod's annotation."""
        amounts = {"shares": self.shares, "of": self.of, "memoryMiB": self.memory_mib}
        return {name: amount for name, amount in amounts.items() if amount}

    @classmethod
    def from_content(cls, content: object) -> Ask:
        """Read it.

        Raises:
            ClaimError: DRA-SHARE-CONTENT.
        """
        if not isinstance(content, Mapping) or set(content) - {"shares", "of", "memoryMiB"}:
            raise _no_ask(content)
        amounts = [content.get(name, 0) for name in ("shares", "of", "memoryMiB")]
        if not all(type(amount) is int and 0 <= amount < 1 << 40 for amount in amounts):
            raise _no_ask(content)
        ask = cls(*amounts)
        if (
            (not ask.shares and not ask.memory_mib)
            or not ask.shares <= ask.of
            or bool(ask.shares) != bool(ask.of)
        ):
            raise _no_ask(content)
        return ask

    def claim_spec(self) -> dict[str, Any]:
        """Give the spec of the ResourceClaim that asks for it."""
        requests: dict[str, str] = {}
        if self.shares:
            requests["shares"] = str(self.shares)
            wanted = f"{_AT}.?sharing.orValue('') == 'shares' && {_AT}.?replicas.orValue(0) == {self.of}"
        else:
            wanted = f"{_AT}.?sharing.orValue('') == 'memory'"
        if self.memory_mib:
            requests["memory"] = f"{self.memory_mib}Mi"
        exactly = {
            "deviceClassName": GPU_CLASS,
            "selectors": [{"cel": {"expression": wanted}}],
            "capacity": {"requests": requests},
        }
        return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}

    @property
    def template_name(self) -> str:
        """The name of the template: for people what it asks for, and a digest of its whole content."""
        text = json.dumps(self.claim_spec(), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        parts = [f"{self.shares}of{self.of}"] if self.shares else []
        parts += [f"{self.memory_mib}mi"] if self.memory_mib else []
        return "-".join((_PREFIX, *parts, digest))

    def template(self, namespace: str) -> dict[str, Any]:
        """Give the ResourceClaimTemplate, in v1."""
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {
                "name": self.template_name,
                "namespace": namespace,
                "labels": {MANAGED_LABEL: MANAGED_BY},
                "annotations": {ANNOTATION: json.dumps({self.template_name: self.content()})},
            },
            "spec": {"spec": self.claim_spec()},
        }

    def __str__(self) -> str:
        """Give it for people."""
        memory = f"{self.memory_mib} MiB of memory" if self.memory_mib else ""
        shares = f"{self.shares} of {self.of} shares" if self.shares else ""
        return " and ".join(part for part in (shares, memory) if part)


@dataclass(frozen=True, slots=True)
class FractionRules:
    """What is rewritten.

    Args:
        gpu: names of resources of which a fraction is a share of a card.
        memory: names of resources that are an amount of a card's memory, in MiB where the number has no suffix.
        shares_per_card: into how many shares a card is cut; a fraction is rounded up to them.
    """

    gpu: frozenset[str] = field(default=frozenset({"nvidia.com/gpu"}))
    memory: frozenset[str] = field(default=frozenset({"nvidia.com/gpumem"}))
    shares_per_card: int = SHARES_PER_CARD

    def shares_of(self, amount: Quantity) -> int:
        """Give the shares that a fraction of a card comes to, rounded up."""
        return -(-amount.nano * self.shares_per_card // _NANO)


def memory_mib(amount: Quantity) -> int:
    """Give an amount of memory in MiB, rounded up; 0 for what is none.

    `4Gi` is what it says. A plain number counts MiB, up to a million; the API server writes 3000 as `3k` before anybody
    sees it, so that the two are the same. Larger ones (`4G`) are bytes.
    """
    if amount.nano <= 0:
        return 0
    if amount.format != "binary" and amount.nano < _MOST_MIB * _NANO:
        return amount.value if amount.is_integer else 0
    return -(-amount.nano // (MIB * _NANO))


def asks_of_pod(annotations: Mapping[str, Any]) -> dict[str, Ask]:
    """Give what a pod's annotation says of its templates, by their names; every name must be that of its content.

    Raises:
        ClaimError: DRA-SHARE-CONTENT.
    """
    text = annotations.get(ANNOTATION) or "{}"
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _no_ask(text) from error
    if not isinstance(found, dict):
        raise _no_ask(found)
    asks = {name: Ask.from_content(content) for name, content in found.items()}
    for name, ask in asks.items():
        if ask.template_name != name:
            raise _no_ask({name: ask.content()})
    return asks


def quantity_of(value: object) -> Quantity | None:
    """Read a quantity as it may stand in JSON; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        return Quantity.parse(str(value))
    except ValueFormatError:
        return None


def _no_ask(content: object) -> ClaimError:
    return ClaimError(
        "DRA-SHARE-CONTENT",
        f"the annotation {ANNOTATION} does not say what its templates hold: {str(content)[:200]}",
        remedy="It is written by the webhook; create the pod again without it.",
    )
