"""A node whose GPUs can be passed through: a PCI bus in plain files, with a kernel that changes them as a real one does."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from prepare_fakes import Killed, Node, make_inventory

from dra.cdi.renderer import CdiRenderer
from dra.errors import DeviceError
from dra.host.open_files import Holder
from dra.host.paths import HostPaths
from dra.host.pci_binding import PciBus
from dra.inventory.model import VfioFunction
from dra.prepare.passthrough.model import Patience
from tests.unit.host.pci_files import PlainBus, PlainKernel


class Kernel(PlainKernel):
    """Makes and removes the nodes of VFIO too. `die_at`: the process ends before this write (counted from 1)."""

    def __init__(self, bus: PlainBus) -> None:
        super().__init__(bus)
        self.die_at = 0

    def write(self, path: Path, text: str) -> str:
        if self.die_at and len(self.writes) + 1 == self.die_at:
            raise Killed(f"{path.name} {text}")
        why = super().write(path, text)
        self.make_nodes()
        return why

    def make_nodes(self) -> None:
        """Let /dev have the nodes of the functions that are bound to vfio."""
        wanted = {"vfio"}
        for device in (self.bus.root / "sys/bus/pci/devices").iterdir():
            with contextlib.suppress(OSError):
                if "vfio" in (device / "driver").readlink().name:
                    wanted.add((device / "iommu_group").readlink().name)
        folder = self.bus.root / "dev/vfio"
        folder.mkdir(parents=True, exist_ok=True)
        for node in folder.iterdir():
            if node.name not in wanted:
                node.unlink()
        for name in wanted:
            number = 0 if name == "vfio" else int(name)
            self.bus.write(f"dev/vfio/{name}", f"simulated-device c 511 {number} gid 0\n")


class Hardware:
    """The node's side. `users`: who has a function open, by address; `persistence`: what was asked for last."""

    def __init__(self, bus: PciBus) -> None:
        self._bus = bus
        self.users: dict[str, list[Holder]] = {}
        self.persistence: dict[str, bool] = {}
        self.refuse_persistence = False
        self.let_go_of: list[str] = []
        self.function, self.bind, self.unbind = bus.function, bus.bind, bus.unbind
        self.vfio_driver, self.load = bus.vfio_driver_for, bus.load_module

    def gpus(self):
        return tuple(each.address for each in self._bus.functions())

    def holders(self, address):
        return tuple(self.users.get(str(address), ()))

    @contextlib.contextmanager
    def let_go(self, address):
        self.let_go_of.append(str(address))
        yield

    def set_persistence(self, address, *, on):
        if self.refuse_persistence:
            raise DeviceError("DRA-NVML-DRIVER-NOT-LOADED", "there is no driver")
        self.persistence[str(address)] = on


class PassthroughNode(Node):
    """Four GPUs, each alone in its IOMMU group (20 and up)."""

    def __init__(self, root: Path, *, gpus: int = 4) -> None:
        self.bus = PlainBus(root / "machine")
        self.bus.paths = HostPaths(host_root=root / "machine", stand_in_nodes=True)
        self.kernel = Kernel(self.bus)
        self.pci = PciBus(self.bus.paths, self.kernel)
        self.hardware = Hardware(self.pci)
        self.whole = make_inventory(gpus)
        for gpu in self.whole.gpus:
            self.bus.device(str(gpu.pci_address), group=20 + gpu.minor)
        self.kernel.make_nodes()
        self.rescans = 0
        self.gate = True
        self.waited = 0.0
        super().__init__(root)
        self.renderer = CdiRenderer(self.bus.paths)
        self.ports = {
            "fresh_inventory": self.look,
            "passthrough": self.hardware,
            "layout_changed": self._changed,
            "patience": Patience(12.0, clock=lambda: self.waited, sleep=self._sleep),
        }
        self.look()
        self.restart()

    def _changed(self) -> None:
        self.rescans += 1

    def _sleep(self, seconds: float) -> None:
        self.waited += 1.0
        self.while_waiting()

    def while_waiting(self) -> None:
        """Let something happen while the driver waits."""

    def look(self):
        """Look at the hardware: NVIDIA's driver shows what it has, the bus shows all."""
        on_nvidia = [g for g in self.whole.gpus if self.pci.function(g.pci_address).driver == "nvidia"]
        functions = [
            VfioFunction(
                index, each.address, each.driver, each.iommu_group or 0, 0x10DE, 0x2330, "H100", 1 << 37,
                gpu_minor=next((g.minor for g in on_nvidia if g.pci_address == each.address), None),
            )
            for index, each in enumerate(self.pci.functions())
            if each.driver
        ]  # fmt: skip
        self.inventory = replace(
            self.whole, gpus=tuple(on_nvidia), vfio=tuple(functions) if self.gate else ()
        )
        return self.inventory

    def address(self, index: int) -> str:
        return str(self.whole.gpus[index].pci_address)

    def driver(self, index: int) -> str:
        return self.pci.function(self.whole.gpus[index].pci_address).driver

    def override(self, index: int) -> str:
        path = self.bus.root / f"sys/bus/pci/devices/{self.address(index)}/driver_override"
        return path.read_text().strip()

    def bind_by_hand(self, index: int, driver: str) -> None:
        self.pci.bind(self.whole.gpus[index].pci_address, driver)
        self.look()

    def marks(self) -> list[str]:
        return sorted(path.name for path in (self.state_dir / "vfio").glob("*"))

    def nodes(self, ref) -> dict[str, list[str]]:
        """The device nodes that each device of a claim gives a container, and those that all of them give."""
        spec = json.loads(self.cdi_file(ref).read_text())
        parts = {"": spec["containerEdits"]} | {
            each["name"].removeprefix(f"{ref.uid}-"): each["containerEdits"] for each in spec["devices"]
        }
        return {
            name: [node["path"] for node in edits.get("deviceNodes", ())] for name, edits in parts.items()
        }

    def is_as_before(self) -> bool:
        """Nothing is left of any claim."""
        drivers = [self.driver(index) for index in range(len(self.whole.gpus))]
        overrides = [self.override(index) for index in range(len(self.whole.gpus))]
        return (set(drivers), set(overrides), self.files(), self.marks()) == ({"nvidia"}, {"(null)"}, [], [])

    def reboot(self, *, keep_cdi: bool = False) -> None:
        for gpu in self.whole.gpus:
            if self.pci.function(gpu.pci_address).driver != "nvidia":
                self.pci.bind(gpu.pci_address, "nvidia")
        self.hardware.users.clear()
        self.look()
        super().reboot(keep_cdi=keep_cdi)
