"""CDI specs with the driver capabilities that policies give the GPUs of a claim."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dra.api.gpu_settings import NodeSettings
from dra.cdi.model import CdiOptions
from dra.cdi.renderer import CdiRenderer, parse_capabilities
from dra.host.paths import HostPaths
from dra.inventory.model import Inventory
from dra.prepare.model import CdiTarget
from dra.slices.sharing import identity_of


class RendererByGpu:
    """Renders with what the flag says, or with what all policies of a claim's GPUs say together. Thread-safe.

    Args:
        paths, options: of the node and of the flags.
        inventory: the GPUs, for their identity.
        settings: what holds for each GPU.
    """

    def __init__(
        self,
        paths: HostPaths,
        options: CdiOptions,
        inventory: Callable[[], Inventory],
        settings: Callable[[], NodeSettings],
    ) -> None:
        self._paths, self._options = paths, options
        self._inventory, self._settings = inventory, settings
        self._plain = CdiRenderer(paths, options)
        self._lock = threading.Lock()
        # A handful: one for each set of capabilities that was asked for.
        self._others: dict[frozenset[str], CdiRenderer] = {}

    def render(
        self, claim_uid: str, devices: Sequence[CdiTarget], *, driver_version: str
    ) -> Mapping[str, Any]:
        """Give the spec. Raises StackError, DeviceError, HostError, BugError: as `CdiRenderer.render`."""
        minors = {device.gpu_minor for device in devices}
        return self._renderer(minors).render(claim_uid, devices, driver_version=driver_version)

    def missing_files(self, spec: Mapping[str, Any]) -> Sequence[str]:
        """Give what a spec takes from the host and what is not there any more."""
        return self._plain.missing_files(spec)

    def _renderer(self, minors: set[int | None]) -> CdiRenderer:
        settings = self._settings()
        asked: frozenset[str] = frozenset()
        said = False
        for gpu in self._inventory().gpus if settings.layers else ():
            if gpu.minor in minors:
                own = settings.of(identity_of(gpu)).driver_capabilities
                said = said or own is not None
                asked |= self._options.capabilities if own is None else parse_capabilities(",".join(own))
        if not said or asked == self._options.capabilities:
            return self._plain
        with self._lock:
            found = self._others.get(asked)
            if found is None:
                found = self._others[asked] = CdiRenderer(
                    self._paths, replace(self._options, capabilities=asked)
                )
            return found
