"""GPU performance monitoring: what engines did between two samples, for whole GPUs and GPU instances (Hopper on).

A sample is kept until the next reading, so that the figures cover the time in between. The first reading in a session
takes two samples a moment apart.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pynvml

from dra.errors import DraError
from dra.nvml.api import NvmlApi
from dra.nvml.errors import GPU_LOST, HUNG, SESSION_ENDED

# Two samples must lie at least this far apart. Source: nvmlGpmSampleGet.
APART_SECONDS = 0.12

_METRICS = {
    "graphics": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A sample, the session it was taken in, and when (monotonic seconds)."""

    sample: Any
    generation: int
    taken: float


# A GPU's subject and a GPU instance of it, -1 for the whole GPU.
_Key = tuple[str, int]


class GpmReader:
    """Keeps one sample for each GPU and GPU instance. Thread-safe; one reading of a GPU at a time."""

    def __init__(
        self,
        *,
        apart_seconds: float = APART_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apart_seconds = apart_seconds
        self._sleep = sleep
        self._clock = clock
        self._mutex = threading.Lock()
        self._kept: dict[_Key, _Kept] = {}

    def read(self, api: NvmlApi, handle: Any, subject: str) -> dict[str, float]:
        """Give what the engines of a whole GPU did, as ratios by `graphics`, `sm`, `tensor`, `dram`; empty if unknown."""
        return self.read_instances(api, handle, subject, (-1,)).get(-1, {})

    def read_instances(
        self, api: NvmlApi, handle: Any, subject: str, instances: Iterable[int]
    ) -> dict[int, dict[str, float]]:
        """Give the same for each of these GPU instances; one that is not known is not in the answer."""
        wanted = tuple(dict.fromkeys(instances))
        self._forget(api, subject, frozenset(wanted))
        if not wanted or not self._is_supported(api, handle, subject):
            return {}
        now = self._clock()
        fresh = [each for each in wanted if self._earlier(subject, each, api.generation) is None]
        for instance in fresh:
            self._keep(api, handle, subject, instance)
        newest = max(
            (kept.taken for each in wanted if (kept := self._earlier(subject, each, api.generation))),
            default=now,
        )
        if (wait := newest + self._apart_seconds - self._clock()) > 0:
            self._sleep(wait)
        found = {}
        for instance in wanted:
            earlier = self._earlier(subject, instance, api.generation)
            if earlier is None:
                continue
            later = self._keep(api, handle, subject, instance)
            if later is not None:
                found[instance] = _between(api, earlier.sample, later, subject)
            _free(api, earlier.sample)
        return {instance: loads for instance, loads in found.items() if loads}

    def keep_only(self, subjects: frozenset[str]) -> None:
        """Forget the samples of other GPUs. Their buffers, some KiB, are lost: nobody can be asked to free them."""
        with self._mutex:
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] in subjects}

    def _is_supported(self, api: NvmlApi, handle: Any, subject: str) -> bool:
        def ask() -> bool:
            support = api.optional("nvmlGpmQueryDeviceSupport", handle, subject=subject)
            return support is not None and bool(support.isSupportedDevice)

        try:
            return api.remembered(("gpm", subject), ask)
        except DraError as error:
            if _ends_reading(error):
                raise
            return False

    def _earlier(self, subject: str, instance: int, generation: int) -> _Kept | None:
        with self._mutex:
            kept = self._kept.get((subject, instance))
        return kept if kept is not None and kept.generation == generation else None

    def _forget(self, api: NvmlApi, subject: str, wanted: frozenset[int]) -> None:
        """Give back the buffers of instances that are gone and of an earlier session."""
        with self._mutex:
            gone = [
                key
                for key, kept in self._kept.items()
                if key[0] == subject and (key[1] not in wanted or kept.generation != api.generation)
            ]
            samples = [self._kept.pop(key).sample for key in gone]
        for sample in samples:
            _free(api, sample)

    def _keep(self, api: NvmlApi, handle: Any, subject: str, instance: int) -> Any:
        """Take a sample and keep it; None if there is none."""
        sample = None
        try:
            sample = api.call("nvmlGpmSampleAlloc", subject=subject)
            if instance < 0:
                api.call("nvmlGpmSampleGet", handle, sample, subject=subject)
            else:
                api.call("nvmlGpmMigSampleGet", handle, instance, sample, subject=subject)
        except DraError as error:
            if sample is not None:
                _free(api, sample)
            with self._mutex:
                self._kept.pop((subject, instance), None)
            if _ends_reading(error):
                raise
            return None
        with self._mutex:
            self._kept[subject, instance] = _Kept(sample, api.generation, self._clock())
        return sample


def _between(api: NvmlApi, earlier: Any, later: Any, subject: str) -> dict[str, float]:
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(_METRICS)
    asked.sample1, asked.sample2 = earlier, later
    for position, metric in enumerate(_METRICS.values()):
        asked.metrics[position].metricId = metric
    try:
        api.call("nvmlGpmMetricsGet", asked, subject=subject)
    except DraError as error:
        if _ends_reading(error):
            raise
        return {}
    found = {}
    for position, name in enumerate(_METRICS):
        metric = asked.metrics[position]
        # An instance that was made anew between the samples gives nonsense.
        if (
            metric.nvmlReturn == pynvml.NVML_SUCCESS
            and math.isfinite(metric.value)
            and 0 <= metric.value <= 100
        ):
            found[name] = metric.value / 100
    return found


def _free(api: NvmlApi, sample: Any) -> None:
    with contextlib.suppress(DraError):
        api.call("nvmlGpmSampleFree", sample, undoing=True)


def _ends_reading(error: DraError) -> bool:
    return error.code in SESSION_ENDED or error.code in (HUNG, GPU_LOST)
