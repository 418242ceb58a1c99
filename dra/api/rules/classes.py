"""The DeviceClasses that come with the driver, by name: what devices they hold. The same as in the plain manifests.

`vfio.gpu.nvidia.com` comes with NVIDIA's chart. Source: NVIDIA's DRA driver, chart templates of DeviceClasses.
"""

from __future__ import annotations

from typing import Literal

DRIVER = "gpu.nvidia.com"

TYPE_OF_CLASS: dict[str, Literal["gpu", "mig", "vfio"]] = {
    "gpu.nvidia.com": "gpu",
    "whole.gpu.nvidia.com": "gpu",
    "mig.nvidia.com": "mig",
    "vfio.gpu.nvidia.com": "vfio",
}
# No card that is cut into shares; a plain claim of one that is shared by memory takes all of it.
_WHOLE = "device.attributes['gpudra.dev'].?sharing.orValue('exclusive') in ['exclusive', 'memory']"


def class_expression(name: str) -> str:
    """Give the one selector of a class of ours.

    Raises:
        KeyError: it is none of ours.
    """
    found = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{TYPE_OF_CLASS[name]}'"
    return f"{found} && {_WHOLE}" if name.startswith("whole.") else found
