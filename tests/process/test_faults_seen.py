"""The checks of the invariants find what they are for: without it, the tests of faults would prove nothing."""

from __future__ import annotations

import json

import pytest

from tests.process.harness import DRIVER, NODE, RESOURCE_API
from tests.process.invariants import (
    check_exclusive,
    check_files,
    check_partitions,
    check_slices,
    expected,
    published,
)

KIND = f"k8s.{DRIVER}/claim"


def put(node, uid, device="gpu-0", *, state="prepared", share=None, admin=False, cdi=True):
    """Write a record and a CDI file as the driver does."""
    name = f"{uid}-{device}"
    record = {
        "claim": {"uid": uid},
        "state": state,
        "boot_id": node.machine.control.state.boot_id,
        "results": [{"device": device, "share_id": share, "admin_access": admin}],
        "devices": [{"device": device, "cdi_ids": [f"{KIND}={name}"]}],
    }
    for path in (node.record_file(uid), node.cdi_file(uid)):
        path.parent.mkdir(parents=True, exist_ok=True)
    node.record_file(uid).write_text(json.dumps(record))
    if cdi:
        node.cdi_file(uid).write_text(json.dumps({"kind": KIND, "devices": [{"name": name}]}))


def test_two_holders_are_seen_and_monitoring_and_shares_are_none(node):
    put(node, "a")
    put(node, "b", admin=True)
    check_exclusive(node)
    put(node, "c", "gpu-1", share="1")
    put(node, "d", "gpu-1", share="2")
    check_exclusive(node)
    put(node, "e", "gpu-1")
    with pytest.raises(AssertionError):
        check_exclusive(node)
    node.record_file("e").unlink()
    put(node, "f")
    with pytest.raises(AssertionError):
        check_exclusive(node)


def test_files_that_do_not_go_together_are_seen(node):
    put(node, "a")
    check_files(node)
    for spoil in (
        lambda: put(node, "b", cdi=False),
        lambda: put(node, "a", state="preparing"),
        lambda: node.record_file("a").unlink(),
        lambda: node.cdi_file("a").write_text(json.dumps({"kind": KIND, "devices": []})),
        lambda: node.cdi_file("a").with_name(".x.dra-tmp").write_text(""),
    ):
        spoil()
        with pytest.raises(AssertionError):
            check_files(node)
        for path in (*node.record_file("a").parent.iterdir(), *node.cdi_file("a").parent.iterdir()):
            path.unlink()
        put(node, "a")
        check_files(node)


def test_an_instance_of_nobody_is_seen(node):
    check_partitions(node)
    node.machine.control.set_mig_mode(0, enabled=True)
    node.machine.control.create_mig(0, "1g.10gb")
    with pytest.raises(AssertionError):
        check_partitions(node)
    node.partitions = {node.machine.profile.gpus[0].uuid: 1}
    check_partitions(node)


def test_slices_that_are_not_the_machine_are_seen(node):
    owner = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node.uid}
    devices = [
        {"name": name, "attributes": {"uuid": {"string": uuid}}}
        for name, (uuid, _) in sorted(expected(node).items())
    ]
    obj = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "s", "ownerReferences": [owner]},
        "spec": {
            "driver": DRIVER,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    node.api.create(f"{RESOURCE_API}/resourceslices", obj)
    check_slices(node, within_seconds=0)
    node.machine.control.lose_gpu(2)
    with pytest.raises(AssertionError):
        check_slices(node, within_seconds=0)
    node.machine.control.recover_gpu(2)
    check_slices(node, within_seconds=0)
    node.machine.control.remove_gpu(2)
    with pytest.raises(AssertionError):
        check_slices(node, within_seconds=0)
    node.machine.control.add_gpu(2)
    node.api.create(
        f"{RESOURCE_API}/resourceslices", {**obj, "metadata": {"name": "t", "ownerReferences": [owner]}}
    )
    assert published(node) == {}
