"""Claims of GPUs that are passed through: the function changes its driver, and comes back to exactly the one it had."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import pytest
from passthrough_node import PassthroughNode
from prepare_fakes import GROUP_VERSION, FakeRenderer, Killed, opaque, result, wait_until

from dra.errors import HostError
from dra.host.open_files import Holder
from dra.prepare import steps
from dra.prepare.passthrough.model import Patience


@pytest.fixture
def node(tmp_path):
    return PassthroughNode(tmp_path)


def vfio_config(*, requests=(), source="FromClaim", **iommu):
    parameters = {"apiVersion": GROUP_VERSION, "kind": "VfioDeviceConfig", "iommu": iommu}
    return opaque(parameters, requests=requests, source=source)


def test_a_claim_binds_the_function_and_its_container_gets_the_group_and_unprepare_gives_it_back(node):
    ref = node.claim(1, "gpu-vfio-2")
    (device,) = node.prepared(ref)
    assert device.cdi_ids == (f"k8s.gpu.nvidia.com/claim={ref.uid}-gpu-vfio-2",)
    assert [node.driver(index) for index in range(4)] == ["nvidia", "nvidia", "vfio-pci", "nvidia"]
    assert node.nodes(ref) == {"": [], "gpu-vfio-2": ["/dev/vfio/22"]}
    assert node.rescans == 1
    # The daemon that keeps it awake has it open, and so has this process.
    assert node.hardware.persistence == {node.address(2): False}
    assert node.hardware.let_go_of == [node.address(2)]
    node.look()
    assert node.unprepare(ref) is None
    assert node.hardware.persistence == {node.address(2): True}
    assert node.rescans == 2
    assert node.is_as_before()


def test_a_second_prepare_changes_nothing_and_looks_at_the_node(node):
    ref = node.claim(1, "gpu-vfio-2")
    first = node.prepared(ref)
    before, writes = node.record_file(ref).read_bytes(), list(node.kernel.writes)
    node.look()
    assert node.prepared(ref) == first
    assert (node.record_file(ref).read_bytes(), node.kernel.writes, node.rescans) == (before, writes, 1)
    # Somebody took it away meanwhile.
    node.bind_by_hand(2, "nvidia")
    assert node.prepared(ref) == first
    assert node.driver(2) == "vfio-pci"
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_a_function_that_was_on_vfio_before_is_left_there(node):
    node.bind_by_hand(1, "vfio-pci")
    ref = node.claim(1, "gpu-vfio-1")
    node.prepared(ref)
    writes = list(node.kernel.writes)
    assert node.nodes(ref)["gpu-vfio-1"] == ["/dev/vfio/21"]
    assert node.unprepare(ref) is None
    assert node.driver(1) == "vfio-pci"
    assert (node.kernel.writes, node.hardware.persistence, node.marks()) == (writes, {}, [])


def test_a_function_that_was_taken_from_vfio_by_hand_meanwhile_is_let_go_of_by_this_process_too(node):
    """Its session of NVML has the GPU open by then, and the kernel would wait for it."""
    node.bind_by_hand(1, "vfio-pci")
    ref = node.claim(1, "gpu-vfio-1")
    node.prepared(ref)
    node.bind_by_hand(1, "nvidia")
    assert node.unprepare(ref) is None
    assert (node.driver(1), node.hardware.let_go_of) == ("vfio-pci", [node.address(1)])


def test_the_variant_of_the_kernel_that_fits_the_device_is_loaded_and_bound(node):
    """Grace Blackwell needs nvgrace_gpu_vfio_pci."""
    node.bus.aliases("alias vfio_pci:v000010DEd00002330sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n")
    node.kernel.modules["nvgrace_gpu_vfio_pci"] = "nvgrace-gpu-vfio-pci"
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    assert node.kernel.loaded == ["nvgrace_gpu_vfio_pci"]
    assert node.driver(0) == "nvgrace-gpu-vfio-pci"
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_a_module_that_cannot_be_loaded_leaves_the_gpu_where_it_was(node):
    node.bus.aliases("alias vfio_pci:v000010DEd00002330sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci\n")
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert (error.code, error.retryable) == ("DRA-VFIO-MODULE", True)
    assert "nvgrace_gpu_vfio_pci" in error.message
    assert node.is_as_before()


# -- who has the GPU open --------------------------------------------------------------------------------


@pytest.mark.fault("F50")
def test_processes_that_have_the_gpu_open_are_named_and_it_stays_where_it_was(node):
    """The wait is bounded, the error says who it is, and once they are gone the next call succeeds."""
    node.hardware.users[node.address(0)] = [Holder(4711, "dcgm-exporter"), Holder(12, "nvidia-persiste")]
    ref = node.claim(1, "gpu-vfio-0")
    error = node.refused(ref)
    assert (error.code, error.retryable) == ("DRA-VFIO-IN-USE", True)
    for word in (
        "gpu-vfio-0",
        node.address(0),
        "dcgm-exporter (pid 4711)",
        "nvidia-persiste (pid 12)",
        "12 s",
    ):
        assert word in error.message
    assert 12 <= node.waited < 14
    # Nothing was written that the kernel would wait in.
    assert [name for name, _ in node.kernel.writes if name != "driver_override"] == []
    assert node.hardware.persistence == {node.address(0): True}
    assert node.is_as_before()
    node.hardware.users.clear()
    node.prepared(ref)
    assert node.driver(0) == "vfio-pci"


def test_all_processes_are_looked_through_a_few_times_only(node):
    pauses = []
    node.ports["patience"] = Patience(12.0, clock=lambda: sum(pauses), sleep=pauses.append)
    node.restart()
    node.hardware.users[node.address(0)] = [Holder(4711, "dcgm-exporter")]
    assert node.refused(node.claim(1, "gpu-vfio-0")).code == "DRA-VFIO-IN-USE"
    assert pauses[0] == pytest.approx(0.1)
    assert len(pauses) < 20


def test_a_process_that_goes_while_it_is_waited_for_costs_nothing_but_time(node):
    node.hardware.users[node.address(0)] = [Holder(4711, "dcgm-exporter")]
    node.while_waiting = lambda: node.waited >= 5 and node.hardware.users.clear()
    node.prepared(node.claim(1, "gpu-vfio-0"))
    assert node.driver(0) == "vfio-pci"


def test_a_process_that_comes_at_the_last_moment_is_seen_before_the_kernel_would_wait_for_it(node):
    open_again = node.hardware.let_go

    def let_go(address):
        node.hardware.users[str(address)] = [Holder(99, "nvtop")]
        return open_again(address)

    node.hardware.let_go = let_go
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert (error.code, "nvtop (pid 99)" in error.message) == ("DRA-VFIO-IN-USE", True)
    node.hardware.users.clear()
    assert node.is_as_before()


@pytest.mark.parametrize("wanted", [False, True], ids=["claim-gone", "claim-retried"])
def test_a_gpu_that_the_kernel_takes_away_long_after_we_gave_up_is_brought_back(node, wanted):
    """Nothing ends a write to `unbind` that waits in the kernel: it may go through when nobody wants it any more."""
    node.kernel.refuse["unbind"] = "the kernel did not answer within 10 s"
    ref = node.claim(1, "gpu-vfio-0")
    assert node.refused(ref).code == "DRA-VFIO-BIND"
    if not wanted:
        assert node.unprepare(ref) is None
        node.api.delete(ref)
    assert (node.driver(0), node.override(0), node.files()) == ("nvidia", "(null)", [])
    node.rescans = 0
    node.janitor().sweep()
    assert (node.driver(0), node.rescans) == ("nvidia", 0)
    del node.kernel.refuse["unbind"]
    (node.bus.root / f"sys/bus/pci/devices/{node.address(0)}/driver").unlink()
    node.restart()
    node.look()
    node.janitor().sweep()
    assert node.is_as_before()
    if wanted:
        node.prepared(ref)
        assert node.driver(0) == "vfio-pci"


def test_a_virtual_machine_that_still_runs_keeps_the_function_and_the_record(node):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.hardware.users[node.address(0)] = [Holder(500, "qemu-system-x86")]
    error = node.unprepare(ref)
    assert error is not None
    assert (error.code, "qemu-system-x86 (pid 500)" in error.message) == ("DRA-VFIO-IN-USE", True)
    assert (node.driver(0), node.record(ref)["state"]) == ("vfio-pci", "unpreparing")
    node.look()
    # Nobody else gets it meanwhile, in either form.
    assert node.refused(node.claim(2, "gpu-vfio-0")).code == "DRA-DEVICE-HELD"
    assert node.refused(node.claim(3, "gpu-0")).code == "DRA-DEVICE-HELD"
    node.hardware.users.clear()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


# -- what keeps a function from being passed through -----------------------------------------------------


def test_another_function_of_the_iommu_group_that_has_a_driver_is_named(node):
    node.bus.device("0000:10:00.1", driver="snd_hda_intel", group=20, pci_class=0x040300)
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert error.code == "DRA-VFIO-GROUP"
    assert "0000:10:00.1 (snd_hda_intel)" in error.message
    assert node.driver(0) == "nvidia"
    node.bus.device("0000:10:00.1", driver="vfio-pci", group=20, pci_class=0x040300)
    node.prepared(node.claim(2, "gpu-vfio-0"))


def test_virtual_functions_in_use_keep_it(node):
    node.bus.link(f"sys/bus/pci/devices/{node.address(0)}/virtfn0", node.root)
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert (error.code, "1 virtual functions" in error.message) == ("DRA-VFIO-SRIOV", True)
    assert node.driver(0) == "nvidia"


def test_a_strangers_driver_keeps_it(node):
    node.bus.device(node.address(0), driver="nouveau", group=20)
    node.look()
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert (error.code, "nouveau" in error.message) == ("DRA-VFIO-DRIVER", True)


def test_without_an_iommu_group_nothing_is_touched(node):
    (node.bus.root / f"sys/bus/pci/devices/{node.address(0)}/iommu_group").unlink()
    error = node.refused(node.claim(1, "gpu-vfio-0"))
    assert error.code == "DRA-VFIO-NO-GROUP"
    assert {name for name, _ in node.kernel.writes} <= {"driver_override"}
    assert (node.driver(0), node.override(0), node.files()) == ("nvidia", "(null)", [])


def test_a_driver_that_does_not_take_the_function_leaves_it_with_the_old_one(node):
    node.kernel.refuse["drivers_probe"] = "No such device"
    ref = node.claim(1, "gpu-vfio-0")
    error = node.refused(ref)
    assert error.code == "DRA-VFIO-BIND"
    # Not even the way back works at this moment: the record says what is left to do.
    assert (node.driver(0), node.record(ref)["state"]) == ("", "preparing")
    node.kernel.refuse.clear()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


@pytest.mark.parametrize("gate", [True, False])
def test_a_function_that_is_not_offered_is_refused_with_what_to_do(node, gate):
    node.gate = gate
    node.look()
    error = node.refused(node.claim(1, "gpu-vfio-7"))
    assert (error.code, error.retryable) == ("DRA-DEVICE-UNKNOWN", True)
    assert ("PassthroughSupport" in str(error.remedy)) is not gate


# -- one GPU, two names ----------------------------------------------------------------------------------


def test_a_gpu_in_use_is_not_passed_through_and_the_other_way_round(node):
    whole, through = node.claim(1, "gpu-1"), node.claim(2, "gpu-vfio-1")
    node.hardware.users.clear()
    node.renderer = _AnyRenderer(node.renderer)
    node.restart()
    node.prepared(whole)
    error = node.refused(through)
    assert (error.code, "default/claim-1" in error.message, "(as gpu-1)" in error.message) == (
        "DRA-DEVICE-HELD", True, True,
    )  # fmt: skip
    assert node.conflicts == [whole.uid]
    assert node.driver(1) == "nvidia"
    assert node.unprepare(whole) is None
    node.prepared(through)
    for look in (lambda: None, node.look):
        look()
        error = node.refused(whole)
        assert (error.code, "default/claim-2" in error.message) == ("DRA-DEVICE-HELD", True)


def test_a_function_that_came_back_a_moment_ago_is_looked_at_before_it_is_taken_again(node):
    first, second = node.claim(1, "gpu-vfio-1"), node.claim(2, "gpu-vfio-1")
    node.prepared(first)
    node.look()
    node.unprepare(first)
    # Nobody has looked since; it still seems to be away.
    node.prepared(second)
    (entry, _) = node.record(second)["effects"]
    assert entry["outcome"] == {"driver": "nvidia", "gpu": "gpu-1", "persistence": True}
    node.unprepare(second)
    assert node.hardware.persistence == {node.address(1): True}


def test_the_functions_of_one_iommu_group_go_to_one_claim(node):
    """Who has the node of a group reaches all of its functions: two claims would have each other's GPU."""
    for index in (0, 1):
        node.bus.device(node.address(index), driver="vfio-pci", group=30)
    node.kernel.make_nodes()
    node.look()
    first, second = node.claim(1, "gpu-vfio-0"), node.claim(2, "gpu-vfio-1")
    node.prepared(first)
    error = node.refused(second)
    assert (error.code, error.retryable, node.conflicts) == ("DRA-DEVICE-HELD", True, [first.uid])
    assert "with all of its IOMMU group (through gpu-vfio-0)" in error.message
    assert node.unprepare(first) is None
    node.prepared(second)
    assert node.unprepare(second) is None
    both = node.claim(3, result("gpu-vfio-0", request="a"), result("gpu-vfio-1", request="b"))
    node.prepared(both)
    assert node.nodes(both) == {"": [], "gpu-vfio-0": ["/dev/vfio/30"], "gpu-vfio-1": ["/dev/vfio/30"]}


def is_free(node, name):
    """Whether nobody holds a lock."""
    try:
        with node.the_engine.locks.hold([name], what="the test", wait_seconds=0):
            return True
    except HostError:
        return False


def test_claims_of_one_iommu_group_are_prepared_one_after_the_other(node):
    node.bus.device(node.address(0), driver="vfio-pci", group=30)
    node.bus.device(node.address(1), group=30)
    node.look()
    free = []
    names = ("gpu-vfio-0", "gpu-vfio-1", "gpu-vfio-2")
    node.hardware.load = lambda _driver: free.extend(name for name in names if is_free(node, name))
    node.prepared(node.claim(1, "gpu-vfio-1"))
    assert free == ["gpu-vfio-2"]


def test_the_number_of_a_gpu_that_went_may_be_given_to_another(node):
    node.renderer = _AnyRenderer(node.renderer)
    node.restart()
    node.prepared(node.claim(1, "gpu-vfio-1"))
    node.look()
    # NVIDIA's driver gives its lowest free number to the next GPU that comes.
    gpus = tuple(replace(gpu, minor=1 if gpu.minor == 3 else gpu.minor) for gpu in node.inventory.gpus)
    node.inventory = replace(node.inventory, gpus=gpus)
    node.prepared(node.claim(2, "gpu-1"))


def test_while_a_function_is_bound_nobody_prepares_the_gpu_that_it_is(node):
    free = []

    def load(_driver):
        free.extend(name for name in ("gpu-1", "gpu-2", "gpu-vfio-1") if is_free(node, name))

    node.hardware.load = load
    node.prepared(node.claim(1, "gpu-vfio-1"))
    assert free == ["gpu-2"]
    node.look()
    free.clear()
    node.hardware.bind = lambda address, driver: load(driver)
    node.unprepare(node.claim(1, "gpu-vfio-1"))
    assert free == ["gpu-2"]


def test_a_caller_with_little_time_still_waits_a_moment_for_the_claims_lock(node):
    """Who listens for 10 s may have to wait for the janitor, which names a claim that was taken over."""
    ref, answers, locks = node.claim(1, "gpu-vfio-1"), [], node.the_engine.locks
    name = f"claim-{ref.uid}"
    caller = threading.Thread(
        target=lambda: answers.append(node.the_engine.prepare([ref], within_seconds=10)), daemon=True
    )
    with locks.hold([name], what="the naming of a claim"):
        caller.start()
        wait_until(lambda: answers or len(locks._turns[name].waiting) > 1)
    caller.join(60)
    assert not isinstance(answers[0][ref.uid], Exception), answers


class _AnyRenderer:
    """A renderer for which no NVIDIA driver needs to be installed."""

    def __init__(self, real):
        self._real = real
        self.missing_files = real.missing_files

    def render(self, uid, devices, *, driver_version):
        if all(each.vfio is not None for each in devices):
            return self._real.render(uid, devices, driver_version=driver_version)
        gpus = [each for each in devices if each.vfio is None]
        return FakeRenderer().render(uid, gpus, driver_version=driver_version)


# -- what a claim may say --------------------------------------------------------------------------------


def _remove_the_first_gpu(node):
    """As `echo 1 > remove` does with a broken one: the others move up."""
    shutil.rmtree(node.bus.root / f"sys/bus/pci/devices/{node.address(0)}")
    node.look()


def test_a_name_that_stands_for_another_gpu_meanwhile_takes_it_from_nobody(node):
    ref = node.claim(1, "gpu-vfio-1")
    node.prepared(ref)
    _remove_the_first_gpu(node)
    error = node.refused(ref)
    assert (error.code, error.retryable) == ("DRA-VFIO-MOVED", True)
    assert node.address(1) in error.message
    assert node.address(2) in error.message
    assert [node.driver(index) for index in (1, 2)] == ["vfio-pci", "nvidia"]
    assert node.unprepare(ref) is None
    assert [node.driver(index) for index in (1, 2)] == ["nvidia", "nvidia"]


def test_a_mark_of_a_gpu_that_is_no_more_says_nothing_of_the_one_that_has_its_name(node):
    lost = node.claim(1, "gpu-vfio-0")
    node.prepared(lost)
    node.record_file(lost).unlink()
    node.bind_by_hand(1, "vfio-pci")
    _remove_the_first_gpu(node)
    node.restart()
    ref = node.claim(2, "gpu-vfio-0")
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.driver(1) == "vfio-pci"


def test_a_claim_of_both_kinds_is_refused_for_good_and_nothing_is_touched(node):
    error = node.refused(node.claim(1, result("gpu-vfio-0", request="vm"), result("gpu-1", request="cuda")))
    assert (error.code, error.retryable) == ("DRA-VFIO-MIXED", False)
    assert "gpu-vfio-0" in error.message
    assert "gpu-1" in error.message
    assert (node.kernel.writes, node.files()) == ([], [])


def test_configuration_chooses_the_interface(node):
    node.bus.write("dev/iommu", "simulated-device c 10 126 gid 0\n")
    node.bus.write(f"sys/bus/pci/devices/{node.address(0)}/vfio-dev/vfio5/dev", "244:5\n")
    node.bus.write("dev/vfio/devices/vfio5", "simulated-device c 244 5 gid 0\n")
    node.kernel.make_nodes = lambda: None
    config = vfio_config(backendPolicy="PreferIommuFD", enableAPIDevice=True)
    ref = node.claim(1, "gpu-vfio-0", configs=[config])
    node.prepared(ref)
    assert node.nodes(ref) == {"": ["/dev/iommu"], "gpu-vfio-0": ["/dev/vfio/devices/vfio5"]}


def test_the_legacy_interface_is_the_default_and_its_own_node_comes_on_demand(node):
    ref = node.claim(1, "gpu-vfio-0", configs=[vfio_config(enableAPIDevice=True, source="FromClass")])
    node.prepared(ref)
    assert node.nodes(ref) == {"": ["/dev/vfio/vfio"], "gpu-vfio-0": ["/dev/vfio/20"]}


def test_two_interfaces_in_one_claim_are_refused(node):
    configs = [
        vfio_config(requests=["a"], backendPolicy="LegacyOnly"),
        vfio_config(requests=["b"], backendPolicy="PreferIommuFD"),
    ]
    both = (result("gpu-vfio-0", request="a"), result("gpu-vfio-1", request="b"))
    error = node.refused(node.claim(1, *both, configs=configs))
    assert (error.code, error.retryable) == ("DRA-VFIO-BACKENDS", False)
    assert node.kernel.writes == []


def test_two_functions_of_one_claim_are_bound_and_given_back_together(node):
    ref = node.claim(1, result("gpu-vfio-0", request="a"), result("gpu-vfio-3", request="b"))
    assert len(node.prepared(ref)) == 2
    assert [node.driver(index) for index in (0, 3)] == ["vfio-pci", "vfio-pci"]
    assert node.nodes(ref) == {"": [], "gpu-vfio-0": ["/dev/vfio/20"], "gpu-vfio-3": ["/dev/vfio/23"]}
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_access_for_monitoring_binds_nothing_and_opens_nothing(node):
    ref = node.claim(1, result("gpu-vfio-0", adminAccess=True))
    node.prepared(ref)
    assert node.nodes(ref) == {"": [], "gpu-vfio-0": []}
    assert (node.kernel.writes, node.driver(0)) == ([], "nvidia")
    user = node.claim(2, "gpu-vfio-0")
    node.prepared(user)
    assert node.unprepare(ref) is None
    assert node.driver(0) == "vfio-pci"


def test_access_for_monitoring_of_all_devices_may_mix_them(node):
    node.renderer = _AnyRenderer(node.renderer)
    node.restart()
    devices = [result(f"gpu-vfio-{n}", request="all", adminAccess=True) for n in range(4)]
    devices += [result(f"gpu-{n}", request="all", adminAccess=True) for n in range(4)]
    assert len(node.prepared(node.claim(1, *devices))) == 8
    assert node.kernel.writes == []


def test_a_gate_that_was_switched_off_since_gives_the_function_back_all_the_same(node):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.gate = False
    node.look()
    node.restart()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_no_nvml_is_needed_to_give_it_back(node):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.hardware.refuse_persistence = True
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_a_driver_that_was_removed_meanwhile_leaves_the_function_free_for_the_next(node):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    (node.bus.root / "sys/bus/pci/drivers/nvidia").rename(node.root / "gone")
    assert node.unprepare(ref) is None
    assert (node.driver(0), node.override(0), node.files(), node.marks()) == ("", "(null)", [], [])


# -- crashes ---------------------------------------------------------------------------------------------


def killed(node, call, ref):
    with pytest.raises(Killed):
        call(ref)
    node.kernel.die_at = 0
    node.look()
    node.restart()


@pytest.mark.parametrize("step", steps.prepare_steps(effects=2))
@pytest.mark.parametrize("finish", ["prepare", "unprepare", "unprepare without NVML"])
def test_killed_at_any_step_of_prepare(node, step, finish):
    ref = node.claim(1, "gpu-vfio-0")
    node.kill_at = step
    killed(node, node.prepare, ref)
    if finish == "prepare":
        node.prepared(ref)
        assert node.nodes(ref)["gpu-vfio-0"] == ["/dev/vfio/20"]
        node.check_invariants()
        node.look()
    node.hardware.refuse_persistence = finish.endswith("NVML")
    assert node.unprepare(ref) is None
    assert node.is_as_before()


@pytest.mark.parametrize("step", steps.unprepare_steps(effects=2))
@pytest.mark.parametrize("finish", ["prepare", "unprepare"])
def test_killed_at_any_step_of_unprepare(node, step, finish):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    node.kill_at = step
    killed(node, node.unprepare, ref)
    if finish == "prepare":
        node.prepared(ref)
        assert node.driver(0) == "vfio-pci"
        node.look()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


@pytest.mark.parametrize("write", range(1, 4))
@pytest.mark.parametrize("finish", ["prepare", "unprepare"])
def test_killed_between_two_writes_to_the_kernel_while_it_is_bound(node, write, finish):
    ref = node.claim(1, "gpu-vfio-0")
    node.kernel.die_at = write
    killed(node, node.prepare, ref)
    if finish == "prepare":
        node.prepared(ref)
        assert node.driver(0) == "vfio-pci"
        node.look()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


@pytest.mark.parametrize("write", range(1, 5))
@pytest.mark.parametrize("finish", ["prepare", "unprepare"])
def test_killed_between_two_writes_to_the_kernel_while_it_is_given_back(node, write, finish):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    node.kernel.die_at = len(node.kernel.writes) + write
    killed(node, node.unprepare, ref)
    if finish == "prepare":
        node.prepared(ref)
        assert node.driver(0) == "vfio-pci"
        node.look()
    assert node.unprepare(ref) is None
    assert node.is_as_before()


def test_a_reboot_ends_the_binding_and_a_claim_that_lives_on_is_bound_anew(node):
    stays, gone = node.claim(1, "gpu-vfio-0"), node.claim(2, "gpu-vfio-1")
    node.prepared(stays)
    node.prepared(gone)
    node.reboot()
    writes = len(node.kernel.writes)
    assert node.unprepare(gone) is None
    assert len(node.kernel.writes) == writes
    node.prepared(stays)
    assert [node.driver(0), node.driver(1)] == ["vfio-pci", "nvidia"]
    assert node.unprepare(stays) is None
    node.janitor().sweep()
    assert node.is_as_before()


# -- lost records ----------------------------------------------------------------------------------------


def removed(node, ref):
    node.record_file(ref).unlink()


def torn(node, ref):
    node.record_file(ref).write_bytes(node.record_file(ref).read_bytes()[:100])


def removed_with_its_spec(node, ref):
    node.record_file(ref).unlink()
    node.cdi_file(ref).unlink()


LOSSES = pytest.mark.parametrize("lose", [removed, torn, removed_with_its_spec])


@LOSSES
def test_a_lost_record_is_rebuilt_and_the_function_still_comes_back_to_nvidia(node, lose):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    lose(node, ref)
    node.restart()
    node.janitor().sweep()
    assert node.driver(0) == "vfio-pci"
    # Where nothing tells of the claim it is the kubelet that prepares it again.
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.hardware.persistence == {node.address(0): True}
    assert node.is_as_before()


@LOSSES
def test_a_lost_record_whose_claim_is_gone_too_frees_the_gpu_once_nobody_has_it_open(node, lose):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    lose(node, ref)
    node.api.delete(ref)
    node.restart()
    node.hardware.users[node.address(0)] = [Holder(500, "qemu-system-x86")]
    for _ in range(2):
        node.janitor().sweep()
    assert node.driver(0) == "vfio-pci"
    node.hardware.users.clear()
    node.rescans = 0
    node.janitor().sweep()
    assert node.is_as_before()
    assert node.rescans == 1


def test_a_function_that_is_nobodys_is_believed_to_be_so_at_the_second_look_only(node):
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    removed_with_its_spec(node, ref)
    node.api.delete(ref)
    node.restart()
    janitor = node.janitor(confirm_seconds=5.0)
    janitor.sweep()
    assert node.driver(0) == "vfio-pci"
    node.now += 6
    janitor.sweep()
    assert node.is_as_before()


def test_a_function_that_an_administrator_bound_is_nobodys_orphan(node):
    node.bind_by_hand(0, "vfio-pci")
    node.janitor().sweep()
    assert node.driver(0) == "vfio-pci"


def test_the_record_alone_is_enough(node):
    """The marks are for lost records; they may be lost themselves."""
    ref = node.claim(1, "gpu-vfio-0")
    node.prepared(ref)
    node.look()
    for mark in (node.state_dir / "vfio").iterdir():
        mark.unlink()
    node.prepared(ref)
    assert node.unprepare(ref) is None
    assert node.is_as_before()
