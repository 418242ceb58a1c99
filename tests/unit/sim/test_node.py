"""A simulated node across restarts, reboots and processes."""

from __future__ import annotations

import threading

import pynvml
import pytest

from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.host.pci import numa_node, pcie_root
from dra.host.proc import device_majors
from dra.sim.node import SimulatedNode
from dra.sim.tree import LAYOUTS, device_numbers


def test_a_restarted_process_finds_the_node_as_it_was(node, use_library):
    made = node("dgx-a100")
    uuids = made.control.set_mig_layout(1, [("3g.20gb", 0)])
    pynvml.nvmlDeviceSetComputeMode(
        pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    )
    marker = made.root / "usr/bin/nvidia-smi"
    marker.write_text("touched")
    again = SimulatedNode("dgx-a100", made.root)
    use_library(again.library())
    pynvml.nvmlInit()
    first, second = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
    assert pynvml.nvmlDeviceGetComputeMode(first) == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(second, 0)) == uuids[0]
    assert marker.read_text() == "touched"  # the tree is not built again
    pynvml.nvmlShutdown()


def test_another_machine_under_the_same_root_is_refused(node):
    made = node("t4-x1")
    with pytest.raises(ValueError, match="t4-x1"):
        SimulatedNode("dgx-h100", made.root)


def test_a_salt_given_when_the_node_was_made_stays(node):
    made = node("t4-x1", salt="worker-7")
    assert SimulatedNode("t4-x1", made.root).profile == made.profile


def test_a_reboot_clears_what_a_reboot_clears(node):
    made = node("dgx-h100")
    control, paths = made.control, HostPaths(**made.paths_kwargs())
    before = boot_id(paths)
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceSetComputeMode(handle, pynvml.NVML_COMPUTEMODE_PROHIBITED)
    control.set_mig_layout(1, [("1g.10gb", 0)])
    control.lose_gpu(2)
    control.remove_gpu(7)
    control.add_process(3, 900)
    control.set_gpu(4, ecc_corrected_total=9, ecc_corrected=2)
    (paths.cdi_root / "claim.yaml").write_text("{}")
    (made.root / "var/lib/kubelet/plugins_registry/keep").write_text("")
    control.reboot()

    assert boot_id(paths) != before
    assert not (paths.cdi_root / "claim.yaml").exists()
    assert paths.cdi_root.is_dir()
    assert (made.root / "var/lib/kubelet/plugins_registry/keep").exists()
    assert (made.root / "run/nvidia-persistenced/socket").exists()
    state = {slot.minor: control.state.gpu(slot.uuid) for slot in made.profile.gpus}
    assert state[0].compute_mode == pynvml.NVML_COMPUTEMODE_DEFAULT
    assert (state[1].instances, state[1].mig_current) == ([], 0)  # Hopper forgets the mode too
    assert not state[2].lost
    assert not state[3].processes
    assert (state[4].ecc_corrected, state[4].ecc_corrected_total) == (0, 11)
    assert not state[7].present
    assert not (made.root / "proc/driver/nvidia/capabilities/gpu1/mig/gi7").exists()


def test_majors_of_dynamic_drivers_move_at_a_reboot_and_the_nodes_with_them(node):
    made = node()
    paths = HostPaths(**made.paths_kwargs())
    before = device_majors(paths)["nvidia-uvm"]
    made.control.reboot()
    after = device_majors(paths)["nvidia-uvm"]
    assert after != before
    assert device_numbers(made.root / "dev/nvidia-uvm").major == after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_settings_object_leads_to_the_nodes_files_in_every_layout(node, layout):
    made = node("dgx-a100", layout=layout, initialise=False)
    paths = HostPaths(**made.paths_kwargs())
    for slot in made.profile.gpus:
        assert pcie_root(paths, slot.pci_address) == slot.root
        assert numa_node(paths, slot.pci_address) == slot.numa_node
    assert list(paths.driver_root.rglob("libcuda.so.1"))
    view, host = paths.dev_root()
    assert device_numbers(view / "dev/nvidia0").major == 195
    assert host == made.tree.dev_root
    made.control.reboot()
    assert list(paths.driver_root.rglob("libcuda.so.1"))
    assert device_numbers(view / "dev/nvidia0").major == 195


def test_a_fresh_node_has_no_device_nodes_until_somebody_makes_them(node):
    made = node(fresh=True)
    made.control.set_mig_mode(0, enabled=True)
    assert not (made.root / "dev/nvidia0").exists()
    made.control.make_device_nodes()
    assert device_numbers(made.root / "dev/nvidia0").minor == 0


def test_without_real_nodes_the_settings_say_that_there_are_stand_ins(node):
    made = node("t4-x1", real_nodes=False, initialise=False)
    assert made.paths_kwargs()["stand_in_nodes"]
    assert not device_numbers(made.root / "dev/nvidia0").real


def test_many_threads_change_the_state_and_no_change_is_lost(node):
    made = node()

    def add(first):
        for pid in range(first, first + 10):
            made.control.add_process(0, pid)

    threads = [threading.Thread(target=add, args=(1000 * i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made.control.state.gpus[0].processes) == 80


def test_a_state_of_an_older_version_is_read_with_defaults(node):
    made = node("t4-x1", initialise=False)
    path = made.root / "sim/state.json"
    path.write_text(
        path.read_text().replace('"temperature":34,', "").replace('"boots":1', '"boots":1,"later":2')
    )
    again = SimulatedNode("t4-x1", made.root)
    assert again.control.state.gpus[0].temperature == 34


def test_fields_a_gpu_does_not_have_are_refused(node):
    made = node("t4-x1", initialise=False)
    with pytest.raises(ValueError, match="colour"):
        made.control.set_gpu(0, colour="green")
