"""A PCI bus in plain files, and a kernel that does in them what a real one does."""

from __future__ import annotations

from pathlib import Path

from dra.host.paths import HostPaths

GPU, AUDIO, BRIDGE, OTHER = "0000:41:00.0", "0000:41:00.1", "0000:40:01.0", "0000:c1:00.0"
RELEASE = "6.8.0-test"


class PlainBus:
    """`/sys`, `/proc` and `/dev` of a node below a directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, HostPaths(host_root=root)
        self.write("proc/sys/kernel/osrelease", RELEASE + "\n")
        self.drivers("nvidia", "vfio-pci")

    def write(self, path: str, text: str) -> None:
        """Write a file, its directories first."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: Path) -> None:
        """Make a symbolic link."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    def drivers(self, *names: str) -> None:
        """Register drivers on the bus."""
        for name in names:
            (self.root / "sys/bus/pci/drivers" / name).mkdir(parents=True, exist_ok=True)

    def device(
        self,
        address: str,
        *,
        driver: str = "nvidia",
        group: int | None = None,
        pci_class: int = 0x030200,
        vendor: int = 0x10DE,
        device: int = 0x2330,
    ) -> str:
        """Put a function on the bus; gives its directory below the root."""
        place = f"sys/bus/pci/devices/{address}"
        self.write(f"{place}/vendor", f"0x{vendor:04x}\n")
        self.write(f"{place}/device", f"0x{device:04x}\n")
        self.write(f"{place}/class", f"0x{pci_class:06x}\n")
        self.write(f"{place}/driver_override", "(null)\n")
        self.write(
            f"{place}/modalias",
            f"pci:v{vendor:08X}d{device:08X}sv000010DEsd000016C1"
            f"bc{pci_class >> 16:02X}sc{pci_class >> 8 & 255:02X}i00\n",
        )
        if driver:
            self.drivers(driver)
            self.link(f"{place}/driver", self.root / "sys/bus/pci/drivers" / driver)
        if group is not None:
            members = self.root / f"sys/kernel/iommu_groups/{group}/devices"
            members.mkdir(parents=True, exist_ok=True)
            self.link(f"{place}/iommu_group", members.parent)
            self.link(f"sys/kernel/iommu_groups/{group}/devices/{address}", self.root / place)
        return place

    def aliases(self, text: str) -> None:
        """Write the table of module aliases."""
        self.write(f"lib/modules/{RELEASE}/modules.alias", text)


class PlainKernel:
    """Does what the kernel does with the writes of a bus in plain files; `refuse` names what fails (a file's name)."""

    def __init__(self, bus: PlainBus) -> None:
        self.bus = bus
        self.writes: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.refuse: dict[str, str] = {}
        self.modules: dict[str, str] = {}

    def write(self, path: Path, text: str) -> str:
        """Take a write."""
        self.writes.append((path.name, text))
        if path.name in self.refuse:
            return self.refuse[path.name]
        devices = self.bus.root / "sys/bus/pci/devices"
        match path.name:
            case "driver_override":
                path.write_text(text if text.strip() else "(null)\n")
            case "unbind":
                (devices / text.strip() / "driver").unlink()
            case "drivers_probe":
                device = devices / text.strip()
                wanted = (device / "driver_override").read_text().strip()
                driver = "nvidia" if wanted == "(null)" else wanted
                if (self.bus.root / "sys/bus/pci/drivers" / driver).is_dir():
                    self.bus.link(
                        f"sys/bus/pci/devices/{text.strip()}/driver",
                        self.bus.root / "sys/bus/pci/drivers" / driver,
                    )
        return ""

    def load_module(self, name: str) -> str:
        """Take a request for a module; `modules` says which driver it brings."""
        self.loaded.append(name)
        if name not in self.modules:
            return f"modprobe: FATAL: Module {name} not found"
        self.bus.drivers(self.modules[name])
        return ""
