"""Making the node match one claim, under the claim's locks: look, plan, carry out.

This is all that a first prepare, a repeated one and a repair do: the plan says what has to be there, and the journal
makes what is not there. Nothing here reads the API.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dra.api.claim import ClaimRef, ClaimView
from dra.errors import DraError, StackError
from dra.inventory.model import Inventory
from dra.prepare import steps
from dra.prepare.batch import fields_of
from dra.prepare.effects import Effect, WriteCdi
from dra.prepare.imports import stands_as_imported
from dra.prepare.journal import Journal
from dra.prepare.mig_view import look_at_partitions
from dra.prepare.model import PreparedDevice
from dra.prepare.node_state import NodeState
from dra.prepare.passthrough.look import is_outdated, look_at_functions
from dra.prepare.passthrough.model import KIND as VFIO_KIND
from dra.prepare.plan import NodeView, Plan, lacks_device, plan_prepare
from dra.prepare.record import Record
from dra.prepare.setup import EnginePorts
from dra.prepare.sharing.model import OpenEffect, SharingContext, open_effects
from dra.prepare.timing import APPLY, PLAN, RENDER, timed
from dra.telemetry.log import get_logger
from dra.values import PciAddress


class Reconciler:
    """Brings about what a claim needs. Thread-safe for different claims."""

    def __init__(self, state: NodeState, ports: EnginePorts, journal: Journal) -> None:
        self._state = state
        self._ports = ports
        self._journal = journal
        self._log = get_logger()

    def inventory_for(self, view: ClaimView) -> Inventory:
        """Give the hardware for a claim: looked at again where the claim's devices are not in it. Before any lock."""
        inventory, fresh = self._ports.inventory(), self._ports.fresh_inventory
        if fresh is not None and (
            lacks_device(view, inventory) or is_outdated(view, inventory, self._ports.passthrough)
        ):
            return fresh()
        return inventory

    def bring_about(
        self, ref: ClaimRef, view: ClaimView, inventory: Inventory, previous: Record | None
    ) -> tuple[PreparedDevice, ...]:
        """Make the node match; give the kubelet's answer.

        Args:
            ref: the claim.
            view: what it was allocated.
            inventory: the hardware.
            previous: its record as of now.

        Raises:
            DraError: it cannot be prepared; a first prepare leaves nothing behind.
        """
        boot_id = self._state.settings.boot_id
        if previous is not None and self._is_between_drivers(previous):
            self._journal.undo(previous, prefix=steps.ROLLBACK)
            self._state.store.remove(ref.uid, fsync=False)
            previous, inventory = None, (self._ports.fresh_inventory or self._ports.inventory)()
        # Who holds its devices already is not asked again: a lost record that may hold them too must not end it.
        holder = previous is not None and previous.is_complete(boot_id) and previous.results == view.results
        if previous is not None and holder and stands_as_imported(previous, self._state.cdi.path(ref.uid)):
            return previous.devices
        began = time.perf_counter()
        try:
            plan = self._plan(ref, view, inventory, previous=previous, holder=holder)
        except DraError as error:
            if (rival := error.fields.get("holder_uid")) is not None:
                self._ports.conflict(str(rival))
            if isinstance(error, StackError) and previous is not None and holder and self._stands(previous):
                # No driver answers, it may be replaced at this moment. That takes nothing from containers that run.
                self._log.warning(
                    "claim_answered_as_prepared", claim=str(ref), claim_uid=ref.uid, **fields_of(error)
                )
                return previous.devices
            raise
        self._ports.timing(PLAN, time.perf_counter() - began)
        for text in plan.warnings:
            self._log.warning("config_ignored", claim=str(ref), claim_uid=ref.uid, reason=text)
        self._ports.step(steps.PLANNED)
        return self._carry_out(ref, view, plan, previous)

    def _plan(
        self, ref: ClaimRef, view: ClaimView, inventory: Inventory, *, previous: Record | None, holder: bool
    ) -> Plan:
        state = self._state
        node = NodeView(
            inventory,
            state.cdi.kind,
            holds=() if holder else state.store.holds(state.settings.boot_id),
            strategies=self._ports.strategies,
            mig=look_at_partitions(view, inventory, state=state, ports=self._ports),
            settings=self._ports.settings(),
            shares=self._ports.shares,
            passthrough=look_at_functions(view, inventory, previous, state=state, ports=self._ports),
        )
        # One look at the journals for all that ask.
        context = SharingContext(ref, functools.cache(self._open_effects), inventory.cuda_version)
        return plan_prepare(view, node, context, holder=holder)

    def _carry_out(
        self, ref: ClaimRef, view: ClaimView, plan: Plan, previous: Record | None
    ) -> tuple[PreparedDevice, ...]:
        path = self._state.cdi.path(ref.uid)
        spec = WriteCdi(path, files=self._state.cdi, uid=ref.uid, content=lambda: self._render(ref.uid, plan))
        metadata, devices = (
            ((), plan.devices) if self._ports.metadata is None else self._ports.metadata.add(view, plan)
        )
        effects: list[Effect] = [*plan.effects, *metadata, spec]
        wanted = Record(
            ref=ref,
            state="preparing",
            boot_id=self._state.settings.boot_id,
            results=view.results,
            configs=view.configs,
            consumers=view.reserved_for,
            devices=devices,
            cdi_file=str(path),
        )
        try:
            with timed(self._ports.timing, APPLY):
                return self._journal.carry_out(wanted, effects, previous=previous).devices
        finally:
            if plan.changed_hardware:
                self._ports.layout_changed()

    def _is_between_drivers(self, record: Record) -> bool:
        """Whether a process died between taking a function from one driver and giving it to another.

        No inventory shows such a function; it is given back first.
        """
        boot_id, node = self._state.settings.boot_id, self._ports.passthrough
        if node is None or record.is_complete(boot_id) or not record.holds(boot_id):
            return False
        return any(
            not node.function(PciAddress.parse(str(entry.args["pci"]))).driver
            for entry in record.journal
            if entry.kind == VFIO_KIND
        )

    def _stands(self, record: Record) -> bool:
        """Whether what was prepared is there as far as files tell, where the driver cannot be asked."""
        if any(entry.state != "applied" for entry in record.journal if entry.kind != WriteCdi.kind):
            return False
        spec = self._state.cdi.content(record.ref.uid, sha256=record.cdi_sha256)
        return spec is not None and not self._ports.renderer.missing_files(spec)

    def _open_effects(self) -> Sequence[OpenEffect]:
        self._state.store.refresh()
        return open_effects(self._state.store.records(), self._state.settings.boot_id)

    def _render(self, uid: str, plan: Plan) -> Mapping[str, Any]:
        with timed(self._ports.timing, RENDER):
            return self._ports.renderer.render(
                uid, plan.complete_targets(), driver_version=plan.driver_version
            )
