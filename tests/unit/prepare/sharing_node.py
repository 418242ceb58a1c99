"""A simulated node on which claims share GPUs: real NVML calls, time-slices in its state, a keeper in memory."""

from __future__ import annotations

import json
from pathlib import Path

from mig_node import MigNode
from prepare_fakes import opaque, result

from dra.errors import DeviceError, HostError
from dra.host.paths import HostPaths
from dra.plugin.sharing import Sharing
from dra.plugin.sharing_ports import ComputeModePort
from dra.prepare.sharing.mps_model import daemon_folders, mps_folder
from dra.sim.sharing import MemoryKeeper

GROUP_VERSION = "resource.nvidia.com/v1beta1"


class Slices:
    """Time-slices of the simulated GPUs, without a program. `error`: raised instead."""

    def __init__(self, sim) -> None:
        self._sim, self.error, self.calls = sim, None, []

    def set(self, gpu_uuid: str, interval: int) -> None:
        self.calls.append((gpu_uuid, interval))
        if self.error is not None:
            raise self.error
        self._sim.set_gpu(gpu_uuid, timeslice=interval)


class Keeper(MemoryKeeper):
    """`absent`: nobody answers. `fail`: raised by `ensure` after the folders are made."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.absent, self.fail = False, None
        self.dead: set[str] = set()
        self.ensured: list[str] = []

    def _here(self) -> None:
        if self.absent:
            raise HostError("DRA-MPS-KEEPER-ABSENT", "no keeper", remedy="Deploy it.")

    def ensure(self, spec) -> None:
        self._here()
        self.ensured.append(spec.id)
        super().ensure(spec)
        self.dead.discard(spec.id)
        if self.fail is not None:
            raise self.fail

    def status(self, daemon_id):
        self._here()
        return None if daemon_id in self.dead else super().status(daemon_id)

    def stop(self, daemon_id) -> None:
        self._here()
        super().stop(daemon_id)


class SharingNode(MigNode):
    def __init__(self, root: Path, *, profile: str = "l40s-x4", dynamic: bool = False, gates=None) -> None:
        super().__init__(root, profile=profile, dynamic=dynamic)
        paths = HostPaths(**{**self.machine.paths_kwargs(), "kubelet_plugins_dir": self.state_dir.parent})
        self.slices = Slices(self.sim)
        self.keeper = Keeper(self.state_dir)
        self.sharing = Sharing(
            paths,
            driver=self.state_dir.name,
            modes=ComputeModePort(self.session, lambda: self.inventory),
            slices=self.slices,
            keeper=self.keeper,
            notify=lambda notice: self.notices.append(notice),
            gates=gates,
        )
        self.ports = {
            **self.ports,
            "strategies": self.sharing.strategies,
            "effects": {**self.ports.get("effects", {}), **self.sharing.effects},
        }
        self.restart()

    # -- the hardware

    def gpu(self, minor: int):
        uuid = self.uuid(minor)
        return next(gpu for gpu in self.sim.state.gpus if gpu.uuid == uuid)

    def uuid(self, minor: int) -> str:
        return next(slot.uuid for slot in self.machine.profile.gpus if slot.minor == minor)

    def compute_mode(self, minor: int) -> int:
        return self.gpu(minor).compute_mode

    def time_slice(self, minor: int) -> int:
        return self.gpu(minor).timeslice

    def daemon(self):
        (found,) = self.keeper.daemons.values()
        return found

    def daemon_folders(self) -> list[str]:
        folder = mps_folder(self.state_dir)
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def clean(self) -> None:
        """Nothing of sharing is left on the node."""
        assert self.files() == []
        assert self.keeper.daemons == {}
        assert self.daemon_folders() == []
        for gpu in self.sim.state.gpus:
            assert (gpu.compute_mode, gpu.timeslice) == (0, 0), gpu.uuid

    # -- what containers get

    def device_edits(self, ref) -> dict[str, dict]:
        spec = json.loads(self.cdi_file(ref).read_text())
        return {each["name"].removeprefix(f"{ref.uid}-"): each["containerEdits"] for each in spec["devices"]}


def gpu_config(strategy: str, **blocks) -> dict:
    return {"apiVersion": GROUP_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy, **blocks}}


def mig_config(strategy: str, **blocks) -> dict:
    return {**gpu_config(strategy, **blocks), "kind": "MigDeviceConfig"}


def interval(name: str) -> dict:
    return gpu_config("TimeSlicing", timeSlicingConfig={"interval": name})


def mps(**fields) -> dict:
    return gpu_config("MPS", mpsConfig=fields)


def share(device: str, letter: str, **more) -> dict:
    return result(device, shareID=f"{letter * 8}-1111-4111-8111-111111111111", **more)


def unsupported() -> DeviceError:
    return DeviceError("DRA-TIME-SLICE-UNSUPPORTED", "the GPU has none", remedy="Remove timeSlicingConfig.")


__all__ = [
    "SharingNode",
    "daemon_folders",
    "gpu_config",
    "interval",
    "mig_config",
    "mps",
    "opaque",
    "share",
    "unsupported",
]
