"""The inventory that lives: looks again periodically and on request, and tells who asked what changed."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from dra.host.paths import HostPaths
from dra.host.pci import device_dir
from dra.inventory.diff import InventoryDiff, diff
from dra.inventory.keep import Kept, plan_inventory
from dra.inventory.model import NODE, Inventory, ScanProblem
from dra.telemetry.log import get_logger
from dra.telemetry.threads import start_thread
from dra.values import PciAddress

Subscriber = Callable[[Inventory, InventoryDiff], None]

INTERVAL_SECONDS = 30.0
# While there is no GPU: a driver container may come up at any moment.
HUNT_SECONDS = 5.0
JITTER = 0.1


class LiveInventory:
    """A thread that keeps `current` true. Never raises; without a driver it is empty, with a problem.

    Args:
        scan: looks once (`Scanner.scan`).
        interval_seconds, hunt_seconds: how often, with and without GPUs.
        in_use: names of devices that claims hold; such GPUs stay listed when they vanish.
        on_bus: whether a GPU's PCI device is still the NVIDIA driver's.
        tidy: called in between; may close an idle session and gives the seconds after which to call it again.
        jitter: gives a number in [-1, 1] by which the interval is varied, so that a fleet does not march.
    """

    def __init__(
        self,
        scan: Callable[[], Inventory],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        hunt_seconds: float = HUNT_SECONDS,
        in_use: Callable[[], Collection[str]] = tuple,
        on_bus: Callable[[PciAddress], bool] = lambda _address: False,
        tidy: Callable[[], float | None] = lambda: None,
        jitter: Callable[[], float] = lambda: random.uniform(-1, 1),  # noqa: S311
    ) -> None:
        self._scan = scan
        self._interval_seconds = interval_seconds
        self._hunt_seconds = hunt_seconds
        self._in_use = in_use
        self._on_bus = on_bus
        self._tidy = tidy
        self._jitter = jitter
        self._changed = threading.Condition()
        self._kept = Kept(Inventory())
        # Looks begun and ended; they differ while one runs.
        self._begun = 0
        self._scans = 0
        # When the next look is due that somebody asked for, by `time.monotonic`; None: nobody did.
        self._due: float | None = None
        self._stopping = False
        self._subscribers: list[Subscriber] = []
        self._thread: threading.Thread | None = None
        self._log = get_logger()

    @property
    def current(self) -> Inventory:
        """The last look; empty before the first."""
        return self._kept.inventory

    def subscribe(self, told: Subscriber) -> Callable[[], None]:
        """Have `told` called with each new inventory and what changed; the answer ends it.

        The first look is always told, also when it finds nothing. Called on the inventory's thread, outside
        its locks; an error of one subscriber is logged and keeps nothing from the others.
        """
        with self._changed:
            self._subscribers.append(told)

        def unsubscribe() -> None:
            with self._changed:
                if told in self._subscribers:
                    self._subscribers.remove(told)

        return unsubscribe

    def start(self) -> None:
        """Start looking."""
        self._thread = threading.Thread(target=self._loop, name="inventory", daemon=True)
        start_thread(self._thread)

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """Stop looking; waits for a look that runs, unless the driver has it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def rescan(self, reason: str = "", *, within_seconds: float = 0.0) -> None:
        """Look again. Requests made during a look, or before one that is due, are answered together by that.

        Args:
            reason: for the log.
            within_seconds: how long it may wait, for whoever makes many requests one after the other.
        """
        with self._changed:
            self._ask(within_seconds)
        self._log.debug("inventory_rescan_requested", reason=reason)

    def rescan_and_wait(self, *, timeout_seconds: float) -> bool:
        """Look again and wait until a look that began after this call is over; False after the timeout."""
        with self._changed:
            target = self._begun + 1
            self._ask(0.0)
            return self._changed.wait_for(
                lambda: self._scans >= target or self._stopping, timeout_seconds
            ) and (self._scans >= target)

    def wait_for_first(self, *, timeout_seconds: float) -> bool:
        """Wait for the first look to be over; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._scans > 0, timeout_seconds)

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                self._begun += 1
                self._due = None
            self._look()
            self._wait()

    def _look(self) -> None:
        kept = self._plan()
        with self._changed:
            before = self._kept.inventory
            first = self._scans == 0
            self._kept = kept
            subscribers = tuple(self._subscribers)
        difference = diff(before, kept.inventory)
        if difference or first:
            # A log whose stream is gone must not end the thread.
            with contextlib.suppress(Exception):
                self._report(difference, kept.inventory)
            for told in subscribers:
                self._tell(told, kept.inventory, difference)
        with self._changed:
            self._scans += 1
            self._changed.notify_all()

    def _plan(self) -> Kept:
        try:
            return plan_inventory(self._kept, self._scan(), in_use=self._in_use(), on_bus=self._on_bus)
        except Exception as error:  # the thread must live: what is known stays known
            with contextlib.suppress(Exception):
                self._log.exception("inventory_scan_failed", error_code="DRA-BUG")
            old = self._kept.inventory
            text = f"the scan failed: {type(error).__name__}: {error}"
            problem = ScanProblem(NODE, "DRA-BUG", text, "Report this with the log.")
            return Kept(replace(old, problems=(problem,)))

    def _tell(self, told: Subscriber, inventory: Inventory, difference: InventoryDiff) -> None:
        try:
            told(inventory, difference)
        except Exception:
            with contextlib.suppress(Exception):
                self._log.exception("inventory_subscriber_failed", error_code="DRA-BUG")

    def _report(self, difference: InventoryDiff, inventory: Inventory) -> None:
        for gpu in difference.added:
            self._log.info("gpu_added", gpu_uuid=gpu.uuid, pci=str(gpu.pci_address), product=gpu.product_name)
        passed = {each.pci_address: each.driver for each in inventory.vfio if each.on_vfio}
        for gpu in difference.removed:
            where = {"gpu_uuid": gpu.uuid, "pci": str(gpu.pci_address)}
            if gpu.pci_address in passed:
                self._log.info("gpu_passed_through", driver=passed[gpu.pci_address], **where)
            else:
                self._log.warning("gpu_removed", **where)
        for change in difference.changed:
            self._log.info(
                "gpu_changed",
                gpu_uuid=change.after.uuid,
                fields=change.changed,
                unusable=change.after.unusable,
            )
        for problem in difference.new_problems:
            self._log.warning(
                "inventory_problem_found",
                subject=problem.subject, error_code=problem.code, error=problem.message, remedy=problem.remedy,
            )  # fmt: skip
        for problem in difference.gone_problems:
            self._log.info("inventory_problem_cleared", subject=problem.subject, error_code=problem.code)

    def _wait(self) -> None:
        base = self._interval_seconds if self._kept.inventory.gpus else self._hunt_seconds
        left = base * (1 + JITTER * self._jitter())
        while left > 0:
            pause = self._tidy()
            step = left if pause is None else min(left, max(pause, 0.01))
            if self._sleep(step):
                return
            left -= step

    def _ask(self, within_seconds: float) -> None:
        due = time.monotonic() + within_seconds
        self._due = due if self._due is None else min(due, self._due)
        self._changed.notify_all()

    def _sleep(self, seconds: float) -> bool:
        """Wait; whether there is something to do before the time is over."""
        end = time.monotonic() + seconds
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                if self._due is not None and now >= self._due:
                    return True
                if now >= end:
                    return False
                self._changed.wait((end if self._due is None else min(end, self._due)) - now)
            return True


def on_bus_of(paths: HostPaths) -> Callable[[PciAddress], bool]:
    """Give the check whether a PCI device is there and bound to the NVIDIA driver.

    A GPU that has fallen off the bus usually still is; one that was unplugged, unbound, or given to a virtual
    machine (vfio-pci) is not.
    """

    def on_bus(address: PciAddress) -> bool:
        try:
            return (device_dir(paths, address) / "driver").readlink().name == "nvidia"
        except OSError:
            return False

    return on_bus
