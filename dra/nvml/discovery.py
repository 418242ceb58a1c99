"""Read the node's GPUs through NVML with few calls, waking none that sleeps.

A GPU whose persistence mode is off loses its state when nobody has it open, and takes seconds and some 30 W to
come back. It is asked once; after that, as long as /proc shows the same GPU with the same driver and nobody else
has woken it through this session, the answers of that time are given again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dra.errors import DraError
from dra.host.paths import HostPaths
from dra.nvml.api import NvmlApi
from dra.nvml.errors import HUNG, INVALID_ARGUMENT, NOT_FOUND, SESSION_ENDED
from dra.nvml.facts import ADDRESSING_MODES, ARCHITECTURES, BRANDS, UNKNOWN, GpuFacts, Issue, NodeFacts
from dra.nvml.kernel import KernelGpu, kernel_gpus
from dra.nvml.mig import read_devices, read_profiles
from dra.nvml.session import NvmlSession
from dra.values import PciAddress

# What NVML says to an address it did not count.
_UNSEEN = frozenset({NOT_FOUND, INVALID_ARGUMENT, "DRA-NVML-GPU-NOT-FOUND"})

_Reading = tuple[GpuFacts, tuple[Issue, ...]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A GPU as it was read last: in which session, under which driver, with which traces in /proc."""

    facts: GpuFacts
    generation: int
    driver_version: str
    kernel: KernelGpu | None


class Discovery:
    """Scans through one session and remembers what does not change. One scan at a time (the caller's care)."""

    def __init__(self, session: NvmlSession, paths: HostPaths) -> None:
        self._session = session
        self._paths = paths
        self._known: dict[PciAddress, _Known] = {}
        self._by_index: dict[int, PciAddress] = {}
        self._by_index_generation = 0
        self._sought: set[PciAddress] = set()

    def scan(self, *, wake: bool = False, profiles: bool = False) -> NodeFacts:
        """Look at the node.

        Args:
            wake: ask sleeping GPUs too.
            profiles: read the MIG profiles with their placements (tens of calls for each GPU).

        Raises:
            StackError: DRA-NVML-…: no GPU can be read at all.
        """
        self._session.refresh()
        kernel = kernel_gpus(self._paths)
        facts, unseen = self._scan(kernel, wake=wake, profiles=profiles)
        fresh = unseen - self._sought
        self._sought = unseen
        if fresh:
            # Plugged in, or given back by a virtual machine, since the session was opened: NVML knows only what
            # it counted then. Tried once for each.
            self._session.reopen("new GPU")
            # One may have gone in the meantime (to a virtual machine): it is tried again when it is back.
            kernel = kernel_gpus(self._paths)
            facts, self._sought = self._scan(kernel, wake=wake, profiles=profiles)
        return facts

    def _scan(
        self, kernel: dict[PciAddress, KernelGpu], *, wake: bool, profiles: bool
    ) -> tuple[NodeFacts, set[PciAddress]]:
        """Give what there is, and the GPUs of the kernel's that NVML does not know."""
        count, driver_version, cuda_version, generation = self._session.run(_read_node)
        issues: list[Issue] = []
        # /proc lists every GPU the module has, unless it is hidden as a whole.
        addresses = set(kernel) or self._addresses_by_index(count, generation, issues)
        asleep, readers = {}, {}
        for address in sorted(addresses):
            known = self._known.get(address)
            if known is not None and known.driver_version != driver_version:
                known = None
            unread = (
                profiles and known is not None and known.facts.mig_capable and not known.facts.mig_profiles
            )
            if known is not None and not wake and not unread and self._may_sleep(known, kernel.get(address)):
                asleep[address] = replace(known.facts, asleep=True)
                continue
            readers[str(address)] = functools.partial(
                _read_gpu,
                address=address,
                kernel=kernel.get(address),
                known=known.facts if known is not None else None,
                this_session=known is not None and known.generation == generation,
                profiles=profiles,
            )
        read = self._read(readers, kernel, issues)
        for address, facts in read.items():
            if facts.issue is None:
                self._known[address] = _Known(facts, generation, driver_version, kernel.get(address))
        gpus = {**asleep, **read}
        self._known = {address: known for address, known in self._known.items() if address in gpus}
        found = NodeFacts(
            driver_version, cuda_version, tuple(gpus[key] for key in sorted(gpus)), tuple(issues)
        )
        unseen = {issue.subject for issue in issues if issue.code in _UNSEEN}
        return found, {address for address in kernel if str(address) in unseen}

    def _may_sleep(self, known: _Known, kernel: KernelGpu | None) -> bool:
        if known.facts.persistence or kernel is None or known.kernel is None:
            return False
        same = (kernel.minor, kernel.mig_layout) == (known.kernel.minor, known.kernel.mig_layout)
        return (
            same
            and kernel.uuid in ("", known.facts.uuid)
            and not self._session.has_handle(str(kernel.address))
        )

    def _addresses_by_index(self, count: int, generation: int, issues: list[Issue]) -> set[PciAddress]:
        """Ask NVML for addresses where /proc does not list all GPUs (hidden, or a virtual machine's)."""
        if self._by_index_generation != generation:
            self._by_index, self._by_index_generation = {}, generation
        missing = [index for index in range(count) if index not in self._by_index]
        calls: Mapping[str, Callable[[NvmlApi], PciAddress]] = {
            f"index {index}": functools.partial(_address_of, index=index) for index in missing
        }
        for index, (subject, result) in zip(missing, self._session.run_each(calls).items(), strict=True):
            if isinstance(result, DraError):
                issues.append(Issue.of(result, subject=subject))
            else:
                self._by_index[index] = result
        return {address for index, address in self._by_index.items() if index < count}

    def _read(
        self,
        readers: Mapping[str, Callable[[NvmlApi], _Reading]],
        kernel: Mapping[PciAddress, KernelGpu],
        issues: list[Issue],
    ) -> dict[PciAddress, GpuFacts]:
        found: dict[PciAddress, GpuFacts] = {}
        for subject, result in self._session.run_each(readers).items():
            address = PciAddress.parse(subject)
            if not isinstance(result, DraError):
                found[address] = result[0]
                issues += result[1]
                continue
            issue = Issue.of(result, subject=subject)
            issues.append(issue)
            facts = self._identity(address, kernel.get(address))
            if facts is not None:
                found[address] = replace(facts, issue=issue)
        return found

    def _identity(self, address: PciAddress, kernel: KernelGpu | None) -> GpuFacts | None:
        """Say which GPU it is that does not answer: from an earlier scan, else from /proc."""
        known = self._known.get(address)
        if known is not None:
            return known.facts
        if kernel is None or kernel.minor is None or not kernel.uuid:
            return None
        return GpuFacts(address=address, uuid=kernel.uuid, minor=kernel.minor, name=kernel.model)


def _read_node(api: NvmlApi) -> tuple[int, str, tuple[int, int] | None, int]:
    # Counting wakes nothing. Source: nvmlDeviceGetCount_v2.
    return int(api.call("nvmlDeviceGetCount")), api.driver_version, api.cuda_version, api.generation


def _address_of(api: NvmlApi, *, index: int) -> PciAddress:
    return api.handle_by_index(index)[0]


def _read_gpu(
    api: NvmlApi,
    *,
    address: PciAddress,
    kernel: KernelGpu | None,
    known: GpuFacts | None,
    this_session: bool,
    profiles: bool,
) -> _Reading:
    """Read one GPU.

    What was read in this session is asked again only where it can change; the MIG profiles, which take tens of
    calls, only where board or driver changed. A GPU that answers only partly keeps the facts it had.
    """
    subject = str(address)
    handle = api.handle(address)
    uuid = str(api.call("nvmlDeviceGetUUID", handle, subject=subject))
    if known is not None and known.uuid != uuid:
        known = None
    if known is not None:
        facts = replace(known, issue=None, asleep=False)
    else:
        facts = GpuFacts(address=address, uuid=uuid, minor=_minor(api, handle, kernel, subject))
    try:
        if known is None or not this_session:
            facts = replace(facts, minor=_minor(api, handle, kernel, subject))
            facts = _read_static(api, handle, facts, subject)
        return _read_changing(api, handle, facts, subject, profiles=profiles)
    except DraError as error:
        if error.code == HUNG or error.code in SESSION_ENDED:
            raise
        issue = Issue.of(error, subject=subject)
        return replace(facts, issue=issue), (issue,)


def _minor(api: NvmlApi, handle: Any, kernel: KernelGpu | None, subject: str) -> int:
    minor = api.optional("nvmlDeviceGetMinorNumber", handle, subject=subject)
    if minor is None and kernel is not None:
        minor = kernel.minor
    if minor is None:
        # Asked again for its error: without a minor there is no device node and no name.
        minor = api.call("nvmlDeviceGetMinorNumber", handle, subject=subject)
    return int(minor)


def _read_static(api: NvmlApi, handle: Any, facts: GpuFacts, subject: str) -> GpuFacts:
    def ask(name: str) -> Any:
        return api.optional(name, handle, subject=subject)

    facts = replace(facts, name=str(api.call("nvmlDeviceGetName", handle, subject=subject)))
    memory = ask("nvmlDeviceGetMemoryInfo")
    facts = replace(facts, memory_bytes=None if memory is None else int(memory.total))
    capability = ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
    return replace(
        facts,
        brand=BRANDS.get(ask("nvmlDeviceGetBrand"), UNKNOWN),
        architecture=ARCHITECTURES.get(ask("nvmlDeviceGetArchitecture"), UNKNOWN),
        compute_capability=(int(capability[0]), int(capability[1])),
        addressing_mode=ADDRESSING_MODES.get(ask("nvmlDeviceGetAddressingMode")),
    )


def _read_changing(api: NvmlApi, handle: Any, facts: GpuFacts, subject: str, *, profiles: bool) -> _Reading:
    mode = api.optional("nvmlDeviceGetMigMode", handle, subject=subject)
    persistence = api.optional("nvmlDeviceGetPersistenceMode", handle, subject=subject)
    enabled = mode is not None and mode[0] == 1
    facts = replace(
        facts,
        mig_capable=mode is not None,
        mig_enabled=enabled,
        mig_devices=(),
        # Where the mode cannot be read there is none to be kept.
        persistence=persistence != 0,
    )
    issues: tuple[Issue, ...] = ()
    if not (facts.mig_capable and (enabled or profiles)):
        # Not kept from a time when they were asked for: equal nodes give equal facts.
        facts = replace(facts, mig_profiles=())
    elif not facts.mig_profiles:
        offered = read_profiles(api, handle, subject=subject, memory_bytes=facts.memory_bytes)
        facts = replace(facts, mig_profiles=offered)
    if enabled:
        devices, issues = read_devices(api, handle, subject=subject, profiles=facts.mig_profiles)
        facts = replace(facts, mig_devices=devices)
    return facts, issues
