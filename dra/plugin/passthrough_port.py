"""GPUs that change their kernel driver on this machine: the PCI bus, and this process's own hold on a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dra.errors import StackError
from dra.host.paths import HostPaths
from dra.host.programs import find_program
from dra.nvml.api import NvmlApi
from dra.nvml.session import RELEASE_SECONDS, NvmlSession
from dra.telemetry.log import get_logger
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.host.kernel import HostKernel
    from dra.host.open_files import Holder
    from dra.host.pci_binding import PciBus, PciFunction

# nvidia-smi takes a second or two on a machine with eight GPUs that sleep.
_SMI_SECONDS = 15.0

log = get_logger()


class PassthroughPort:
    """The node's side of passing GPUs through. Thread-safe for different functions.

    Args:
        paths: where the node's files are.
        session: NVML.
        kernel: what binds functions and loads modules; None: this machine's.
        release_seconds: how long closing the session may take.
    """

    def __init__(
        self,
        paths: HostPaths,
        session: NvmlSession,
        *,
        kernel: HostKernel | None = None,
        release_seconds: float = RELEASE_SECONDS,
    ) -> None:
        self._paths, self._session, self._kernel = paths, session, kernel
        self._release_seconds = release_seconds

    @functools.cached_property
    def _bus(self) -> PciBus:
        # Loaded with the first claim that needs it: most nodes never do.
        from dra.host.pci_binding import PciBus

        return PciBus(self._paths, self._kernel)

    def function(self, address: PciAddress) -> PciFunction:
        """Give a function as it is now."""
        return self._bus.function(address)

    def gpus(self) -> tuple[PciAddress, ...]:
        """Give the addresses of all GPUs on the bus."""
        return tuple(each.address for each in self._bus.functions())

    def vfio_driver(self, address: PciAddress) -> str:
        """Give the driver of the vfio family that fits a function best."""
        return self._bus.vfio_driver_for(address)

    def load(self, driver: str) -> None:
        """Have the kernel load a driver's module. Raises HostError: DRA-VFIO-MODULE."""
        self._bus.load_module(driver)

    def bind(self, address: PciAddress, driver: str) -> None:
        """Bind a function to a loaded driver. Raises HostError: DRA-VFIO-NO-DRIVER, DRA-VFIO-BIND."""
        self._bus.bind(address, driver)

    def unbind(self, address: PciAddress) -> None:
        """Leave a function without a driver. Raises HostError: DRA-VFIO-BIND."""
        self._bus.unbind(address)

    def holders(self, address: PciAddress) -> tuple[Holder, ...]:
        """Give the other processes that have the function open: through NVIDIA's driver, DRM or VFIO."""
        from dra.host.open_files import holders_of

        function = self._bus.function(address)
        nodes = []
        if function.on_vfio:
            names = (str(function.iommu_group), f"devices/{function.vfio_device or '-'}")
            nodes = [self._paths.dev / "vfio" / name for name in names]
        found = {*self._bus.holders(address), *holders_of(self._paths.proc, nodes)}
        own = self._own_pid()
        return tuple(sorted(each for each in found if each.pid != own))

    @contextlib.contextmanager
    def let_go(self, address: PciAddress) -> Iterator[None]:
        """Have this process let go of all GPUs while the block runs: NVML opens and closes them together.

        Raises:
            StackError: DRA-VFIO-NVML-HANGS: a call is stuck in the driver.
        """
        reason = f"PCI device {address} changes its kernel driver"
        with self._session.paused(reason, timeout_seconds=self._release_seconds) as clean:
            if not clean:
                raise StackError(
                    "DRA-VFIO-NVML-HANGS",
                    f"PCI device {address}: the kernel driver cannot be changed, since this driver's own NVML session could "
                    "not be closed in time",
                    remedy="A call hangs in the NVIDIA driver: look for 'NVRM' in the kernel log (dmesg). The call is "
                    "retried by itself.",
                    pci=str(address),
                )
            yield

    def set_persistence(self, address: PciAddress, *, on: bool) -> None:
        """Switch a GPU's persistence mode: by the driver's nvidia-smi, which reaches nvidia-persistenced, else by NVML.

        Raises:
            StackError, DeviceError: DRA-NVML-…
        """
        mode = int(on)
        program = find_program(self._paths, "nvidia-smi")
        if program is not None:
            end = program.run("-i", str(address), "-pm", str(mode), seconds=_SMI_SECONDS)
            if end.status == 0:
                return
            log.info("nvidia_smi_failed", pci=str(address), status=end.status, said=end.words)
        subject = str(address)

        def change(api: NvmlApi) -> None:
            api.call("nvmlDeviceSetPersistenceMode", api.handle(address), mode, subject=subject)

        self._session.run(change, subject=subject)

    def _own_pid(self) -> int:
        """Give this process's id as the node's /proc has it, which may be another than its own pid namespace's."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._paths.proc / "self").readlink().name)
        return os.getpid()
