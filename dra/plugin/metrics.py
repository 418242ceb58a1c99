"""The daemon's metrics: what is counted, what is looked up at a scrape, and the server that gives it out.

Counting costs some dictionary operations a call and happens always; everything else only with `--http-endpoint`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dra import __version__
from dra.errors import DraError
from dra.health.outcome import devices_of, mig_name
from dra.inventory.model import Inventory
from dra.inventory.names import GpuName, MigName, parse_device_name, parse_vfio_name
from dra.telemetry import families as f
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.metrics import Registry, Samples, render, samples_of

if TYPE_CHECKING:
    from dra.controller.publisher import PublisherStatus
    from dra.health.feed import DeviceCondition
    from dra.health.monitor import HealthSnapshot
    from dra.inventory.sampling import Sampler
    from dra.plugin.parts import Parts
    from dra.plugin.readiness import Readiness
    from dra.prepare.allocations import Allocation
    from dra.prepare.store import RecordStore
    from dra.telemetry.http import HttpServer, Request, Response

log = get_logger()


def pool_samples(status: PublisherStatus) -> Iterator[Samples]:
    """Give the publisher's state."""
    yield samples_of(f.POOL_READY, [((), float(status.ready))])
    yield samples_of(f.POOL_PUBLISHING, [((), float(status.state == "publishing"))])
    yield samples_of(f.POOL_DEVICES, [((), status.devices)])
    yield samples_of(f.POOL_SLICES, [((), status.slices)])
    yield samples_of(f.POOL_GENERATION, [((), status.generation)])
    yield samples_of(f.POOL_WRITES, [((), status.writes)])
    yield samples_of(f.POOL_RESTORES, [((), status.restores)])
    yield samples_of(f.POOL_FAILURES, [((), status.failures)])
    yield samples_of(f.POOL_PUBLISHED, [((), status.last_success)])


def node_samples(inventory: Inventory, readiness: Readiness, *, node: str, driver: str) -> Iterator[Samples]:
    """Give versions, readiness and what could not be read."""
    cuda = "{}.{}".format(*inventory.cuda_version) if inventory.cuda_version else ""
    yield samples_of(f.NODE_INFO, [((node, driver, __version__, inventory.driver_version, cuda), 1)])
    missing = readiness.missing()
    yield samples_of(f.NODE_READY, [((part,), float(part not in missing)) for part in readiness.names])
    codes = Tally(problem.code for problem in inventory.problems)
    yield samples_of(f.NODE_PROBLEMS, [((code,), count) for code, count in codes.items()])


def record_samples(
    store: RecordStore, held: Sequence[Allocation], *, node: str, driver: str
) -> Iterator[Samples]:
    """Give what the claim records say. Source of the device types: NVIDIA's prepared_devices."""
    states = {"preparing": 0, "prepared": 0, "unpreparing": 0, "damaged": len(store.damaged())}
    for record in store.records():
        states[record.state] += 1
    yield samples_of(f.NODE_CLAIMS, [((state,), count) for state, count in states.items()])
    types = Tally(_device_type(each.device) for each in held)
    yield samples_of(
        f.NV_PREPARED, [((node, driver, kind), types[kind]) for kind in ("gpu", "mig", "vfio", "unknown")]
    )


def _device_type(device: str) -> str:
    name = parse_device_name(device)
    if name is None:
        return "unknown" if parse_vfio_name(device) is None else "vfio"
    return "mig" if isinstance(name, MigName) else "gpu"


def health_of(conditions: Sequence[DeviceCondition]) -> dict[str, bool]:
    """Give the health of devices, by name; one that is not known is not in it."""
    return {each.device: each.state == "Healthy" for each in conditions if each.state != "Unknown"}


def health_samples(health: HealthSnapshot, inventory: Inventory) -> Iterator[Samples]:
    """Give what is held against devices, the XIDs since the start, and which GPUs NVML tells of."""
    gpus = {gpu.uuid: (str(GpuName(gpu.minor)), gpu.uuid, "") for gpu in inventory.gpus}
    parts = {
        mig_name(gpu, mig): (mig_name(gpu, mig), mig.uuid, mig.profile.name)
        for gpu in inventory.gpus
        for mig in gpu.mig_devices
    }
    devices = {labels[0]: labels for labels in gpus.values()} | parts
    yield samples_of(
        f.GPU_CONDITION,
        [
            ((*devices[name], each.key.rpartition("/")[2], each.grade.name.lower()), 1)
            for each in health.conditions
            for name in devices_of(each.scope, inventory)
            if name in devices
        ],
    )
    yield samples_of(
        f.GPU_XID,
        [((*gpus[uuid], str(xid)), count) for (uuid, xid), count in health.xids.items() if uuid in gpus],
    )
    yield samples_of(
        f.GPU_WATCHED,
        [(labels, float(uuid in health.watch.registered)) for uuid, labels in gpus.items()],
    )


def process_samples() -> Iterator[Samples]:
    """Give what this process takes. Source: proc(5)."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - a Path would cost more than the rest
        fields = file.read().rpartition(b")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    yield samples_of(f.PROCESS_CPU, [((), (int(fields[11]) + int(fields[12])) / ticks)])
    yield samples_of(f.PROCESS_VIRTUAL, [((), int(fields[20]))])
    yield samples_of(f.PROCESS_RESIDENT, [((), int(fields[21]) * page)])
    yield samples_of(f.PROCESS_THREADS, [((), int(fields[17]))])
    yield samples_of(f.PROCESS_START, [((), _boot_time() + int(fields[19]) / ticks)])
    yield samples_of(f.PROCESS_DESCRIPTORS, [((), len(os.listdir("/proc/self/fd")) - 1)])  # noqa: PTH208
    import resource

    yield samples_of(f.PROCESS_MAX_DESCRIPTORS, [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])])


@functools.cache
def _boot_time() -> int:
    with open("/proc/stat", "rb") as file:  # noqa: PTH123
        return next((int(line.split()[1]) for line in file if line.startswith(b"btime ")), 0)


class DeviceCollector:
    """Looks at the hardware and the records when it is scraped, and joins them. One scrape at a time.

    `conditions` gives the health of devices, `place_of` and `command_of` tell of processes.
    """

    def __init__(
        self,
        sampler: Sampler,
        allocations: Callable[[Inventory], Sequence[Allocation]],
        *,
        conditions: Callable[[], Sequence[DeviceCondition]],
        place_of: Callable[[int], Any],
        command_of: Callable[[int], str],
    ) -> None:
        from dra.plugin.device_metrics import ClaimSeries

        self._sampler, self._allocations, self._conditions = sampler, allocations, conditions
        self._place_of, self._command_of = place_of, command_of
        self._claims = ClaimSeries()
        self._mutex = threading.Lock()

    def __call__(self) -> Iterator[Samples]:
        """Collect."""
        from dra.diagnose.usage import shares, uses
        from dra.plugin.device_metrics import device_samples

        snapshot = self._sampler.sample()
        held = self._allocations(snapshot.inventory)
        place_of = functools.cache(self._place_of)
        found = uses(snapshot, held, place_of=place_of, command_of=self._command_of)
        yield from device_samples(snapshot, found, healthy=health_of(self._conditions()))
        with self._mutex:
            claims = tuple(self._claims.samples(held, shares(found, place_of=place_of)))
        yield from claims
        yield samples_of(f.SAMPLE_SECONDS, [((), snapshot.duration_seconds)])


class MetricsEndpoint:
    """The daemon's HTTP server: metrics, `/healthz` and `/readyz`. Nothing of it is there until `start`."""

    def __init__(
        self, endpoint: str, path: str, registry: Registry, *, missing: Callable[[], Mapping[str, str]]
    ) -> None:
        self._endpoint, self._path, self._registry, self._missing = endpoint, path, registry, missing
        self._server: HttpServer | None = None

    @property
    def port(self) -> int:
        """The TCP port, 0 while there is none."""
        return 0 if self._server is None else self._server.port

    def start(self) -> None:
        """Serve, if an endpoint was given.

        Raises:
            ConfigError: DRA-FLAG-ENDPOINT.
            HostError: DRA-HOST-NO-THREADS.
        """
        if not self._endpoint:
            return
        from dra.telemetry.http import HttpServer, Response, Route

        server = HttpServer(
            self._endpoint,
            {
                self._path: Route(self._metrics),
                "/healthz": Route(lambda _request: Response(b"ok\n"), quick=True),
                "/readyz": Route(self._ready, quick=True),
            },
        )
        server.start()
        self._server = server

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()

    def _metrics(self, request: Request) -> Response:
        from dra.telemetry.http import Response

        body, content_type = render(self._registry.collect(), accept=request.headers.get("accept", ""))
        return Response(body, content_type)

    def _ready(self, _request: Request) -> Response:
        from dra.telemetry.http import Response

        missing = self._missing()
        text = "".join(f"{name}: {reason}\n" for name, reason in missing.items()) or "ok\n"
        return Response(text.encode("utf-8", "replace"), status=503 if missing else 200)


def metrics_of(parts: Parts) -> MetricsEndpoint:
    """Wire a daemon's metrics; its parts must be there, and need not run."""
    settings, registry = parts.settings, Registry()
    endpoint = MetricsEndpoint(
        settings.http_endpoint, settings.metrics_path, registry, missing=parts.readiness.missing
    )
    if not settings.http_endpoint:
        return endpoint
    from dra.host.cgroups import command_of, place_of
    from dra.inventory.sampling import Sampler

    names = {"node": settings.node_name, "driver": settings.driver_name}
    paths, store = parts.machine.paths, parts.engine.store
    held = functools.partial(_held, store, parts.engine.settings.boot_id)
    sampler = Sampler(
        parts.session,
        lambda: parts.inventory.current,
        held=lambda: [each.device for each in store.holds(parts.engine.settings.boot_id)],
        min_interval_seconds=settings.metrics_interval_seconds,
        interval=parts.policies.telemetry_interval,
    )
    if (health := parts.health) is not None:
        registry.add(lambda: health_samples(health.monitor.snapshot(), parts.inventory.current))
    registry.add(
        *parts.calls.recorders,
        lambda: pool_samples(parts.publisher.status()),
        lambda: node_samples(parts.inventory.current, parts.readiness, **names),
        DeviceCollector(
            sampler,
            held,
            conditions=lambda: parts.feed.current()[1],
            place_of=functools.partial(place_of, paths),
            command_of=functools.partial(command_of, paths),
        ),
        lambda: record_samples(store, held(parts.inventory.current), **names),
        process_samples,
    )
    return endpoint


def _held(store: RecordStore, boot_id: str, inventory: Inventory) -> tuple[Allocation, ...]:
    """Give what prepared claims hold now, of all instances on this node."""
    from dra.prepare.allocations import allocations

    try:
        store.refresh()
    except DraError as error:
        log.warning("records_not_readable", **error_fields(error))
    return allocations(
        store.records(), inventory, boot_id=boot_id, prepared_at=functools.partial(_written_at, store)
    )


def _written_at(store: RecordStore, uid: str) -> float | None:
    try:
        return store.path(uid).stat().st_mtime
    except OSError:
        return None
