"""What a container gets of a function that is passed through: VFIO's nodes, and nothing of NVIDIA's driver."""

import pytest

from dra.cdi.model import CdiDevice, CdiOptions, VfioAccess
from dra.cdi.renderer import CdiRenderer
from dra.cdi.spec import check
from dra.errors import StackError
from dra.values import PciAddress
from tests.contract.cdi_container import start
from tests.unit.cdi.node import BDF, UID, make_node, put, stand_in

SECOND = PciAddress.parse("0000:1b:00.0")


def device(name="gpu-vfio-0", address=BDF, **access):
    return CdiDevice(name, None, address, vfio=VfioAccess(**{"group": 12, **access}))


@pytest.fixture
def paths(tmp_path):
    """A node whose NVIDIA driver is gone: no library, no node of it is needed."""
    paths = make_node(tmp_path, driver=False, dev=False)
    stand_in(tmp_path / "dev/vfio/vfio", 10, 196)
    stand_in(tmp_path / "dev/vfio/12", 511, 0, mode=0o600)
    stand_in(tmp_path / "dev/vfio/13", 511, 1, mode=0o600)
    return paths


def with_iommufd(root, address, number):
    stand_in(root / "dev/iommu", 10, 126, mode=0o660)
    put(root / f"sys/bus/pci/devices/{address}/vfio-dev/vfio{number}/dev", f"244:{number}\n")
    stand_in(root / f"dev/vfio/devices/vfio{number}", 244, number, mode=0o600)


def container(paths, *devices, root):
    spec = CdiRenderer(paths).render(UID, devices, driver_version="")
    check(spec)
    return start(spec, [entry["name"] for entry in spec["devices"]], root)


def test_a_container_gets_the_node_of_the_iommu_group_and_nothing_else(paths, tmp_path):
    seen = container(paths, device(), root=tmp_path)
    assert seen.nodes == {"/dev/vfio/12": ("c", 511, 0, 0o600, 0)}
    assert (seen.env, seen.files, seen.hooks) == ({"NVIDIA_VISIBLE_DEVICES": "void"}, {}, [])


def test_the_node_of_the_interface_comes_once_if_it_is_asked_for(paths, tmp_path):
    both = (device(api_device=True), device("gpu-vfio-1", SECOND, group=13, api_device=True))
    spec = CdiRenderer(paths).render(UID, both, driver_version="")
    assert [node["path"] for node in spec["containerEdits"]["deviceNodes"]] == ["/dev/vfio/vfio"]
    assert sorted(container(paths, *both, root=tmp_path).nodes) == [
        "/dev/vfio/12",
        "/dev/vfio/13",
        "/dev/vfio/vfio",
    ]


def test_iommufd_gives_nodes_of_single_functions(paths, tmp_path):
    with_iommufd(tmp_path, BDF, 3)
    seen = container(paths, device(iommufd=True, api_device=True), root=tmp_path)
    assert sorted(seen.nodes) == ["/dev/iommu", "/dev/vfio/devices/vfio3"]
    assert seen.nodes["/dev/vfio/devices/vfio3"][1:4] == (244, 3, 0o600)


def test_one_function_without_a_node_of_its_own_keeps_the_whole_claim_on_groups(paths, tmp_path):
    """A process cannot use both interfaces."""
    with_iommufd(tmp_path, BDF, 3)
    two = (device(iommufd=True, api_device=True), device("gpu-vfio-1", SECOND, group=13, iommufd=True))
    assert sorted(container(paths, *two, root=tmp_path).nodes) == [
        "/dev/vfio/12",
        "/dev/vfio/13",
        "/dev/vfio/vfio",
    ]


def test_iommufd_is_not_used_where_the_kernel_has_none_or_nobody_asks(paths, tmp_path):
    assert list(container(paths, device(iommufd=True), root=tmp_path).nodes) == ["/dev/vfio/12"]
    with_iommufd(tmp_path, BDF, 3)
    assert list(container(paths, device(), root=tmp_path).nodes) == ["/dev/vfio/12"]


def test_access_for_monitoring_opens_nothing(paths, tmp_path):
    seen = container(paths, device(group=None, api_device=True), root=tmp_path)
    assert (seen.nodes, seen.env) == ({}, {"NVIDIA_VISIBLE_DEVICES": "void"})


def test_a_monitored_function_among_gpus_takes_nothing_from_them(tmp_path):
    paths = make_node(tmp_path)
    gpu = CdiDevice("gpu-0", 0, BDF)
    spec = CdiRenderer(paths, CdiOptions()).render(UID, [gpu, device(group=None)], driver_version="580.95.05")
    check(spec)
    assert "/dev/nvidia0" in start(spec, [f"{UID}-gpu-0"], tmp_path).nodes
    assert "/dev/nvidia0" not in start(spec, [f"{UID}-gpu-vfio-0"], tmp_path).nodes


@pytest.mark.parametrize(
    ("gone", "access"), [("12", {}), ("vfio", {"api_device": True})], ids=["group", "interface"]
)
def test_a_node_that_is_not_there_is_an_error_that_names_it(paths, tmp_path, gone, access):
    (tmp_path / f"dev/vfio/{gone}").unlink()
    with pytest.raises(StackError, match=f"/dev/vfio/{gone}") as caught:
        CdiRenderer(paths).render(UID, [device(**access)], driver_version="")
    assert (caught.value.code, caught.value.retryable) == ("DRA-VFIO-NODE-MISSING", True)


def test_a_spec_whose_node_went_away_is_told_of(paths, tmp_path):
    renderer = CdiRenderer(paths)
    spec = renderer.render(UID, [device()], driver_version="")
    assert renderer.missing_files(spec) == []
    (tmp_path / "dev/vfio/12").unlink()
    assert renderer.missing_files(spec) == ["/dev/vfio/12"]


def test_a_driver_root_with_a_dev_of_its_own_has_no_vfio_nodes_and_none_are_looked_for_there(tmp_path):
    paths = make_node(tmp_path, driver_root="/run/nvidia/driver", driver=False, dev=False)
    (paths.driver_root / "dev").mkdir(parents=True)
    stand_in(tmp_path / "dev/vfio/12", 511, 0)
    (node,) = CdiRenderer(paths).render(UID, [device()], driver_version="")["devices"][0]["containerEdits"][
        "deviceNodes"
    ]
    assert node["path"] == "/dev/vfio/12"
    assert "hostPath" not in node
