"""What the allocator works on: features, devices, prior allocations, errors.

Objects come as resource.k8s.io/v1 JSON; here they become values that are cheap to compare. Quantities are kept
as billionths in plain ints, because the search compares them often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dra.errors import DraError

# Results of one claim (resource.k8s.io AllocationResultsMaxSize).
MAX_RESULTS = 32


@dataclass(frozen=True, slots=True)
class Features:
    """The gates that change decisions; the defaults are those of Kubernetes 1.36."""

    admin_access: bool = True
    prioritized_list: bool = True
    partitionable_devices: bool = True
    device_taints: bool = True
    consumable_capacity: bool = True
    device_binding: bool = True
    list_type_attributes: bool = False


class DeviceId(NamedTuple):
    """A device in the cluster: unique over drivers, pools and slices."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        """Give `driver/pool/device`, as the scheduler's messages do."""
        return f"{self.driver}/{self.pool}/{self.device}"


class AllocatorError(DraError):
    """The scheduling attempt is over: a class is missing, an expression fails, an `All` pool is incomplete.

    With `on_node_only`, other nodes may still be tried.
    """

    def __init__(self, message: str, *, on_node_only: bool = False) -> None:
        super().__init__("DRA-ALLOCATION", message)
        self.on_node_only = on_node_only


class SearchLimitError(DraError):
    """The search gave up. The scheduler has a time limit of ten seconds a node for the same reason."""

    def __init__(self, steps: int) -> None:
        super().__init__("DRA-ALLOCATION-TOO-LONG", f"no decision after {steps} devices were tried")


class Selector(Protocol):
    """A compiled CEL selector; `dra.cel` makes them."""

    def evaluate(self, device: Mapping[str, Any], *, driver: str) -> bool:
        """Tell whether the v1 device matches; raises on a run-time error."""


# Gives a compiled selector for an expression, or raises; called once for each expression.
CompileSelector = Callable[[str], Selector]


@dataclass(frozen=True, slots=True)
class AllocatedState:
    """What other claims hold: whole devices, and consumed capacity (billionths) of shared ones."""

    devices: frozenset[DeviceId] = frozenset()
    capacity: Mapping[DeviceId, Mapping[str, int]] = field(default_factory=dict)
    # Devices that only have shares; the capacity of such a share may be empty.
    shared: frozenset[DeviceId] = frozenset()


@dataclass(slots=True, eq=False)
class Device:
    """A device of a slice. `raw` is its JSON; counters are (set, counter) -> billionths."""

    id: DeviceId
    raw: Mapping[str, Any]
    multi: bool = False
    consumes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    taints: tuple[Mapping[str, Any], ...] = ()
    binds_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    binds_to_node: bool = False
    # Node selection: the slice's, or with perDeviceNodeSelection the device's own.
    node_name: str = ""
    node_selector: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Pool:
    """All slices of one pool at its newest generation, as one node sees them.

    `devices` are those that the node may use, in order. `all_devices` also has those for other nodes: they
    take part in the counters. `incomplete` and `invalid` say why nothing may be taken from it.
    """

    driver: str
    name: str
    incomplete: bool = False
    invalid: str = ""
    # The generation, how many of its slices there are, how many there should be, and when the newest was made.
    generation: int = 0
    found: int = 0
    wanted: int = 0
    changed: str = ""
    devices: list[Device] = field(default_factory=list)
    all_devices: list[Device] = field(default_factory=list)
    counters: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def has_binding_conditions(self) -> bool:
        """Whether some device of the node's has binding conditions; such pools are tried last."""
        return any(device.binds_conditions for device in self.devices)

    def __str__(self) -> str:
        """Give `driver/pool`."""
        return f"{self.driver}/{self.name}"
