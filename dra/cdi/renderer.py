"""Renders a claim's spec from the node as it is at this moment.

What changes seldom is kept (the driver's files and the edits that follow from them), what may have changed since the
last call is looked at each time: majors, nodes, the hook program, and one lstat for each file that will be mounted. An
engine refuses a container when a mount's source is missing, and says so to nobody who could act.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dra.cdi.checked import ANY_CLAIM, CheckedSpec, RootPart, SpecParts
from dra.cdi.edits import complete_claim_spec, root_part
from dra.cdi.exposure import CommonEdits, common_edits
from dra.cdi.files import SpecFiles
from dra.cdi.hook import find_hook
from dra.cdi.mig_nodes import mig_capability_nodes
from dra.cdi.model import CdiDevice, CdiOptions, NodeFiles, WantedDevice
from dra.cdi.node_making import Runner, run_program
from dra.cdi.nodes import ClaimNodes, NodeSource
from dra.cdi.spec import device_name, is_device_name, kind_of
from dra.errors import ConfigError, StackError
from dra.host.driver_catalog import DriverCatalog
from dra.host.driver_files import DriverFiles
from dra.host.driver_lists import CAPABILITIES, DEFAULT_CAPABILITIES
from dra.host.paths import HostPaths, strip_root
from dra.host.shared_look import SharedLook
from dra.telemetry.log import get_logger

_log = get_logger(room="cdi")
# Without these a container has no CUDA, or no NVML.
_REQUIRED = ("libcuda.so.", "libnvidia-ml.so.")
# One for each GPU and partition that claims have had alone, and some for those that have several.
_MOST_PATTERNS = 128


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The spec of any claim that has certain devices, and the nodes it was made with."""

    nodes: ClaimNodes
    parts: SpecParts


@dataclass(frozen=True, slots=True)
class _Kept:
    """The edits that follow from a driver's files and the hook program, both as they were found.

    `root` is what specs have of `common`; `sources` says where this process sees the source of each mount. `patterns`
    are filled as claims come.
    """

    driver: DriverFiles
    hook_path: str
    common: CommonEdits
    root: RootPart
    sources: tuple[tuple[str, str], ...]
    patterns: dict[tuple[CdiDevice, ...], _Pattern] = field(default_factory=dict, compare=False)


class CdiRenderer:
    """Gives the CDI specs of claims on one node. Safe for several threads."""

    def __init__(
        self, paths: HostPaths, options: CdiOptions | None = None, *, runner: Runner = run_program
    ) -> None:
        self._paths = paths
        self._options = options or CdiOptions()
        self._catalog = DriverCatalog(paths, capabilities=self._options.capabilities)
        self._nodes = NodeSource(paths, runner=runner)
        self._files = SpecFiles(paths.cdi_root, driver=self._options.driver)
        self._edits: _Kept | None = None
        # By driver version; claims that are prepared at once share one look at the driver's files.
        self._looks: dict[str, SharedLook[_Kept]] = {}
        self._hook_missing = False

    @property
    def files(self) -> SpecFiles:
        """The files that hold the specs."""
        return self._files

    def render(self, claim_uid: str, devices: Sequence[WantedDevice], *, driver_version: str) -> CheckedSpec:
        """Give the spec of a claim. About half a millisecond while the driver's directories stay as they are.

        `driver_version` is NVML's text; empty where no NVML answers: then the loaded module's counts.

        Raises:
            StackError: DRA-DRIVER-LIBRARIES-MISSING, DRA-DRIVER-VERSION-MISMATCH, DRA-DEVICE-NODE-MISSING,
                DRA-CDI-HOOK-MISSING, DRA-DRIVER-FILE-GONE: retryable, nothing is kept; DRA-MIG-CAPS-DRIVER;
                DRA-VFIO-NODE-MISSING for functions that are passed through.
            DeviceError: DRA-MIG-CAPABILITY: the kernel does not list a MIG device's instances.
            BugError: DRA-CDI-INVALID: what was made breaks the rules of the specification.
            HostError: /proc cannot be read.
        """
        if devices and all(device.vfio is not None for device in devices):
            # Loaded with the first such claim: most nodes have none.
            from dra.cdi.passthrough import passthrough_spec

            return passthrough_spec(self._paths, claim_uid, devices, driver=self._options.driver)
        wanted = tuple(self._as_cdi_device(device) for device in devices)
        # Nodes first: making them loads the modules, which fills in the driver's version.
        nodes = self._nodes.get(
            {each.gpu_minor: each.pci_address for each in wanted if each.gpu_minor is not None}
        )
        kept = self._look(driver_version).get()
        if not all(_is_like_others(device) and _may_be_named(claim_uid, device) for device in wanted):
            return self._complete(claim_uid, wanted, nodes, kept).for_claim(claim_uid)
        pattern = kept.patterns.get(wanted)
        if pattern is None or pattern.nodes != nodes:
            pattern = _Pattern(nodes, self._complete(ANY_CLAIM, wanted, nodes, kept))
            if len(kept.patterns) >= _MOST_PATTERNS:
                kept.patterns.clear()
            kept.patterns[wanted] = pattern
        return pattern.parts.for_claim(claim_uid)

    def _complete(
        self, claim_uid: str, devices: Sequence[CdiDevice], nodes: ClaimNodes, kept: _Kept
    ) -> SpecParts:
        return complete_claim_spec(
            claim_uid=claim_uid,
            devices=devices,
            node=self._node_files(kept.driver, nodes, kept.hook_path),
            options=self._options,
            env=kept.common.env,
            root=kept.root,
        )

    def _as_cdi_device(self, device: WantedDevice) -> CdiDevice:
        found = device
        if not isinstance(found, CdiDevice):
            found = CdiDevice(
                name=device.name,
                gpu_minor=device.gpu_minor,
                pci_address=device.pci_address,
                share_id=device.share_id,
                admin=device.admin,
                extra_env=device.extra_env,
                extra_mounts=device.extra_mounts,
                mig_instances=device.mig_instances,
                vfio=device.vfio,
            )
        if found.mig_instances is None or found.gpu_minor is None:
            return found
        gpu_instance, compute_instance = found.mig_instances
        nodes = mig_capability_nodes(
            self._paths,
            gpu_minor=found.gpu_minor,
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
        )
        return replace(found, extra_nodes=(*nodes, *found.extra_nodes), mig_instances=None)

    def needs_rewrite(self, path: Path, spec: Mapping[str, Any]) -> bool:
        """Whether the file at `path` is missing or is not this spec.

        Raises:
            HostError: it is there and cannot be read.
        """
        return self._files.needs_rewrite(path, spec)

    def missing_files(self, spec: Mapping[str, Any]) -> list[str]:
        """Give the host's files and nodes that a spec names and that are gone; what cannot be seen from here is not.

        No NVML, and nothing is made.
        """
        parts = [spec, *spec.get("devices", ())]
        edits = [part.get("containerEdits") or {} for part in parts]
        wanted = {
            mount["hostPath"]: self._paths.view_of(mount["hostPath"])
            for each in edits
            for mount in each.get("mounts", ())
        }
        for node in (node for each in edits for node in each.get("deviceNodes", ())):
            path = node.get("hostPath") or node["path"]
            wanted[path] = self._view_of_node(path)
        return sorted(path for path, view in wanted.items() if view is not None and not os.path.lexists(view))

    def _view_of_node(self, path: str) -> Path | None:
        root, spelling = self._paths.dev_root()
        inside = strip_root(path, spelling)
        return self._paths.view_of(path) if inside is None else root / inside.lstrip("/")

    def _look(self, driver_version: str) -> SharedLook[_Kept]:
        look = self._looks.get(driver_version)
        if look is None:
            fresh = SharedLook(lambda: self._present_edits(driver_version))
            look = self._looks.setdefault(driver_version, fresh)
        return look

    def _present_edits(self, driver_version: str) -> _Kept:
        """Give the driver's files and edits of which every mount source was just seen."""
        kept = self._kept_edits(driver_version)
        gone = _gone(kept.sources)
        if gone:
            # The directories looked unchanged, or changed between the two looks: look for the files once more.
            self._catalog.forget()
            kept = self._kept_edits(driver_version)
            gone = _gone(kept.sources)
        lost = sorted(path for path in gone if path.rpartition("/")[2].startswith(_REQUIRED))
        if lost:
            raise StackError(
                "DRA-DRIVER-FILE-GONE",
                f"{lost[0]} was there a moment ago and is gone",
                remedy="The driver is being installed or removed; the call is retried.",
                path=lost[0],
            )
        if gone:
            _log.warning("driver_files_gone", files=sorted(gone)[:5])
            left = tuple(mount for mount in kept.common.mounts if mount.host_path not in gone)
            return self._keep(kept.driver, kept.hook_path, replace(kept.common, mounts=left))
        return kept

    def _kept_edits(self, driver_version: str) -> _Kept:
        driver = self._catalog.get(driver_version)
        hook_path = self._hook_path()
        kept = self._edits
        if kept is not None and kept.driver is driver and kept.hook_path == hook_path:
            return kept
        node = self._node_files(driver, ClaimNodes((), {}), hook_path)
        self._edits = kept = self._keep(driver, hook_path, common_edits(node, self._options))
        return kept

    def _keep(self, driver: DriverFiles, hook_path: str, common: CommonEdits) -> _Kept:
        root = str(self._paths.driver_root).rstrip("/")
        sources = tuple(
            (source, f"{root}{strip_root(source, self._paths.driver_root_host)}")
            for source in sorted({mount.host_path for mount in common.mounts})
        )
        part = root_part(common, kind=kind_of(self._options.driver))
        return _Kept(driver, hook_path, common, part, sources)

    def _node_files(self, driver: DriverFiles, nodes: ClaimNodes, hook_path: str) -> NodeFiles:
        return NodeFiles(
            driver=driver,
            driver_root_host=self._paths.driver_root_host,
            control_nodes=nodes.control,
            gpus=nodes.gpus,
            hook_path=hook_path,
        )

    def _hook_path(self) -> str:
        if self._options.exposure not in ("auto", "hooks"):
            return ""
        found = find_hook(self._paths, self._options.hook_path)
        wanted = self._options.hook_path
        missing = bool(wanted) and not found
        if missing and not self._hook_missing:
            _log.warning("cdi_hook_not_found", path=wanted, exposure=self._options.exposure)
        self._hook_missing = missing
        return found


def parse_capabilities(text: str) -> frozenset[str]:
    """Read `--driver-capabilities`: names with commas, `all`, or empty for the default.

    Raises:
        ConfigError: DRA-DRIVER-CAPABILITIES.
    """
    names = {name.strip() for name in text.split(",") if name.strip()}
    if not names:
        return DEFAULT_CAPABILITIES
    if names == {"all"}:
        return CAPABILITIES
    unknown = sorted(names - CAPABILITIES)
    if unknown:
        raise ConfigError(
            "DRA-DRIVER-CAPABILITIES",
            f"unknown driver capability {', '.join(unknown)}",
            remedy=f"Use {', '.join(sorted(CAPABILITIES))}, or all.",
        )
    return frozenset(names)


def _is_like_others(device: CdiDevice) -> bool:
    """Whether a device is the same in the spec of every claim that has it, but for the claim's UID in its name."""
    return not (device.share_id or device.extra_env or device.extra_mounts)


def _may_be_named(claim_uid: str, device: CdiDevice) -> bool:
    return is_device_name(device_name(claim_uid, device.name))


def _gone(sources: tuple[tuple[str, str], ...]) -> set[str]:
    """Give the sources of mounts that this process does not see."""
    gone = set()
    for source, view in sources:
        try:
            os.lstat(view)
        except OSError:
            gone.add(source)
    return gone
