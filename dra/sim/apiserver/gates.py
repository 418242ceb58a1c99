"""Feature gates and served versions of resource.k8s.io by Kubernetes version.

Source: pkg/features/kube_features.go of 1.36; 1.37 as its enhancements announce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Preset = Literal["all", "default"]

# Gate: the minor version that knows it first, and the one from which it is on by default (None: not yet).
_GATES: dict[str, tuple[int, int | None]] = {
    "DRAAdminAccess": (32, 34),
    "DRAResourceClaimDeviceStatus": (32, 33),
    "DRAPrioritizedList": (33, 34),
    "DRAPartitionableDevices": (33, 36),
    "DRADeviceTaints": (33, 36),
    "DRADeviceTaintRules": (33, 37),
    "DRAConsumableCapacity": (34, 36),
    "DRADeviceBindingConditions": (34, 36),
    "DRAExtendedResource": (34, 36),
    "DRAListTypeAttributes": (36, None),
    "DRANodeAllocatableResources": (36, None),
}
# Off even in `all`: their form still changes from version to version.
_UNSETTLED = {"DRAListTypeAttributes", "DRANodeAllocatableResources"}


def gates_for(
    minor: int, features: Mapping[str, bool] | None = None, *, preset: Preset = "all"
) -> dict[str, bool]:
    """Give the gates of Kubernetes 1.`minor`, changed by `features`.

    `all` switches on what the version knows and a GPU driver may meet, `default` what a plain cluster has on.
    """
    gates = {}
    for name, (known, on) in _GATES.items():
        if preset == "all":
            gates[name] = minor >= known and name not in _UNSETTLED
        else:
            gates[name] = on is not None and minor >= on
    gates.update(features or {})
    return gates


def served_dra_versions(minor: int) -> tuple[str, ...]:
    """Give the served versions of resource.k8s.io, best first (beta versions as a cluster admin switches them on)."""
    versions = [("v1", 34, 99), ("v1beta2", 33, 38), ("v1beta1", 32, 37), ("v1alpha3", 33, 36)]
    return tuple(name for name, first, last in versions if first <= minor <= last)


def taint_rule_versions(minor: int) -> tuple[str, ...]:
    """Give the versions in which DeviceTaintRule exists."""
    if minor >= 37:
        return ("v1", "v1beta2")
    return ("v1beta2", "v1alpha3") if minor == 36 else ("v1alpha3",) if minor >= 33 else ()
