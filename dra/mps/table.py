"""The keeper's table on disk: what daemons there should be, and which processes they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dra.errors import HostError
from dra.host.files import read_bytes, write_durable
from dra.prepare.sharing.mps_model import DaemonSpec
from dra.telemetry.log import get_logger

log = get_logger()

VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One daemon. `pid` 0: none was started, or that is not known. `ready`: it has its limits."""

    spec: DaemonSpec
    pid: int = 0
    started: int = 0
    ready: bool = False
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that the plugin should tell the owner of a claim. `number` counts up, over restarts of the keeper too."""

    number: int
    daemon: str
    reason: str
    message: str

    def as_json(self) -> dict[str, Any]:
        """Give it for the protocol and the table."""
        return {
            "number": self.number,
            "daemon": self.daemon,
            "reason": self.reason,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Content:
    """All of the table. `heard` is the number up to which the plugin has told what happened."""

    boot_id: str
    rows: Mapping[str, Row] = field(default_factory=dict)
    happenings: tuple[Happening, ...] = ()
    last: int = 0
    heard: int = 0

    def with_row(self, row: Row) -> Content:
        """Give it with a row put in."""
        return replace(self, rows={**self.rows, row.spec.id: row})

    def without(self, daemon_id: str) -> Content:
        """Give it without a row."""
        return replace(self, rows={key: row for key, row in self.rows.items() if key != daemon_id})


def load(path: Path, boot_id: str) -> Content:
    """Read the table; after a reboot, or where it is damaged, it starts anew.

    Raises:
        HostError: it is there and cannot be read.
    """
    data = read_bytes(path)
    if data is None:
        return Content(boot_id)
    try:
        found = _decode(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        # The newest only: a disk that damages it again and again is not filled by it.
        aside = path.with_name(f"{path.name}.corrupt")
        log.warning("mps_table_damaged", path=str(path), aside=str(aside), error=repr(error))
        try:
            path.replace(aside)
        except OSError as problem:
            log.warning("mps_table_not_set_aside", path=str(path), error=str(problem))
        return Content(boot_id)
    if found.boot_id != boot_id:
        # Nothing of it runs any more; the claims are prepared again.
        return Content(boot_id, last=found.last, heard=found.last)
    return found


def save(path: Path, content: Content) -> None:
    """Write it. A power failure may lose it: it ends the daemons too.

    Raises:
        HostError: the disk refuses.
    """
    data = {
        "version": VERSION,
        "boot_id": content.boot_id,
        "daemons": [
            {"spec": row.spec.as_json(), "pid": row.pid, "started": row.started, "ready": row.ready,
             "restarts": row.restarts}
            for row in content.rows.values()
        ],
        "events": [each.as_json() for each in content.happenings],
        "last": content.last,
        "heard": content.heard,
    }  # fmt: skip
    write_durable(path, json.dumps(data, indent=1).encode(), mode=0o600, fsync=False)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Give the rows for somebody else than the keeper; nothing where the table says nothing."""
    try:
        data = read_bytes(path)
        return () if data is None else tuple(_decode(json.loads(data)).rows.values())
    except (HostError, ValueError, KeyError, TypeError):
        return ()


def _decode(data: Any) -> Content:
    rows = (
        Row(
            DaemonSpec.from_json(item["spec"]),
            int(item["pid"]),
            int(item["started"]),
            bool(item["ready"]),
            int(item.get("restarts", 0)),
        )
        for item in data["daemons"]
    )
    return Content(
        str(data["boot_id"]),
        {row.spec.id: row for row in rows},
        tuple(_happenings(data.get("events", ()))),
        int(data.get("last", 0)),
        int(data.get("heard", 0)),
    )


def _happenings(items: Iterable[Any]) -> Iterable[Happening]:
    for item in items:
        yield Happening(int(item["number"]), str(item["daemon"]), str(item["reason"]), str(item["message"]))
