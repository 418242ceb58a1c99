"""What the prepare room asks of the API server and of NVML, made from the clients of this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from dra.api.claim import ClaimRef, Consumer
from dra.errors import DraError
from dra.inventory.model import Gpu, Inventory
from dra.inventory.names import MigName, parse_device_name
from dra.nvml.session import NvmlSession
from dra.prepare.model import Notice
from dra.prepare.partitions import DEVICE_KIND, look_in
from dra.prepare.passthrough.model import function_of
from dra.prepare.record import Record
from dra.slices.devices import SliceProblem
from dra.slices.sharing import NOT_SHARED
from dra.telemetry.log import error_fields, get_logger
from dra.values import PciAddress

if TYPE_CHECKING:
    from dra.kube.client import KubeClient
    from dra.kube.events import EventRecorder

log = get_logger()

# Without a loaded driver nothing can run on a GPU.
_NO_DRIVER = frozenset({"DRA-NVML-LIBRARY-NOT-FOUND", "DRA-NVML-DRIVER-NOT-LOADED"})


class ClaimPort:
    """ResourceClaims of the API server, read when asked, never cached."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    def get(self, namespace: str, name: str, timeout_seconds: float) -> dict[str, Any]:
        """Give a claim. Raises KubeError."""
        from dra.kube.resources import RESOURCE_CLAIMS

        return self._client.get(RESOURCE_CLAIMS, name, namespace, timeout_seconds=timeout_seconds)

    def list(self, timeout_seconds: float) -> Iterable[dict[str, Any]]:
        """Give all claims. Raises KubeError."""
        from dra.kube.resources import RESOURCE_CLAIMS

        return self._client.list(RESOURCE_CLAIMS, timeout_seconds=timeout_seconds).items


class ClaimEvents:
    """Says on the claim in the API what went wrong with it."""

    def __init__(self, events: EventRecorder) -> None:
        self._events = events

    def notify(self, notice: Notice) -> None:
        """Write an Event about a notice of the prepare room; one without a claim is only logged."""
        if notice.ref is None:
            log.warning("claim_notice", reason=notice.reason, message=notice.message)
            return
        self._emit(notice.ref, notice.reason, notice.message, warning=notice.warning)
        for consumer in notice.consumers:
            if consumer.resource == "pods":
                self._emit_pod(notice, consumer, namespace=notice.ref.namespace)

    def failed(self, verb: str, ref: ClaimRef, error: DraError) -> None:
        """Write an Event about a failed prepare or unprepare call."""
        self._emit(ref, f"{verb.capitalize()}Failed", str(error), warning=True)

    def _emit_pod(self, notice: Notice, pod: Consumer, *, namespace: str) -> None:
        from dra.kube.events import ObjectReference

        about = ObjectReference("v1", "Pod", pod.name, pod.uid, namespace)
        text = f"claim {notice.ref}: {notice.message}"
        self._events.emit(about, "Warning" if notice.warning else "Normal", notice.reason, text)

    def _emit(self, ref: ClaimRef, reason: str, message: str, *, warning: bool) -> None:
        from dra.kube.events import ObjectReference

        about = ObjectReference("resource.k8s.io/v1", "ResourceClaim", ref.name, ref.uid, ref.namespace)
        self._events.emit(about, "Warning" if warning else "Normal", reason, message)


class NodeEvents:
    """Says on the Node in the API what keeps its GPUs from being published as they should be."""

    def __init__(self, events: EventRecorder, node_name: str) -> None:
        self._events, self._node_name = events, node_name

    def problem(self, problem: SliceProblem) -> None:
        """Write an Event about a device that is published as exclusive though it should be shared."""
        if problem.code != NOT_SHARED:
            return
        from dra.kube.events import ObjectReference

        # The kubelet too refers to its node by the name in place of the UID.
        about = ObjectReference("v1", "Node", self._node_name, self._node_name)
        text = f"{problem.code}: {problem.message}. {problem.remedy}"
        self._events.emit(about, "Warning", "GpuSharingNotPublished", text)


class GpuUsers:
    """Whether processes run on the devices of a claim: as NVML sees them, and on functions that are passed through.

    `holders` gives the processes that have such a function open.
    """

    def __init__(
        self,
        session: NvmlSession,
        inventory: Callable[[], Inventory],
        *,
        holders: Callable[[PciAddress], Collection[object]] = lambda _address: (),
    ) -> None:
        self._session, self._inventory, self._holders = session, inventory, holders

    def in_use(self, record: Record) -> bool:
        """Whether any device of the record has processes. Where NVML does not say, it is taken to have some."""
        inventory = self._inventory()
        gpus = {gpu.minor: gpu for gpu in inventory.gpus}
        for result in record.results:
            function = None if result.admin_access else function_of(result.device, inventory)
            if function is not None and self._holders(function.pci_address):
                return True
            name = parse_device_name(result.device)
            gpu = gpus.get(name.minor) if name else None
            if name is None or gpu is None:
                continue
            instance = _gpu_instance(record, gpu, name) if isinstance(name, MigName) else None
            if self._has_processes(gpu, instance):
                return True
        return False

    def _has_processes(self, gpu: Gpu, instance: int | None) -> bool:
        """Whether there are processes on a GPU, or on one GPU instance of it."""
        subject = str(gpu.pci_address)

        def count(api: Any) -> int:
            handle = api.handle(gpu.pci_address)
            names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
            found = [one for name in names for one in api.optional(name, handle, subject=subject) or ()]
            return sum(instance in (None, getattr(one, "gpuInstanceId", None)) for one in found)

        try:
            return self._session.run(count, subject=subject) > 0
        except DraError as error:
            if error.code in _NO_DRIVER:
                return False
            log.warning("gpu_users_unknown", **error_fields(error))
            return True


def _gpu_instance(record: Record, gpu: Gpu, name: MigName) -> int | None:
    """Give the GPU instance of a MIG device: as it was made, else as it was seen; None if it is not known."""
    for entry in record.journal:
        if entry.kind == DEVICE_KIND and entry.args.get("device") == str(name) and "gi" in entry.outcome:
            return int(entry.outcome["gi"])
    found = look_in(gpu, name).partition
    return None if found is None else found.gpu_instance
