"""Containers that would need two MPS daemons: a CUDA process talks to the one whose directory it is told last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dra.api.rules.claims import request_names
from dra.diagnose.validate_config import opaque_configs
from dra.diagnose.validate_object import Subject

# (container's path, (path and name of the request; empty: all of the claim's)).
Use = tuple[str, tuple[str, str]]


class MpsUses:
    """Collects, for each container of the pods of the files, the groups with strategy MPS that it uses."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], set[tuple[str, int]]] = {}
        self._pods: dict[int, Subject] = {}

    def add(self, pod: Subject, claim: str, target: Subject, uses: Sequence[Use]) -> None:
        """Note how the containers of a pod use one of its claims, which the files have."""
        if target.kind not in ("ResourceClaim", "ResourceClaimTemplate"):
            return
        groups = dict(_mps_groups(target))
        if not groups:
            return
        self._pods[id(pod)] = pod
        for container, (_, request) in uses:
            used = {group for name, group in groups.items() if request in ("", name)}
            found = self._groups.setdefault((id(pod), container), set())
            found |= {(claim, group) for group in used}

    def report(self) -> None:
        """Warn of containers that use several."""
        for (pod, container), groups in self._groups.items():
            if len(groups) < 2:
                continue
            self._pods[pod].report(
                "warning", "DRA-CONFIG-MPS-TWICE", container,
                f"the container uses devices of {len(groups)} groups with strategy MPS, and reaches the daemon of one only",
                remedy="Let each container use one of them, or put their devices into one group: one configuration for "
                "all their requests.",
            )  # fmt: skip


def _mps_groups(target: Subject) -> Iterator[tuple[str, int]]:
    """Give each request that is shared through MPS, with the configuration that makes it so: the last that fits."""
    spec = target.claim_spec()
    assert spec is not None
    configs = [(index, config) for index, _, config in opaque_configs(target)]
    for name in sorted({name.partition("/")[0] for name in request_names(spec[1])}):
        for index, config in reversed(configs):
            names = {str(each).partition("/")[0] for each in config.get("requests") or ()}
            if names and name not in names:
                continue
            parameters: Any = (config.get("opaque") or {}).get("parameters")
            sharing = parameters.get("sharing") if isinstance(parameters, dict) else None
            if isinstance(sharing, dict) and sharing.get("strategy") == "MPS":
                yield name, index
            break
