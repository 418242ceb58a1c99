"""The kubelet's two calls, and what the driver itself does with claims: the way into this room.

Each claim of a call is on its own: it fails or succeeds, waits and hangs without the others. What is done with one
claim is in `dra.prepare.prepare_claim` and `dra.prepare.unprepare_claim`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from dra.api.claim import ClaimRef
from dra.errors import DraError, HostError
from dra.inventory.model import Inventory
from dra.prepare.attempts import Attempts
from dra.prepare.batch import for_each
from dra.prepare.journal import Journal
from dra.prepare.mig_orphans import find_orphans, release_partitions
from dra.prepare.model import PrepareOutcome
from dra.prepare.node_state import NodeState, gpus_of
from dra.prepare.partitions import MadePartition, made_partitions
from dra.prepare.passthrough.orphans import find_orphan_functions, release_functions
from dra.prepare.prepare_claim import ClaimPreparer
from dra.prepare.reconcile import Reconciler
from dra.prepare.record import Record
from dra.prepare.setup import EnginePorts, EngineSettings
from dra.prepare.unprepare_claim import ClaimUnpreparer
from dra.prepare.workers import WorkerPool
from dra.telemetry.log import error_fields, get_logger

__all__ = ["Engine", "EnginePorts", "EngineSettings"]


class Engine:
    """Prepares and unprepares claims. Thread-safe; a second process on the same directories is expected."""

    def __init__(self, settings: EngineSettings, ports: EnginePorts) -> None:
        self._ports = ports
        self._state = state = NodeState(settings, ports)
        self.settings = settings
        self.cdi, self.store, self.locks, self.marks = state.cdi, state.store, state.locks, state.marks
        self.passthrough_marks = state.passthrough_marks
        self.metadata_files = None if ports.metadata is None else ports.metadata.files
        journal = Journal(state.store, state.catalog, boot_id=settings.boot_id, step=ports.step)
        attempts = Attempts()
        self._preparer = ClaimPreparer(state, ports, Reconciler(state, ports, journal), attempts)
        self._unpreparer = ClaimUnpreparer(state, ports, journal, attempts)
        # Each verb has threads of its own: an API that hangs holds up prepares, which must not keep pods from ending.
        self._preparing = WorkerPool("claim", limit=settings.parallel_claims)
        self._unpreparing = WorkerPool("claim-end", limit=settings.parallel_claims)
        self._log = get_logger()

    def inventory(self) -> Inventory:
        """Give the hardware as of the last look."""
        return self._ports.inventory()

    def partitions(self) -> tuple[MadePartition, ...]:
        """Give the partitions that were made for claims, or may have been, in this boot."""
        return made_partitions(self.store.records(), self.settings.boot_id)

    def open(self) -> None:
        """Make the directories, read the records, and remove the CDI specs of an earlier boot.

        A disk that refuses does not stop the driver: it is logged, and tried again at each call.
        """
        try:
            self._state.open()
        except HostError as error:
            self._log.error("state_not_readable", **error_fields(error))

    def prepare(
        self, refs: Sequence[ClaimRef], *, within_seconds: float | None = None
    ) -> dict[str, PrepareOutcome]:
        """Prepare claims; give each UID its devices, or what is wrong. Never raises for one of them.

        Args:
            refs: the claims.
            within_seconds: how long the caller waits. A claim whose GPU is not free in time for that is refused while
                somebody still listens. What has begun is brought to its end, so that the next call finds it done.

        Source: NodePrepareResources of KEP-4381: each UID has an entry, the second answer is as the first.
        """
        give_up_at = None if within_seconds is None else time.monotonic() + within_seconds
        return for_each(refs, lambda ref: self._preparer.prepare(ref, give_up_at), pool=self._preparing)

    def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, DraError | None]:
        """Unprepare claims; give each UID None or what is wrong. Unknown claims are fine. No API, no NVML."""
        return for_each(refs, self._unpreparer.unprepare, pool=self._unpreparing)

    def unprepare_if(
        self, uid: str, expected: Record | None, reason: str, *, wait_seconds: float = 0.5
    ) -> bool:
        """Unprepare a claim unless its record is no longer `expected`; whether it was done.

        Raises:
            DraError: what keeps it from being unprepared.
        """
        return self._unpreparer.unprepare_if(uid, expected, reason, wait_seconds=wait_seconds)

    def name_claim(self, expected: Record, ref: ClaimRef, *, wait_seconds: float = 0.5) -> None:
        """Write down what a claim is called of which only the UID was known, unless its record changed meanwhile."""
        with self._state.locked(expected.ref, gpus_of(expected), "naming", wait_seconds):
            self.store.refresh()
            if self.store.get(ref.uid) == expected:
                self.store.put(replace(expected, ref=ref), fsync=False)

    def restore_spec(self, expected: Record, *, wait_seconds: float = 0.5) -> bool:
        """Write the CDI spec of a prepared claim again if it is gone; whether that was needed. No API.

        No prepare call does it: the kubelet makes none for a container that it restarts, nor for the second pod
        of a claim. Nothing is done if the record is no longer `expected`.

        Raises:
            DraError: what keeps it from being written.
        """
        return self._preparer.restore_spec(expected, wait_seconds=wait_seconds)

    def orphans(self) -> tuple[set[str], frozenset[str]]:
        """Give the devices, and the GPUs in MIG mode, that were changed by us and of which no record tells."""
        partitions, modes = find_orphans(self._state)
        return partitions.keys() | find_orphan_functions(self._state).keys(), modes

    def release_orphans(self, claimed: Collection[str], *, wait_seconds: float = 0.5) -> list[str]:
        """Undo what we did to the hardware and no record tells of, unless it is among the `claimed` devices.

        Partitions are destroyed, functions get their driver back; gives the names of the devices.
        """
        mig, passthrough = self._ports.mig, self._ports.passthrough
        gone: list[str] = []
        if mig is not None:
            gone += release_partitions(self._state, mig, self.inventory(), claimed, wait_seconds=wait_seconds)
        if passthrough is not None:
            gone += release_functions(self._state, passthrough, claimed, wait_seconds=wait_seconds)
        if gone:
            self._ports.layout_changed()
        return gone
