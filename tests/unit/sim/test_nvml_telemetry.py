"""pynvml against the simulated library: loads, by GPU, by GPU instance and by process."""

from __future__ import annotations

import ctypes

import pynvml
import pytest


def raises(code):
    return pytest.raises(pynvml.nvmlExceptionClass(code))


def handle_of(made, minor):
    slot = next(slot for slot in made.profile.gpus if slot.minor == minor)
    return pynvml.nvmlDeviceGetHandleByUUID(slot.uuid)


def between(first, second, *metrics):
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(metrics)
    asked.sample1, asked.sample2 = first, second
    for position, metric in enumerate(metrics):
        asked.metrics[position].metricId = metric
    pynvml.nvmlGpmMetricsGet(asked)
    return [(asked.metrics[i].nvmlReturn, asked.metrics[i].value) for i in range(len(metrics))]


def test_a_gpu_instance_has_a_load_of_its_own_between_two_samples(node):
    made = node("dgx-h100")
    small, large = made.control.set_mig_layout(0, [("1g.10gb", 6), ("3g.40gb", 0)])
    made.control.set_mig(small, utilization=12.5, utilization_memory=3)
    made.control.set_mig(large, utilization=80)
    handle = handle_of(made, 0)
    assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 1
    loads = {}
    for instance in made.control.state.gpus[0].instances:
        samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        for sample in samples:
            pynvml.nvmlGpmMigSampleGet(handle, instance.gi, sample)
        found = between(
            *samples, pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 9
        )
        loads[instance.size] = found
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)
    unsupported = (pynvml.NVML_ERROR_NOT_SUPPORTED, 0.0)
    assert loads == {1: [(0, 12.5), (0, 3.0), unsupported], 4: [(0, 80.0), (0, 0.0), unsupported]}
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlDeviceGetUtilizationRates(handle)


def test_a_whole_gpu_is_sampled_the_same_way(node):
    made = node("dgx-h100")
    made.control.set_gpu(1, utilization_gpu=40)
    handle = handle_of(made, 1)
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    for sample in samples:
        pynvml.nvmlGpmSampleGet(handle, sample)
    assert between(*samples, pynvml.NVML_GPM_METRIC_SM_UTIL) == [(0, 40.0)]
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):  # in the wrong order
        between(*reversed(samples), pynvml.NVML_GPM_METRIC_SM_UTIL)


def test_samples_of_two_sources_and_freed_ones_are_refused(node):
    made = node("dgx-h100")
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    for minor, sample in enumerate(samples):
        pynvml.nvmlGpmSampleGet(handle_of(made, minor), sample)
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        between(*samples, pynvml.NVML_GPM_METRIC_SM_UTIL)
    pynvml.nvmlGpmSampleFree(samples[0])
    with raises(pynvml.NVML_ERROR_INVALID_ARGUMENT):
        pynvml.nvmlGpmSampleFree(samples[0])


def test_before_hopper_there_is_no_monitoring(node):
    made = node("dgx-a100")
    handle = handle_of(made, 0)
    assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 0
    with raises(pynvml.NVML_ERROR_NOT_SUPPORTED):
        pynvml.nvmlGpmSampleGet(handle, pynvml.nvmlGpmSampleAlloc())


def test_a_process_has_the_load_that_was_set_or_an_even_share(node):
    made = node("l40s-x4")
    made.control.set_gpu(0, utilization_gpu=60, utilization_encoder=7, utilization_decoder=9)
    made.control.add_process(0, 100, utilization=45)
    made.control.add_process(0, 101)
    handle = handle_of(made, 0)
    samples = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
    assert {sample.pid: sample.smUtil for sample in samples} == {100: 45, 101: 30}
    assert pynvml.nvmlDeviceGetEncoderUtilization(handle)[0] == 7
    assert pynvml.nvmlDeviceGetDecoderUtilization(handle)[0] == 9


def test_nvlink_counters_are_fields(node):
    made = node("dgx-h100")
    made.control.set_gpu(0, nvlink_replays=4, nvlink_tx_kib=1024, nvlinks_down=[3])
    whole = ctypes.c_uint(-1).value
    asked = [
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, whole),
    ]
    values = pynvml.nvmlDeviceGetFieldValues(handle_of(made, 0), asked)
    assert [(value.nvmlReturn, value.value.ullVal) for value in values] == [(0, 4), (0, 1), (0, 1024)]
