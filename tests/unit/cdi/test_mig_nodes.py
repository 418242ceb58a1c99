"""Capability nodes of MIG devices: read from the kernel, needed on no host."""

import pytest

from dra.cdi.mig_nodes import mig_capability_nodes
from dra.cdi.model import DeviceNode
from dra.errors import DeviceError, StackError
from tests.unit.cdi.node import make_node, put

ACCESS = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


def nodes(paths, instance=7, compute=0, gpu=0):
    return mig_capability_nodes(paths, gpu_minor=gpu, gpu_instance=instance, compute_instance=compute)


@pytest.fixture
def paths(tmp_path):
    paths = make_node(tmp_path)
    put(capability(paths, "gi7"), ACCESS.format(66))
    put(capability(paths, "gi7/ci0"), ACCESS.format(67))
    return paths


def capability(paths, part, gpu=0):
    return paths.proc / f"driver/nvidia/capabilities/gpu{gpu}/mig/{part}/access"


def test_the_nodes_come_out_though_the_host_has_none(paths):
    assert not (paths.dev / "nvidia-caps").exists()
    assert nodes(paths) == (
        DeviceNode("/dev/nvidia-caps/nvidia-cap66", 237, 66, mode=0o444),
        DeviceNode("/dev/nvidia-caps/nvidia-cap67", 237, 67, mode=0o444),
    )


@pytest.mark.parametrize("text", ["", "DeviceFileMinor: x\n", "nonsense", "DeviceFileMode: 292\n"])
def test_an_access_file_that_cannot_be_read_is_an_error_of_that_device_only(paths, text):
    put(capability(paths, "gi8"), ACCESS.format(75))
    put(capability(paths, "gi8/ci0"), text)
    with pytest.raises(DeviceError, match=r"DRA-MIG-CAPABILITY.*gi8/ci0 of /dev/nvidia0"):
        nodes(paths, instance=8)
    assert nodes(paths)[0].minor == 66


def test_an_instance_that_does_not_exist_is_not_guessed(paths):
    put(paths.proc / "driver/nvidia-caps/mig-minors", "gpu0/gi9/access 84\ngpu0/gi9/ci0/access 85\n")
    with pytest.raises(DeviceError) as caught:
        nodes(paths, instance=9)
    assert caught.value.retryable
    assert "nvidia-smi mig -lgi" in caught.value.remedy


def test_a_kernel_without_access_files_has_the_table(tmp_path):
    paths = make_node(tmp_path)
    put(
        paths.proc / "driver/nvidia-caps/mig-minors",
        "config 1\ngpu1/gi9/access 219\ngpu1/gi9/ci0/access 220\n",
    )
    assert [node.minor for node in nodes(paths, instance=9, gpu=1)] == [219, 220]
    with pytest.raises(DeviceError):
        nodes(paths, instance=10, gpu=1)


def test_a_kernel_without_the_capability_driver_is_said_so(paths):
    put(paths.proc / "devices", "Character devices:\n195 nvidia\n")
    with pytest.raises(StackError, match="DRA-MIG-CAPS-DRIVER"):
        nodes(paths)
