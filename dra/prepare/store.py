"""The claim records of a node on disk: `claims/<uid>.json`.

Two plugin processes may run at once. Each keeps what it read in memory and looks at the directory again before it
decides: a file is read anew when its inode, size or times changed. What cannot be read, or is no file, is renamed to
`.corrupt-<n>`, and its claim counts as damaged until it is prepared again or unprepared; the other claims go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dra.api.claim import ClaimRef
from dra.errors import HostError, RecordError
from dra.host.files import ensure_dir, host_error, is_leftover, write_durable
from dra.host.shared_look import SharedLook
from dra.prepare import set_aside
from dra.prepare.holds import Hold, hold_of
from dra.prepare.model import is_safe_uid
from dra.prepare.partitions import holds_no_device
from dra.prepare.record import Record, corrupt_record, decode_record, encode_record
from dra.prepare.record_files import Signature, discard, read_entry, signature_of
from dra.telemetry.log import error_fields, get_logger

# The kernel stamps files with the time of its last tick: two changes within one tick look like one.
_TICK_NANOSECONDS = 20_000_000


@dataclass(frozen=True, slots=True)
class Damage:
    """A claim whose record was lost.

    `devices` are (device, share id or its beginning) as far as something still tells them; `ref` has an empty
    name if nothing tells it.
    """

    ref: ClaimRef
    devices: tuple[tuple[str, str | None], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class _Read:
    """A file as it was read: a record, or why it is none. Neither: damaged, but the disk let it not be renamed."""

    signature: Signature
    record: Record | None
    error: RecordError | None


class RecordStore:
    """Reads and writes records. Thread-safe; a claim's record is written under that claim's lock only.

    `report` hears of each record that was lost. `salvage` gives what else is known of a lost claim: the device
    names of its CDI file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        report: Callable[[Damage], None],
        salvage: Callable[[str], tuple[tuple[str, str | None], ...]],
    ) -> None:
        self._directory = directory
        self._report = report
        self._salvage = salvage
        self._files: dict[str, _Read] = {}
        self._damaged: dict[str, Damage] = {}
        # Claims of which a damaged file was set aside; most have none, and no directory is read for those.
        self._aside: set[str] = set()
        self._seen_at: int | None = None
        self._mutex = threading.Lock()
        self._look = SharedLook(self._refresh)
        self._told: list[Callable[[], None]] = []
        self._log = get_logger()

    def open(self) -> None:
        """Make the directory and read what is there.

        Raises:
            HostError: where the directory can be neither made nor read.
        """
        ensure_dir(self._directory, mode=0o750)
        self.refresh()

    def subscribe(self, told: Callable[[], None]) -> None:
        """Have `told` called after records were written, removed, or found to be others; it must be quick and raise nothing."""
        self._told.append(told)

    def _tell(self) -> None:
        for told in self._told:
            told()

    def path(self, uid: str) -> Path:
        """Give where a claim's record is."""
        return self._directory / f"{uid}.json"

    def refresh(self, *, fully: bool = False) -> None:
        """Take in what another process changed. One stat if nothing did.

        With `fully` each file is looked at, and so also found if it was changed in place, which no driver does.

        Raises:
            HostError: the directory cannot be read.
        """
        if fully:
            self._refresh(fully=True)
        else:
            # Claims that are prepared at once share one look.
            self._look.get()

    def _refresh(self, *, fully: bool = False) -> None:
        found: list[Damage] = []
        with self._mutex:
            try:
                now = time.time_ns()
                try:
                    seen_at = self._directory.stat().st_mtime_ns
                except FileNotFoundError:
                    self._remake(found)
                    seen_at = self._directory.stat().st_mtime_ns
                if seen_at == self._seen_at and not fully:
                    return
                before = dict(self._files)
                self._scan(found)
                changed = before != self._files
                # Only when the last change lies well back does every later one show as a new time; or well ahead, where
                # the clock was set back.
                self._seen_at = seen_at if abs(now - seen_at) > _TICK_NANOSECONDS else None
            except OSError as error:
                raise host_error(error, "read", self._directory) from error
        for damage in found:
            self._report(damage)
        if changed or found:
            self._tell()

    def get(self, uid: str) -> Record | None:
        """Read a claim's record from disk; None if there is none (or it was damaged and set aside just now).

        Raises:
            RecordError: DRA-RECORD-NEWER.
            HostError: the file cannot be read.
        """
        found: list[Damage] = []
        with self._mutex:
            read = self._take_in(uid, found)
        for damage in found:
            self._report(damage)
        if read is not None and read.error is not None:
            raise read.error
        return None if read is None else read.record

    def records(self) -> tuple[Record, ...]:
        """Give the readable records as of the last look, by UID."""
        with self._mutex:
            return tuple(read.record for _, read in sorted(self._files.items()) if read.record is not None)

    def unreadable(self) -> Mapping[str, RecordError]:
        """Give the claims whose record only a newer version of the driver can read."""
        with self._mutex:
            return {uid: read.error for uid, read in self._files.items() if read.error is not None}

    def damaged(self) -> Mapping[str, Damage]:
        """Give the claims whose record was lost."""
        with self._mutex:
            return dict(self._damaged)

    def holds(self, boot_id: str) -> list[Hold]:
        """Give every device held on this node, lost records included."""
        found = []
        for record in self.records():
            if record.holds(boot_id) and not holds_no_device(record):
                found += [hold_of(record, result) for result in record.results if not result.admin_access]
        for damage in self.damaged().values():
            found += [Hold(damage.ref, device, share) for device, share in damage.devices]
        for uid in self.unreadable():
            found += [Hold(ClaimRef("", "", uid), device, share) for device, share in self._salvage(uid)]
        return found

    def put(self, record: Record, *, fsync: bool, fsync_name: bool = False) -> None:
        """Write a record. The claim is damaged no more; the damaged file stays beside it until `remove`.

        With `fsync` a power failure leaves it whole, or the record before it, or none: enough for what a reboot
        undoes. `fsync_name` makes sure that it is this one, for effects that nothing else would find.

        Raises:
            HostError: the disk is full, read-only, ...; the old record is still there.
        """
        uid = record.ref.uid
        data = encode_record(record)
        path = self.path(uid)
        try:
            write_durable(path, data, mode=0o600, fsync=fsync, fsync_name=fsync_name)
        except HostError as error:
            if error.code != "DRA-HOST-MISSING":
                raise
            # Somebody removed the directory under a running plugin.
            ensure_dir(self._directory, mode=0o750)
            write_durable(path, data, mode=0o600, fsync=fsync, fsync_name=fsync_name)
        with self._mutex:
            with contextlib.suppress(OSError):
                self._files[uid] = _Read(signature_of(path.stat()), record, None)
            self._damaged.pop(uid, None)
        self._tell()

    def remove(self, uid: str, *, fsync: bool) -> None:
        """Remove a claim's record and what was set aside of it; fine if there is nothing.

        Raises:
            HostError: as `put`.
        """
        if uid in self._aside:
            try:
                aside = set_aside.of_claim(self._directory, uid)
            except OSError as error:
                raise host_error(error, "read", self._directory) from error
            for path in aside:
                discard(path, fsync=fsync)
            self._aside.discard(uid)
        if os.path.lexists(self.path(uid)):
            discard(self.path(uid), fsync=fsync)
        with self._mutex:
            self._files.pop(uid, None)
            self._damaged.pop(uid, None)
        self._tell()

    def mark_lost(self, uid: str, reason: str) -> None:
        """Count a claim as damaged of which something is there (a CDI file), but no record."""
        with self._mutex:
            if uid in self._damaged or self._is_readable(uid):
                return
            damage = Damage(ClaimRef("", "", uid), self._salvage(uid), reason)
            self._damaged[uid] = damage
        self._report(damage)

    def leftovers(self) -> list[Path]:
        """Give the temporary files of writes that never ended, or have not yet."""
        try:
            with os.scandir(self._directory) as entries:
                return [Path(entry.path) for entry in entries if is_leftover(entry.name, prefix="")]
        except OSError:
            return []

    def remove_strays(self) -> int:
        """Remove what was set aside under names of no claim, once it is old or too much; how many files."""
        return set_aside.remove_strays(self._directory)

    # -- below: called with the mutex held ---------------------------------------------------------------

    def _scan(self, found: list[Damage]) -> None:
        present, changed, corrupt = set(), [], {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                uid = entry.name.removesuffix(".json")
                if uid != entry.name and is_safe_uid(uid):
                    present.add(uid)
                    known = self._files.get(uid)
                    if known is None or known.signature != _look_at(entry):
                        changed.append(uid)
                elif (claim := set_aside.claim_of(entry.name)) is not None:
                    corrupt[claim] = Path(entry.path)
        self._aside = set(corrupt)
        for uid in [uid for uid in self._files if uid not in present]:
            del self._files[uid]
        for uid in changed:
            self._take_in(uid, found)
        for uid, path in corrupt.items():
            # Set aside by an earlier process, which ended before the claim was rebuilt.
            if uid not in present and uid not in self._damaged:
                self._note_damage(uid, path, "its record was set aside earlier", found)
        for uid in [uid for uid in self._damaged if self._is_readable(uid)]:
            del self._damaged[uid]

    def _remake(self, found: list[Damage]) -> None:
        """Make the directory that somebody removed; what was in it is still known, and counts as lost."""
        ensure_dir(self._directory, mode=0o750)
        for uid, read in self._files.items():
            if read.record is not None:
                devices = tuple((r.device, r.share_id) for r in read.record.results if not r.admin_access)
                damage = Damage(read.record.ref, devices, "its directory was removed")
                self._damaged[uid] = damage
                found.append(damage)
        self._files.clear()
        self._aside.clear()

    def _take_in(self, uid: str, found: list[Damage]) -> _Read | None:
        path = self.path(uid)
        known = self._files.get(uid)
        try:
            entry = read_entry(path, unless=None if known is None else known.signature)
        except OSError as error:
            raise host_error(error, "read", path) from error
        if entry is None:
            self._files.pop(uid, None)
            return None
        if known is not None and known.signature == entry.signature:
            return known
        signature, data = entry.signature, entry.data
        try:
            if entry.trouble:
                raise corrupt_record(uid, entry.trouble)
            read = _Read(signature, decode_record(data, uid=uid), None)
        except RecordError as error:
            if error.code == "DRA-RECORD-NEWER":
                read = _Read(signature, None, error)
            else:
                self._set_aside(uid, data, error, found)
                if os.path.lexists(path):
                    self._files[uid] = _Read(signature, None, None)
                return None
        self._files[uid] = read
        return read

    def _set_aside(self, uid: str, data: bytes, error: RecordError, found: list[Damage]) -> None:
        self._files.pop(uid, None)
        target = self.path(uid)
        try:
            target = set_aside.set_aside(target, uid)
        except HostError as problem:
            # A read-only disk: the file stays, the claim is damaged all the same.
            self._log.error("record_not_set_aside", **error_fields(problem))
        else:
            self._aside.add(uid)
        digest = hashlib.sha256(data).hexdigest()
        self._log.error(
            "record_corrupt", **error_fields(error), path=str(target), bytes=len(data), sha256=digest
        )
        self._note_damage(uid, target, error.message, found)

    def _note_damage(self, uid: str, path: Path, reason: str, found: list[Damage]) -> None:
        try:
            entry = read_entry(path)
        except OSError:
            entry = None
        told = set_aside.told_by(b"" if entry is None else entry.data, uid)
        devices = tuple(dict.fromkeys(self._salvage(uid))) or tuple((device, None) for device in told.devices)
        damage = Damage(told.ref, devices, reason)
        self._damaged[uid] = damage
        found.append(damage)

    def _is_readable(self, uid: str) -> bool:
        read = self._files.get(uid)
        return read is not None and (read.record is not None or read.error is not None)


def _look_at(entry: os.DirEntry[str]) -> Signature | None:
    try:
        return signature_of(entry.stat(follow_symlinks=False))
    except OSError:
        return None  # whoever reads it finds out why
