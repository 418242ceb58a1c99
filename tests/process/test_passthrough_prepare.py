"""GPUs given to virtual machines by the real daemon: who has one open, killed on the way, after a reboot, taken over."""

from __future__ import annotations

import json

import pytest

from dra.cli.main import main
from dra.prepare.imports.checkpoint import (
    Checkpoint,
    CheckpointClaim,
    CheckpointDevice,
    DeviceGroup,
    encode_checkpoint,
    parse_checkpoint,
)
from dra.sim.kubelet import PrepareError, UnprepareError
from tests.process import conftest
from tests.process.harness import DRIVER, NODE, Node, wait_until
from tests.process.invariants import published

GATE = "--feature-gates=PassthroughSupport=true"
# How long a process that has a GPU open is waited for; on a real node 12 s.
SOON = {"dra.prepare.passthrough.model:Patience.seconds": 0.5, **conftest.SOON}
# The other steps are in the unit tests, which end the engine at each of them.
KILLED_AT = ("prepare:record-written", "prepare:effect-applied:0", "unprepare:effect-undone:0")


@pytest.fixture
def node():
    made = Node(profile="h100-nvl-x2")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared():
    """A node with a kubelet and a daemon for several tests, each of which leaves it as it was."""
    made = Node(profile="h100-nvl-x2")
    kubelet, daemon = start(made, f"{GATE},DeviceMetadata=true")
    made.allow_monitoring()
    yield made, kubelet
    assert daemon.logged("persistence_not_set") == []
    assert daemon.terminate(within_seconds=45) == 0
    made.close()


def start(node, *arguments, **more):
    """Start a kubelet and a daemon that offers both GPUs in both forms."""
    kubelet = node.kubelet()
    daemon = node.daemon(GATE, "--inventory-interval=1", *arguments, periods=SOON, **more)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_until(
        lambda: offered(node) == {"gpu-0", "gpu-1", "gpu-vfio-0", "gpu-vfio-1"}, what="both are offered"
    )
    return kubelet, daemon


def offered(node):
    """The whole GPUs that are published."""
    return {name for name in published(node) if "-mig-" not in name}


def drivers(node):
    return [node.machine.pci.driver_of(gpu) for gpu in (0, 1)]


def overrides(node):
    devices = node.root / "sys/bus/pci/devices"
    return [
        (devices / str(node.machine.pci.address_of(gpu)) / "driver_override").read_text().strip()
        for gpu in (0, 1)
    ]


def is_as_before(node):
    """Both GPUs are the NVIDIA driver's, freely, and nothing is left of any claim."""
    marks = list((node.state_dir / "vfio").glob("*"))
    left = (node.records(), node.cdi_files(), node.leftovers(), marks)
    return (
        drivers(node) == ["nvidia"] * 2
        and overrides(node) == ["(null)"] * 2
        and left == (set(), set(), [], [])
    )


def config(**iommu):
    return {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "VfioDeviceConfig", "iommu": iommu}


def test_a_container_gets_the_bare_device_and_the_gpu_comes_back(shared):
    node, kubelet = shared
    shown = next(
        device["attributes"]
        for each in node.slices()
        for device in each["spec"].get("devices", ())
        if device["name"] == "gpu-vfio-1"
    )
    pod = node.pod("p", node.claim("bare", "gpu-vfio-1", configs=(config(enableAPIDevice=True),)))
    view = kubelet.run_pod(pod).views["main"]
    assert sorted(view.device_nodes) == ["/dev/vfio/23", "/dev/vfio/vfio"]
    assert (view.env["NVIDIA_VISIBLE_DEVICES"], view.libraries, view.hooks) == ("void", {}, ())
    assert drivers(node) == ["nvidia", "vfio-pci"]
    # What KubeVirt reads, all that the slice says of the device (KEP-5304).
    (file,) = (node.state_dir / "dra-device-metadata").glob("*/*/metadata.json")
    (device,) = json.loads(file.read_text())["requests"][0]["devices"]
    assert device["attributes"] == shown
    assert device["attributes"]["resource.kubernetes.io/pciBusID"] == {
        "string": str(node.machine.pci.address_of(1))
    }
    wait_until(
        lambda: offered(node) == {"gpu-0", "gpu-vfio-0", "gpu-vfio-1"}, what="the GPU itself is not offered"
    )
    kubelet.stop_pod(pod)
    assert is_as_before(node)
    wait_until(lambda: len(offered(node)) == 4, what="both are offered again")
    assert all(gpu.persistence for gpu in node.machine.control.state.gpus)
    # And it works.
    whole = node.pod("q", node.claim("whole", "gpu-1", pods=("q",)))
    assert kubelet.run_pod(whole).views["main"].gpus == (1,)
    kubelet.stop_pod(whole)


def test_a_process_that_has_the_gpu_open_is_named_and_the_gpu_stays_what_it_was_until_it_is_gone(shared):
    """Fault F50: unbinding would wait in the kernel for ever; the call is bounded and says who it is."""
    node, kubelet = shared
    node.machine.pci.hold(0, 4711, "dcgm-exporter")
    claim = node.claim("busy", "gpu-vfio-0")
    pod = node.pod("p", claim)
    with pytest.raises(PrepareError, match=r"gpu-vfio-0 .* in use by dcgm-exporter \(pid 4711\)"):
        kubelet.run_pod(pod)
    assert is_as_before(node)
    wait_until(lambda: len(offered(node)) == 4, what="the slice is true")
    wait_until(
        lambda: any("dcgm-exporter (pid 4711)" in event["message"] for event in node.told_events(claim)),
        what="the claim's owner reads it",
    )
    node.machine.pci.let_go(4711)
    assert list(kubelet.run_pod(pod).views["main"].device_nodes) == ["/dev/vfio/20"]
    kubelet.stop_pod(pod)
    assert is_as_before(node)


def test_two_claims_of_one_gpu_and_a_claim_of_both_kinds(shared):
    node, kubelet = shared
    first = node.pod("p", node.claim("first", "gpu-vfio-0"))
    kubelet.run_pod(first)
    for name, device in (("d", "gpu-vfio-0"), ("e", "gpu-0")):
        with pytest.raises(PrepareError, match="held .*by claim default/first "):
            kubelet.run_pod(node.pod(name, node.claim(name, device, pods=(name,))))
    mixed = node.pod("m", node.claim("m", "gpu-vfio-1", "gpu-1", pods=("m",)))
    with pytest.raises(PrepareError, match="DRA-VFIO-MIXED.*gpu-vfio-1.*gpu-1"):
        kubelet.run_pod(mixed)
    second = node.pod("f", node.claim("f", "gpu-vfio-1", pods=("f",)))
    assert list(kubelet.run_pod(second).views["main"].device_nodes) == ["/dev/vfio/23"]
    assert drivers(node) == ["vfio-pci"] * 2
    kubelet.stop_pod(first)
    assert drivers(node) == ["nvidia", "vfio-pci"]
    kubelet.stop_pod(second)
    assert is_as_before(node)


def test_access_for_monitoring_takes_nothing_away(shared):
    node, kubelet = shared
    watcher = node.pod("w", node.claim("w", "gpu-vfio-0", "gpu-1", pods=("w",), admin=True))
    view = kubelet.run_pod(watcher).views["main"]
    assert view.gpus == (1,)
    assert not any("vfio" in path for path in view.device_nodes)
    assert drivers(node) == ["nvidia"] * 2
    user = node.pod("p", node.claim("user", "gpu-vfio-0"))
    kubelet.run_pod(user)
    kubelet.stop_pod(watcher)
    assert drivers(node) == ["vfio-pci", "nvidia"]
    kubelet.stop_pod(user)
    assert is_as_before(node)


def test_killed_on_the_way_the_next_process_finishes_the_job(node):
    kubelet = node.kubelet()
    for number, step in enumerate(KILLED_AT):
        before = kubelet.connection(DRIVER)
        doomed = node.daemon(GATE, crash_at=step, periods=SOON)
        kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
        pod = node.pod("p", node.claim(f"c{number}", "gpu-vfio-0"))
        with pytest.raises((PrepareError, UnprepareError)):
            kubelet.run_pod(pod)
            kubelet.stop_pod(pod)
        assert doomed.wait(within_seconds=60) == -9, step
        before = kubelet.connection(DRIVER)
        daemon = node.daemon(GATE, periods=SOON)
        kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
        if step.startswith("prepare"):
            assert list(kubelet.run_pod(pod).views["main"].device_nodes) == ["/dev/vfio/20"], step
            assert drivers(node) == ["vfio-pci", "nvidia"], step
        kubelet.stop_pod(pod)
        assert is_as_before(node), step
        daemon.kill()


def test_a_restart_with_a_live_claim_shows_and_gives_out_what_is_really_free(node):
    kubelet, daemon = start(node)
    pod = node.pod("p", node.claim("c", "gpu-vfio-0"))
    kubelet.run_pod(pod)
    before = kubelet.connection(DRIVER)
    assert daemon.terminate(within_seconds=45) == 0
    daemon = node.daemon(GATE, "--inventory-interval=1", periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    wait_until(
        lambda: offered(node) == {"gpu-1", "gpu-vfio-0", "gpu-vfio-1"}, what="the GPU in use is hidden"
    )
    assert drivers(node) == ["vfio-pci", "nvidia"]
    with pytest.raises(PrepareError, match="held .*by claim default/c "):
        kubelet.run_pod(node.pod("q", node.claim("d", "gpu-0", pods=("q",))))
    # Also with the gate off by now, and no NVML that answers, the claim can end.
    before = kubelet.connection(DRIVER)
    assert daemon.terminate(within_seconds=45) == 0
    node.machine.control.remove_library()
    node.daemon(periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert is_as_before(node)


def test_after_a_reboot_a_claim_that_lives_on_is_bound_anew_and_one_that_ended_leaves_nothing(node):
    kubelet, daemon = start(node)
    stays = node.pod("p", node.claim("c", "gpu-vfio-0"))
    gone = node.pod("q", node.claim("d", "gpu-vfio-1", pods=("q",)))
    kubelet.run_pod(stays)
    kubelet.run_pod(gone)
    kubelet.stop()
    daemon.kill()
    node.machine.control.reboot()
    assert drivers(node) == ["nvidia"] * 2
    node.delete_claim("d")
    kubelet, daemon = start(node)
    kubelet.run_pod(stays)
    assert drivers(node) == ["vfio-pci", "nvidia"]
    kubelet.stop_pod(stays)
    assert drivers(node) == ["nvidia"] * 2
    wait_until(lambda: is_as_before(node), what="the janitor has swept")


def test_a_gpu_that_was_on_vfio_before_is_offered_so_and_left_so(node):
    node.machine.pci.bind(1, "vfio-pci")
    kubelet = node.kubelet()
    node.daemon(GATE, "--inventory-interval=1", periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    wait_until(lambda: offered(node) == {"gpu-0", "gpu-vfio-0", "gpu-vfio-1"}, what="it is offered as it is")
    pod = node.pod("p", node.claim("c", "gpu-vfio-1"))
    assert list(kubelet.run_pod(pod).views["main"].device_nodes) == ["/dev/vfio/23"]
    kubelet.stop_pod(pod)
    assert drivers(node) == ["nvidia", "vfio-pci"]


def test_iommufd_where_the_kernel_has_it(node):
    node.machine.pci.set_iommufd(True)
    kubelet, _ = start(node)
    wanted = config(backendPolicy="PreferIommuFD", enableAPIDevice=True)
    pod = node.pod("p", node.claim("c", "gpu-vfio-0", "gpu-vfio-1", configs=(wanted,)))
    view = kubelet.run_pod(pod).views["main"]
    assert sorted(view.device_nodes) == ["/dev/iommu", "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1"]
    kubelet.stop_pod(pod)
    assert is_as_before(node)


def test_a_claim_of_nvidias_driver_is_taken_over_given_back_to_it_and_taken_over_again(node, capsys):
    """Through `dra export-checkpoint`; the function stays bound all the time, and goes back to nvidia in the end."""
    claim = node.claim("c", "gpu-vfio-1")
    uid, address = claim["metadata"]["uid"], node.machine.pci.address_of(1)
    told = CheckpointDevice(
        "vfio", ("r0",), NODE, "gpu-vfio-1", (f"k8s.{DRIVER}/claim={uid}-gpu-vfio-1",),
        uuid="61e3c5d4-0000-5000-8000-000000000000", pci_bus_id=str(address),
    )  # fmt: skip
    entry = CheckpointClaim(uid, True, (DeviceGroup((told,)),), claim["status"])
    checkpoint = node.state_dir / "checkpoint.json"
    node.state_dir.mkdir(parents=True)
    checkpoint.write_bytes(
        encode_checkpoint(Checkpoint((entry,), boot_id=node.machine.control.state.boot_id), release="v0.4")
    )
    node.machine.pci.bind(1, "vfio-pci")
    pod = node.pod("p", claim)
    kubelet = node.kubelet()
    daemon = node.daemon(GATE, periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert list(kubelet.run_pod(pod).views["main"].device_nodes) == ["/dev/vfio/23"]
    before = kubelet.connection(DRIVER)
    assert daemon.terminate(within_seconds=45) == 0
    command = [
        "export-checkpoint",
        "--simulate",
        node.profile,
        "--host-root",
        str(node.root),
        "--node-name",
        NODE,
    ]
    assert main([*command, "--release", "v0.4"]) == 0, capsys.readouterr()
    (written,) = parse_checkpoint(checkpoint.read_bytes()).claims
    (device,) = written.groups[0].devices
    assert (device.kind, device.device, device.pci_bus_id) == ("vfio", "gpu-vfio-1", str(address))
    assert drivers(node) == ["nvidia", "vfio-pci"]
    # NVIDIA's driver did not come after all.
    node.daemon(GATE, periods=SOON)
    kubelet.wait_registered(DRIVER, timeout_seconds=60, instead_of=before)
    kubelet.stop_pod(pod)
    assert is_as_before(node)
