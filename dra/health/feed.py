"""What the health stream tells the kubelet: one line a device, and a feed that wakes whoever streams it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, VfioName, parse_device_name, parse_vfio_name

HealthState = Literal["Healthy", "Unhealthy", "Unknown"]


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """The state of one published device. `message` is shown in the status of pods that hold it."""

    pool: str
    device: str
    state: HealthState = "Healthy"
    message: str = ""


def plan_conditions(
    inventory: Inventory,
    *,
    pool: str,
    devices: Iterable[str],
    unhealthy: Mapping[str, str] | None = None,
    unknown: Mapping[str, str] | None = None,
) -> tuple[DeviceCondition, ...]:
    """Give the condition of each published device, in order of names.

    A GPU that the scan could not fully read is unhealthy with the scan's reason, and so are its partitions; one
    that is published and no longer found is too. `unhealthy` are messages by device name from whoever watches the
    GPUs; that of a GPU (`gpu-3`) holds for its partitions, and all of them say more than the scan's code. `unknown`
    are the same for devices that nobody watches. A GPU that can be passed through is as well as it is while NVIDIA's
    driver has it; afterwards only the virtual machine knows.
    """
    reasons = {gpu.minor: gpu.unusable for gpu in inventory.gpus}
    messages = (unhealthy or {}, unknown or {})
    siblings = {
        str(VfioName(each.index)): str(GpuName(each.gpu_minor))
        for each in inventory.vfio
        if each.gpu_minor is not None
    }
    return tuple(
        replace(_condition(pool, siblings[name], reasons, messages), device=name)
        if name in siblings
        else _condition(pool, name, reasons, messages)
        for name in sorted(devices)
    )


def _condition(
    pool: str, device: str, reasons: Mapping[int, str], messages: tuple[Mapping[str, str], Mapping[str, str]]
) -> DeviceCondition:
    if parse_vfio_name(device):
        return DeviceCondition(
            pool, device, "Unknown", "the GPU is passed through, and not watched by the node"
        )
    parsed = parse_device_name(device)
    if not isinstance(parsed, GpuName | MigName):
        return DeviceCondition(pool, device, "Unknown", "the device has no name of this driver")
    reason = reasons.get(parsed.minor, f"GPU {parsed.minor} is not found on the node")
    names = (device, str(GpuName(parsed.minor)))
    unhealthy, unknown = (next((each[name] for name in names if name in each), "") for each in messages)
    if unhealthy or reason:
        return DeviceCondition(pool, device, "Unhealthy", unhealthy or reason)
    return DeviceCondition(pool, device, "Unknown" if unknown else "Healthy", unknown)


class HealthFeed:
    """The current conditions and a way to wait for their change. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._conditions: tuple[DeviceCondition, ...] = ()
        self._closed = False
        self._told: list[Callable[[], None]] = []

    def subscribe(self, told: Callable[[], None]) -> None:
        """Have `told` called after each change, on the thread that publishes; it must be quick and raise nothing."""
        self._told.append(told)

    def publish(self, conditions: tuple[DeviceCondition, ...]) -> None:
        """Replace the conditions; wakes the waiting ones if anything differs."""
        with self._changed:
            if conditions == self._conditions:
                return
            self._conditions = conditions
            self._version += 1
            self._changed.notify_all()
        for told in self._told:
            told()

    def current(self) -> tuple[int, tuple[DeviceCondition, ...]]:
        """Give the version and the conditions."""
        with self._changed:
            return self._version, self._conditions

    def wait(
        self, *, seen: int, timeout_seconds: float, gone: Callable[[], bool] = lambda: False
    ) -> tuple[int, tuple[DeviceCondition, ...]]:
        """Wait until the version differs from `seen`, the feed is closed, `gone()` holds or the time is over.

        Whoever makes `gone` true calls `wake` afterwards.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._version != seen or self._closed or gone(), timeout=timeout_seconds
            )
            return self._version, self._conditions

    def wake(self) -> None:
        """Make the waiting ones look again (a client went away)."""
        with self._changed:
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether streams must end."""
        return self._closed

    def close(self) -> None:
        """End all streams."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
