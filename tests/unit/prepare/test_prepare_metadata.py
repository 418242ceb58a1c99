"""Device metadata: what containers find in their files, and that nothing of it is left."""

from __future__ import annotations

import json
import os

import pytest
from prepare_fakes import Killed, make_claim, result, uid_of

from dra.api.claim import POD_CLAIM_NAME, ClaimRef
from dra.prepare.metadata import MetadataFiles, MetadataPlanner, WriteMetadata
from dra.prepare.sweep.leftovers import LEFTOVER_SECONDS

DRIVER = "gpu.nvidia.com"


class Published:
    """The attributes that are published now."""

    def __init__(self) -> None:
        self.version = "580.95.05"

    def of(self, device):
        return {
            "uuid": {"string": f"GPU-{device}"},
            "index": {"int": 3},
            "driverVersion": {"version": self.version},
            "resource.kubernetes.io/pciBusID": {"string": "0000:10:00.0"},
        }


@pytest.fixture
def published(node):
    found = Published()
    use(node, found)
    return found


def use(node, found, *, enabled=True):
    files = MetadataFiles(
        DRIVER, state_dir=node.state_dir, cdi_root=node.cdi_root, host_path=lambda path: f"/host{path}"
    )
    node.ports["metadata"] = MetadataPlanner(files, found.of, enabled=enabled)
    node.restart()


def file_of(node, name="claim-1", request="gpu"):
    return node.state_dir / "dra-device-metadata" / f"default_{name}" / request / "metadata.json"


def read(path):
    return json.loads(path.read_text())


def left(node):
    """What lies about of metadata."""
    root = node.state_dir / "dra-device-metadata"
    names = [path.name for path in node.cdi_root.glob("*metadata*")]
    return names + [str(path.relative_to(root)) for path in root.rglob("*")]


def test_each_request_has_a_file_and_the_first_device_its_id(node, published):
    ref = node.claim(
        1,
        result("gpu-0", request="big"),
        result("gpu-1", request="big"),
        result("gpu-2", request="small/alt"),
    )
    devices = node.prepared(ref)
    ids = {device.device: device.cdi_ids[1:] for device in devices}
    assert ids == {
        "gpu-0": (f"{DRIVER}/metadata={ref.uid}_big",), "gpu-1": (), "gpu-2": (f"{DRIVER}/metadata={ref.uid}_small",),
    }  # fmt: skip
    found = read(file_of(node, request="big"))
    assert found == {
        "apiVersion": "metadata.resource.k8s.io/v1alpha1", "kind": "DeviceMetadata",
        "metadata": {"name": "claim-1", "namespace": "default", "uid": ref.uid, "generation": 1},
        "requests": [
            {"name": "big", "devices": [
                {"driver": DRIVER, "pool": devices[0].pool, "name": name, "attributes": published.of(name)}
                for name in ("gpu-0", "gpu-1")
            ]},
        ],
    }  # fmt: skip
    assert [each["name"] for each in read(file_of(node, request="small"))["requests"]] == ["small/alt"]
    assert file_of(node, request="big").stat().st_mode & 0o777 == 0o644
    assert file_of(node, request="big").parent.stat().st_mode & 0o777 == 0o755
    spec = read(node.cdi_root / f"{DRIVER}_metadata_{ref.uid}_big.json")
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", f"{DRIVER}/metadata")
    (device,) = spec["devices"]
    assert device["name"] == f"{ref.uid}_big"
    assert device["containerEdits"] == {
        "mounts": [
            {
                "hostPath": f"/host{file_of(node, request='big')}",
                "containerPath": "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/claim-1/big/gpu.nvidia.com-metadata.json",
                "options": ["ro", "bind"],
            }
        ]
    }
    assert node.unprepare(ref) is None
    assert left(node) == []


def test_a_claim_from_a_template_is_found_by_the_pods_name_for_it_also_without_the_api(node, published):
    ref = node.claim(1, "gpu-0")
    claim = make_claim(ref, result("gpu-0"))
    claim["metadata"]["annotations"] = {POD_CLAIM_NAME: "my-gpu"}
    node.api.put(claim)
    node.prepared(ref)
    spec = node.cdi_root / f"{DRIVER}_metadata_{ref.uid}_gpu.json"
    place = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/my-gpu/gpu/gpu.nvidia.com-metadata.json"
    assert place in spec.read_text()
    assert read(file_of(node))["podClaimName"] == "my-gpu"
    spec.unlink()
    node.api.hang()
    node.prepared(ref)
    assert place in spec.read_text()
    node.api.release()


def test_what_changed_is_written_in_place_with_the_next_generation(node, published):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    with file_of(node).open() as mounted:
        node.prepared(ref)
        assert json.load(mounted)["metadata"]["generation"] == 1
        published.version = "590.1"
        node.prepared(ref)
        mounted.seek(0)
        found = json.load(mounted)
    assert found["metadata"]["generation"] == 2
    assert found["requests"][0]["devices"][0]["attributes"]["driverVersion"] == {"version": "590.1"}


@pytest.mark.parametrize(
    "harm",
    [lambda path: path.unlink(), lambda path: path.write_text("{"), lambda path: path.write_text("[]")],
)
def test_a_file_that_was_removed_or_spoilt_is_written_again(node, published, harm):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    harm(file_of(node))
    node.prepared(ref)
    assert read(file_of(node))["requests"]


def test_without_the_option_there_is_nothing_and_what_there_is_goes_with_its_claim(node, published):
    old, new = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    node.prepared(old)
    use(node, published, enabled=False)
    assert len(node.prepared(new)[0].cdi_ids) == 1
    assert node.unprepare(new) is None
    assert left(node) != []
    assert node.unprepare(old) is None
    assert left(node) == []


def test_a_newer_claim_of_the_same_name_keeps_its_file(node, published):
    old = node.claim(1, "gpu-0", name="c")
    node.prepared(old)
    new = node.claim(2, "gpu-1", name="c")
    node.prepared(new)
    assert node.unprepare(old) is None
    assert read(file_of(node, name="c"))["metadata"] == {
        "name": "c", "namespace": "default", "uid": new.uid, "generation": 1,
    }  # fmt: skip
    assert node.unprepare(new) is None
    assert left(node) == []


def test_a_crash_at_any_step_leaves_nothing_once_it_is_unprepared(node, published):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.unprepare(ref)
    steps = list(dict.fromkeys(node.steps))
    assert len(steps) > 5
    for step in steps:
        node.kill_at = step
        try:
            node.prepare(ref)
            node.unprepare(ref)
        except Killed:
            pass
        node.restart()
        node.prepared(ref)
        assert read(file_of(node))["metadata"]["uid"] == ref.uid
        assert node.unprepare(ref) is None
        assert left(node) == []


def test_after_a_reboot_the_spec_is_there_again(node, published):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.reboot()
    assert not list(node.cdi_root.glob("*metadata*"))
    node.prepared(ref)
    assert list(node.cdi_root.glob("*metadata*"))


def test_a_damaged_record_cannot_make_it_remove_other_files(node, published):
    files = MetadataFiles(DRIVER, state_dir=node.state_dir, cdi_root=node.cdi_root)
    good = {"namespace": "a", "claim": "b", "uid": "u", "request": "r", "podClaim": ""}
    for key in good:
        with pytest.raises(ValueError, match="no names"):
            WriteMetadata(files, {**good, key: f"..{os.sep}x"})
    WriteMetadata(files, good).undo()  # of what is not there


def lose_record(node, ref):
    node.record_file(ref).unlink()
    node.cdi_file(ref).unlink()
    node.restart()


def sweep_until_nothing_moves(node, janitor):
    """What belongs to nobody is looked at a second time, and its empty directory after that."""
    for _ in range(6):
        janitor.sweep()
        node.now += LEFTOVER_SECONDS


def test_what_a_lost_record_told_of_is_swept(node, published):
    lost, kept = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    node.prepared(lost)
    node.prepared(kept)
    lose_record(node, lost)
    janitor = node.janitor()
    janitor.sweep()
    assert file_of(node).exists()
    sweep_until_nothing_moves(node, janitor)
    assert not file_of(node).parent.parent.exists()
    assert file_of(node, "claim-2").exists()
    assert [path.name for path in node.cdi_root.glob("*metadata*")] == [
        f"{DRIVER}_metadata_{kept.uid}_gpu.json"
    ]
    node.unprepare(kept)
    assert left(node) == []


def test_a_new_claim_of_the_same_name_keeps_what_it_wrote_over_the_lost_ones(node, published):
    node.prepared(node.claim(1, "gpu-0"))
    lose_record(node, ClaimRef("default", "claim-1", uid_of(1)))
    janitor = node.janitor()
    janitor.sweep()
    node.now += LEFTOVER_SECONDS
    ref = node.claim(9, "gpu-0", name="claim-1")
    node.prepared(ref)
    sweep_until_nothing_moves(node, janitor)
    assert read(file_of(node))["metadata"]["uid"] == ref.uid
    assert [path.name for path in node.cdi_root.glob("*metadata*")] == [
        f"{DRIVER}_metadata_{ref.uid}_gpu.json"
    ]


def test_a_claim_whose_record_is_damaged_keeps_its_own_until_it_is_rebuilt(node, published):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.record_file(ref).write_bytes(b"garbage")
    node.restart()
    node.api.down = True
    janitor = node.janitor()
    sweep_until_nothing_moves(node, janitor)
    assert file_of(node).exists()
    assert node.cdi_root.joinpath(f"{DRIVER}_metadata_{ref.uid}_gpu.json").exists()
    node.api.down = False
    assert janitor.sweep().rebuilt == [ref.uid]
    node.unprepare(ref)
    assert left(node) == []


def test_claims_that_nvidias_driver_has_keep_theirs_and_other_files_are_left(node, published):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    lose_record(node, ref)
    others = [
        node.cdi_root / f"{DRIVER}_metadata_no-request.json",
        node.cdi_root / f"other.driver_metadata_{ref.uid}_gpu.json",
        node.cdi_root / f"{DRIVER}_metadata_{ref.uid}_gpu.json.bak",
    ]
    for path in others:
        path.write_text("{}")
    checkpoint = node.state_dir / "checkpoint.json"
    checkpoint.write_text(f'{{"v2": {{"preparedClaims": {{"{ref.uid}": 1}}}}}}')
    janitor = node.janitor()
    sweep_until_nothing_moves(node, janitor)
    assert file_of(node).exists()
    checkpoint.unlink()
    sweep_until_nothing_moves(node, janitor)
    assert sorted(left(node)) == sorted(path.name for path in others)


def test_half_written_files_go_once_nobody_can_be_writing_them(node, published):
    node.prepared(node.claim(1, "gpu-0"))
    half = file_of(node, "claim-9")
    half.parent.mkdir(parents=True)
    half.write_text('{"metadata": {"uid": ')
    spec = node.cdi_root / f".{DRIVER}_metadata_{'0' * 8}_gpu.json.abc.dra-tmp"
    spec.write_text("{}")
    janitor = node.janitor()
    janitor.sweep()
    assert half.exists()
    assert spec.exists()
    sweep_until_nothing_moves(node, janitor)
    assert not half.parent.parent.exists()
    assert not spec.exists()
    assert file_of(node).exists()
