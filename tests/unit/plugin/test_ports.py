"""What the prepare room sees of API server and NVML, and the kill points of the tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.errors import DeviceError, StackError
from dra.inventory.model import Gpu, Inventory, VfioFunction
from dra.plugin.ports import ClaimEvents, GpuUsers
from dra.prepare.model import Notice
from dra.prepare.record import Record
from dra.values import PciAddress

REF = ClaimRef("ns", "c", "uid-c")
GPU = Gpu(
    minor=3, uuid="GPU-3", pci_address=PciAddress.parse("0000:10:00.0"), product_name="H100", brand="Nvidia",
    architecture="Hopper", compute_capability=(9, 0), memory_bytes=1,
)  # fmt: skip


def record(*devices):
    results = tuple(AllocatedDevice(request="r", driver="d", pool="p", device=device) for device in devices)
    return Record(ref=REF, state="prepared", boot_id="b", results=results)


class Session:
    """NVML with processes by function name, or an error."""

    def __init__(self, *, error=None, **processes):
        self.error, self.processes = error, processes

    def run(self, call, *, subject):
        if self.error is not None:
            raise self.error
        return call(self)

    def handle(self, address):
        return address

    def optional(self, name, handle, *, subject):
        return self.processes.get(name)


def users(session):
    return GpuUsers(session, lambda: Inventory(gpus=(GPU,)))


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"]
)
def test_a_gpu_with_a_process_of_either_kind_is_in_use(function):
    assert users(Session(**{function: ["a process"]})).in_use(record("gpu-3"))


def test_a_function_that_is_passed_through_is_in_use_while_somebody_has_it_open():
    function = VfioFunction(0, GPU.pci_address, "vfio-pci", 20, 0x10DE, 0x2330, "H100", 1 << 37, on_vfio=True)
    holders = {GPU.pci_address: ["qemu"]}
    found = GpuUsers(
        Session(), lambda: Inventory(vfio=(function,)), holders=lambda address: holders.get(address, [])
    )
    assert found.in_use(record("gpu-vfio-0"))
    assert not found.in_use(record("gpu-vfio-1"))
    holders.clear()
    assert not found.in_use(record("gpu-vfio-0"))


def test_a_gpu_without_processes_is_free_also_where_nvml_does_not_support_the_question():
    assert not users(Session(nvmlDeviceGetComputeRunningProcesses=[])).in_use(record("gpu-3"))


def test_a_partition_is_in_use_with_its_gpu():
    session = Session(nvmlDeviceGetComputeRunningProcesses=["a process"])
    assert users(session).in_use(record("gpu-3-mig-1g12gb-19-0"))


def test_a_gpu_that_is_gone_has_no_processes():
    session = Session(nvmlDeviceGetComputeRunningProcesses=["a process"])
    assert not users(session).in_use(record("gpu-7"))


def test_where_nvml_does_not_answer_the_device_counts_as_used():
    assert users(Session(error=DeviceError("DRA-NVML-HUNG", "stuck"))).in_use(record("gpu-3"))


@pytest.mark.parametrize("code", ["DRA-NVML-LIBRARY-NOT-FOUND", "DRA-NVML-DRIVER-NOT-LOADED"])
def test_without_a_driver_nothing_is_in_use(code):
    assert not users(Session(error=StackError(code, "no driver"))).in_use(record("gpu-3"))


class Recorder:
    def __init__(self):
        self.said = []

    def emit(self, about, type_, reason, message):
        self.said.append((about.kind, about.namespace, about.name, about.uid, type_, reason, message))


def test_a_failure_is_an_event_on_the_claim_with_the_same_text_as_the_answer():
    recorder = Recorder()
    ClaimEvents(recorder).failed(
        "prepare", REF, DeviceError("DRA-DEVICE-HELD", "held by x/y", remedy="Delete it.")
    )
    assert recorder.said == [
        (
            "ResourceClaim",
            "ns",
            "c",
            "uid-c",
            "Warning",
            "PrepareFailed",
            "DRA-DEVICE-HELD: held by x/y. Delete it.",
        )
    ]


def test_a_notice_without_a_claim_is_no_event():
    recorder = Recorder()
    ClaimEvents(recorder).notify(Notice(None, "ClaimRecordLost", "text"))
    ClaimEvents(recorder).notify(Notice(REF, "StaleClaimReleased", "text", warning=False))
    assert [entry[4:] for entry in recorder.said] == [("Normal", "StaleClaimReleased", "text")]


def test_the_pods_of_a_claim_read_a_notice_too():
    recorder = Recorder()
    consumers = (Consumer("pods", "trainer", "uid-p"), Consumer("podgroups", "g", "uid-g"))
    ClaimEvents(recorder).notify(Notice(REF, "CdiSpecRestored", "text", consumers=consumers))
    assert [entry[:4] for entry in recorder.said] == [
        ("ResourceClaim", "ns", "c", "uid-c"), ("Pod", "ns", "trainer", "uid-p"),
    ]  # fmt: skip
    assert recorder.said[1][4:] == ("Warning", "CdiSpecRestored", "claim ns/c: text")


def test_the_crash_point_kills_the_process_at_its_count_and_not_before():
    program = (
        "from dra.plugin.crash import crash_step\n"
        "step = crash_step(('here', 2))\n"
        "step('there'); step('here'); print('once', flush=True); step('here'); print('twice')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (-9, "once\n")


def test_who_asks_for_the_part_of_grpc_that_the_daemon_leaves_out_gets_it():
    program = (
        "import dra.plugin.daemon, grpc\n"
        "assert not hasattr(grpc, 'aio')\n"
        "from grpc import aio\n"
        "print(aio.server is grpc.aio.server)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_daemon_loads_nothing_that_only_the_command_line_needs():
    program = "import sys, dra.plugin.daemon, dra.plugin.machine, dra.cli.plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    loaded = done.stdout.split()
    forbidden = (
        "rich",
        "yaml",
        "grpc.aio",
        "aiohttp",
        "pydantic",
        "kubernetes",
        "urllib3",
        "requests",
        "multiprocessing",
        "unittest",
        "dra.sim",
        "dra.cel",
        "dra.diagnose",
        "dra.allocator",
    )
    assert [
        name for name in loaded if name.startswith(tuple(f"{bad}." for bad in forbidden)) or name in forbidden
    ] == []
