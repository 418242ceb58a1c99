"""What goes into a checkpoint for the way back, and what cannot."""

from __future__ import annotations

import pytest
from prepare_fakes import uid_of

from dra.errors import HostError
from dra.inventory.model import Inventory, ScanProblem
from dra.prepare.imports.export import export_records, write_export
from dra.prepare.record import JournalEntry


def exported(node):
    return export_records(node.the_engine.store.records(), node.inventory, boot_id=node.boot_id)


def test_prepared_claims_go_in_with_their_hardware(node):
    node.prepared(node.claim(1, "gpu-0", "gpu-3"))
    found = exported(node)
    (claim,) = found.checkpoint.claims
    assert [device.uuid for device in claim.groups[0].devices] == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-00000003-0000-0000-0000-000000000000",
    ]
    assert claim.groups[0].devices[0].cdi_ids == (f"k8s.gpu.nvidia.com/claim={uid_of(1)}-gpu-0",)
    assert claim.status["reservedFor"][0]["name"] == "pod-a"
    assert found.refused == ()


def test_what_their_driver_could_not_undo_is_refused_with_the_reason(node):
    node.prepared(node.claim(1, "gpu-0"))
    node.prepared(node.claim(2, "gpu-1"))
    record = node.the_engine.store.get(uid_of(2))
    from dataclasses import replace

    with_mps = replace(record, journal=(*record.journal, JournalEntry("mps-daemon", {}, "applied")))
    gone = replace(node.the_engine.store.get(uid_of(1)), state="unpreparing")
    found = export_records([gone, with_mps], node.inventory, boot_id=node.boot_id)
    assert found.claims == ()
    assert dict(found.refused) == {
        "default/claim-1": "it is unpreparing",
        "default/claim-2": "it has an MPS daemon of ours",
    }
    lost = replace(record, results=(replace(record.results[0], device="gpu-99"),))
    assert "gpu-99" in export_records([lost], node.inventory, boot_id=node.boot_id).refused[0][1]
    blind = Inventory(
        problems=(ScanProblem("node", "DRA-NVML-LIBRARY-NOT-FOUND", "no library under /wrong"),)
    )
    ((_, why),) = export_records([record], blind, boot_id=node.boot_id).refused
    assert "no GPU was: no library under /wrong" in why


def test_a_time_slice_is_told_to_the_group_that_has_it(node):
    from dataclasses import replace

    node.prepared(node.claim(1, "gpu-0", "gpu-1"))
    record = node.the_engine.store.get(uid_of(1))
    entry = JournalEntry(
        "time-slice", {"gpu": "GPU-00000001-0000-0000-0000-000000000000", "interval": "Long"}, "applied"
    )
    found = export_records(
        [replace(record, journal=(entry, *record.journal))], node.inventory, boot_id=node.boot_id
    )
    groups = found.checkpoint.claims[0].groups
    assert [(g.time_slice_applied, [d.device for d in g.devices]) for g in groups] == [
        (True, ["gpu-1"]),
        (None, ["gpu-0"]),
    ]


def test_records_are_put_by_after_the_checkpoint_is_there_and_nothing_is_written_over(node):
    node.prepared(node.claim(1, "gpu-0"))
    kept = write_export(exported(node), node.state_dir, release="v0.4")
    assert (node.state_dir / "checkpoint.json").exists() and kept.name == "claims.exported-1"
    with pytest.raises(HostError) as caught:
        write_export(exported(node), node.state_dir, release="v0.4")
    assert caught.value.code == "DRA-CHECKPOINT-EXISTS"


def test_claims_of_an_earlier_boot_stay_out(node):
    node.prepared(node.claim(1, "gpu-0"))
    assert export_records(node.the_engine.store.records(), node.inventory, boot_id="other").claims == ()
