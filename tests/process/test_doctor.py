"""`dra doctor` on a node whose driver runs: the claim's ladder, and what breaks it."""

from __future__ import annotations

import json

from dra.cli.main import main
from dra.diagnose.doctor.model import EXIT_CODES
from tests.process.harness import NODE


def doctor(node, capsys, *words):
    capsys.readouterr()
    code = main([
        "doctor", *words, "--simulate", node.profile, "--host-root", str(node.root), "--node-name", NODE,
        "--kubeconfig", str(node.kubeconfig), "-o", "json",
    ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["exitCode"] == code
    return report, [finding["code"] for rung in report["rungs"] for finding in rung["findings"]]


def test_a_prepared_claim_is_well_and_three_ways_to_break_it_are_three_findings(clean, capsys):
    """Q3 of the troubleshooting questions."""
    node = clean.node
    claim = node.claim("well", "gpu-1")
    uid = claim["metadata"]["uid"]
    report, _ = doctor(node, capsys, "claim/well")
    assert report["brokenRung"] == "record" and report["exitCode"] == EXIT_CODES["record"]
    clean.prepare(claim)
    report, found = doctor(node, capsys, "claim/well")
    assert (report["exitCode"], found) == (0, []), report
    names = [
        "claim",
        "allocation",
        "reservation",
        "placement",
        "record",
        "cdi-file",
        "device-files",
        "driver-files",
    ]
    assert [rung["name"] for rung in report["rungs"]] == names
    # The node itself: nothing of this claim is wrong.
    report, _ = doctor(node, capsys)
    assert report["brokenRung"] is None
    assert any(rung["text"].startswith("1 claim prepared") for rung in report["rungs"])
    try:
        break_and_look(node, capsys, uid)
    finally:
        clean.prepare(claim)
        assert clean.unprepare(claim) == [""]
        node.delete_claim("well")


def break_and_look(node, capsys, uid):
    (library,) = [
        path for path in node.root.rglob("libcuda.so.*") if path.name.count(".") > 3 and not path.is_symlink()
    ]
    kept = library.read_bytes()
    library.unlink()
    report, found = doctor(node, capsys, "claim/well")
    assert report["brokenRung"] == "driver-files" and "DRA-DRIVER-FILE-GONE" in found
    library.write_bytes(kept)
    device = node.root / "dev/nvidia1"
    numbers = device.lstat()
    real = device.is_char_device()
    device.unlink()
    (node.root / "dev/nvidia7").rename(device)
    report, found = doctor(node, capsys, "claim/well")
    assert report["brokenRung"] == "device-files" and "DRA-DEVICE-NODE-STALE" in found
    device.rename(node.root / "dev/nvidia7")
    node.machine.control.make_device_nodes()
    assert device.exists() and device.is_char_device() == real and device.lstat().st_rdev == numbers.st_rdev
    spec = node.cdi_file(uid)
    for _ in range(20):
        # The driver writes it again within seconds, which may be before the doctor has looked.
        spec.unlink(missing_ok=True)
        report, found = doctor(node, capsys, "claim/well")
        if report["brokenRung"] is not None:
            break
    assert report["brokenRung"] == "cdi-file" and found == ["DRA-CDI-FILE-MISSING"]


def test_a_claim_without_device_points_to_explain(clean, capsys):
    node = clean.node
    node.api.create(
        "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
        {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "poor", "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}},
        },
    )  # fmt: skip
    report, found = doctor(node, capsys, "claim/poor")
    assert report["brokenRung"] == "allocation" and found == ["DRA-CLAIM-NOT-ALLOCATED"]
    node.api.request("DELETE", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/poor")
    capsys.readouterr()
    report, found = doctor(node, capsys, "claim/none")
    assert report["brokenRung"] == "claim" and found == ["DRA-CLAIM-NOT-FOUND"]
