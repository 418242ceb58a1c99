"""A kubelet that follows the contract with DRA drivers: registration, calls, retries, wiping of slices."""

from dra.sim.kubelet.claims import Device, PrepareError, UnprepareError
from dra.sim.kubelet.node import SimKubelet
from dra.sim.kubelet.pod_loop import PodLoop
from dra.sim.kubelet.pods import RunningPod
from dra.sim.kubelet.programs import ProgramEnd
from dra.sim.kubelet.versions import KubeletVersion, Timings

__all__ = [
    "Device",
    "KubeletVersion",
    "PodLoop",
    "PrepareError",
    "ProgramEnd",
    "RunningPod",
    "SimKubelet",
    "Timings",
    "UnprepareError",
]
