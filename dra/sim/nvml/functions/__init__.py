"""The bodies of the simulated functions, by topic. Importing this package fills the table."""

from dra.sim.nvml.functions import (
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

LOADED = (device, events, fields, gpm, links, mig, mig_changes, processes, system, telemetry)
