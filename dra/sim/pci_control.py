"""Change the PCI side of a simulated node from anywhere: drivers, IOMMU, who has a GPU open, faults of the kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from dra.sim.kernel import FAULT_PREFIX, lose_driver
from dra.sim.nvml.files import SIM_FOLDER, machine_of, sync_files, tree_of
from dra.sim.nvml.state import Fault, GpuState, NodeState, StateStore, reset
from dra.sim.profiles import GpuSlot
from dra.sim.tree.nodes import make_link, write_text
from dra.values import PciAddress


class PciControl:
    """More switches of one simulated node; a GPU is named by its minor number. See `dra.sim.nvml.control`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = StateStore(root / SIM_FOLDER)

    def bind(self, gpu: int, driver: str) -> None:
        """Bind a GPU to a driver, as an administrator did long ago: asks nobody, overrides nothing. Empty: to none."""

        def change(state: NodeState) -> None:
            found = self._gpu(state, gpu)
            found.pci_driver, found.driver_override = driver, ""
            if driver not in ("", "nvidia", *state.vfio_drivers):
                state.vfio_drivers.append(driver)
            reset(found)

        lose_driver(self.root, self.address_of(gpu))
        self._change(change)

    def driver_of(self, gpu: int) -> str:
        """Give the driver that a GPU is bound to, empty for none."""
        return self._gpu(self._store.read(), gpu).pci_driver

    def address_of(self, gpu: int) -> PciAddress:
        """Give where a GPU is."""
        return self._slot(gpu).pci_address

    def set_iommu(self, enabled: bool) -> None:
        """Boot with or without an IOMMU."""
        self._change(lambda state: setattr(state, "iommu", enabled))

    def set_iommufd(self, enabled: bool) -> None:
        """Have a kernel with or without IOMMUFD."""
        self._change(lambda state: setattr(state, "iommufd", enabled))

    def set_virtual_functions(self, gpu: int, count: int) -> None:
        """Cut so many virtual functions from a GPU."""
        self._change(lambda state: setattr(self._gpu(state, gpu), "vfs", count))

    def hold(self, gpu: int, pid: int, comm: str = "python3") -> None:
        """Let a process have a GPU's device node open: it stands in the node's /proc."""
        self._slot(gpu)
        process = self.root / "proc" / str(pid)
        write_text(process / "comm", comm + "\n")
        node = tree_of(self.root, self._store.read()).dev_dir / f"nvidia{gpu}"
        make_link(process / f"fd/{10 + gpu}", str(node))

    def held_by(self, pid: int) -> list[int]:
        """Give the GPUs that a process of `hold` has open."""
        links = (self.root / "proc" / str(pid) / "fd").glob("*")
        return sorted(int(link.readlink().name.removeprefix("nvidia")) for link in links)

    def let_go(self, pid: int) -> None:
        """Let that process end."""
        shutil.rmtree(self.root / "proc" / str(pid), ignore_errors=True)

    def set_kernel_fault(
        self,
        what: str,
        *,
        gpu: int | None = None,
        error: int = 0,
        hang: bool = False,
        times: int | None = None,
    ) -> int:
        """Make the kernel refuse something; gives a number with which `SimControl.clear` takes the fault back.

        Args:
            what: `driver_override`, `unbind`, `bind`, `drivers_probe` or `load_module`; a shell pattern.
            gpu: only for this GPU.
            error: an errno.
            hang: it does not answer, until the writer gives up (see `set_kernel_patience`).
            times: for so many writes, None for all.
        """

        def add(state: NodeState) -> int:
            state.fault_number += 1
            wanted = "" if gpu is None else self._gpu(state, gpu).uuid
            fault = Fault(
                state.fault_number, FAULT_PREFIX + what, wanted, error, hang=hang, times=-1 if times is None else times
            )  # fmt: skip
            state.faults.append(fault)
            return state.fault_number

        return self._store.update(add)

    def set_kernel_patience(self, seconds: float) -> None:
        """Have a write to the kernel that it does not answer given up after so long; 10 s on a real node."""
        self._store.update(lambda state: setattr(state, "kernel_patience_seconds", seconds))

    def _change(self, change: Callable[[NodeState], None]) -> None:
        self._store.update(change)
        sync_files(self.root)

    def _slot(self, gpu: int) -> GpuSlot:
        found = next((slot for slot in machine_of(self._store.read()).gpus if slot.minor == gpu), None)
        if found is None:
            raise ValueError(f"the node has no GPU {gpu}")
        return found

    def _gpu(self, state: NodeState, gpu: int) -> GpuState:
        found = state.gpu(self._slot(gpu).uuid)
        if found is None:
            raise ValueError(f"the node has no GPU {gpu}")
        return found
