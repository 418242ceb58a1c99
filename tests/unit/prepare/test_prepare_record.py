"""The record's file format, and a store that outlives damage and other versions."""

from __future__ import annotations

import json
import os

import pytest
from prepare_fakes import DRIVER, POOL, result, uid_of

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer, OpaqueConfig
from dra.errors import RecordError
from dra.prepare.model import PreparedDevice
from dra.prepare.record import JournalEntry, Record, checksum, decode_record, encode_record
from dra.values import Quantity

UID = uid_of(1)
FULL = Record(
    ref=ClaimRef("default", "one", UID),
    state="prepared",
    boot_id="boot-1",
    results=(
        AllocatedDevice("a/b", DRIVER, POOL, "gpu-0", "share", True, {"memory": Quantity.parse("8Gi")}),
    ),
    configs=(OpaqueConfig("FromClass", ("a",), DRIVER, {"kind": "GpuConfig", "x": {"y": [1, None]}}),),
    consumers=(Consumer("pods", "p", "u"),),
    journal=(JournalEntry("cdi-file", {"file": "/x"}, "applied"), JournalEntry("other", {}, "pending")),
    devices=(PreparedDevice(("a",), POOL, "gpu-0", ("k=v",), "share"),),
    cdi_file="/x",
    cdi_sha256="00",
)


def rewrite(data: bytes, change) -> bytes:
    content = json.loads(data)
    change(content)
    content["checksum"] = checksum(content)
    return json.dumps(content).encode()


def test_a_record_is_read_as_it_was_written():
    assert decode_record(encode_record(FULL), uid=UID) == FULL


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_a_cut_file_is_corrupt(cut):
    with pytest.raises(RecordError) as caught:
        decode_record(encode_record(FULL)[:cut], uid=UID)
    assert caught.value.code == "DRA-RECORD-CORRUPT"
    assert UID in str(caught.value)


def test_a_changed_character_is_found_by_the_checksum():
    data = encode_record(FULL).replace(b'"device":"gpu-0"', b'"device":"gpu-1"', 1)
    with pytest.raises(RecordError, match="checksum"):
        decode_record(data, uid=UID)


@pytest.mark.parametrize(
    "data", [b"[]", b"null", b"\x00" * 100, b"\xff\xfe", b"[" * 100_000, b'{"version": 1}']
)
def test_what_is_no_record_is_corrupt(data):
    with pytest.raises(RecordError) as caught:
        decode_record(data, uid=UID)
    assert caught.value.code == "DRA-RECORD-CORRUPT"


@pytest.mark.parametrize("key", ["claim", "state"])
def test_a_record_without_what_it_cannot_do_without_is_corrupt(key):
    with pytest.raises(RecordError):
        decode_record(rewrite(encode_record(FULL), lambda c: c.pop(key)), uid=UID)


def test_a_record_of_another_claim_is_corrupt():
    with pytest.raises(RecordError, match="it is of claim"):
        decode_record(encode_record(FULL), uid=uid_of(2))


@pytest.mark.fault("F9")
def test_an_older_record_without_later_fields_is_read():
    optional = ["configs", "consumers", "effects", "devices", "cdi", "boot_id", "checksum", "readable_from"]
    content = json.loads(encode_record(FULL))
    for key in optional:
        del content[key]
    for item in content["results"]:
        del item["consumed_capacity"], item["admin_access"], item["share_id"]
    record = decode_record(json.dumps(content).encode(), uid=UID)
    assert record.results == (AllocatedDevice("a/b", DRIVER, POOL, "gpu-0"),)
    assert record.journal == ()
    assert not record.holds("boot-1")


@pytest.mark.fault("F9")
def test_fields_of_a_newer_version_survive_a_rewrite_at_every_depth():
    def newer(content):
        content["version"] = 7
        content["new_top"] = {"deep": [1]}
        content["claim"]["new_claim"] = "x"
        content["results"][0]["new_result"] = None
        content["effects"][1]["new_effect"] = {"a": 1}
        content["cdi"]["new_cdi"] = True

    record = decode_record(rewrite(encode_record(FULL), newer), uid=UID)
    assert record.state == "prepared"
    again = json.loads(encode_record(record))
    assert again["new_top"] == {"deep": [1]}
    assert again["claim"]["new_claim"] == "x"
    assert again["results"][0]["new_result"] is None
    assert again["effects"][1]["new_effect"] == {"a": 1}
    assert again["cdi"]["new_cdi"] is True
    assert decode_record(encode_record(record), uid=UID) == record


def test_fields_of_a_newer_version_of_an_effect_that_is_struck_go_with_it():
    data = rewrite(encode_record(FULL), lambda c: c["effects"][1].update(new_effect=1))
    record = decode_record(data, uid=UID)
    left = json.loads(encode_record(record.without_entry(record.journal[1])))["effects"]
    assert left == [{"kind": "cdi-file", "args": {"file": "/x"}, "state": "applied"}]


def test_a_record_that_only_a_newer_version_may_read_says_so_and_is_no_damage():
    with pytest.raises(RecordError) as caught:
        decode_record(rewrite(encode_record(FULL), lambda c: c.update(version=9, readable_from=9)), uid=UID)
    assert caught.value.code == "DRA-RECORD-NEWER"
    assert "Upgrade" in str(caught.value)


def test_an_unknown_state_of_an_effect_is_checked_like_a_pending_one():
    data = rewrite(encode_record(FULL), lambda c: c["effects"][0].update(state="half-way"))
    assert decode_record(data, uid=UID).journal[0].state == "pending"


# -- on disk --------------------------------------------------------------------------------------------------

DAMAGES = [b"", b"\x00" * 64, b'{"version": 1, "claim"', os.urandom(256), b"[]"]


@pytest.mark.parametrize("data", DAMAGES, ids=["empty", "zeros", "cut", "random", "list"])
@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.fault("F8")
def test_a_damaged_record_is_set_aside_reported_and_rebuilt(node, data, restarted):
    ref, other = node.claim(1, "gpu-0"), node.claim(2, "gpu-1")
    first, second = node.prepared(ref), node.prepared(other)
    node.record_file(ref).write_bytes(data)
    if restarted:
        node.restart()

    assert node.prepared(other) == second
    node.the_engine.store.refresh(fully=True)
    aside = node.record_file(ref).with_name(f"{ref.uid}.json.corrupt-1")
    assert aside.read_bytes() == data
    (notice,) = node.notices
    assert notice.reason == "ClaimRecordLost"
    assert ref.uid in notice.message

    node.notices.clear()
    report = node.janitor().sweep()
    assert report.rebuilt == [ref.uid]
    assert [n.reason for n in node.notices] == ["ClaimRecordRebuilt"]
    assert node.notices[0].ref == ref
    assert node.record(ref)["state"] == "prepared"
    assert node.prepared(ref) == first
    node.check_invariants()
    assert node.unprepare(ref) is None
    assert node.unprepare(other) is None
    assert node.files() == []


def test_the_devices_of_a_lost_record_stay_held_until_it_is_rebuilt(node):
    ref, rival = node.claim(1, "gpu-0", "gpu-2"), node.claim(2, "gpu-2")
    node.prepared(ref)
    node.record_file(ref).write_bytes(b"garbage")
    node.api.claims.pop((ref.namespace, ref.name))
    node.restart()

    error = node.refused(rival)
    assert error.code == "DRA-DEVICE-HELD"
    assert ref.uid in str(error)
    assert "lost" in str(error)
    # Also for the next process, which finds only what was set aside.
    node.restart()
    assert node.refused(rival).code == "DRA-DEVICE-HELD"

    assert node.janitor().sweep().released == [ref.uid]
    assert node.files() == []
    node.prepared(rival)


def test_the_lost_record_of_a_monitoring_claim_does_not_end_who_uses_the_device(node):
    user, monitor = node.claim(1, "gpu-0"), node.claim(2, result("gpu-0", adminAccess=True))
    first = node.prepared(user)
    node.prepared(monitor)
    node.record_file(monitor).write_bytes(b"")
    node.restart()
    assert node.prepared(user) == first


def test_without_a_cdi_file_a_damaged_record_itself_tells_what_it_held(node):
    ref, rival = node.claim(1, "gpu-3"), node.claim(2, "gpu-3")
    node.prepared(ref)
    node.record_file(ref).write_bytes(node.record_file(ref).read_bytes()[:-20])
    node.cdi_file(ref).unlink()
    node.restart()
    error = node.refused(rival)
    assert error.code == "DRA-DEVICE-HELD"
    assert "default/claim-1" in str(error)


def test_a_share_of_a_lost_record_does_not_keep_other_shares_away(node):
    ref = node.claim(1, result("gpu-0", shareID="aaaaaaaa-1111-4111-8111-111111111111"))
    node.prepared(ref)
    node.record_file(ref).write_bytes(b"")
    node.restart()
    node.prepared(node.claim(2, result("gpu-0", shareID="bbbbbbbb-1111-4111-8111-111111111111")))
    same = node.claim(3, result("gpu-0", shareID="aaaaaaaa-2222-4111-8111-111111111111"))
    assert node.refused(same).code == "DRA-DEVICE-HELD"


def test_a_claim_with_a_damaged_record_is_unprepared_without_the_api(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.record_file(ref).write_bytes(b"garbage")
    node.restart()
    node.api.hang()
    assert node.unprepare(ref) is None
    assert node.files() == []
    node.api.release()
    node.prepared(node.claim(2, "gpu-0"))


def test_a_record_that_is_damaged_again_is_set_aside_beside_the_first(node):
    ref = node.claim(1, "gpu-0")
    for _ in range(2):
        node.prepared(ref)
        node.record_file(ref).write_bytes(b"garbage")
        node.the_engine.store.refresh(fully=True)
    names = [path.name for path in (node.state_dir / "claims").iterdir()]
    assert sorted(names) == [f"{ref.uid}.json.corrupt-{n}" for n in (1, 2)]
    node.prepared(ref)
    node.unprepare(ref)
    assert node.files() == []


def test_a_record_of_a_newer_version_is_left_alone_and_holds_its_devices(node):
    ref, rival = node.claim(1, "gpu-0"), node.claim(2, "gpu-0")
    node.prepared(ref)
    data = rewrite(node.record_file(ref).read_bytes(), lambda c: c.update(version=9, readable_from=9))
    node.record_file(ref).write_bytes(data)
    node.restart()
    assert node.refused(ref).code == "DRA-RECORD-NEWER"
    assert node.unprepare(ref).code == "DRA-RECORD-NEWER"
    assert node.refused(rival).code == "DRA-DEVICE-HELD"
    node.janitor().sweep()
    assert node.record_file(ref).read_bytes() == data
    assert node.cdi_file(ref).exists()


def test_unknown_fields_survive_a_repair_and_an_unprepare_that_stops_half_way(node):
    ref = node.claim(1, "gpu-0")
    node.prepared(ref)
    node.record_file(ref).write_bytes(
        rewrite(node.record_file(ref).read_bytes(), lambda c: c.update(version=2, later={"x": 1}))
    )
    node.restart()
    node.renderer.salt = "-new"
    node.prepared(ref)
    assert node.record(ref)["later"] == {"x": 1}


def test_what_another_process_wrote_is_seen_before_deciding(node):
    mine, theirs = node.claim(1, "gpu-0"), node.claim(2, "gpu-0")
    other = node.new_engine()
    for _ in range(5):
        assert not isinstance(other.prepare([theirs])[theirs.uid], Exception)
        assert node.refused(mine).code == "DRA-DEVICE-HELD"
        assert node.prepared(theirs)
        assert other.unprepare([theirs]) == {theirs.uid: None}
        node.prepared(mine)
        assert other.unprepare([mine]) == {mine.uid: None}


def test_other_files_in_the_directory_are_no_records(node):
    for name in ("notes.txt", "a.b.json", ".hidden.json", "x.json.bak"):
        (node.state_dir / "claims" / name).write_text("?")
    node.restart()
    assert node.the_engine.store.records() == ()
    assert node.notices == []
    node.prepared(node.claim(1, "gpu-0"))
