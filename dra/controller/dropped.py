"""What the API server left out of a slice when it stored it. Pure.

A server whose feature gate is off drops the gate's fields without an error. Published is what was stored, so
the difference is found by comparing, told once, and the stored form is then taken as the wanted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra.errors import KubeError

# The gate behind each field that can go missing, by the end of its path.
# Source: pkg/registry/resource/resourceslice strategy (dropDisabledFields) of Kubernetes 1.36.
GATES = {
    "devices[].taints": "DRADeviceTaints",
    "devices[].consumesCounters": "DRAPartitionableDevices",
    "sharedCounters": "DRAPartitionableDevices",
    "perDeviceNodeSelection": "DRAPartitionableDevices",
    "devices[].nodeName": "DRAPartitionableDevices",
    "devices[].nodeSelector": "DRAPartitionableDevices",
    "devices[].allNodes": "DRAPartitionableDevices",
    "devices[].allowMultipleAllocations": "DRAConsumableCapacity",
    "devices[].capacity.*.requestPolicy": "DRAConsumableCapacity",
    "devices[].bindsToNode": "DRADeviceBindingConditions",
    "devices[].bindingConditions": "DRADeviceBindingConditions",
    "devices[].bindingFailureConditions": "DRADeviceBindingConditions",
    "devices[].attributes.*.ints": "DRAListTypeAttributes",
    "devices[].attributes.*.bools": "DRAListTypeAttributes",
    "devices[].attributes.*.strings": "DRAListTypeAttributes",
    "devices[].attributes.*.versions": "DRAListTypeAttributes",
    "devices[].nodeAllocatableResourceMappings": "DRANodeAllocatableResources",
}
# Maps whose keys are names, not fields.
_NAMED = {"attributes", "capacity", "counters"}


@dataclass(frozen=True, slots=True)
class DroppedFields:
    """Fields that were sent and not stored, as paths with indexes and names left out, and the likely gates."""

    fields: tuple[str, ...]
    gates: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything was dropped."""
        return bool(self.fields)

    @property
    def error(self) -> KubeError:
        """The same as a sentence with a remedy."""
        gates = ", ".join(self.gates) or "an unknown feature gate"
        return KubeError(
            "DRA-SLICE-FIELDS-DROPPED",
            f"the API server stored the ResourceSlices without {', '.join(self.fields)}",
            remedy=f"Switch on {gates} on kube-apiserver and kube-scheduler, or upgrade; until then the pool is "
            "published without what needs it.",
            retryable=False,
            fields_dropped=self.fields,
            gates=self.gates,
        )


def dropped_fields(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> DroppedFields:
    """Compare two normal forms; what has another value or was added does not count."""
    paths: set[str] = set()
    _compare(sent, stored, path="", paths=paths)
    return describe(paths)


def describe(paths: set[str]) -> DroppedFields:
    """Give paths with the gates they belong to."""
    gates = {GATES[path] for path in paths if path in GATES}
    return DroppedFields(tuple(sorted(paths)), tuple(sorted(gates)))


def _compare(sent: Any, stored: Any, *, path: str, paths: set[str]) -> None:
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        named = path.rpartition(".")[2] in _NAMED
        for key, value in sent.items():
            step = "*" if named else key
            inner = f"{path}.{step}" if path else step
            if key not in stored:
                paths.add(inner)
            else:
                _compare(value, stored[key], path=inner, paths=paths)
    elif isinstance(sent, list) and isinstance(stored, list):
        for ours, theirs in zip(sent, stored, strict=False):
            _compare(ours, theirs, path=f"{path}[]", paths=paths)
