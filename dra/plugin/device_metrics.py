"""The series of GPUs, MIG devices and claims, made from one round of readings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dra.diagnose.usage import Share, Use, by_claim, mig_space
from dra.inventory.sampling import Snapshot
from dra.nvml.telemetry import CLOCK_REASONS, GpuReading
from dra.prepare.allocations import Allocation
from dra.telemetry import families as f
from dra.telemetry.metrics import Family, Labels, Samples, samples_of

Values = list[tuple[Labels, float | None]]

# Pods of one claim that are named; a claim for more has one series without a pod.
MAX_PODS = 8

_SIMPLE: tuple[tuple[Family, str], ...] = (
    (f.GPU_MEMORY_UTILIZATION, "memory_load"),
    (f.GPU_ENCODER_UTILIZATION, "encoder_load"),
    (f.GPU_DECODER_UTILIZATION, "decoder_load"),
    (f.GPU_POWER, "power_watts"),
    (f.GPU_POWER_LIMIT, "power_limit_watts"),
    (f.GPU_ENERGY, "energy_joules"),
    (f.GPU_PCIE_GENERATION, "pcie_generation"),
    (f.GPU_PCIE_WIDTH, "pcie_width"),
)
# Family, values of the labels after those of the device, the counter, and what it is multiplied with.
_COUNTED: tuple[tuple[Family, Labels, str, int], ...] = (
    (f.GPU_ECC, ("corrected", "volatile"), "ecc_corrected_volatile", 1),
    (f.GPU_ECC, ("uncorrected", "volatile"), "ecc_uncorrected_volatile", 1),
    (f.GPU_ECC, ("corrected", "aggregate"), "ecc_corrected_aggregate", 1),
    (f.GPU_ECC, ("uncorrected", "aggregate"), "ecc_uncorrected_aggregate", 1),
    (f.GPU_REMAPPED, ("corrected",), "remapped_corrected", 1),
    (f.GPU_REMAPPED, ("uncorrected",), "remapped_uncorrected", 1),
    (f.GPU_REMAP_PENDING, (), "remap_pending", 1),
    (f.GPU_REMAP_FAILED, (), "remap_failed", 1),
    (f.GPU_RETIRED, ("corrected",), "retired_single", 1),
    (f.GPU_RETIRED, ("uncorrected",), "retired_double", 1),
    (f.GPU_RETIRED_PENDING, (), "retired_pending", 1),
    (f.GPU_TEMPERATURE, ("memory",), "memory_temperature", 1),
    (f.GPU_PCIE_REPLAYS, (), "pcie_replays", 1),
    (f.GPU_NVLINK_ERRORS, ("crc_flit",), "nvlink_crc_flit", 1),
    (f.GPU_NVLINK_ERRORS, ("crc_data",), "nvlink_crc_data", 1),
    (f.GPU_NVLINK_ERRORS, ("replay",), "nvlink_replays", 1),
    (f.GPU_NVLINK_ERRORS, ("recovery",), "nvlink_recoveries", 1),
    (f.GPU_NVLINK_BYTES, ("sent",), "nvlink_sent_kib", 1024),
    (f.GPU_NVLINK_BYTES, ("received",), "nvlink_received_kib", 1024),
)


class Page:
    """Collects values by family."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Family, Values]] = {}

    def put(self, family: Family, labels: Labels, value: float | None) -> None:
        """Add a series; None adds nothing."""
        self._found.setdefault(family.name, (family, []))[1].append((labels, value))

    def samples(self) -> Iterator[Samples]:
        """Give what was collected."""
        for family, values in self._found.values():
            yield samples_of(family, values)


def device_samples(
    snapshot: Snapshot, found: Iterable[Use], *, healthy: Mapping[str, bool] | None = None
) -> Iterator[Samples]:
    """Give the series of all GPUs and MIG devices. `healthy` by device name; those that are not in it are not known."""
    page = Page()
    for use in found:
        labels = (use.device, use.uuid, use.profile)
        _identity(page, use, labels)
        page.put(f.GPU_HEALTHY, labels, _flag((healthy or {}).get(use.device)))
        page.put(f.GPU_UTILIZATION, labels, use.load)
        _memory(page, use, labels)
        if use.reading is not None or use.mig_reading is not None:
            _processes(page, use, labels)
        page.put(f.GPU_ALLOCATIONS, labels, len(use.holders))
        if use.mig is not None:
            for engine, ratio in (use.mig_reading.activity if use.mig_reading else {}).items():
                page.put(f.GPU_ACTIVITY, (*labels, engine), ratio)
            continue
        error = snapshot.errors.get(use.uuid)
        page.put(f.GPU_UNREADABLE, (*labels, error.code if error else ""), 1 if error else None)
        page.put(f.GPU_ASLEEP, labels, 1 if use.uuid in snapshot.asleep else None)
        _mig_mode(page, use, labels)
        if use.reading is not None:
            _reading(page, use.reading, labels)
    return page.samples()


def _identity(page: Page, use: Use, labels: Labels) -> None:
    gpu = use.gpu
    parent = gpu.uuid if use.mig is not None else ""
    rest = (parent, gpu.product_name, gpu.architecture, str(gpu.pci_address))
    page.put(f.GPU_INFO, (*labels, *rest), 1)


def _memory(page: Page, use: Use, labels: Labels) -> None:
    if use.memory is None:
        return
    page.put(f.GPU_MEMORY_TOTAL, labels, use.memory.total)
    page.put(f.GPU_MEMORY_USED, labels, use.memory.used)
    page.put(f.GPU_MEMORY_FREE, labels, use.memory.free)
    page.put(f.GPU_MEMORY_RESERVED, labels, use.memory.reserved)


def _processes(page: Page, use: Use, labels: Labels) -> None:
    for kind in ("compute", "graphics"):
        page.put(f.GPU_PROCESSES, (*labels, kind), sum(each.kind == kind for each in use.processes))
    page.put(f.GPU_MPS_CLIENTS, labels, sum(each.mps for each in use.processes))
    page.put(f.GPU_FOREIGN, labels, len(use.foreign))


def _mig_mode(page: Page, use: Use, labels: Labels) -> None:
    if not use.gpu.mig_capable:
        return
    page.put(f.GPU_MIG_ENABLED, labels, _flag(use.gpu.mig_enabled))
    space = mig_space(use.gpu)
    if space is not None:
        page.put(f.GPU_MIG_DEVICES, labels, len(use.gpu.mig_devices))
        for state, count in (
            ("used", space.used),
            ("free", space.free),
            ("largest_hole", space.largest_hole),
        ):
            page.put(f.GPU_MIG_SLICES, (*labels, state), count)


def _reading(page: Page, reading: GpuReading, labels: Labels) -> None:
    for family, name in _SIMPLE:
        page.put(family, labels, getattr(reading, name))
    page.put(f.GPU_TEMPERATURE, (*labels, "gpu"), reading.temperature)
    for family, more, name, factor in _COUNTED:
        count = reading.counters.get(name)
        page.put(family, (*labels, *more), None if count is None else count * factor)
    for clock, hertz in reading.clocks_hertz.items():
        page.put(f.GPU_CLOCK, (*labels, clock), hertz)
    if reading.clock_reasons is not None:
        for reason, bit in CLOCK_REASONS.items():
            page.put(f.GPU_CLOCK_REASON, (*labels, reason), _flag(bool(reading.clock_reasons & bit)))
    for engine, ratio in reading.activity.items():
        page.put(f.GPU_ACTIVITY, (*labels, engine), ratio)
    page.put(f.GPU_NVLINKS, (*labels, "up"), reading.links_up)
    page.put(f.GPU_NVLINKS, (*labels, "down"), reading.links_down)


def _flag(value: bool | None) -> float | None:
    return None if value is None else float(value)


class ClaimSeries:
    """The series of claims. Remembers the energy of a GPU when its claim was first seen. One caller at a time."""

    def __init__(self) -> None:
        self._energy_before: dict[tuple[str, str], float] = {}

    def samples(self, held: Iterable[Allocation], used: Iterable[Share]) -> Iterator[Samples]:
        """Give the series of all allocations, and of what they use."""
        page, held, used = Page(), tuple(held), tuple(used)
        for each in held:
            for pod in _pods(each):
                labels = (*_claim_labels(each, pod), each.ref.uid, "true" if each.admin else "false")
                page.put(f.CLAIM_DEVICE, labels, 1)
        for members in by_claim(held).values():
            first = members[0]
            page.put(f.CLAIM_PREPARED, (first.ref.namespace, first.ref.name), first.prepared)
            page.put(f.CLAIM_CONSUMERS, (first.ref.namespace, first.ref.name), len(first.consumers))
        before, self._energy_before = self._energy_before, {}
        for share in used:
            labels = _claim_labels(share.allocation, _only_pod(share.allocation))
            page.put(f.CLAIM_UTILIZATION, labels, share.load)
            page.put(f.CLAIM_MEMORY_USED, labels, share.memory_used)
            page.put(f.CLAIM_MEMORY_LIMIT, labels, share.memory_limit)
            page.put(f.CLAIM_PROCESSES, labels, share.processes)
            page.put(f.CLAIM_ENERGY, labels, self._energy_of(share, before))
        # A GPU that cannot be read for a while keeps its claim's energy.
        for each in held:
            key = (each.ref.uid, each.uuid)
            if key in before:
                self._energy_before.setdefault(key, before[key])
        return page.samples()

    def _energy_of(self, share: Share, before: Mapping[tuple[str, str], float]) -> float | None:
        energy = share.energy_joules
        if energy is None:
            return None
        key = (share.allocation.ref.uid, share.allocation.uuid)
        start = before.get(key, energy)
        # The driver was loaded anew: it counts from zero again.
        self._energy_before[key] = start = start if energy >= start else 0.0
        return energy - start


def _pods(allocation: Allocation) -> tuple[str, ...]:
    pods = tuple(each.name for each in allocation.consumers if each.resource == "pods")
    return pods if 0 < len(pods) <= MAX_PODS else ("",)


def _only_pod(allocation: Allocation) -> str:
    pods = _pods(allocation)
    return pods[0] if len(pods) == 1 else ""


def _claim_labels(allocation: Allocation, pod: str) -> Labels:
    return (
        allocation.ref.namespace, allocation.ref.name, pod, allocation.container, allocation.request,
        allocation.device, allocation.uuid, allocation.profile, allocation.share,
    )  # fmt: skip
