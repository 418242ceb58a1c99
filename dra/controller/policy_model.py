"""What the keeper of policies is told, what it sees of the rest of the driver, and what it says of the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dra.api.gpu_settings import NodeSettings
from dra.errors import DraError
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import GpuName
from dra.prepare.holds import Hold
from dra.prepare.layouts import LayoutChanger
from dra.slices.taints import Taint

State = Literal["Applied", "Waiting", "Changing", "Refused"]
# Hears (policy or empty, GPU's device name or empty, type, reason, message) for Events.
Tell = Callable[[str, str, Literal["Normal", "Warning"], str, str], None]


@dataclass(frozen=True, slots=True)
class PolicyTimings:
    """In seconds.

    Args:
        settle: from the taint being in the API until no scheduler can still be about to give the GPU out.
        poll, slow_poll: between looks at the claims, at first and later.
        idle: between looks where nothing is to be done.
        stored: how long a publication is waited for before the next step is taken all the same.
        retry: after a change that failed, and for what was given up.
    """

    settle: float = 1.5
    poll: float = 0.5
    slow_poll: float = 5.0
    idle: float = 30.0
    stored: float = 10.0
    retry: float = 600.0


@dataclass(frozen=True, slots=True)
class PolicyPorts:
    """What the keeper sees of the rest of the driver.

    Args:
        inventory, look_again: the hardware, as last seen and newly looked at.
        claims: all claims of the cluster; raises DraError.
        holds: what claims of this node hold.
        publish: takes the settings that are to be published and used.
        taint: takes the taints by device name.
        stored: whether the API has what was published last.
        leads: whether this instance publishes for the node; of two, one waits and only follows what the other did.
        changer: changes layouts; None where MIG cannot be changed.
        tell: hears what is worth an Event.
        report: takes what each GPU's state is, whenever it changed.
        time_slice: sets a GPU's default time-slice; raises DraError.
    """

    inventory: Callable[[], Inventory]
    look_again: Callable[[], Inventory]
    claims: Callable[[], Iterable[Mapping[str, Any]]]
    holds: Callable[[], Iterable[Hold]]
    publish: Callable[[NodeSettings], None]
    taint: Callable[[Mapping[str, tuple[Taint, ...]]], None]
    stored: Callable[[], bool]
    leads: Callable[[], bool] = lambda: True
    changer: LayoutChanger | None = None
    tell: Tell = lambda *_said: None
    report: Callable[[NodeReport], None] = lambda _report: None
    time_slice: Callable[[Gpu, str], None] = lambda _gpu, _interval: None


@dataclass(frozen=True, slots=True)
class GpuReport:
    """How far one GPU is.

    Args:
        claims: those that are waited for.
        policy: whose word the change is; empty: the flags'.
        blocks: what is to change.
    """

    device: str
    uuid: str
    product: str
    state: State = "Applied"
    code: str = ""
    message: str = ""
    claims: tuple[str, ...] = ()
    policy: str = ""
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How far the node is. `policies`: (name, generation), the uppermost first. `problem`: why nothing is changed."""

    policies: tuple[tuple[str, int], ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    conflicts: tuple[str, ...] = ()
    problem: str = ""


def report_of(gpu: Gpu, state: State = "Applied", error: DraError | None = None) -> GpuReport:
    """Say how far a GPU is, and what went wrong."""
    code, message = ("", "") if error is None else (error.code, str(error))
    return GpuReport(str(GpuName(gpu.minor)), gpu.uuid, gpu.product_name, state, code, message)


def waiting_report(gpu: Gpu, message: str, claims: tuple[str, ...] = ()) -> GpuReport:
    """Say for what a GPU waits; `message` goes on after `gpu-0 waits`."""
    device = str(GpuName(gpu.minor))
    return GpuReport(device, gpu.uuid, gpu.product_name, "Waiting", "", f"{device} waits {message}", claims)
