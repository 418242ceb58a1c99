"""Device metadata of claims that no record tells of: a lost record's effects are known to nobody who could undo them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dra.errors import DraError
from dra.host.files import is_leftover, read_bytes
from dra.prepare.engine import Engine
from dra.prepare.imports.names import CHECKPOINT
from dra.prepare.metadata import MetadataFiles
from dra.prepare.model import is_safe_uid
from dra.telemetry.log import error_fields, get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of metadata or its CDI spec; the claim's UID, None where the file does not tell it."""

    path: Path
    uid: str | None


def find_orphan_metadata(engine: Engine, files: MetadataFiles | None) -> list[Path]:
    """Give files of claims that have no record, half-written files, and empty directories. Never raises.

    A claim whose record was lost keeps its own until it is rebuilt or released. What is given may be written at this
    moment, as by a new claim of the same name: whoever removes it waits until it stays unchanged.
    """
    if files is None:
        return []
    # Files first: prepare writes the record before them, unprepare removes them before the record.
    found = [*_specs(files), *_metadata(files)]
    orphans = [*_unfinished(files), *_empty(files)]
    if not found:
        return orphans
    store = engine.store
    try:
        store.refresh(fully=True)
        # A claim that NVIDIA's driver prepared and that was not taken over.
        checkpoint = read_bytes(engine.settings.state_dir / CHECKPOINT) or b""
    except DraError as error:
        log.warning("metadata_not_swept", **error_fields(error))
        return orphans
    known = {record.ref.uid for record in store.records()}
    known |= store.damaged().keys() | store.unreadable().keys()
    orphans += [
        each.path
        for each in found
        if each.uid is None or (each.uid not in known and each.uid.encode() not in checkpoint)
    ]
    return orphans


def _specs(files: MetadataFiles) -> list[_Found]:
    pattern = re.compile(re.escape(files.spec_prefix) + r"(?P<uid>[^_]+)_.+\.json")
    matches = ((name, pattern.fullmatch(name)) for name in _names(files.cdi_root))
    return [
        _Found(files.cdi_root / name, match["uid"])
        for name, match in matches
        if match and is_safe_uid(match["uid"])
    ]


def _metadata(files: MetadataFiles) -> list[_Found]:
    return [
        _Found(path, _uid_in(path))
        for claim in _names(files.root)
        for request in _names(files.root / claim)
        if (path := files.root / claim / request / files.file_name).is_file()
    ]


def _uid_in(path: Path) -> str | None:
    try:
        uid = json.loads(read_bytes(path) or b"null")["metadata"]["uid"]
    except (DraError, ValueError, KeyError, TypeError):
        return None
    return uid if isinstance(uid, str) and is_safe_uid(uid) else None


def _unfinished(files: MetadataFiles) -> Iterator[Path]:
    names = (name for name in _names(files.cdi_root) if is_leftover(name, prefix=files.spec_prefix))
    return (files.cdi_root / name for name in names)


def _empty(files: MetadataFiles) -> Iterator[Path]:
    for claim in _names(files.root):
        requests = _names(files.root / claim)
        empty = [request for request in requests if not _names(files.root / claim / request)]
        yield from (files.root / claim / request for request in empty)
        # The one above it goes next, once that has stayed empty too.
        if not requests:
            yield files.root / claim


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except OSError:
        return []
