"""Feature gates and served versions of resource.k8s.io by Kubernetes version."""

from __future__ import annotations

from collections.abc import Mapping

# What the simulator switches on wherever the version knows it: everything a DRA driver may meet.
_SINCE: dict[str, int] = {
    "DRAAdminAccess": 33,
    "DRAPrioritizedList": 33,
    "DRAResourceClaimDeviceStatus": 32,
    "DRAPartitionableDevices": 33,
    "DRADeviceTaints": 33,
    "DRADeviceTaintRules": 35,
    "DRAConsumableCapacity": 34,
    "DRADeviceBindingConditions": 34,
    "DRAExtendedResource": 34,
}


def gates_for(minor: int, features: Mapping[str, bool] | None = None) -> dict[str, bool]:
    """Give the gates of Kubernetes 1.`minor`, changed by `features`."""
    gates = {name: minor >= since for name, since in _SINCE.items()}
    gates["DRAListTypeAttributes"] = False
    gates.update(features or {})
    return gates


def served_dra_versions(minor: int) -> tuple[str, ...]:
    """Give the served versions of resource.k8s.io, best first (beta versions as a cluster admin switches them on)."""
    if minor <= 32:
        return ("v1beta1", "v1alpha3")
    if minor == 33:
        return ("v1beta2", "v1beta1", "v1alpha3")
    return ("v1", "v1beta2", "v1beta1", "v1alpha3")
