"""One look at the hardware: NVML's facts and sysfs' topology as an `Inventory`. Never raises for a bad node."""

from __future__ import annotations

from dra.errors import DraError
from dra.host.paths import HostPaths
from dra.host.pci import numa_node, pcie_root
from dra.inventory.model import NODE, Gpu, Inventory, MigDevice, MigProfile, ScanProblem
from dra.nvml.discovery import Discovery
from dra.nvml.facts import GpuFacts, Issue, MigProfileFacts
from dra.nvml.session import NvmlSession


class Scanner:
    """Looks again and again through one session; what cannot change is read once.

    One scan at a time: the live inventory's thread, or a command.
    """

    def __init__(self, session: NvmlSession, paths: HostPaths) -> None:
        self._discovery = Discovery(session, paths)
        self._paths = paths

    def scan(self, *, wake: bool = False, profiles: bool = False) -> Inventory:
        """Give what the node has now.

        No driver, or none that answers, gives an inventory without GPUs and with one problem whose subject is
        `node`. See `Discovery.scan` for the arguments.
        """
        try:
            facts = self._discovery.scan(wake=wake, profiles=profiles)
        except DraError as error:
            return Inventory(problems=(ScanProblem(NODE, error.code, error.message, error.remedy),))
        return Inventory(
            driver_version=facts.driver_version,
            cuda_version=facts.cuda_version,
            gpus=tuple(gpu_of(each, self._paths) for each in facts.gpus),
            problems=tuple(_problem(issue) for issue in facts.issues),
        )


def scan(session: NvmlSession, paths: HostPaths, *, wake: bool = True, profiles: bool = False) -> Inventory:
    """Give what the node has, once."""
    return Scanner(session, paths).scan(wake=wake, profiles=profiles)


def gpu_of(facts: GpuFacts, paths: HostPaths) -> Gpu:
    """Add sysfs' topology to NVML's facts. `unusable` is the code of what is wrong, which stays the same as
    long as the cause does.
    """
    return Gpu(
        minor=facts.minor,
        uuid=facts.uuid,
        pci_address=facts.address,
        product_name=facts.name,
        brand=facts.brand,
        architecture=facts.architecture,
        compute_capability=facts.compute_capability,
        memory_bytes=facts.memory_bytes,
        addressing_mode=facts.addressing_mode,
        numa_node=numa_node(paths, facts.address),
        pcie_root=pcie_root(paths, facts.address),
        mig_capable=facts.mig_capable,
        mig_enabled=facts.mig_enabled,
        mig_profiles=tuple(_profile(each) for each in facts.mig_profiles),
        mig_devices=tuple(
            MigDevice(
                uuid=each.uuid,
                profile=_profile(each.profile),
                gpu_instance_id=each.gpu_instance_id,
                compute_instance_id=each.compute_instance_id,
                start=each.start,
                size=each.size,
            )
            for each in facts.mig_devices
        ),
        unusable=facts.issue.code if facts.issue else "",
        persistence=facts.persistence,
    )


def _profile(facts: MigProfileFacts) -> MigProfile:
    return MigProfile(
        name=facts.name,
        profile_id=facts.profile_id,
        memory_mib=facts.memory_mib,
        multiprocessors=facts.multiprocessors,
        copy_engines=facts.copy_engines,
        decoders=facts.decoders,
        encoders=facts.encoders,
        jpeg_engines=facts.jpeg_engines,
        ofa_engines=facts.ofa_engines,
        placements=facts.placements,
    )


def _problem(issue: Issue) -> ScanProblem:
    return ScanProblem(issue.subject, issue.code, issue.message, issue.remedy)
