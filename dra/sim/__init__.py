"""The simulated world: NVML, node trees, machine profiles, API server, scheduler, kubelet, runtime."""
