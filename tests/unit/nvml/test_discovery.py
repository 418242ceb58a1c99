import threading
from dataclasses import replace

import pynvml
import pytest

from dra.errors import StackError
from dra.host.paths import HostPaths
from dra.nvml.discovery import Discovery
from dra.nvml.library import InjectedLibrary
from dra.nvml.mig import profile_name
from dra.nvml.session import NvmlSession
from tests.unit.nvml.nvml_fake import FakeGpu, FakeNvml, gpus


class Node:
    """A fake library, its session and a /proc; `proc=False` hides the GPUs from /proc as a container may."""

    def __init__(self, root, devices, *, proc=True, **options):
        self.library = FakeNvml(devices)
        self.paths = HostPaths(host_root=root)
        self.options = options
        if proc:
            for gpu in devices:
                self.kernel(gpu)
        self.session = NvmlSession(InjectedLibrary(lambda: self.library), **options)
        self.discovery = Discovery(self.session, self.paths)

    def kernel(self, gpu, *, uuid=None, excluded="No"):
        folder = self.paths.proc / "driver/nvidia/gpus" / gpu.address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "information").write_text(
            f"Model: \t\t {gpu.name}\nIRQ:   \t\t 100\nGPU UUID: \t {uuid or gpu.uuid}\n"
            f"Bus Location: \t {gpu.address}\nDevice Minor: \t {gpu.minor}\nGPU Excluded:\t {excluded}\n"
        )

    def scan(self, **options):
        return self.discovery.scan(**options)

    def sleep(self):
        """Close the session, as idleness does."""
        self.session.close()
        self.library.touched.clear()
        self.library.calls.clear()


@pytest.fixture
def node(tmp_path):
    nodes = []

    def make(devices, **options):
        nodes.append(Node(tmp_path, devices, **options))
        return nodes[-1]

    yield make
    for each in nodes:
        each.session.close()


def test_a_gpu_is_read_with_all_its_facts(node):
    facts = node(gpus(1)).scan()
    gpu = facts.gpus[0]
    assert (facts.driver_version, facts.cuda_version) == ("580.95.05", (13, 0))
    assert (str(gpu.address), gpu.minor, gpu.uuid) == (
        "0000:10:00.0",
        0,
        "GPU-00000000-0000-0000-0000-000000000000",
    )
    assert (gpu.name, gpu.brand, gpu.architecture) == ("NVIDIA H100 80GB HBM3", "Nvidia", "Hopper")
    assert (gpu.compute_capability, gpu.memory_bytes, gpu.addressing_mode) == ((9, 0), 81559 << 20, "HMM")
    assert (gpu.mig_capable, gpu.mig_enabled) == (True, False)
    assert facts.issues == ()


@pytest.mark.parametrize("proc", [True, False])
def test_gpus_come_in_the_order_of_their_addresses_with_or_without_proc(node, proc):
    devices = gpus(3)
    devices[0], devices[2] = devices[2], devices[0]
    facts = node(devices, proc=proc).scan()
    assert [gpu.minor for gpu in facts.gpus] == [0, 1, 2]


def test_what_a_gpu_does_not_support_is_left_empty(node):
    one = node([FakeGpu(0x10, 4, "GPU-x", memory=None, mig=None)])
    one.library.faults["nvmlDeviceGetAddressingMode", None] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    gpu = one.scan().gpus[0]
    assert (gpu.memory_bytes, gpu.mig_capable, gpu.addressing_mode) == (None, False, None)
    assert gpu.issue is None


def test_a_second_scan_asks_only_for_what_can_change(node):
    one = node(gpus(2))
    first = one.scan()
    one.library.calls.clear()
    assert one.scan() == first
    assert dict(one.library.calls) == {
        "nvmlDeviceGetCount_v2": 1,
        "nvmlDeviceGetUUID": 2,
        "nvmlDeviceGetMigMode": 2,
        "nvmlDeviceGetPersistenceMode": 2,
    }


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode"]
)
def test_one_bad_gpu_hides_no_other_and_is_still_listed(node, function):
    one = node(gpus(8))
    one.library.faults[function, 0x13] = pynvml.NVML_ERROR_GPU_IS_LOST
    facts = one.scan()
    assert [gpu.minor for gpu in facts.gpus] == list(range(8))
    assert [gpu.minor for gpu in facts.gpus if gpu.issue] == [3]
    assert facts.gpus[3].uuid == "GPU-00000000-0000-0000-0000-000000000003"
    assert facts.gpus[3].issue.code == "DRA-NVML-GPU-LOST"
    assert [issue.subject for issue in facts.issues] == ["0000:13:00.0"]


def test_a_gpu_lost_after_a_good_scan_keeps_its_facts_and_comes_back(node):
    one = node(gpus(2))
    healthy = one.scan()
    one.library.faults["nvmlDeviceGetUUID", 0x11] = pynvml.NVML_ERROR_GPU_IS_LOST
    ill = one.scan().gpus[1]
    assert ill.issue.code == "DRA-NVML-GPU-LOST"
    assert (ill.name, ill.memory_bytes) == (healthy.gpus[1].name, healthy.gpus[1].memory_bytes)
    one.library.faults.clear()
    assert one.scan() == healthy


def test_a_bad_gpu_of_unknown_identity_is_reported_only(node):
    one = node(gpus(2), proc=False)
    one.library.faults["nvmlDeviceGetHandleByIndex_v2", 0x11] = pynvml.NVML_ERROR_NO_PERMISSION
    facts = one.scan()
    assert [gpu.minor for gpu in facts.gpus] == [0]
    assert [(issue.subject, issue.code) for issue in facts.issues] == [("index 1", "DRA-NVML-NO-PERMISSION")]


def test_a_hung_gpu_costs_itself_and_recovers_by_itself(node):
    one = node(gpus(3), call_seconds=0.3)
    gate = one.library.hangs["nvmlDeviceGetName", 0x11] = threading.Event()
    recovered = threading.Event()
    one.session.on_recovered(lambda subject: recovered.set())
    facts = one.scan()
    assert [gpu.issue.code if gpu.issue else "" for gpu in facts.gpus] == ["", "DRA-NVML-HUNG", ""]
    one.library.calls.clear()
    one.scan()
    assert one.library.calls["nvmlDeviceGetUUID"] == 2  # the hung one is not asked again
    gate.set()
    assert recovered.wait(60)
    assert [gpu.issue for gpu in one.scan().gpus] == [None, None, None]


def test_gpus_without_persistence_are_woken_once_and_then_left_asleep(node):
    one = node([FakeGpu(0x10, 0, "GPU-a", persistence=0), FakeGpu(0x11, 1, "GPU-b", persistence=1)])
    first = one.scan()
    one.sleep()
    second = one.scan()
    assert one.library.touched == [0x11]
    assert [gpu.asleep for gpu in second.gpus] == [True, False]
    assert second.gpus[0].name == first.gpus[0].name
    one.sleep()
    one.scan(wake=True)
    assert sorted(one.library.touched) == [0x10, 0x11]


def test_a_gpu_that_this_session_holds_awake_is_asked(node):
    one = node([FakeGpu(0x10, 0, "GPU-a", persistence=0)])
    one.scan()
    one.library.calls.clear()
    assert one.scan().gpus[0].asleep is False
    assert one.library.calls["nvmlDeviceGetMigMode"] == 1


@pytest.mark.parametrize("trace", ["another card", "partitioned", "gone", "new driver"])
def test_a_sleeping_gpu_is_asked_again_when_proc_tells_of_a_change(node, trace):
    gpu = FakeGpu(0x10, 0, "GPU-a", persistence=0)
    one = node([gpu])
    one.scan()
    one.sleep()
    if trace == "another card":
        gpu.uuid = "GPU-b"
        one.kernel(gpu)
    elif trace == "partitioned":
        (one.paths.proc / "driver/nvidia/capabilities/gpu0/mig/gi7/ci0").mkdir(parents=True)
    elif trace == "new driver":
        one.library.driver = "590.10"
    else:
        one.library.gpus.clear()
        folder = one.paths.proc / "driver/nvidia/gpus/0000:10:00.0"
        (folder / "information").unlink()
        folder.rmdir()
        assert one.scan().gpus == ()
        return
    assert one.scan().gpus[0].uuid == gpu.uuid
    assert one.library.touched == [0x10]


def test_a_uuid_the_kernel_does_not_know_yet_wakes_nothing(node):
    gpu = FakeGpu(0x10, 0, "GPU-a", persistence=0)
    one = node([gpu])
    one.scan()
    one.sleep()
    one.kernel(gpu, uuid="GPU-????????-????-????-????-????????????")
    assert one.scan().gpus[0].uuid == "GPU-a"
    assert one.library.touched == []


def test_gpus_excluded_from_the_driver_are_no_gpus_of_ours(node):
    devices = gpus(2)
    one = node(devices[:1])
    one.kernel(devices[1], excluded="Yes")
    facts = one.scan()
    assert [gpu.minor for gpu in facts.gpus] == [0]
    assert facts.issues == ()


def test_no_library_is_an_error_of_the_whole_scan(tmp_path):
    def give():
        raise OSError("nothing here")

    discovery = Discovery(NvmlSession(InjectedLibrary(give)), HostPaths(host_root=tmp_path))
    with pytest.raises(StackError) as caught:
        discovery.scan()
    assert caught.value.code == "DRA-NVML-LIBRARY-NOT-FOUND"


def mig_gpu(devices):
    return FakeGpu(0x10, 0, "GPU-a", mig=1, mig_devices=devices)


def test_mig_devices_come_with_profile_and_placement(node):
    facts = node([mig_gpu([(8, 0, "MIG-b", 19, 3, 1), (2, 0, "MIG-a", 9, 4, 4)])]).scan()
    gpu = facts.gpus[0]
    assert gpu.mig_enabled
    assert [(d.uuid, d.profile.name, d.profile.profile_id, d.start, d.size) for d in gpu.mig_devices] == [
        ("MIG-b", "1g.10gb", 19, 3, 1),
        ("MIG-a", "3g.40gb", 9, 4, 4),
    ]
    assert gpu.mig_devices[0].profile.placements == tuple((start, 1) for start in range(7))


def test_a_divided_gpu_instance_is_reported_and_its_neighbour_listed(node):
    facts = node(
        [mig_gpu([(2, 0, "MIG-a", 9, 4, 4), (2, 1, "MIG-c", 9, 4, 4), (8, 0, "MIG-b", 19, 0, 1)])]
    ).scan()
    assert [device.uuid for device in facts.gpus[0].mig_devices] == ["MIG-b"]
    assert [issue.code for issue in facts.issues] == ["DRA-NVML-MIG-DIVIDED"]
    assert facts.gpus[0].issue is None


def test_an_unknown_profile_costs_its_device_only(node):
    facts = node([mig_gpu([(2, 0, "MIG-a", 77, 4, 4), (8, 0, "MIG-b", 19, 0, 1)])]).scan()
    assert [device.uuid for device in facts.gpus[0].mig_devices] == ["MIG-b"]
    assert "77" in facts.issues[0].message


def test_profiles_are_read_only_when_asked_for(node):
    one = node(gpus(1))
    assert one.scan().gpus[0].mig_profiles == ()
    assert one.library.calls["nvmlDeviceGetGpuInstanceProfileInfoV"] == 0
    assert [profile.name for profile in one.scan(profiles=True).gpus[0].mig_profiles] == [
        "1g.10gb",
        "3g.40gb",
    ]


def test_profiles_are_read_once_for_a_board_and_a_driver_also_over_sessions(node):
    one = node(gpus(1))
    first = one.scan(profiles=True)
    one.sleep()
    assert one.scan(profiles=True) == first
    assert one.library.calls["nvmlDeviceGetGpuInstanceProfileInfoV"] == 0
    one.session.close()
    one.library.driver = "590.1.2"
    assert one.scan(profiles=True).gpus == first.gpus
    assert one.library.calls["nvmlDeviceGetGpuInstanceProfileInfoV"] > 0


def test_a_sleeping_gpu_is_not_woken_for_profiles_that_are_known(node):
    one = node([FakeGpu(0x10, 0, "GPU-a", persistence=0)])
    one.scan()
    one.sleep()
    assert one.scan(profiles=True).gpus[0].asleep is False  # they were not known
    one.sleep()
    (gpu,) = one.scan(profiles=True).gpus
    assert gpu.asleep
    assert [profile.name for profile in gpu.mig_profiles] == ["1g.10gb", "3g.40gb"]
    assert one.library.touched == []


def test_a_gpu_that_answers_only_partly_keeps_its_partitions_also_in_a_new_session(node):
    one = node([mig_gpu([(8, 0, "MIG-b", 19, 3, 1)])])
    before = one.scan().gpus[0]
    one.session.close()
    one.library.faults["nvmlDeviceGetName", None] = pynvml.NVML_ERROR_UNKNOWN
    after = one.scan().gpus[0]
    assert after.issue.code == "DRA-NVML-UNKNOWN"
    assert replace(after, issue=None) == before


@pytest.mark.parametrize(
    ("enumerated", "memory", "total", "name"),
    [
        (0, 4864, 40960, "1g.5gb"),
        (7, 4864, 40960, "1g.5gb+me"),
        (9, 9856, 40960, "1g.10gb"),
        (2, 19968, 40960, "3g.20gb"),
        (4, 40192, 40960, "7g.40gb"),
        (0, 16384, 143771, "1g.18gb"),
        (0, 22500, 183359, "1g.23gb"),
        (0, 5952, 24576, "1g.6gb"),
    ],
)
def test_profile_names_are_computed_for_drivers_that_tell_none(enumerated, memory, total, name):
    assert profile_name(enumerated=enumerated, memory_mib=memory, gpu_memory_bytes=total << 20) == name
