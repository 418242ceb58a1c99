"""The whole path from the library to the pool on simulated machines, with things going wrong."""

import threading

import pytest

from dra.host.paths import HostPaths
from dra.inventory.live import LiveInventory, on_bus_of
from dra.inventory.scan import Scanner
from dra.nvml.node import session_of
from dra.sim.node import SimulatedNode
from dra.sim.profiles import PROFILES
from dra.slices.features import NEWEST
from dra.slices.pool import build_pool
from dra.slices.validate import validate_slices


class Watched:
    """A simulated node under a live inventory."""

    def __init__(self, profile, root, *, start=True, **options):
        self.node = SimulatedNode(profile, root)
        self.control = self.node.control
        self.paths = HostPaths(**self.node.paths_kwargs())
        self.session = session_of(self.paths, library=self.node.library)
        self.live = LiveInventory(
            Scanner(self.session, self.paths).scan,
            interval_seconds=3600,
            hunt_seconds=3600,
            on_bus=on_bus_of(self.paths),
            **options,
        )
        self.heard = []
        self.live.subscribe(lambda _, difference: self.heard.append(difference))
        if start:
            self.live.start()
            assert self.live.wait_for_first(timeout_seconds=20)

    def look(self):
        assert self.live.rescan_and_wait(timeout_seconds=30)
        return self.live.current

    def states(self):
        return [gpu.unusable for gpu in self.live.current.gpus]

    def pool(self):
        made = build_pool(self.live.current, node_name="node-1", features=NEWEST)
        assert validate_slices(made.specs(generation=1)) == []
        return made


@pytest.fixture
def watch(tmp_path):
    made = []

    def make(profile, **options):
        made.append(Watched(profile, tmp_path / "node", **options))
        return made[-1]

    yield make
    for each in made:
        each.control.clear()
        each.live.stop()
        each.session.close()


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_machine_is_read_as_it_is_and_publishes_a_valid_pool(watch, profile):
    node = watch(profile)
    slots = sorted(PROFILES[profile].gpus, key=lambda slot: slot.pci_address)
    found = node.live.current
    assert found.problems == ()
    assert [(gpu.uuid, gpu.minor, gpu.product_name, gpu.pci_address) for gpu in found.gpus] == [
        (slot.uuid, slot.minor, slot.model.name, slot.pci_address) for slot in slots
    ]
    assert [gpu.pcie_root for gpu in found.gpus] == [slot.root for slot in slots]
    assert [-1 if gpu.numa_node is None else gpu.numa_node for gpu in found.gpus] == [
        slot.numa_node for slot in slots
    ]
    pool = node.pool()
    assert pool.problems == ()
    assert [device["name"] for device in pool.devices] == [f"gpu-{slot.minor}" for slot in slots]


def test_a_lost_gpu_is_tainted_and_the_taint_goes_when_it_is_back(watch):
    node = watch("dgx-h100")
    node.control.lose_gpu(3)
    node.look()
    assert node.states() == ["", "", "", "DRA-NVML-GPU-LOST", "", "", "", ""]
    tainted = [device["name"] for device in node.pool().devices if "taints" in device]
    assert tainted == ["gpu-3"]
    node.control.recover_gpu(3)
    node.look()
    assert node.states() == [""] * 8
    assert [change.changed for difference in node.heard[1:] for change in difference.changed] == [
        ("unusable",)
    ] * 2


def test_a_gpu_that_hangs_costs_itself_and_comes_back_when_the_driver_lets_it(watch, tmp_path):
    node = watch("dgx-h100", start=False)
    node.session._call_seconds = 0.5
    recovered = threading.Event()
    node.session.on_recovered(lambda _: recovered.set())
    fault = node.control.set_fault("nvmlDeviceGetName", gpu=5, hang=True)
    node.live.start()
    assert node.live.wait_for_first(timeout_seconds=20)
    assert [gpu.minor for gpu in node.live.current.gpus if gpu.unusable == "DRA-NVML-HUNG"] == [5]
    assert node.session.run(lambda api: api.call("nvmlDeviceGetCount")) == 8
    node.control.clear(fault)
    assert recovered.wait(60)
    node.look()
    assert node.states() == [""] * 8


def test_a_driver_that_comes_later_is_picked_up_without_a_restart(watch):
    node = watch("l40s-x4", start=False)
    node.control.remove_library()
    node.live.start()
    assert node.live.wait_for_first(timeout_seconds=20)
    assert [problem.code for problem in node.live.current.problems] == ["DRA-NVML-LIBRARY-NOT-FOUND"]
    assert node.pool().devices == ()
    node.control.install_library()
    node.look()
    assert len(node.pool().devices) == 4


def test_a_driver_upgrade_under_us_is_seen_and_the_new_version_published(watch):
    node = watch("dgx-a100")
    node.control.upgrade_driver("590.44.01", module=False)
    node.look()
    assert node.states() == ["DRA-NVML-VERSION-MISMATCH"] * 8
    assert len(node.pool().devices) == 8
    assert "Reboot the node" in node.live.current.problems[0].remedy
    node.control.unload_driver(force=True)
    node.control.load_driver()
    node.look()
    assert node.states() == [""] * 8
    versions = {device["attributes"]["driverVersion"]["version"] for device in node.pool().devices}
    assert versions == {"590.44.1"}


def test_an_unloaded_driver_leaves_the_gpus_listed_and_tainted(watch):
    node = watch("l40s-x4")
    node.control.unload_driver(force=True)
    node.look()
    assert node.states() == ["DRA-NVML-DRIVER-NOT-LOADED"] * 4
    node.control.load_driver()
    node.look()
    assert node.states() == [""] * 4


def test_a_gpu_taken_out_is_reported_gone_once_and_one_put_in_is_found(watch):
    node = watch("dgx-h100")
    node.control.remove_gpu(2)
    node.look()
    node.look()
    assert [[gpu.minor for gpu in difference.removed] for difference in node.heard[1:]] == [[2]]
    assert "gpu-2" not in [device["name"] for device in node.pool().devices]
    node.control.add_gpu(2)
    node.look()
    assert node.states() == [""] * 8
    assert [gpu.minor for gpu in node.heard[-1].added] == [2]


def test_partitions_made_and_destroyed_by_hand_are_followed(watch):
    node = watch("dgx-a100")
    node.control.set_mig_mode(1, enabled=True)
    node.look()
    assert [device["name"] for device in node.pool().devices] == [f"gpu-{n}" for n in (0, 2, 3, 4, 5, 6, 7)]
    node.control.set_mig_layout(1, [("3g.20gb", 4), ("1g.5gb", 0), ("1g.5gb", 2)])
    node.look()
    assert [device["name"] for device in node.pool().devices][1:4] == [
        "gpu-1-mig-1g5gb-19-0",
        "gpu-1-mig-1g5gb-19-2",
        "gpu-1-mig-3g20gb-9-4",
    ]
    device = node.pool().devices[3]
    assert device["capacity"]["memory"] == {"value": "20096Mi"}
    assert {name for name in device["capacity"] if name.startswith("memorySlice")} == {
        "memorySlice4", "memorySlice5", "memorySlice6", "memorySlice7"
    }  # fmt: skip
    node.control.set_mig_mode(1, enabled=False)
    node.look()
    assert len(node.pool().devices) == 8


def test_profiles_have_the_names_the_tools_of_the_driver_compute(tmp_path):
    from dra.nvml.mig import _SHAPES, profile_name

    node = SimulatedNode("dgx-a100", tmp_path)
    paths = HostPaths(**node.paths_kwargs())
    session = session_of(paths, library=node.library)
    try:
        gpu = Scanner(session, paths).scan(profiles=True).gpus[0]
    finally:
        session.close()
    assert {profile.name for profile in gpu.mig_profiles} >= {
        "1g.5gb",
        "2g.10gb",
        "3g.20gb",
        "4g.20gb",
        "7g.40gb",
    }
    for profile in gpu.mig_profiles:
        computed = {
            profile_name(enumerated=n, memory_mib=profile.memory_mib, gpu_memory_bytes=gpu.memory_bytes)
            for n in _SHAPES
        }
        assert profile.name in computed


def test_sleeping_gpus_are_not_woken_by_later_looks(watch):
    node = watch("l40s-x4", start=False)
    for minor in range(4):
        node.control.set_gpu(minor, persistence=False)
    node.live.start()
    assert node.live.wait_for_first(timeout_seconds=20)
    first = node.live.current
    node.session.close()
    node.control.reset_calls()
    for _ in range(3):
        assert node.look() == first
    assert node.control.count_wake_ups() == 0
    assert node.control.open_sessions() == 1


def test_the_driver_can_be_unloaded_after_a_release_and_the_pool_stays(watch):
    node = watch("l40s-x4")
    assert node.session.release("driver unload")
    node.control.unload_driver()
    node.look()
    assert node.states() == [""] * 4
    assert [problem.code for problem in node.live.current.problems] == ["DRA-NVML-RELEASED"]
    node.control.load_driver()
    node.session.resume()
    node.look()
    assert node.live.current.problems == ()
