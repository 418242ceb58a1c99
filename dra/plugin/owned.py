"""What the claim records say that this driver made of the hardware, for the inventory."""

from __future__ import annotations

from dra.errors import DraError
from dra.inventory.ownership import Owned
from dra.prepare.mig_marks import MarkDirectory
from dra.prepare.partitions import MODE_KIND, made_partitions
from dra.prepare.store import RecordStore
from dra.telemetry.log import error_fields, get_logger

log = get_logger()


def owned_by(store: RecordStore, boot_id: str, marks: MarkDirectory | None = None) -> Owned:
    """Give the partitions and MIG modes that are ours, of all instances on this node, lost records' included.

    A disk that does not answer gives what was read last: a partition that is ours must not become somebody else's.
    """
    try:
        store.refresh()
    except DraError as error:
        log.warning("records_not_readable", **error_fields(error))
    records = store.records()
    modes = (
        str(entry.args.get("gpu", ""))
        for record in records
        if record.boot_id == boot_id
        for entry in record.journal
        if entry.kind == MODE_KIND
    )
    told = Owned(frozenset(made.device for made in made_partitions(records, boot_id)), frozenset(modes))
    return told if marks is None else told | marks.read().owned
