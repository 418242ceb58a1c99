"""An inventory and taints as the pool of ResourceSlices that one node publishes. Pure and deterministic.

Order is policy, for the scheduler takes the first device that fits: GPUs by PCI address, and within a GPU the
smallest partitions first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dra.api.gpu_settings import NO_SETTINGS, GpuIdentity, GpuSettings, NodeSettings
from dra.api.limits import MAX_ATTRIBUTES_AND_CAPACITIES
from dra.inventory.model import Gpu, Inventory, VfioFunction
from dra.inventory.names import GpuName, VfioName, parse_vfio_name
from dra.slices.devices import SliceProblem, gpu_device, mig_device
from dra.slices.extras import reserved_taint, with_extra_attributes
from dra.slices.features import ServerFeatures
from dra.slices.layout import GpuGroup, Offer, SliceContent, lay_out
from dra.slices.partitions import MigMode, counter_set, plan_forms, possible_devices, whole_device
from dra.slices.rules import Violation, check_device
from dra.slices.sharing import identity_of, share_device
from dra.slices.taints import Taint, merge_taints, taint_of_unusable
from dra.slices.validate import validate_slices
from dra.values import PciAddress

__all__ = ["DRIVER", "MigMode", "PoolContent", "SliceContent", "build_pool"]

DRIVER = "gpu.nvidia.com"


@dataclass(frozen=True, slots=True)
class PoolContent:
    """A pool without what changes from write to write (generation, names, owner).

    Two that have the same `slices` publish the same. `problems` say what was cut, left out or withheld.
    """

    driver: str
    node_name: str
    pool_name: str
    slices: tuple[SliceContent, ...]
    problems: tuple[SliceProblem, ...] = ()

    @property
    def devices(self) -> tuple[dict[str, Any], ...]:
        """Every device of the pool, in order."""
        return tuple(device for each in self.slices for device in each.devices or ())

    def specs(self, *, generation: int) -> list[dict[str, Any]]:
        """Give the `spec` of each slice."""
        return [
            {
                "driver": self.driver,
                "nodeName": self.node_name,
                "pool": {
                    "name": self.pool_name,
                    "generation": generation,
                    "resourceSliceCount": len(self.slices),
                },
                **each.spec_part(),
            }
            for each in self.slices
        ]


def build_pool(
    inventory: Inventory,
    *,
    node_name: str,
    features: ServerFeatures,
    driver: str = DRIVER,
    pool_name: str = "",
    taints: Mapping[str, tuple[Taint, ...]] | None = None,
    mig_mode: MigMode = "static",
    settings: NodeSettings = NO_SETTINGS,
    mps: bool = False,
    in_use: Collection[str] = (),
) -> PoolContent:
    """Give the pool that a node publishes.

    Args:
        inventory: what the node has.
        node_name: the Node's name.
        features: what the server stores.
        driver: the driver's name.
        pool_name: empty: the node's name, as NVIDIA's driver has it.
        taints: by device name; those of a GPU (`gpu-3`) hold for its partitions too.

        mig_mode: `dynamic` lists every partition that could be made, with counters, where the server keeps those;
            `static` those that exist; `none` no partitions.
        settings: what holds for each GPU: how it is shared, partitions like the whole.
        mps: MPS daemons can be had on this node, so that shares can be held to their amounts.
        in_use: names of devices that claims hold; asked where a GPU can also be passed through.

    A GPU in MIG mode is not listed as a whole, unless its partitions are made on demand. A device that must not be
    given out is tainted; on a server without taints it is withheld, which is safe: a claim that has it keeps it.
    """
    listing = _Listing(inventory, features, settings, taints or {}, in_use, mig_mode=mig_mode, mps=mps)
    groups = [listing.group_of(gpu, function) for gpu, function in _hardware(inventory, in_use)]
    problems = listing.problems
    slices = lay_out([group for group in groups if group is not None], features, problems)
    pool = PoolContent(driver, node_name, pool_name or node_name, slices)
    return replace(pool, problems=(*problems, *_invalid(pool, counters_apart=features.counters_apart)))


@dataclass(slots=True)
class _Listing:
    """One listing of a node's devices: what it is made of (as for `build_pool`), and what is listed so far."""

    inventory: Inventory
    features: ServerFeatures
    settings: NodeSettings
    taints: Mapping[str, tuple[Taint, ...]]
    in_use: Collection[str]
    mig_mode: MigMode = field(kw_only=True)
    mps: bool = field(kw_only=True)
    names: set[str] = field(default_factory=set, init=False)
    problems: list[SliceProblem] = field(default_factory=list, init=False)

    def group_of(self, gpu: Gpu | None, function: VfioFunction | None) -> GpuGroup | None:
        """Give what is listed of one GPU; None if its counter set has a name that another has."""
        own = self.settings.of(_identity(gpu, function))
        shared, devices = self._offer(gpu, function, own.mig.mode or self.mig_mode)
        what = _what(gpu, function)
        if shared is not None:
            if not _is_free(shared["name"], self.names, what, self.problems):
                return None
            self.names.add(shared["name"])
        listed = [self._device(each, gpu, own, what) for each in devices]
        return GpuGroup(tuple(device for device in listed if device is not None), shared)

    def _offer(self, gpu: Gpu | None, function: VfioFunction | None, mig_mode: MigMode) -> Offer:
        """Give the counter set of a GPU, if it needs one, and its devices, among them the one that passes it through."""
        features, problems = self.features, self.problems
        offer: Offer = (None, [])
        if gpu is not None:
            offer = _offer_of(gpu, self.inventory, problems, mig_mode=mig_mode, features=features)
        if function is None:
            return offer
        # Not loaded by the many daemons that never pass anything through.
        from dra.slices.passthrough import with_vfio

        return with_vfio(offer, gpu, function, features=features, in_use=self.in_use, problems=problems)

    def _device(
        self, device: dict[str, Any], gpu: Gpu | None, own: GpuSettings, what: str
    ) -> dict[str, Any] | None:
        """Give a device as it is published; None for one that cannot be."""
        name = device["name"]
        # What a virtual machine gets is nobody else's.
        if gpu is not None and not parse_vfio_name(name):
            device = share_device(
                device, gpu, settings=self.settings, features=self.features, mps=self.mps,
                cuda_version=self.inventory.cuda_version, problems=self.problems,
            )  # fmt: skip
        fit = _fit(with_extra_attributes(device, own), self.problems)
        if fit is None or not _is_free(name, self.names, what, self.problems):
            return None
        self.names.add(name)
        given = [self.taints.get(whose, ()) for whose in (name, *_whole_of(gpu))]
        return _taint(fit, gpu, (*given, reserved_taint(own)), self.features, self.problems)


def _hardware(inventory: Inventory, in_use: Collection[str]) -> list[tuple[Gpu | None, VfioFunction | None]]:
    """Give each GPU, with the function by which it can be passed through, in the order in which they are listed.

    One that a virtual machine has is a function alone. A GPU that NVIDIA's driver has and does not tell of is not
    listed, unless a claim holds it.
    """
    functions = {each.pci_address: each for each in inventory.vfio}
    found: list[tuple[tuple[PciAddress, int, str], Gpu | None, VfioFunction | None]] = [
        ((gpu.pci_address, gpu.minor, gpu.uuid), gpu, functions.pop(gpu.pci_address, None))
        for gpu in inventory.gpus
    ]
    found += [
        ((each.pci_address, -1, ""), None, each)
        for each in functions.values()
        if each.on_vfio or str(VfioName(each.index)) in in_use
    ]
    return [(gpu, function) for _, gpu, function in sorted(found, key=lambda each: each[0])]


def _identity(gpu: Gpu | None, function: VfioFunction | None) -> GpuIdentity:
    if gpu is not None:
        return identity_of(gpu)
    return GpuIdentity() if function is None else GpuIdentity("", function.product_name, function.pci_address)


def _what(gpu: Gpu | None, function: VfioFunction | None) -> str:
    """Say which GPU is meant, for problems."""
    return gpu.uuid if gpu is not None else "" if function is None else str(function.pci_address)


def _whole_of(gpu: Gpu | None) -> tuple[str, ...]:
    return () if gpu is None else (str(GpuName(gpu.minor)),)


def _invalid(pool: PoolContent, *, counters_apart: bool) -> list[SliceProblem]:
    """Say what the server will still refuse: what cannot be left out (names), and our own mistakes."""
    return [
        SliceProblem(
            "", broken.path, "DRA-SLICE-INVALID", f"pool {pool.pool_name}: {broken.path}: {broken.message}",
            "Check the node's and the driver's name; else report it.",
        )
        # Each device was checked when it was made to fit.
        for broken in validate_slices(
            pool.specs(generation=0), counters_apart=counters_apart, devices_too=False
        )
    ]  # fmt: skip


def _offer_of(
    gpu: Gpu,
    inventory: Inventory,
    problems: list[SliceProblem],
    *,
    mig_mode: MigMode,
    features: ServerFeatures,
) -> Offer:
    """Give the counter set of a GPU, if it needs one, and the devices that are listed of it."""
    forms = plan_forms(gpu, mig_mode=mig_mode, features=features)
    if forms.possible:
        shared = counter_set(gpu, problems)
        if shared is not None:
            devices = possible_devices(gpu, inventory, problems)
            whole = [whole_device(gpu, inventory, shared, problems)] if forms.whole else []
            return shared, [*devices, *whole]
        forms = plan_forms(gpu, mig_mode="static", features=features)
    if forms.whole:
        return None, [gpu_device(gpu, inventory, problems)]
    return None, list(_existing(gpu, inventory, problems)) if forms.existing else []


def _existing(gpu: Gpu, inventory: Inventory, problems: list[SliceProblem]) -> Iterator[dict[str, Any]]:
    for mig in sorted(
        gpu.mig_devices, key=lambda each: (each.size, each.profile.profile_id, each.start, each.uuid)
    ):
        yield mig_device(gpu, mig, inventory, problems)


def _is_free(name: str, names: set[str], what: str, problems: list[SliceProblem]) -> bool:
    if name not in names:
        return True
    problems.append(
        SliceProblem(
            name,
            "name",
            "DRA-SLICE-DUPLICATE",
            f"{name}: a second device of this name ({what}) is left out; two would make the pool invalid",
            "Reload the NVIDIA kernel module; report it.",
        )
    )
    return False


def _fit(device: dict[str, Any], problems: list[SliceProblem]) -> dict[str, Any] | None:
    """Leave out what the server would refuse, so that the device stays; None only for an impossible name."""
    name = str(device["name"])
    attributes = dict(device.get("attributes", {}))
    capacity = dict(device.get("capacity", {}))
    for broken in check_device(device, name):
        if broken.attribute:
            attributes.pop(broken.attribute, None)
        elif broken.capacity:
            capacity.pop(broken.capacity, None)
        elif broken.path.endswith(".name"):
            problems.append(
                SliceProblem(name, "name", "DRA-SLICE-NAME", f"{name}: {broken.message}; it is left out")
            )
            return None
        else:
            problems += _own_mistakes(broken, name)
            continue
        problems.append(_left_out(name, broken.attribute or broken.capacity, broken.message))
    surplus = len(attributes) + len(capacity) - MAX_ATTRIBUTES_AND_CAPACITIES
    # Those written last are the least asked for (single memory slices).
    for key in reversed([*capacity]) if surplus > 0 else ():
        if surplus <= 0:
            break
        del capacity[key]
        surplus -= 1
        problems.append(_left_out(name, key, f"a device has at most {MAX_ATTRIBUTES_AND_CAPACITIES}"))
    fit = {**device, "attributes": attributes}
    if "capacity" in device:
        fit["capacity"] = capacity
    return fit


def _own_mistakes(broken: Violation, device: str) -> Iterator[SliceProblem]:
    """Give what of a device nobody can leave out; what makes it too large is cut afterwards."""
    if broken.path != device:
        text = f"{broken.path}: {broken.message}"
        yield SliceProblem(device, broken.path, "DRA-SLICE-INVALID", text, "Report it.")


def _left_out(device: str, field: str, why: str) -> SliceProblem:
    return SliceProblem(device, field, "DRA-SLICE-FIELD", f"{device}: {field} is left out: {why}")


def _taint(
    device: dict[str, Any],
    gpu: Gpu | None,
    groups: Iterable[tuple[Taint, ...]],
    features: ServerFeatures,
    problems: list[SliceProblem],
) -> dict[str, Any] | None:
    """Put the taints on, of earlier groups first; None if the server cannot hold them and one of them keeps away."""
    name = str(device["name"])
    said = {taint.key for group in groups for taint in group}
    # Whoever watches the GPUs says more of a lost one than the scan, and which effect it has.
    unusable = [taint for taint in taint_of_unusable(gpu) if taint.key not in said] if gpu is not None else []
    kept, dropped = merge_taints(*groups, unusable)
    if not features.taint_effect_none:
        kept = tuple(taint for taint in kept if taint.effect != "None")
    if dropped:
        problems.append(_left_out(name, "taints", f"{len(dropped)} of its taints have no room"))
    if not kept:
        return device
    if features.device_taints:
        fit = {**device, "taints": [taint.as_json() for taint in kept]}
        return _with_valid_taints(fit, problems)
    away = [taint for taint in kept if taint.keeps_away]
    if not away:
        return device
    reasons = ", ".join(taint.key + (f"={taint.value}" if taint.value else "") for taint in away)
    problems.append(
        SliceProblem(
            name,
            "taints",
            "DRA-SLICE-WITHHELD",
            f"{name}: it is withheld, for the API server does not keep device taints ({reasons})",
            "Turn on the feature gate DRADeviceTaints, or upgrade to Kubernetes 1.36.",
        )
    )
    return None


def _with_valid_taints(device: dict[str, Any], problems: list[SliceProblem]) -> dict[str, Any]:
    name = str(device["name"])
    bad = {
        int(broken.path.rpartition(".taints[")[2].partition("]")[0]): broken.message
        for broken in check_device(device, name)
        if ".taints[" in broken.path
    }
    problems += [_left_out(name, "taints", message) for message in bad.values()]
    taints = [taint for index, taint in enumerate(device["taints"]) if index not in bad]
    return (
        {**device, "taints": taints}
        if taints
        else {key: value for key, value in device.items() if key != "taints"}
    )
