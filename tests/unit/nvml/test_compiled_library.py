"""The real way, end to end: a compiled library is found, loaded and called through ctypes, and replaced."""

import os
import shutil
import subprocess

import pytest

from dra.host.paths import HostPaths
from dra.inventory.scan import Scanner
from dra.nvml.node import session_of

SOURCE = r"""
#include <stdio.h>
#include <string.h>
static int sessions;
static int gpu = 7;
int nvmlInitWithFlags(unsigned flags) { sessions++; return flags == 1 ? 0 : 2; }
int nvmlShutdown(void) { if (!sessions) return 1; sessions--; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "%s", VERSION); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12090; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { if (!sessions) return 1; *count = 1; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **handle) {
    if (strcmp(text, "00000000:3B:00.0")) return 6;
    *handle = &gpu;
    return 0;
}
static int mine(void *handle) { return handle == &gpu ? 0 : 2; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) { snprintf(text, size, "GPU-compiled"); return mine(h); }
int nvmlDeviceGetMinorNumber(void *h, unsigned *minor) { *minor = 4; return mine(h); }
int nvmlDeviceGetName(void *h, char *text, unsigned size) { snprintf(text, size, "Compiled GPU"); return mine(h); }
int nvmlDeviceGetBrand(void *h, int *brand) { *brand = 2; return mine(h); }
int nvmlDeviceGetArchitecture(void *h, unsigned *arch) { *arch = 6; return mine(h); }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { *major = 7; *minor = 5; return mine(h); }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *memory) { memory[0] = 15ULL << 30; return mine(h); }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *then) { return 3; }
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def install(root, version):
    folder = root / "usr/lib64"
    folder.mkdir(parents=True, exist_ok=True)
    source, fresh = root / "nvml.c", folder / "fresh"
    source.write_text(SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f'-DVERSION="{version}"', "-o", str(fresh), str(source)],
        check=True,
        timeout=60,
    )
    os.replace(fresh, folder / "libnvidia-ml.so.1")


@pytest.fixture
def scanner(tmp_path):
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("GPU UUID: GPU-compiled\nDevice Minor: 4\n")
    install(tmp_path, "575.57.08")
    paths = HostPaths(host_root=tmp_path)
    session = session_of(paths)
    yield Scanner(session, paths)
    session.close()


def test_a_library_of_machine_code_is_loaded_called_and_replaced_without_a_restart(scanner, tmp_path):
    found = scanner.scan()
    assert found.problems == ()
    assert (found.driver_version, found.cuda_version) == ("575.57.08", (12, 9))
    (gpu,) = found.gpus
    assert (gpu.minor, gpu.uuid, gpu.product_name, gpu.brand) == (4, "GPU-compiled", "Compiled GPU", "Tesla")
    assert (gpu.architecture, gpu.compute_capability, gpu.memory_bytes) == ("Turing", (7, 5), 15 << 30)
    # What this old library does not export is what the GPU does not have.
    assert (gpu.mig_capable, gpu.addressing_mode) == (False, None)
    install(tmp_path, "580.95.05")
    assert scanner.scan().driver_version == "580.95.05"
