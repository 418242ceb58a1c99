"""GPUs that are passed through: their devices, and that a GPU is never given out twice, as itself and passed through. Pure.

Where the server keeps counters, a GPU, its partitions and `gpu-vfio-<index>` draw on one set: that of the partitions, or
one made for this, with a single counter. Where it does not, whichever of them is held hides the others. Loaded only where
something can be passed through.

Source: reference driver, devices of type `vfio`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

from dra.inventory.model import Gpu, VfioFunction
from dra.inventory.names import GpuName, VfioName, parse_device_name
from dra.slices.devices import STANDARD, SliceProblem, cut
from dra.slices.features import ServerFeatures
from dra.slices.layout import Offer
from dra.slices.partitions import counter_set_name, touched_counters
from dra.values import PciAddress, Quantity

# The counter of a set that is there for the exclusion alone.
WHOLE = "gpu"
_TOUCH = "1m"

Device = dict[str, Any]


def with_vfio(
    offer: Offer,
    gpu: Gpu | None,
    function: VfioFunction,
    *,
    features: ServerFeatures,
    in_use: Collection[str],
    problems: list[SliceProblem],
) -> Offer:
    """Add the device by which a GPU is passed through, so that it and the others exclude each other.

    Args:
        offer: what is listed of the GPU so far.
        gpu: the GPU, if NVIDIA's driver has it.
        function: its PCI function.
        features: what the server stores.
        in_use: names of devices that claims hold.
        problems: takes what could not be published as it is.

    Only a GPU that is listed as a whole can be passed through: one that is cut, or that somebody put in MIG mode, is not.
    """
    counter_set, devices = offer
    if gpu is None:
        return None, [vfio_device(function, problems)]
    name, whole = str(VfioName(function.index)), str(GpuName(gpu.minor))
    if name not in in_use and not any(device["name"] == whole for device in devices):
        return offer
    device = vfio_device(function, problems)
    if not features.partitionable:
        return counter_set, _without_siblings(devices, device, gpu, in_use)
    if counter_set is None:
        counter_set = {"name": counter_set_name(gpu), "counters": {WHOLE: {"value": "1"}}}
        touch = [{"counterSet": counter_set["name"], "counters": {WHOLE: {"value": _TOUCH}}}]
        devices = [{**each, "consumesCounters": touch} for each in devices]
    # All of what the whole GPU takes a little of, and each partition a part.
    taken = touched_counters(counter_set) or counter_set["counters"]
    device["consumesCounters"] = [{"counterSet": counter_set["name"], "counters": taken}]
    return counter_set, _before_last(devices, device)


def vfio_device(function: VfioFunction, problems: list[SliceProblem]) -> Device:
    """Give a GPU that is passed through. Source: reference driver, attributes and capacities of type `vfio`."""
    name = str(VfioName(function.index))
    product = cut(function.product_name)
    if product != function.product_name:
        text = (
            f"{name}: attribute productName: {function.product_name!r} is too long; {product!r} is published"
        )
        problems.append(SliceProblem(name, "productName", "DRA-SLICE-CUT", text))
    attributes: dict[str, dict[str, Any]] = {
        "type": {"string": "vfio"},
        "uuid": {"string": vfio_uuid(function.pci_address)},
        "deviceID": {"string": f"0x{function.device_id:04x}"},
        "vendorID": {"string": f"0x{function.vendor_id:04x}"},
        "productName": {"string": product},
        "iommuFDEnabled": {"bool": function.iommufd},
        f"{STANDARD}/pciBusID": {"string": str(function.pci_address)},
    }
    if function.pcie_root is not None:
        attributes[f"{STANDARD}/pcieRoot"] = {"string": cut(function.pcie_root)}
    if function.numa_node is not None:
        attributes[f"{STANDARD}/numaNode"] = {"int": function.numa_node}
    size = str(Quantity.of(function.addressable_bytes, binary=True))
    return {"name": name, "attributes": attributes, "capacity": {"addressableMemory": {"value": size}}}


def vfio_uuid(address: PciAddress) -> str:
    """Give the UUID of a place on the bus, which is not the GPU's own: that is known to NVIDIA's driver only."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, str(address)))


def _before_last(devices: list[Device], device: Device) -> list[Device]:
    """Put a device before the whole GPU, which comes last and stays where there is not room for all."""
    return [*devices[:-1], device, *devices[-1:]]


def _without_siblings(
    devices: list[Device], device: Device, gpu: Gpu, in_use: Collection[str]
) -> list[Device]:
    """Leave out what can no longer be given out; what a claim holds stays."""
    if device["name"] in in_use:
        return _before_last([each for each in devices if each["name"] in in_use], device)
    names = (parse_device_name(each) for each in in_use)
    held = any(name is not None and name.minor == gpu.minor for name in names)
    return devices if held else _before_last(devices, device)
