"""Every layout of a driver that the simulator can make gives a container a working CUDA, in every tier."""

from __future__ import annotations

import pytest

from dra.cdi.model import CdiDevice, CdiOptions
from dra.cdi.renderer import CdiRenderer
from dra.cdi.spec import check
from dra.host.paths import HostPaths
from dra.sim.node import SimulatedNode
from tests.contract.cdi_container import start

UID = "6f1d2b3c-1111-4222-8333-444455556666"
HOOK = "usr/bin/nvidia-cdi-hook"
LAYOUTS = ("host", "operator", "cos", "debian-current", "ldcache")


def container(root, profile, layout, exposure, **node_options):
    node = SimulatedNode(profile, root, layout=layout, **node_options)
    paths = HostPaths(**node.paths_kwargs())
    if exposure == "hooks":
        hook = root / HOOK
        hook.parent.mkdir(parents=True, exist_ok=True)
        hook.write_text("#!/bin/sh\n")
        hook.chmod(0o755)
    devices = [CdiDevice(f"gpu-{slot.minor}", slot.minor, slot.pci_address) for slot in node.profile.gpus]
    renderer = CdiRenderer(paths, CdiOptions(exposure=exposure))
    spec = renderer.render(UID, devices, driver_version=node.profile.driver_version)
    check(spec)
    return start(spec, [device["name"] for device in spec["devices"]], root), len(devices)


@pytest.mark.parametrize("exposure", ["hooks", "soname", "ld-library-path"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_and_nvml_load_and_the_nodes_are_there(tmp_path, layout, exposure):
    seen, count = container(tmp_path, "l40s-x4", layout, exposure)
    for image in ("debian", "redhat"):
        for name in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"):
            assert seen.load(name, image) is not None, (name, image)
    assert {f"/dev/nvidia{minor}" for minor in range(count)} | {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(
        seen.nodes
    )
    assert any(path.endswith("/nvidia-smi") for path in seen.files)
    assert any("/lib/firmware/nvidia/" in path for path in seen.files)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_arm_machine_s_libraries_stand_where_arm_images_look(tmp_path, layout):
    seen, _ = container(tmp_path, "gb200", layout, "soname")
    for directory in ("/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        assert seen.open(f"{directory}/libcuda.so.1") is not None
    assert not any("x86_64" in path for path in seen.files)


@pytest.mark.parametrize("real_nodes", [None, False])
@pytest.mark.parametrize("layout", ["host", "operator", "cos"])
def test_a_node_that_nobody_used_since_boot_gets_its_device_nodes(tmp_path, layout, real_nodes):
    seen, count = container(tmp_path, "l40s-x4", layout, "soname", fresh=True, real_nodes=real_nodes)
    assert {f"/dev/nvidia{minor}" for minor in range(count)} | {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(
        seen.nodes
    )
