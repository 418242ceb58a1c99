"""NVIDIA's checkpoint: every form is read as it was written, damage is seen, and what we write has their checksums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_fakes import uid_of

from dra.errors import RecordError
from dra.prepare.imports.checkpoint import (
    RELEASES,
    Checkpoint,
    CheckpointClaim,
    checksum,
    encode_checkpoint,
    parse_checkpoint,
)

DATA = Path(__file__).parents[2] / "data/nvidia-checkpoints"


def data_of(release):
    return (DATA / f"{release}.json").read_bytes()


@pytest.mark.parametrize("release", RELEASES)
def test_every_form_is_read(release):
    found = parse_checkpoint(data_of(release))
    assert found.version == (1 if release == "v25.3" else 2)
    assert bool(found.boot_id) == (release in ("v0.4", "v0.5"))
    claims = {claim.uid: claim for claim in found.claims}
    assert set(claims) == {uid_of(n) for n in range(1, 5 if release == "v25.3" else 6)}
    whole, sliced, mps, mig = (claims[uid_of(n)].groups[0] for n in range(1, 5))
    assert (whole.devices[0].kind, whole.devices[0].device) == ("gpu", "gpu-0")
    assert whole.devices[0].uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert sliced.time_slice_applied is (True if release in ("v0.4", "v0.5") else None)
    assert mps.mps_daemon == f"{uid_of(3)}-0a1b2" and not whole.mps_daemon
    assert mig.devices[0].uuid == "MIG-00000000-0000-5000-8000-000000000007"
    old = release in ("v25.3", "v25.8")
    assert mig.devices[0].instances == (None if old else (7, 0))
    assert mig.devices[0].device == ("gpu-2-mig-19-6-1" if old else "gpu-2-mig-1g10gb-19-6")
    assert [entry["name"] for entry in claims[uid_of(2)].status["reservedFor"]] == ["pod-b", "pod-c"]
    if release != "v25.3":
        assert not claims[uid_of(5)].completed


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_written_is_read_again(release):
    found = parse_checkpoint(data_of(release))
    again = parse_checkpoint(encode_checkpoint(found, release=release))
    assert [(c.uid, c.completed, c.groups) for c in again.claims] == [
        (c.uid, c.completed, c.groups) for c in found.claims
    ]
    assert again.boot_id == found.boot_id


def test_the_bytes_are_those_of_the_releases_own_code_apart_from_parts_of_the_status_that_nobody_reads():
    def without(data):
        top = json.loads(data)
        for part in (top["v1"], top.get("v2") or {}):
            part.pop("checksum", None)
            for claim in (part.get("preparedClaims") or {}).values():
                for key in ("nodeSelector", "allocationTimestamp"):
                    (claim["status"].get("allocation") or {}).pop(key, None)
        top.pop("checksum")
        return json.dumps(top)

    for release in RELEASES:
        theirs = data_of(release)
        assert without(encode_checkpoint(parse_checkpoint(theirs), release=release)) == without(theirs), (
            release
        )


def test_an_empty_checkpoint_is_byte_for_byte_theirs():
    # Recorded from the driver's own code.
    theirs = b'{"checksum":1083090442,"v1":{},"v2":{"checksum":4166374854}}'
    assert encode_checkpoint(Checkpoint(()), release="v0.5") == theirs
    assert parse_checkpoint(theirs).claims == ()


def test_a_damaged_v2_is_served_by_v1():
    data = data_of("v0.5").replace(b'"nodeBootID":"1', b'"nodeBootID":"2')
    found = parse_checkpoint(data)
    assert found.version == 1 and len(found.claims) == 4 and all(claim.completed for claim in found.claims)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}x", b'{"checksum":1,"v1":{}}', b"\xff\xfe"])
def test_what_is_no_checkpoint_is_refused(data):
    with pytest.raises(RecordError) as caught:
        parse_checkpoint(data)
    assert caught.value.code == "DRA-CHECKPOINT-CORRUPT"


@given(st.data(), st.sampled_from(RELEASES))
def test_no_damage_gives_other_devices(data, release):
    """A changed byte is seen, or changes nothing that counts."""
    whole = data_of(release)
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[place]))
    try:
        found = parse_checkpoint(whole[:place] + bytes([byte]) + whole[place + 1 :])
    except RecordError:
        return
    expected = {claim.uid: claim for claim in parse_checkpoint(whole).claims}
    for claim in found.claims:
        if found.version == 1:
            # Not in v1: who is half prepared.
            assert claim.groups == expected[claim.uid].groups
        else:
            assert claim == expected[claim.uid]


@given(st.integers(0, 4000), st.sampled_from(RELEASES))
def test_a_cut_file_is_refused(length, release):
    whole = data_of(release)
    with pytest.raises(RecordError):
        parse_checkpoint(whole[: min(length, len(whole) - 1)])


def test_the_checksum_is_that_of_kubernetes_checkpoint_manager():
    # FNV-1a over the dump of the bytes; the figure is from the driver's own code.
    assert checksum('{"checksum":0,"v1":{}}') == 1083090442


@pytest.mark.parametrize("release", RELEASES)
def test_parameters_with_characters_that_go_escapes(release):
    status = {"allocation": {"devices": {"config": [
        {"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"a": "<&>\u2028é"}}}]}}}  # fmt: skip
    claim = CheckpointClaim(uid_of(9), completed=True, groups=(), status=status)
    data = encode_checkpoint(replace(Checkpoint((claim,)), boot_id="b"), release=release)
    assert b"\\u003c\\u0026\\u003e\\u2028" in data and "é".encode() in data
    assert parse_checkpoint(data).claims[0].status == status
