"""Configurations of NVIDIA's mig-parted as GpuNodePolicies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dra.api.policy import decode_policy
from dra.errors import ConfigError

Json = Mapping[str, Any]


def mig_parted(config: Json, name: str = "") -> tuple[dict[str, Any], ...]:
    """Turn a configuration of NVIDIA's mig-parted into GpuNodePolicies, one for each of its `mig-configs`.

    Each chooses the nodes with the label `nvidia.com/mig.config=<name>`, as MIG manager does. Of `devices` only `all`
    has a counterpart: GPUs are not chosen by an index, which moves.

    Args:
        config: the file: `{version: v1, mig-configs: {NAME: [{devices: all, mig-enabled: true, mig-devices: {...}}]}}`.
        name: only this one of its configurations; empty: all.

    Raises:
        ConfigError: DRA-MIG-PARTED.
    """
    configs = config.get("mig-configs")
    if not isinstance(configs, Mapping) or (name and name not in configs):
        wanted = f" {name}" if name else ""
        raise _parted(f"has no mig-configs{wanted}", "Give a file of nvidia-mig-parted, with mig-configs.")
    made = []
    for key in [name] if name else sorted(configs):
        groups = [_parted_group(str(key), entry) for entry in configs[key] or ()]
        body: dict[str, Any] = {
            "apiVersion": "gpudra.dev/v1alpha1",
            "kind": "GpuNodePolicy",
            "metadata": {"name": f"mig-{str(key).lower().replace('_', '-').replace('.', '-')}"},
            "spec": {"nodeSelector": {"matchLabels": {"nvidia.com/mig.config": str(key)}}, "gpus": groups},
        }
        decode_policy(body)
        made.append(body)
    return tuple(made)


def _parted_group(key: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise _parted(f"{key}: an entry is not an object", "See mig-parted's examples.")
    if entry.get("devices", "all") != "all":
        raise _parted(
            f"{key}: devices: {entry['devices']} chooses GPUs by index, which moves",
            "Write a policy that chooses them by uuid or pciAddress.",
        )
    if entry.get("device-filter"):
        raise _parted(
            f"{key}: device-filter chooses GPUs by PCI id, which a policy cannot",
            "Write a policy that chooses them by product.",
        )
    layout = entry.get("mig-devices") or {}
    if not entry.get("mig-enabled"):
        return {"match": {}, "mig": {"mode": "none"}}
    return {"match": {}, "mig": {"mode": "static", **({"layout": dict(layout)} if layout else {})}}


def _parted(what: str, remedy: str) -> ConfigError:
    return ConfigError("DRA-MIG-PARTED", f"the mig-parted configuration {what}", remedy=remedy)
