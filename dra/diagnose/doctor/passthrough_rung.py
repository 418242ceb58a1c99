"""Passing GPUs through to virtual machines: whether the node can, and what keeps single GPUs from it."""

from __future__ import annotations

from collections.abc import Iterator

from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, note, warning
from dra.diagnose.doctor.published_rungs import records_on_disk
from dra.host.boot import boot_id
from dra.host.module_aliases import PLAIN_MODULE, aliases_file
from dra.host.pci_binding import NVIDIA, PciBus, PciFunction
from dra.inventory.names import VfioName
from dra.inventory.passthrough import can_be_passed, no_iommu


def look_at_passthrough(ctx: NodeContext) -> Looked:
    """Look at IOMMU, modules and each GPU; binds nothing."""
    bus = PciBus(ctx.paths)
    functions = bus.functions()
    if not bus.has_iommu():
        problem = no_iommu()
        return Looked("", (warning(problem.code, problem.message, problem.remedy),))
    findings = [*_module(ctx, bus, functions)]
    held = _held(ctx)
    for index, function in enumerate(functions):
        findings += _of_one(function, str(VfioName(index)), held)
    able = sum(can_be_passed(each) for each in functions)
    away = sum(each.on_vfio for each in functions)
    backends = "the IOMMU's groups" + (" and IOMMUFD" if bus.has_iommufd() else "")
    return Looked(
        f"{able} of {len(functions)} GPUs can be passed through, {away} are, by {backends}", tuple(findings)
    )


def _module(ctx: NodeContext, bus: PciBus, functions: tuple[PciFunction, ...]) -> Iterator[Finding]:
    """Say which drivers are neither loaded nor among the kernel's modules."""
    for driver in sorted({bus.vfio_driver_for(each.address) for each in functions}):
        if bus.is_loaded(driver):
            continue
        table = aliases_file(ctx.paths)
        if table is None:
            why = "the modules of the running kernel are not below /lib/modules"
        elif f" {PLAIN_MODULE}" in table.read_text(encoding="ascii", errors="replace"):
            continue
        else:
            why = "the running kernel has no such module"
        yield warning(
            "DRA-VFIO-MODULE-ABSENT",
            f"the driver {driver} is not loaded, and {why}: no GPU can be passed through",
            "Install the kernel's modules (a package of its own on some systems), or load it at boot.",
        )


def _of_one(function: PciFunction, device: str, held: frozenset[str]) -> Iterator[Finding]:
    where = f"{device} (PCI {function.address})"
    if function.iommu_group is None:
        yield warning(
            "DRA-VFIO-NOT-OFFERED",
            f"{where} has no IOMMU group and is not offered for passthrough",
            "The slot lies behind no IOMMU: look at dmesg for DMAR or AMD-Vi.",
        )
    elif function.sriov_vfs:
        yield note(
            "DRA-VFIO-NOT-OFFERED",
            f"{where} is cut into {function.sriov_vfs} virtual functions and is not offered for passthrough",
        )
    elif not function.on_vfio and function.driver != NVIDIA:
        has = f"is bound to {function.driver}" if function.driver else "has no kernel driver"
        yield note("DRA-VFIO-NOT-OFFERED", f"{where} {has} and is not offered for passthrough")
    others = [each for each in function.group_members if each.in_the_way]
    if others:
        names = ", ".join(f"{each.address} ({each.driver})" for each in others)
        yield warning(
            "DRA-VFIO-GROUP-SHARED",
            f"{where} shares its IOMMU group {function.iommu_group} with {names}: it cannot be passed through without them",
            "Bind them to vfio-pci or to no driver, or put the card into a slot of its own.",
        )
    if function.on_vfio and device not in held:
        yield note(
            "DRA-VFIO-BOUND-BY-HAND",
            f"{where} is bound to {function.driver} and no claim has it: it is offered for passthrough only, and stays so",
        )


def _held(ctx: NodeContext) -> frozenset[str]:
    now = boot_id(ctx.paths)
    return frozenset(
        result.device
        for each in records_on_disk(ctx)
        if each.record is not None and each.record.holds(now)
        for result in each.record.results
    )
