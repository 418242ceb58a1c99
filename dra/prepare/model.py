"""What prepare answers, and the ports through which it sees the rest of the driver.

The room depends on these protocols only: the API server, the hardware and the content of CDI specs come from
elsewhere (`dra/kube`, `dra/inventory`, `dra/cdi`), or from fakes in tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dra.api.claim import ClaimRef, Consumer
from dra.cdi.model import Mount, VfioAccess
from dra.errors import ClaimError, DraError, KubeError
from dra.inventory.model import Inventory
from dra.values import PciAddress

# A UID becomes part of file names and of CDI device names; dots would make suffixes ambiguous.
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One device of the answer to the kubelet. Source: k8s.io/kubelet/pkg/apis/dra/v1 Device."""

    request_names: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


PrepareOutcome = tuple[PreparedDevice, ...] | DraError


@dataclass(frozen=True, slots=True)
class CdiTarget:
    """A device for which a CDI spec is wanted.

    `name` is the device's name in the pool. `admin`: access for monitoring only, nothing that changes the device.
    `mig_instances` are the ids of GPU instance and compute instance of a MIG device, None for a whole GPU. The extras are
    what the way of sharing adds. A function that is passed through has `vfio`, no minor and no UUID of a GPU.
    """

    name: str
    gpu_minor: int | None
    pci_address: PciAddress
    gpu_uuid: str
    share_id: str | None = None
    admin: bool = False
    mig_instances: tuple[int, int] | None = None
    extra_env: tuple[str, ...] = ()
    extra_mounts: tuple[Mount, ...] = ()
    vfio: VfioAccess | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that the owner of a claim should read in an Event. `ref` is None where the claim is not known.

    The pods among the `consumers` are told too.
    """

    ref: ClaimRef | None
    reason: str
    message: str
    warning: bool = True
    consumers: tuple[Consumer, ...] = ()


def says_gone(error: KubeError) -> bool:
    """Whether the API server itself says that this very object does not exist.

    A bare 404 says less: a proxy gives it, and an API server that does not serve the group at the moment.
    """
    return error.code == "DRA-API-NOT-FOUND"


class ClaimSource(Protocol):
    """The API server, as far as claims go. Both calls raise KubeError."""

    def get(self, namespace: str, name: str, timeout_seconds: float) -> Mapping[str, Any]:
        """Give a ResourceClaim. Raises KubeError; `says_gone` tells whether there is none."""
        ...

    def list(self, timeout_seconds: float) -> Iterable[Mapping[str, Any]]:
        """Give all ResourceClaims; called only to find the owner of a record or CDI file that cannot say it."""
        ...


class CdiRenderer(Protocol):
    """Makes the content of a claim's CDI spec: a pure function of the devices and of the node's driver files."""

    def render(
        self, claim_uid: str, devices: Sequence[CdiTarget], *, driver_version: str
    ) -> Mapping[str, Any]:
        """Give the spec. Raises StackError or HostError where driver files or device nodes are missing."""
        ...

    def missing_files(self, spec: Mapping[str, Any]) -> Sequence[str]:
        """Give what a spec takes from the host and what is not there any more, as the host spells it."""
        ...


InventorySource = Callable[[], Inventory]
Notify = Callable[[Notice], None]


def no_step(_name: str) -> None:
    """Do nothing at a step of the journal."""


def do_nothing() -> None:
    """Do nothing."""


def no_notice(_notice: Notice) -> None:
    """Tell nobody."""


def check_uid(ref: ClaimRef) -> None:
    """Refuse a UID that could not be part of a file name.

    Raises:
        ClaimError: DRA-CLAIM-UID-FORM.
    """
    if not is_safe_uid(ref.uid):
        raise ClaimError(
            "DRA-CLAIM-UID-FORM",
            f"claim {ref} has the UID {ref.uid[:140]!r}, which is not one that the API server makes",
            remedy="Check what calls the plugin's socket.",
        )


def is_safe_uid(text: str) -> bool:
    """Whether a text can be a claim's UID in a file name."""
    return _UID.fullmatch(text) is not None
