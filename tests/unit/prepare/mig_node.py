"""A node with simulated GPUs whose partitions are really made: engine, CDI renderer, NVML, /proc."""

from __future__ import annotations

import json
from pathlib import Path

from prepare_fakes import Node

from dra.cdi.renderer import CdiRenderer
from dra.host.paths import HostPaths
from dra.inventory.names import MigName, profile_slug
from dra.inventory.scan import Scanner
from dra.nvml.library import InjectedLibrary
from dra.nvml.session import NvmlSession
from dra.plugin.mig_port import MigPort
from dra.sim.node import SimulatedNode


class MigNode(Node):
    """`dynamic`: partitions are made on demand. `inventory` is as of the last look; `look()` looks again."""

    def __init__(self, root: Path, *, profile: str = "dgx-h100", dynamic: bool = True) -> None:
        self.machine = SimulatedNode(profile, root / "machine", real_nodes=False)
        self.sim = self.machine.control
        paths = HostPaths(**{**self.machine.paths_kwargs(), "cdi_root": root / "cdi"})
        self.session = NvmlSession(InjectedLibrary(self.machine.library))
        self.scanner = Scanner(self.session, paths)
        self.changes = 0
        super().__init__(root)
        self.look()
        self.renderer = CdiRenderer(paths)
        self.ports = {
            "fresh_inventory": self.look,
            "mig": MigPort(self.session, lambda: self.inventory),
            "layout_changed": self._changed,
        }
        self.settings = {"create_partitions": dynamic}
        self.restart()

    def close(self) -> None:
        self.session.close()

    def look(self):
        self.inventory = self.scanner.scan(profiles=True)
        return self.inventory

    def _changed(self) -> None:
        self.changes += 1

    def reboot(self, *, keep_cdi: bool = False) -> None:
        self.sim.reboot()
        self.session.refresh()
        self.look()
        super().reboot(keep_cdi=keep_cdi)

    def name(self, gpu: int, profile: str, start: int) -> str:
        """Give the device name of a placement."""
        found = next(each for each in self.inventory.gpus if each.minor == gpu)
        offered = next(each for each in found.mig_profiles if each.name == profile)
        return str(MigName(gpu, profile_slug(profile), offered.profile_id, start))

    def partitions(self) -> list[str]:
        """Give the names of the partitions that the hardware has, half-made ones with a `?`."""
        found = []
        for slot, gpu in zip(self.machine.profile.gpus, self.sim.state.gpus, strict=True):
            table = self.sim._table(self.sim.state, gpu)
            for instance in gpu.instances:
                profile = table.by_id(instance.profile_id)
                name = str(
                    MigName(slot.minor, profile_slug(profile.name), instance.profile_id, instance.start)
                )
                found.append(name if instance.computes else f"{name}?")
        return sorted(found)

    def mode(self, gpu: int) -> int:
        """Give the MIG mode of the hardware."""
        uuid = next(slot.uuid for slot in self.machine.profile.gpus if slot.minor == gpu)
        return next(each.mig_current for each in self.sim.state.gpus if each.uuid == uuid)

    def effects(self, ref) -> list[dict]:
        return self.record(ref)["effects"]

    def nodes(self, ref) -> dict[str, list[str]]:
        """Give the device nodes of each device of a claim's spec."""
        spec = json.loads(self.cdi_file(ref).read_text())
        return {
            device["name"].removeprefix(f"{ref.uid}-"): [
                node["path"] for node in device["containerEdits"]["deviceNodes"]
            ]
            for device in spec["devices"]
        }

    def capabilities(self, gpu: int, gi: int, ci: int) -> list[str]:
        """Give the capability nodes that the kernel lists for an instance."""
        base = self.machine.root / f"proc/driver/nvidia/capabilities/gpu{gpu}/mig"
        minors = [
            (base / part / "access").read_text().split("DeviceFileMinor:")[1].split()[0]
            for part in (f"gi{gi}", f"gi{gi}/ci{ci}")
        ]
        return [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in minors]
