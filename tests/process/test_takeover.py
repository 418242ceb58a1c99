"""A node that NVIDIA's driver served is taken over, with live claims; and is given back."""

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
from tests.process.conftest import call
from tests.process.harness import DRIVER, NODE, wait_until

KIND = "k8s.gpu.nvidia.com/claim"


def leave_as_nvidias_driver(node, *claims, release="v0.4"):
    """Write what NVIDIA's driver has on disk for claims that it prepared: its checkpoint and its CDI files."""
    boot_id = (node.root / "proc/sys/kernel/random/boot_id").read_text().strip()
    entries = []
    for claim in claims:
        uid, status = claim["metadata"]["uid"], claim["status"]
        devices = []
        for result in status["allocation"]["devices"]["results"]:
            name = result["device"]
            uuid = next(s.uuid for s in node.machine.profile.gpus if f"gpu-{s.minor}" == name)
            devices.append(
                CheckpointDevice(
                    "gpu", (result["request"],), NODE, name, (f"{KIND}={uid}-{name}",), uuid=uuid
                )
            )
        listed = "".join(
            f"- name: {uid}-{device.device}\n  containerEdits:\n    deviceNodes:\n"
            f"    - path: /dev/nvidia{device.device.removeprefix('gpu-')}\n"
            for device in devices
        )
        node.cdi_file(uid).parent.mkdir(parents=True, exist_ok=True)
        node.cdi_file(uid).write_text(
            f"---\ncdiVersion: 0.5.0\nkind: {KIND}\ndevices:\n{listed}containerEdits:\n  env:\n"
            "  - NVIDIA_VISIBLE_DEVICES=void\n"
        )
        entries.append(CheckpointClaim(uid, True, (DeviceGroup(tuple(devices)),), status))
    node.state_dir.mkdir(parents=True, exist_ok=True)
    data = encode_checkpoint(Checkpoint(tuple(entries), boot_id=boot_id), release=release)
    (node.state_dir / "checkpoint.json").write_bytes(data)
    (node.state_dir / "nvidia-cdi-hook").write_text("")


def checkpoints(node):
    return sorted(path.name for path in node.state_dir.glob("checkpoint.json*"))


@pytest.mark.parametrize("killed", [False, True], ids=["at-once", "killed-half-way"])
def test_a_node_with_a_checkpoint_of_nvidias_driver_and_two_live_claims_is_taken_over(node, killed):
    one, two = node.claim("one", "gpu-0"), node.claim("two", "gpu-1", "gpu-2")
    uids = {claim["metadata"]["uid"] for claim in (one, two)}
    leave_as_nvidias_driver(node, one, two)
    kubelet = node.kubelet()
    if killed:
        crashed = node.daemon(crash_at=f"import:record-written:{min(uids)}")
        crashed.wait(within_seconds=60)
        assert checkpoints(node) == ["checkpoint.json"] and node.records() == {min(uids)}
    daemon = node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    # The claims stay: their records hold the devices, the CDI files are as they were, the checkpoint is retired.
    assert checkpoints(node) == ["checkpoint.json.imported-1"]
    assert node.records() == node.cdi_files() == uids
    assert all(node.cdi_file(uid).read_text().startswith("---") for uid in uids)
    assert (node.state_dir / "nvidia-cdi-hook").exists()
    node.check_consistent()
    other = node.claim("other", "gpu-2")
    (refused,) = call(connection.prepare, [other])
    assert "DRA-DEVICE-HELD" in refused.error
    # The names, which the checkpoint did not have, come from the API.
    wait_until(lambda: {r["claim"]["name"] for r in node.read_records().values()} == {"one", "two"})
    # The kubelet prepares one again (it was restarted): same device, and the file is ours now.
    (again,) = call(connection.prepare, [one])
    assert [device.device_name for device in again.devices] == ["gpu-0"]
    assert json.loads(node.cdi_file(one["metadata"]["uid"]).read_text())["kind"] == KIND
    # Unprepare works, for the one that was prepared again and for the one that was not, and frees the devices.
    assert [entry.error for entry in call(connection.unprepare, [one, two])] == ["", ""]
    (entry,) = call(connection.prepare, [other])
    assert entry.error == "" and entry.devices[0].device_name == "gpu-2"
    call(connection.unprepare, [other])
    assert (node.records(), node.cdi_files(), node.leftovers()) == (set(), set(), [])
    assert daemon.logged("checkpoint_imported")


def test_and_it_is_given_back(node, capsys):
    one, two = node.claim("one", "gpu-0"), node.claim("two", "gpu-1", "gpu-2")
    kubelet, daemon = node.kubelet(), node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    call(connection.prepare, [one, two])
    words = [
        "export-checkpoint",
        "--simulate",
        node.profile,
        "--host-root",
        str(node.root),
        "--node-name",
        NODE,
    ]
    # While the driver serves, nothing is handed over.
    assert main(words) == 2
    assert "DRA-EXPORT-DRIVER-RUNS" in capsys.readouterr().err
    assert daemon.terminate(within_seconds=10) == 0
    assert main([*words, "--release", "v0.4"]) == 0
    found = parse_checkpoint((node.state_dir / "checkpoint.json").read_bytes())
    held = {claim.uid: [d.device for g in claim.groups for d in g.devices] for claim in found.claims}
    assert held == {one["metadata"]["uid"]: ["gpu-0"], two["metadata"]["uid"]: ["gpu-1", "gpu-2"]}
    gpus = {slot.minor: slot.uuid for slot in node.machine.profile.gpus}
    assert {d.uuid for c in found.claims for g in c.groups for d in g.devices} == {gpus[n] for n in (0, 1, 2)}
    assert node.records() == set() and (node.state_dir / "claims.exported-1").is_dir()
    assert len(node.cdi_files()) == 2
    # A second time there is something of NVIDIA's, which is not written over.
    (node.state_dir / "claims").mkdir()
    assert main(words) == 1
    (node.state_dir / "claims").rmdir()
    # And back once more: the driver imports what it exported.
    node.daemon()
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    assert node.records() == {one["metadata"]["uid"], two["metadata"]["uid"]}
    assert [entry.error for entry in call(connection.unprepare, [one, two])] == ["", ""]
    assert (node.records(), node.cdi_files()) == (set(), set())
