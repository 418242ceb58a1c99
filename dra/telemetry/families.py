"""Every metric of the driver: name, kind, meaning, labels. docs/metrics.md is made from this list.

Units are those of the names (seconds, bytes, celsius, watts, joules, hertz, ratios from 0 to 1). A label without a value
is empty. `device` is the name in the ResourceSlice, `uuid` NVML's, `profile` that of a MIG device.
"""

from __future__ import annotations

from dra.telemetry.metrics import Family

DEVICE = ("device", "uuid", "profile")
CLAIM = ("namespace", "claim", "pod", "container", "request", *DEVICE, "share")

# Of a call of some milliseconds, and of one that waits for other things.
_CALL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0)

# NVIDIA's names. Source: pkg/metrics of NVIDIA's driver.
NV_REQUESTS = Family(
    "nvidia_dra_requests_total",
    "counter",
    "Prepare and unprepare calls that succeeded.",
    ("driver", "operation"),
)
NV_DURATION = Family(
    "nvidia_dra_request_duration_seconds",
    "histogram",
    "How long prepare and unprepare calls took that succeeded.",
    ("driver", "operation"),
    buckets=tuple(0.05 * 2**n for n in range(9)),
)
NV_INFLIGHT = Family(
    "nvidia_dra_requests_inflight",
    "gauge",
    "Prepare and unprepare calls that are being worked on.",
    ("driver", "operation"),
)
NV_PREPARED = Family(
    "nvidia_dra_prepared_devices",
    "gauge",
    "Devices of prepared claims by type.",
    ("node", "driver", "device_type"),
)
NV_PREPARE_ERRORS = Family(
    "nvidia_dra_node_prepare_errors_total",
    "counter",
    "Claims that could not be prepared, by the stage that failed.",
    ("driver", "error_type"),
)
NV_UNPREPARE_ERRORS = Family(
    "nvidia_dra_node_unprepare_errors_total",
    "counter",
    "Claims that could not be unprepared, by the stage that failed.",
    ("driver", "error_type"),
)

# The node and this process.
NODE_INFO = Family(
    "dra_node_info",
    "gauge",
    "Always 1; the versions are in the labels.",
    ("node", "driver", "plugin_version", "driver_version", "cuda_version"),
)
NODE_READY = Family(
    "dra_node_ready",
    "gauge",
    "Whether a part of the plugin is ready (1) or something is missing (0).",
    ("part",),
)
NODE_PROBLEMS = Family(
    "dra_node_problems",
    "gauge",
    "What the last look at the hardware could not read, by error code.",
    ("code",),
)
NODE_CALLS = Family(
    "dra_node_call_duration_seconds",
    "histogram",
    "How long prepare and unprepare calls took, whatever came of them.",
    ("operation",),
    buckets=_CALL_BUCKETS,
)
NODE_STEPS = Family(
    "dra_node_prepare_step_seconds",
    "histogram",
    "How long the steps of preparing a claim took.",
    ("step",),
    buckets=_STEP_BUCKETS,
)
NODE_CLAIM_ERRORS = Family(
    "dra_node_claim_errors_total",
    "counter",
    "Claims that could not be prepared or unprepared, by error code.",
    ("operation", "code"),
)
NODE_CLAIMS = Family(
    "dra_node_claims", "gauge", "Claims that have a record on this node, by state.", ("state",)
)
POOL_READY = Family(
    "dra_node_pool_ready",
    "gauge",
    "Whether the pool in the API equals the hardware, written by this process.",
)
POOL_PUBLISHING = Family(
    "dra_node_pool_publishing",
    "gauge",
    "Whether this process publishes (1) or waits for another instance (0).",
)
POOL_DEVICES = Family("dra_node_pool_devices", "gauge", "Devices in the published pool.")
POOL_SLICES = Family("dra_node_pool_slices", "gauge", "ResourceSlices of the published pool.")
POOL_GENERATION = Family("dra_node_pool_generation", "gauge", "Generation of the published pool.")
POOL_WRITES = Family("dra_node_pool_writes_total", "counter", "ResourceSlices written or deleted.")
POOL_RESTORES = Family(
    "dra_node_pool_restores_total", "counter", "Changes of somebody else that were undone."
)
POOL_FAILURES = Family("dra_node_pool_failures", "gauge", "Attempts to publish that failed in a row.")
POOL_PUBLISHED = Family(
    "dra_node_pool_published_timestamp_seconds",
    "gauge",
    "When the pool was last seen to be right, since 1970.",
)
SAMPLE_SECONDS = Family(
    "dra_node_sample_duration_seconds", "gauge", "How long the last round of reading all GPUs took."
)

# A GPU or a MIG device.
GPU_INFO = Family(
    "dra_gpu_info",
    "gauge",
    "Always 1; what the device is.",
    (*DEVICE, "parent", "product", "architecture", "pci_address"),
    ("DCGM_FI_DEV_NAME", "DCGM_FI_DEV_UUID", "DCGM_FI_DEV_PCI_BUSID"),
)
GPU_HEALTHY = Family(
    "dra_gpu_healthy",
    "gauge",
    "Whether the device is healthy (1) or not (0); absent while that is not known.",
    DEVICE,
)
GPU_CONDITION = Family(
    "dra_gpu_condition",
    "gauge",
    "Always 1; what is held against the device, by the key of its taint and how bad it is (note, ill, lost).",
    (*DEVICE, "key", "grade"),
)
GPU_WATCHED = Family(
    "dra_gpu_health_watched",
    "gauge",
    "Whether NVML tells of this GPU's errors (1) or only the kernel log and the checks do (0).",
    DEVICE,
)
GPU_ASLEEP = Family(
    "dra_gpu_asleep",
    "gauge",
    "Always 1; a GPU that was not read because that would wake it (no persistence mode, nobody uses it).",
    DEVICE,
)
GPU_UNREADABLE = Family(
    "dra_gpu_unreadable",
    "gauge",
    "Always 1; a GPU that could not be read just now, by error code.",
    (*DEVICE, "code"),
)
GPU_UTILIZATION = Family(
    "dra_gpu_utilization_ratio",
    "gauge",
    "Part of the time in which a kernel ran; of MIG devices as GPM gives it (Hopper and later), elsewhere absent.",
    DEVICE,
    ("DCGM_FI_DEV_GPU_UTIL",),
)
GPU_MEMORY_UTILIZATION = Family(
    "dra_gpu_memory_utilization_ratio",
    "gauge",
    "Part of the time in which device memory was read or written.",
    DEVICE,
    ("DCGM_FI_DEV_MEM_COPY_UTIL",),
)
GPU_ENCODER_UTILIZATION = Family(
    "dra_gpu_encoder_utilization_ratio",
    "gauge",
    "Load of the video encoders.",
    DEVICE,
    ("DCGM_FI_DEV_ENC_UTIL",),
)
GPU_DECODER_UTILIZATION = Family(
    "dra_gpu_decoder_utilization_ratio",
    "gauge",
    "Load of the video decoders.",
    DEVICE,
    ("DCGM_FI_DEV_DEC_UTIL",),
)
GPU_ACTIVITY = Family(
    "dra_gpu_engine_activity_ratio",
    "gauge",
    "Activity of an engine since the last reading, by GPM: graphics, sm, tensor or dram (Hopper and later).",
    (*DEVICE, "engine"),
    (
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_PROF_SM_ACTIVE",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
    ),
)
GPU_MEMORY_TOTAL = Family(
    "dra_gpu_memory_total_bytes", "gauge", "Device memory.", DEVICE, ("DCGM_FI_DEV_FB_TOTAL",)
)
GPU_MEMORY_USED = Family(
    "dra_gpu_memory_used_bytes",
    "gauge",
    "Device memory that processes have.",
    DEVICE,
    ("DCGM_FI_DEV_FB_USED",),
)
GPU_MEMORY_FREE = Family(
    "dra_gpu_memory_free_bytes", "gauge", "Device memory that is free.", DEVICE, ("DCGM_FI_DEV_FB_FREE",)
)
GPU_MEMORY_RESERVED = Family(
    "dra_gpu_memory_reserved_bytes",
    "gauge",
    "Device memory that the driver keeps for itself.",
    DEVICE,
    ("DCGM_FI_DEV_FB_RESERVED",),
)
GPU_TEMPERATURE = Family(
    "dra_gpu_temperature_celsius",
    "gauge",
    "Temperature of the die (gpu) or of the memory (memory).",
    (*DEVICE, "sensor"),
    ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_MEMORY_TEMP"),
)
GPU_POWER = Family("dra_gpu_power_watts", "gauge", "Power draw.", DEVICE, ("DCGM_FI_DEV_POWER_USAGE",))
GPU_POWER_LIMIT = Family(
    "dra_gpu_power_limit_watts",
    "gauge",
    "Power limit in force.",
    DEVICE,
    ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT",),
)
GPU_ENERGY = Family(
    "dra_gpu_energy_joules_total",
    "counter",
    "Energy since the kernel module was loaded.",
    DEVICE,
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",),
)
GPU_CLOCK = Family(
    "dra_gpu_clock_hertz",
    "gauge",
    "Clocks: graphics, sm, memory, video.",
    (*DEVICE, "clock"),
    ("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_VIDEO_CLOCK"),
)
GPU_CLOCK_REASON = Family(
    "dra_gpu_clock_reduced",
    "gauge",
    "Whether a reason keeps the clocks below their highest (1) or not (0).",
    (*DEVICE, "reason"),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS",),
)
GPU_ECC = Family(
    "dra_gpu_ecc_errors_total",
    "counter",
    "Memory errors: corrected or uncorrected, since the last reset (volatile) or in the board's life (aggregate).",
    (*DEVICE, "type", "scope"),
    (
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
        "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
    ),
)
GPU_XID = Family(
    "dra_gpu_xid_errors_total",
    "counter",
    "XIDs that the driver reported since this process started, by number.",
    (*DEVICE, "xid"),
    ("DCGM_FI_DEV_XID_ERRORS",),
)
GPU_REMAPPED = Family(
    "dra_gpu_remapped_rows_total",
    "counter",
    "Memory rows that were remapped for corrected or uncorrected errors.",
    (*DEVICE, "type"),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
)
GPU_REMAP_PENDING = Family(
    "dra_gpu_row_remap_pending", "gauge", "Whether a row waits for a reset to be remapped.", DEVICE,
    ("DCGM_FI_DEV_ROW_REMAP_PENDING",),
)  # fmt: skip
GPU_REMAP_FAILED = Family(
    "dra_gpu_row_remap_failed", "gauge", "Whether remapping a row has failed.", DEVICE,
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE",),
)  # fmt: skip
GPU_RETIRED = Family(
    "dra_gpu_retired_pages_total",
    "counter",
    "Memory pages that were retired for corrected or uncorrected errors (before Ampere).",
    (*DEVICE, "type"),
    ("DCGM_FI_DEV_RETIRED_SBE", "DCGM_FI_DEV_RETIRED_DBE"),
)
GPU_RETIRED_PENDING = Family(
    "dra_gpu_page_retirement_pending", "gauge", "Whether a page waits for a reset to be retired.", DEVICE,
    ("DCGM_FI_DEV_RETIRED_PENDING",),
)  # fmt: skip
GPU_PCIE_REPLAYS = Family(
    "dra_gpu_pcie_replays_total",
    "counter",
    "PCIe retransmissions.",
    DEVICE,
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER",),
)
GPU_PCIE_GENERATION = Family(
    "dra_gpu_pcie_link_generation", "gauge", "PCIe generation that the link runs at.", DEVICE,
    ("DCGM_FI_DEV_PCIE_LINK_GEN",),
)  # fmt: skip
GPU_PCIE_WIDTH = Family(
    "dra_gpu_pcie_link_width", "gauge", "PCIe lanes in use.", DEVICE, ("DCGM_FI_DEV_PCIE_LINK_WIDTH",)
)
GPU_NVLINKS = Family("dra_gpu_nvlink_links", "gauge", "NVLinks that are up or down.", (*DEVICE, "state"))
GPU_NVLINK_ERRORS = Family(
    "dra_gpu_nvlink_errors_total",
    "counter",
    "NVLink errors of all links: crc_flit, crc_data, replay, recovery.",
    (*DEVICE, "type"),
    (
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    ),
)
GPU_NVLINK_BYTES = Family(
    "dra_gpu_nvlink_bytes_total",
    "counter",
    "Data sent and received over all NVLinks.",
    (*DEVICE, "direction"),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",),
)
GPU_PROCESSES = Family(
    "dra_gpu_processes", "gauge", "Processes on the device: compute or graphics.", (*DEVICE, "kind")
)
GPU_MPS_CLIENTS = Family("dra_gpu_mps_clients", "gauge", "Processes that use the device through MPS.", DEVICE)
GPU_FOREIGN = Family(
    "dra_gpu_foreign_processes", "gauge", "Processes on the device that belong to no claim of it.", DEVICE
)
GPU_ALLOCATIONS = Family(
    "dra_gpu_allocations",
    "gauge",
    "Prepared allocations of the device, access for monitoring left out.",
    DEVICE,
)
GPU_MIG_ENABLED = Family(
    "dra_gpu_mig_enabled", "gauge", "Whether MIG mode is on; absent where there is no MIG.", DEVICE
)
GPU_MIG_DEVICES = Family("dra_gpu_mig_devices", "gauge", "MIG devices that exist on the GPU.", DEVICE)
GPU_MIG_SLICES = Family(
    "dra_gpu_mig_memory_slices", "gauge", "Memory slices of a GPU in MIG mode: used, free, largest_hole.",
    (*DEVICE, "state"),
)  # fmt: skip

# A claim's part of a device.
CLAIM_DEVICE = Family(
    "dra_claim_device_info",
    "gauge",
    "Always 1; one series for each prepared allocation (and pod), to join with the device by uuid.",
    (*CLAIM, "claim_uid", "admin_access"),
)
CLAIM_UTILIZATION = Family(
    "dra_claim_utilization_ratio",
    "gauge",
    "Load of the claim's device; of a shared one that of the claim's own processes, absent where that is not known.",
    CLAIM,
)
CLAIM_MEMORY_USED = Family(
    "dra_claim_memory_used_bytes",
    "gauge",
    "Memory used on the claim's device; of a shared one by the claim's own processes.",
    CLAIM,
)
CLAIM_MEMORY_LIMIT = Family(
    "dra_claim_memory_limit_bytes",
    "gauge",
    "Memory of the claim's device, or what of it the claim was given.",
    CLAIM,
)
CLAIM_PROCESSES = Family(
    "dra_claim_processes", "gauge", "Processes of the claim's pods on its device.", CLAIM
)
CLAIM_ENERGY = Family(
    "dra_claim_energy_joules_total",
    "counter",
    "Energy of the claim's GPU since this process first saw the claim; of whole GPUs with one holder only.",
    CLAIM,
)
CLAIM_PREPARED = Family(
    "dra_claim_prepared_timestamp_seconds",
    "gauge",
    "When the claim was prepared, since 1970.",
    ("namespace", "claim"),
)
CLAIM_CONSUMERS = Family(
    "dra_claim_consumers", "gauge", "Pods that the claim is reserved for.", ("namespace", "claim")
)

# Of any process. Source: the names of Prometheus' own client libraries.
PROCESS_CPU = Family("process_cpu_seconds_total", "counter", "User and system CPU time of this process.")
PROCESS_RESIDENT = Family("process_resident_memory_bytes", "gauge", "Resident memory of this process.")
PROCESS_VIRTUAL = Family("process_virtual_memory_bytes", "gauge", "Virtual memory of this process.")
PROCESS_DESCRIPTORS = Family("process_open_fds", "gauge", "Open file descriptors of this process.")
PROCESS_MAX_DESCRIPTORS = Family("process_max_fds", "gauge", "Limit of open file descriptors.")
PROCESS_THREADS = Family("process_threads", "gauge", "Threads of this process.")
PROCESS_START = Family("process_start_time_seconds", "gauge", "When this process started, since 1970.")

FLEET_GPUS = Family(
    "dra_fleet_gpus", "gauge",
    "GPUs by product: allocated to a claim, whole or in part; tainted, so that no new pod gets them; free.",
    ("product", "state"),
)  # fmt: skip
FLEET_MEMORY_SLICES = Family(
    "dra_fleet_memory_slices", "gauge",
    "MIG memory slices of GPUs whose partitions are made on demand: allocated, free, or stranded: free, and no "
    "partition fits on them.",
    ("product", "state"),
)  # fmt: skip

GROUPS: tuple[tuple[str, tuple[Family, ...]], ...] = (
    (
        "NVIDIA's driver's own",
        (NV_REQUESTS, NV_DURATION, NV_INFLIGHT, NV_PREPARED, NV_PREPARE_ERRORS, NV_UNPREPARE_ERRORS),
    ),
    (
        "The node",
        (
            NODE_INFO, NODE_READY, NODE_PROBLEMS, NODE_CALLS, NODE_STEPS, NODE_CLAIM_ERRORS, NODE_CLAIMS, POOL_READY,
            POOL_PUBLISHING, POOL_DEVICES, POOL_SLICES, POOL_GENERATION, POOL_WRITES, POOL_RESTORES, POOL_FAILURES,
            POOL_PUBLISHED, SAMPLE_SECONDS,
        ),
    ),
    (
        "GPUs and MIG devices",
        (
            GPU_INFO, GPU_HEALTHY, GPU_CONDITION, GPU_WATCHED, GPU_ASLEEP, GPU_UNREADABLE, GPU_UTILIZATION, GPU_MEMORY_UTILIZATION,
            GPU_ENCODER_UTILIZATION, GPU_DECODER_UTILIZATION, GPU_ACTIVITY, GPU_MEMORY_TOTAL, GPU_MEMORY_USED,
            GPU_MEMORY_FREE, GPU_MEMORY_RESERVED, GPU_TEMPERATURE, GPU_POWER, GPU_POWER_LIMIT, GPU_ENERGY, GPU_CLOCK,
            GPU_CLOCK_REASON, GPU_ECC, GPU_XID, GPU_REMAPPED, GPU_REMAP_PENDING, GPU_REMAP_FAILED, GPU_RETIRED,
            GPU_RETIRED_PENDING, GPU_PCIE_REPLAYS, GPU_PCIE_GENERATION, GPU_PCIE_WIDTH, GPU_NVLINKS, GPU_NVLINK_ERRORS,
            GPU_NVLINK_BYTES, GPU_PROCESSES, GPU_MPS_CLIENTS, GPU_FOREIGN, GPU_ALLOCATIONS, GPU_MIG_ENABLED,
            GPU_MIG_DEVICES, GPU_MIG_SLICES,
        ),
    ),
    (
        "Claims",
        (
            CLAIM_DEVICE, CLAIM_UTILIZATION, CLAIM_MEMORY_USED, CLAIM_MEMORY_LIMIT, CLAIM_PROCESSES, CLAIM_ENERGY,
            CLAIM_PREPARED, CLAIM_CONSUMERS,
        ),
    ),
    ("The fleet (served by the replica of dra fleet that leads)", (FLEET_GPUS, FLEET_MEMORY_SLICES)),
    (
        "This process",
        (
            PROCESS_CPU, PROCESS_RESIDENT, PROCESS_VIRTUAL, PROCESS_DESCRIPTORS, PROCESS_MAX_DESCRIPTORS,
            PROCESS_THREADS, PROCESS_START,
        ),
    ),
)  # fmt: skip
