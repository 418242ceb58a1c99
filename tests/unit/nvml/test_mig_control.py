import pytest

from dra.errors import DeviceError, DraError
from dra.nvml.library import InjectedLibrary
from dra.nvml.mig_control import MigOfGpu
from dra.nvml.session import NvmlSession
from dra.sim.node import SimulatedNode


class Rig:
    """GPU 0 of a simulated node and a session on it."""

    def __init__(self, root, profile):
        self.node = SimulatedNode(profile, root, real_nodes=False)
        self.control = self.node.control
        self.session = NvmlSession(InjectedLibrary(self.node.library))
        self.slot = next(slot for slot in self.node.profile.gpus if slot.minor == 0)
        self.by = {"address": self.slot.pci_address}

    @property
    def gpu(self):
        return self.control.state.gpu(self.slot.uuid)

    @property
    def layout(self):
        """What lies on the GPU: profile id, start, and whether it is whole."""
        return sorted((each.profile_id, each.start, len(each.computes)) for each in self.gpu.instances)

    def mig(self, **options):
        return MigOfGpu(self.session, self.slot.uuid, **{**self.by, **options})

    def create(self, profile_id=19, start=0, **options):
        return self.mig(**options).create(profile_id=profile_id, start=start)

    def find(self, profile_id=19, start=0):
        return self.mig().find(profile_id=profile_id, start=start)

    def destroy(self, facts, **options):
        return self.mig().destroy(**{"gi": facts.gi, "ci": facts.ci, "uuid": facts.uuid, **options})

    def mode_off(self):
        return self.mig().mode_off_if_empty()

    def leave_half(self, profile_id=19, start=0):
        """A crash between the two halves of a creation: a GPU instance without a compute instance."""
        self.create(profile_id, start)
        self.control._change(
            lambda state: [each.computes.clear() for each in state.gpu(self.slot.uuid).instances]
        )


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(profile="dgx-h100"):
        made.append(Rig(tmp_path, profile))
        return made[-1]

    yield make
    for each in made:
        each.session.close()


def test_a_device_is_made_where_it_was_asked_for_and_found_there(rig):
    on = rig()
    made = on.create(19, 5)
    assert (made.profile_id, made.start, made.size) == (19, 5, 1)
    assert made.uuid.startswith("MIG-")
    assert on.layout == [(19, 5, 1)]
    found = on.find(19, 5)
    assert (found.gi, found.ci, found.uuid) == (made.gi, made.ci, made.uuid)
    assert on.find(19, 4) is None
    assert on.find(20, 5) is None


def test_only_the_first_device_switches_the_mode_on(rig):
    on = rig()
    assert on.create(19, 0).mode_switched
    assert not on.create(19, 1).mode_switched


@pytest.mark.parametrize("known", [True, False])
def test_the_gpu_is_found_by_uuid_where_its_address_is_not_known(rig, known):
    on = rig()
    on.by = on.by if known else {}
    made = on.create(9, 4)
    assert on.destroy(made)
    assert on.layout == []


def test_a_board_that_was_replaced_is_left_alone(rig):
    on = rig()
    with pytest.raises(DeviceError) as refused:
        MigOfGpu(on.session, "GPU-other", address=on.slot.pci_address).create(profile_id=19, start=0)
    assert refused.value.code == "DRA-MIG-GPU-CHANGED"
    assert on.slot.uuid in refused.value.message
    assert on.layout == []


@pytest.mark.fault("F40")
def test_on_ampere_the_mode_is_never_switched(rig):
    on = rig("dgx-a100")
    with pytest.raises(DeviceError) as refused:
        on.create()
    assert refused.value.code == "DRA-MIG-MODE-NEEDS-RESET"
    assert (on.gpu.mig_current, on.gpu.mig_pending) == (0, 0)
    on.control.set_mig_mode(0, enabled=True)
    made = on.create()
    assert not made.mode_switched
    on.destroy(made)
    assert on.mode_off() is False
    assert on.gpu.mig_current == 1


def test_a_process_keeps_the_mode_off_and_is_named_as_the_reason(rig):
    on = rig()
    on.control.add_process(0, 4711)
    with pytest.raises(DeviceError) as refused:
        on.create()
    assert refused.value.code == "DRA-MIG-IN-USE"
    assert refused.value.retryable
    assert on.layout == []


@pytest.mark.parametrize(("profile_id", "start"), [(19, 7), (9, 2), (4711, 0)])
def test_a_place_that_the_profile_does_not_have_is_refused_and_the_mode_untouched(rig, profile_id, start):
    on = rig()
    with pytest.raises(DeviceError) as refused:
        on.create(profile_id, start)
    assert refused.value.code == "DRA-MIG-PLACEMENT"
    assert on.gpu.mig_current == 0


@pytest.mark.parametrize(
    ("other", "said"), [("1g.10gb", "is there already"), ("3g.40gb", "(profile 9) has 0 to 3")]
)
@pytest.mark.fault("F38")
def test_a_place_that_is_taken_is_refused_and_the_holder_named(rig, other, said):
    on = rig()
    on.control.set_mig_layout(0, [(other, 0)])
    before = on.layout
    with pytest.raises(DeviceError) as refused:
        on.create(19, 0)
    assert (refused.value.code, refused.value.retryable) == ("DRA-MIG-OCCUPIED", True)
    assert said in refused.value.message
    assert on.layout == before


def test_every_profile_gets_one_compute_instance_over_all_of_it_and_the_plain_kind(rig):
    on = rig()
    for profile_id, slices in ((19, 1), (20, 1), (15, 1), (14, 2), (9, 3), (5, 4), (0, 7)):
        made = on.create(profile_id, 0)
        compute = on.gpu.instances[0].computes[0]
        plain = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[slices]
        assert (compute.profile_id, compute.size) == (plain, slices)
        on.destroy(made)


def test_a_refused_compute_profile_gives_way_to_the_next(rig):
    on = rig()
    on.control.set_fault("nvmlGpuInstanceCreateComputeInstance", error="NOT_SUPPORTED", times=1)
    on.create(20, 0)  # 1g+me also lists the compute profile with media engines
    assert on.gpu.instances[0].computes[0].profile_id == 7


def calls_of(on, work):
    """The NVML functions that `work` calls, in no order."""
    on.control.reset_calls()
    work()
    skip = ("nvmlInit", "nvmlShutdown", "nvmlErrorString", "nvmlSystem")
    return sorted(name for name in on.control.count_calls() if not name.startswith(skip))


def test_a_failure_at_any_call_of_creation_leaves_nothing_behind_and_the_retry_succeeds(rig):
    on = rig()
    made = []
    names = calls_of(on, lambda: made.append(on.create(9, 4)))
    assert {"nvmlDeviceSetMigMode", "nvmlGpuInstanceCreateComputeInstance"} <= set(names)
    on.destroy(made[0])
    on.mode_off()
    for name in names:
        on.session.close()
        fault = on.control.set_fault(name, error="UNKNOWN", times=1)
        with pytest.raises(DraError):
            on.create(9, 4)
        on.control.clear(fault)
        assert (name, on.layout, on.gpu.mig_current) == (name, [], 0)
        retried = on.create(9, 4)
        assert on.layout == [(9, 4, 1)]
        on.destroy(retried)
        assert on.mode_off()


def test_a_failure_at_any_call_of_destruction_is_told_and_the_retry_succeeds(rig):
    on = rig()
    made = on.create(9, 4)
    names = calls_of(on, lambda: on.destroy(made))
    assert {"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"} <= set(names)
    for name in names:
        made = on.create(9, 4)
        on.session.close()
        fault = on.control.set_fault(name, error="UNKNOWN", times=1)
        with pytest.raises(DraError):
            on.destroy(made)
        on.control.clear(fault)
        assert on.destroy(made)
        assert (name, on.layout) == (name, [])


def test_what_cannot_be_taken_back_is_named_and_completed_by_the_next_attempt(rig):
    on = rig()
    on.control.set_fault("nvmlGpuInstanceCreateComputeInstance", error="UNKNOWN", times=1)
    on.control.set_fault("nvmlGpuInstanceDestroy", error="UNKNOWN", times=1)
    with pytest.raises(DraError) as failed:
        on.create(9, 4)
    assert failed.value.fields["left"] == "GPU instance, MIG mode"
    assert on.layout == [(9, 4, 0)]
    assert on.find(9, 4) is None
    on.create(9, 4)
    assert on.layout == [(9, 4, 1)]


def test_a_creation_that_comes_too_late_takes_itself_back(rig):
    on = rig()
    on.create(14, 4)
    hang = on.control.set_fault("nvmlGpuInstanceCreateComputeInstance", hang=True)
    recovered = []
    import threading

    free = threading.Event()
    on.session.on_recovered(lambda subject: (recovered.append(subject), free.set()))
    with pytest.raises(DraError) as late:
        on.create(19, 0, deadline_seconds=0.2)
    assert late.value.code == "DRA-NVML-HUNG"
    on.control.clear(hang)
    assert free.wait(60)
    assert recovered == [str(on.slot.pci_address)]
    assert on.layout == [(14, 4, 1)]


@pytest.mark.fault("F39")
def test_a_device_in_use_is_not_destroyed_and_can_be_later(rig):
    on = rig()
    made = on.create(19, 2)
    on.control.add_process(0, 4711, gi=made.gi, ci=made.ci)
    with pytest.raises(DeviceError) as refused:
        on.destroy(made)
    assert (refused.value.code, refused.value.retryable) == ("DRA-MIG-IN-USE", True)
    assert made.uuid in refused.value.message
    assert on.layout == [(19, 2, 1)]
    on.control.remove_process(4711)
    assert on.destroy(made)
    assert not on.destroy(made)


def test_another_device_with_the_same_ids_is_not_ours(rig):
    on = rig()
    made = on.create(19, 2)
    assert not on.destroy(made, uuid="MIG-another")
    on.destroy(made)
    again = on.create(20, 6)  # ids are used again, and the UUID follows from them
    assert (again.gi, again.uuid) == (made.gi, made.uuid)
    assert not on.destroy(made, profile_id=19, start=2)
    assert on.layout == [(20, 6, 1)]


def test_half_a_device_is_destroyed_from_either_side(rig):
    on = rig()
    on.leave_half(9, 0)
    instance = on.gpu.instances[0]
    assert on.mig().destroy(gi=instance.gi, ci=0, uuid="MIG-gone")
    assert on.layout == []
    on.leave_half(9, 0)
    assert on.mig().clear_half_made(profile_id=9, start=0)
    assert on.layout == []
    on.create(9, 0)
    assert not on.mig().clear_half_made(profile_id=9, start=0)
    assert on.layout == [(9, 0, 1)]


def test_the_mode_goes_off_only_when_the_gpu_is_empty(rig):
    on = rig()
    one, two = on.create(19, 0), on.create(19, 1)
    assert on.mode_off() is False
    on.destroy(one)
    assert on.mode_off() is False
    on.destroy(two)
    on.control.add_process(0, 4711)
    with pytest.raises(DeviceError) as refused:
        on.mode_off()
    assert refused.value.code == "DRA-MIG-IN-USE"
    on.control.remove_process(4711)
    assert on.mode_off() is True
    assert on.gpu.mig_current == 0
    assert on.mode_off() is True
    assert on.find(19, 0) is None


def test_a_half_made_instance_keeps_the_mode_on(rig):
    on = rig()
    on.leave_half(9, 0)
    assert on.mode_off() is False
    assert on.gpu.mig_current == 1


def test_the_second_creation_of_a_session_asks_little(rig):
    on = rig()
    on.create(19, 0)
    on.control.reset_calls()
    on.create(19, 1)
    assert sum(on.control.count_calls().values()) <= 6


def test_a_look_tells_the_mode_and_what_stands_at_a_place_whole_or_half(rig):
    on = rig()

    def look(profile_id, start):
        return on.mig().look(profile_id=profile_id, start=start)

    assert look(9, 0).mode_on is False
    on.leave_half(9, 0)
    half = look(9, 0)
    assert (half.mode_on, half.gi, half.ci, half.uuid) == (True, on.gpu.instances[0].gi, None, "")
    made = on.create(19, 4)
    whole = look(19, 4)
    assert (whole.gi, whole.ci, whole.uuid, whole.size) == (made.gi, made.ci, made.uuid, 1)
    assert look(19, 5).gi is None
    listed = on.mig().instances()
    assert [(each.profile_id, each.start, each.size) for each in listed] == [(9, 0, 4), (19, 4, 1)]
    assert on.mig().destroy(gi=half.gi, ci=None, uuid="")
    assert not on.mig().destroy(gi=made.gi, ci=None, uuid="")
    assert on.layout == [(19, 4, 1)]
