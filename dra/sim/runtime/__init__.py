"""A container engine that resolves CDI names and reports what the container would see."""

from dra.sim.runtime.container import ContainerView, DeviceNode, MountPoint, Runtime
from dra.sim.runtime.oci import CreateError
from dra.sim.runtime.specs import SpecCache, SpecError, UnresolvableError, parse_spec

__all__ = [
    "ContainerView",
    "CreateError",
    "DeviceNode",
    "MountPoint",
    "Runtime",
    "SpecCache",
    "SpecError",
    "UnresolvableError",
    "parse_spec",
]
