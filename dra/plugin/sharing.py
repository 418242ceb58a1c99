"""Sharing in the daemon: which planners and effects there are on this machine, and what is heard of the MPS keeper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from dra.api.gpu_settings import GpuSettings
from dra.errors import ConfigError
from dra.host.paths import HostPaths
from dra.inventory.model import Inventory
from dra.nvml.session import NvmlSession
from dra.plugin.keeper_presence import answers
from dra.plugin.sharing_ports import ComputeModePort, SmiTimeSlices
from dra.prepare.effects import Revive
from dra.prepare.model import Notice, Notify
from dra.prepare.sharing.compute_mode import ComputeMode, ComputeModes
from dra.prepare.sharing.enforce import ShareEnforcer
from dra.prepare.sharing.keeper_client import KeeperClient, visible_processes
from dra.prepare.sharing.model import ConfigGroup, SharingContext, SharingPlan, StrategyPlanner, Tell
from dra.prepare.sharing.mps import MpsDaemon, MpsKeeper, MpsPlanner
from dra.prepare.sharing.time_slice import Interval, TimeSlice, TimeSlices, TimeSlicingPlanner

if TYPE_CHECKING:
    from dra.plugin.settings import PluginSettings
    from dra.prepare.sharing.mps_model import DaemonSpec

K = TypeVar("K", bound=MpsKeeper)

# NVIDIA's gates by strategy. Without a word they are on here.
_GATES = {"TimeSlicing": "TimeSlicingSettings", "MPS": "MPSSupport"}


class Sharing(Generic[K]):
    """The ways of sharing on one machine.

    Args:
        paths: the node.
        driver: name of the DRA driver.
        modes, slices, keeper: the hardware's side, and who runs MPS daemons.
        notify: hears what the owners of claims should read.
        gates: NVIDIA's feature gates that were set; one that is off makes its strategy an error.
        base: the time-slice of a GPU while no claim asks for one.
        available: whether the keeper answers now; None: never.
        state_dir: the driver's directory; None: its usual place.
        host_path: gives the host's spelling of a path below it; None: the usual one.
    """

    def __init__(
        self,
        paths: HostPaths,
        *,
        driver: str,
        modes: ComputeModes,
        slices: TimeSlices,
        keeper: K,
        notify: Notify,
        gates: Mapping[str, bool] | None = None,
        base: Callable[[str], Interval] = lambda _uuid: "Default",
        available: Callable[[], bool] | None = None,
        state_dir: Path | None = None,
        host_path: Callable[[Path], str] | None = None,
    ) -> None:
        self._notify = notify
        self.keeper = keeper
        self.mps = MpsPlanner(
            keeper,
            modes,
            state_dir=state_dir or paths.state_dir(driver),
            host_path=host_path or paths.host_spelling,
            tell=self._tell,
        )
        time_slicing = TimeSlicingPlanner(slices, modes, base=base, tell=self._tell)
        planners: Mapping[str, StrategyPlanner] = {"TimeSlicing": time_slicing, "MPS": self.mps}
        self.strategies: Mapping[str, StrategyPlanner] = {
            strategy: planner if (gates or {}).get(_GATES[strategy], True) else _switched_off(strategy)
            for strategy, planner in planners.items()
        }
        self.shares = ShareEnforcer(
            self.mps if (gates or {}).get(_GATES["MPS"], True) else None,
            modes,
            available=available or (lambda: False),
            tell=self._tell_of_share,
        )
        # Also of what is switched off now: it may have been on.
        self.effects: Mapping[str, Revive] = {
            ComputeMode.kind: lambda args: ComputeMode.revive(args, modes=modes),
            TimeSlice.kind: lambda args: TimeSlice.revive(args, slices=slices, base=base),
            MpsDaemon.kind: lambda args: MpsDaemon.revive(args, keeper=keeper),
        }

    def _tell(self, context: SharingContext) -> Tell:
        return lambda reason, message: self._notify(Notice(context.claim, reason, message))

    def _tell_of_share(self, context: SharingContext) -> Tell:
        # That nothing holds, or may not, is for the owner to weigh; the rest is how it should be.
        return lambda reason, message: self._notify(
            Notice(context.claim, reason, message, warning=reason in ("ShareNotEnforced", "ShareManyDaemons"))
        )


class HeardKeeper(KeeperClient):
    """A keeper whose news somebody begins to hear when it is first used."""

    in_use: Callable[[], None] = staticmethod(lambda: None)
    # Whether shares are published as held by it: a claim is not prepared without while it is away for a moment.
    promised: Callable[[], bool] = staticmethod(lambda: False)

    def available(self) -> bool:
        """Say whether claims are to be held by its daemons. It is asked only where nothing was promised yet."""
        return self.promised() or answers(self)

    def ensure(self, spec: DaemonSpec) -> None:
        """Have a daemon run. Raises DraError."""
        self.in_use()
        super().ensure(spec)


def sharing_of(
    paths: HostPaths,
    *,
    driver: str,
    session: NvmlSession,
    inventory: Callable[[], Inventory],
    notify: Notify,
    settings: PluginSettings,
    settings_of: Callable[[str], GpuSettings],
) -> Sharing[HeardKeeper]:
    """Give what a machine with NVML, nvidia-smi and a keeper has."""
    keeper = HeardKeeper(paths.state_dir(driver), proc=visible_processes(paths.proc))

    def base(gpu_uuid: str) -> Interval:
        return settings_of(gpu_uuid).time_slice or "Default"

    return Sharing(
        paths,
        driver=driver,
        modes=ComputeModePort(session, inventory),
        slices=SmiTimeSlices(paths),
        keeper=keeper,
        available=keeper.available,
        notify=notify,
        gates=settings.gates,
        base=base,
    )


def _switched_off(strategy: str) -> StrategyPlanner:
    gate = _GATES[strategy]

    def refuse(group: ConfigGroup, _context: SharingContext) -> SharingPlan:
        raise ConfigError(
            "DRA-CONFIG-GATE-OFF",
            f"{group.config.kind} asks for sharing strategy {strategy}, which this node's driver has switched off "
            f"(feature gate {gate}=false)",
            remedy=f"Remove the sharing block, or switch {gate} on in the plugin's --feature-gates.",
            strategy=strategy,
            gate=gate,
        )

    return refuse
