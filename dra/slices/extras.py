"""What an administrator adds to a GPU's devices: attributes of our domain, and that it is held back. Pure."""

from __future__ import annotations

from typing import Any

from dra.api.gpu_settings import GpuSettings
from dra.slices.taints import Taint

DOMAIN = "gpudra.dev"
RESERVED = "gpu.nvidia.com/reserved"


def with_extra_attributes(device: dict[str, Any], settings: GpuSettings) -> dict[str, Any]:
    """Give a device with the extra attributes of its GPU, `gpudra.dev/<name>`; an own one of that name stays."""
    extra = {f"{DOMAIN}/{name}": dict(value) for name, value in settings.attributes.items()}
    if not extra:
        return device
    return {**device, "attributes": {**extra, **device.get("attributes", {})}}


def reserved_taint(settings: GpuSettings) -> tuple[Taint, ...]:
    """Give the taint of a GPU that is held back for those who tolerate it."""
    if settings.reserved is None:
        return ()
    return (Taint(RESERVED, settings.reserved.effect, settings.reserved.value),)
