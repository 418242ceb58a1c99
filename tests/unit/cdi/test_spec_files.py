"""The files in the CDI directory: ours written whole, others never touched."""

import json
import os

import pytest

from dra.cdi.files import SpecFiles, kind_in
from dra.errors import BugError, ClaimError, HostError
from dra.host.files import temporary_name
from tests.unit.cdi.node import UID, put

OTHER = "00000000-1111-4222-8333-444455556666"
SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "k8s.gpu.nvidia.com/claim",
    "devices": [{"name": f"{UID}-gpu-0", "containerEdits": {"env": ["A=b"]}}],
    "containerEdits": {},
}
NVIDIAS = """---
cdiVersion: 0.5.0
containerEdits:
    env:
        - kind=fake
devices:
    - containerEdits: {}
      name: 11111111-gpu-0
kind: k8s.gpu.nvidia.com/claim
"""


@pytest.fixture
def files(tmp_path):
    return SpecFiles(tmp_path / "cdi")


def test_a_spec_has_nvidia_s_file_name_and_can_be_read_by_everybody(files, tmp_path):
    old = os.umask(0o077)
    try:
        path = files.write(UID, SPEC)
    finally:
        os.umask(old)
    assert path == tmp_path / f"cdi/k8s.gpu.nvidia.com-claim_{UID}.yaml"
    assert path.stat().st_mode & 0o777 == 0o644
    assert json.loads(path.read_bytes()) == SPEC
    assert not files.needs_rewrite(path, SPEC)


def test_a_directory_that_was_removed_is_made_again(files, tmp_path):
    files.write(UID, SPEC)
    (tmp_path / "cdi" / f"k8s.gpu.nvidia.com-claim_{UID}.yaml").unlink()
    (tmp_path / "cdi").rmdir()
    assert files.write(UID, SPEC).exists()


def test_an_invalid_spec_is_not_written_and_the_old_file_stays(files):
    path = files.write(UID, SPEC)
    before = path.read_bytes()
    with pytest.raises(BugError, match="DRA-CDI-INVALID"):
        files.write(UID, {**SPEC, "devices": []})
    assert path.read_bytes() == before


def test_a_directory_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    put(tmp_path / "cdi", "in the way")
    with pytest.raises(HostError, match=r"DRA-HOST-MISSING.*cdi"):
        SpecFiles(tmp_path / "cdi").write(UID, SPEC)


def test_a_file_that_reads_back_otherwise_is_an_error(files, monkeypatch):
    monkeypatch.setattr("dra.cdi.files.read_bytes", lambda path: b"{}")
    with pytest.raises(HostError, match=r"DRA-CDI-READ-BACK.*does not hold"):
        files.write(UID, SPEC)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes().replace(b"0.5.0", b"0.7.0")),
        lambda path: path.chmod(0o600),
    ],
)
def test_a_file_that_was_changed_needs_to_be_written_again(files, damage):
    path = files.write(UID, SPEC)
    damage(path)
    assert files.needs_rewrite(path, SPEC)
    files.write(UID, SPEC)
    assert not files.needs_rewrite(path, SPEC)


def test_removing_twice_is_fine(files):
    files.write(UID, SPEC)
    assert files.remove(UID)
    assert not files.remove(UID)
    assert files.list_ours() == ()


@pytest.mark.parametrize("uid", ["", "../../etc/passwd", "a/b", "a.b", ".hidden", "a" * 200])
def test_a_uid_that_cannot_be_part_of_a_name_is_refused(files, uid):
    for call in (files.path, files.remove, lambda uid: files.write(uid, SPEC)):
        with pytest.raises(ClaimError, match="DRA-CLAIM-UID-FORM"):
            call(uid)


def test_orphans_are_ours_by_name_and_by_kind_and_nothing_else(files, tmp_path):
    live = files.write(UID, SPEC)
    orphan = files.write(OTHER, SPEC)
    cdi = tmp_path / "cdi"
    taken_over = put(cdi / "k8s.gpu.nvidia.com-claim_22222222-1111-4222-8333-444455556666.yaml", NVIDIAS)
    empty = put(cdi / "k8s.gpu.nvidia.com-claim_33333333-1111-4222-8333-444455556666.yaml", "")
    foreign = [
        put(cdi / "nvidia.yaml", "kind: nvidia.com/gpu\n"),
        put(
            cdi / "k8s.compute-domain.nvidia.com-claim_1.yaml", "kind: k8s.compute-domain.nvidia.com/claim\n"
        ),
        put(cdi / f"k8s.gpu.nvidia.com-claim_{OTHER}.json", json.dumps(SPEC)),
        put(
            cdi / "k8s.gpu.nvidia.com-claim_other-kind.yaml",
            json.dumps({**SPEC, "kind": "k8s.gpu.example.com/claim"}),
        ),
        put(cdi / "k8s.gpu.nvidia.com-claim_no-kind.yaml", "something else\n"),
        put(cdi / "k8s.gpu.nvidia.com-claim_a b.yaml", json.dumps(SPEC)),
        put(cdi / "mine.yaml", json.dumps(SPEC)),
    ]
    (cdi / "k8s.gpu.nvidia.com-claim_dir.yaml").mkdir()
    (cdi / "k8s.gpu.nvidia.com-claim_link.yaml").symlink_to(live)
    assert {file.path for file in files.list_ours()} == {live, orphan, taken_over, empty}
    assert all(path.exists() for path in foreign)


def test_a_write_that_never_ended_leaves_no_spec(tmp_path):
    files = SpecFiles(tmp_path)
    put(temporary_name(files.path(UID)), b'{"cdiVersion"')
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.glob("*.yaml"))
    assert files.list_ours() == ()


def test_a_directory_that_is_not_there_has_no_files(tmp_path):
    files = SpecFiles(tmp_path / "absent")
    assert files.list_ours() == ()
    assert not files.remove(UID)


def test_another_driver_s_claims_are_not_ours(tmp_path):
    ours, other = SpecFiles(tmp_path), SpecFiles(tmp_path, driver="gpu.example.com")
    path = other.write(UID, {**SPEC, "kind": "k8s.gpu.example.com/claim"})
    assert path.name == f"k8s.gpu.example.com-claim_{UID}.yaml"
    assert ours.list_ours() == ()
    assert [file.path for file in other.list_ours()] == [path]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", ""),
        (NVIDIAS.encode(), "k8s.gpu.nvidia.com/claim"),
        (b'kind: "a/b"\n', "a/b"),
        (b"devices:\n  kind: a/b\n", ""),
        (b"[1]", ""),
        (b'{"kind": 1}', ""),
        (b"\xff\xfe", ""),
    ],
)
def test_the_kind_is_read_from_json_and_from_nvidia_s_yaml(data, kind):
    assert kind_in(data) == kind
