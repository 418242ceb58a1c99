"""A simulated NVML that stands where the C library stands for pynvml."""
