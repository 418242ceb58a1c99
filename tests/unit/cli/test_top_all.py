"""`dra top --all`: the GPUs of all nodes and who holds them, from dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dra.cli.main import main
from dra.sim.apiserver import SimApiServer
from tests.unit.diagnose.explain_world import gpu, held, holder_pod, slice_of

XID = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute", "timeAdded": "2026-09-01T10:00:00Z"}


def partition(index: int, parent: int) -> dict[str, Any]:
    attributes = {"type": {"string": "mig"}, "parentUUID": {"string": f"GPU-{parent:04}"}}
    return {
        "name": f"gpu-{parent}-mig-{index}",
        "attributes": attributes,
        "capacity": {"memory": {"value": "10Gi"}},
    }


def dump(folder: Path, *objects: dict[str, Any]) -> str:
    file = folder / "dump.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
    return str(file)


def world(folder: Path) -> str:
    policies = {
        "memory": {"value": "80Gi", "requestPolicy": {"default": "0"}},
        "shares": {"value": "100", "requestPolicy": {"default": "1"}},
    }
    devices = [
        gpu(0),
        gpu(1),
        gpu(2, taints=[XID]),
        gpu(3, allowMultipleAllocations=True, capacity=policies),
        gpu(4),
        *[partition(n, 4) for n in range(3)],
    ]
    part = held(
        "part", "n1", "gpu-3", pod="small", shareID="s1", consumedCapacity={"shares": "20", "memory": "0"}
    )
    return dump(
        folder,
        slice_of("n1", [gpu(9)], name="old", generation=1),
        slice_of("n1", devices, generation=2),
        slice_of("n2", [partition(0, 7)]),
        slice_of("n1", [gpu(0)], driver="other.example.com"),
        held("big", "n1", "gpu-1"),
        held("one", "n1", "gpu-4-mig-1", pod="mig"),
        part,
        holder_pod(),
        holder_pod("small"),
    )


def test_each_gpu_with_its_holders_taints_and_shares_and_partitions_that_are_held(tmp_path, capsys):
    assert main(["top", "--all", "-o", "json", "-f", world(tmp_path)]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [(each["node"], each["device"], each["state"]) for each in devices] == [
        ("n1", "gpu-0", "free"),
        ("n1", "gpu-1", "held"),
        ("n1", "gpu-2", "free"),
        ("n1", "gpu-3", "shared"),
        ("n1", "gpu-4", "cut"),
        ("n1", "gpu-4-mig-1", "held"),
        ("n2", "gpu-7-mig-0", "free"),
    ]
    by_name = {each["device"]: each for each in devices}
    assert by_name["gpu-1"]["holders"] == [{"claim": "team-b/big", "pods": ["train-0"], "idle": ""}]
    assert by_name["gpu-4-mig-1"]["holders"][0]["idle"] == "its pod mig is gone"
    assert by_name["gpu-3"]["used"] == {"shares": "20 of 100"}
    assert by_name["gpu-2"]["taints"] == ["gpu.nvidia.com/xid=79:NoExecute since 2026-09-01T10:00:00Z"]


def at(place: int, device: dict[str, Any]) -> dict[str, Any]:
    bus = {"resource.kubernetes.io/pciBusID": {"string": f"0000:{place:02x}:00.0"}}
    return {**device, "attributes": {**device["attributes"], **bus}}


def bare(index: int, place: int) -> dict[str, Any]:
    return at(place, {"name": f"gpu-vfio-{index}", "attributes": {"type": {"string": "vfio"}}})


def test_a_gpu_that_can_be_passed_through_is_one_row_that_of_the_side_which_is_held(tmp_path, capsys):
    devices = [
        *[at(index + 1, gpu(index)) for index in range(4)],
        {**partition(0, 3), "name": "gpu-3-mig-0"},
        *[bare(index, index + 1) for index in range(5)],
    ]
    claims = [held("whole", "n1", "gpu-1"), held("vm", "n1", "gpu-vfio-2"), held("part", "n1", "gpu-3-mig-0")]
    file = dump(tmp_path, slice_of("n1", devices), *claims, holder_pod())
    assert main(["top", "--all", "-o", "json", "-f", file]) == 0
    rows = json.loads(capsys.readouterr().out)["devices"]
    assert {each["device"]: each["state"] for each in rows} == {
        "gpu-0": "free",
        "gpu-1": "held",
        "gpu-vfio-2": "held",
        "gpu-3": "cut",
        "gpu-3-mig-0": "held",
        "gpu-vfio-4": "free",
    }


def test_the_table_sums_up(tmp_path, capsys):
    assert main(["top", "--all", "-f", world(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NODE", "DEVICE", "PRODUCT", "MEMORY", "STATE", "HELD", "BY", "TAINTS"]
    assert "shared (shares 20 of 100)  team-b/part (pod small)" in lines[4]
    assert lines[-1] == "7 devices on 2 nodes, 2 free, 1 tainted"


def test_what_could_not_be_read_is_said_and_makes_the_exit_code(tmp_path, capsys):
    assert main(["top", "--all", "-f", dump(tmp_path, slice_of("n1", [gpu(0)]))]) == 1
    assert "not known: ResourceClaims not in the files" in capsys.readouterr().out


def test_files_without_all_are_refused(tmp_path, capsys):
    assert main(["top", "-f", world(tmp_path)]) == 2
    assert "DRA-CLI-TOP-FILES" in capsys.readouterr().err


def test_a_cluster_is_read_where_no_files_are_named(tmp_path, capsys):
    with SimApiServer() as server:
        server.create("/apis/resource.k8s.io/v1/resourceslices", slice_of("n1", [gpu(0), gpu(1)]))
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        assert main(["top", "--all", "--kubeconfig", str(kubeconfig)]) == 0
        assert {line.method for line in server.requests.all()} == {"GET"}
    assert capsys.readouterr().out.splitlines()[-1] == "2 devices on 1 node, 2 free, 0 tainted"
