"""The bodies of the simulated functions, by topic. `FUNCTIONS` holds them all by name."""

from dra.sim.nvml.functions import (  # noqa: F401  each module enters its bodies in the table
    device,
    events,
    fields,
    gpm,
    links,
    mig,
    mig_changes,
    processes,
    system,
    telemetry,
)
from dra.sim.nvml.registry import FUNCTIONS

__all__ = ["FUNCTIONS"]
