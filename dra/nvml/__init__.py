"""NVML: the only room that imports `pynvml`. Loads the library late, survives its loss, and reads GPUs."""
