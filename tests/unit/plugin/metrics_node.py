"""A simulated node with claims on it, scraped as Prometheus would, without a server and without a daemon."""

from __future__ import annotations

import functools
import re
import threading

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.health.feed import DeviceCondition
from dra.host.cgroups import command_of, place_of
from dra.host.paths import HostPaths
from dra.inventory.sampling import Sampler, Snapshot
from dra.inventory.scan import Scanner
from dra.nvml.node import session_of
from dra.plugin.metrics import DeviceCollector
from dra.prepare.allocations import allocations
from dra.prepare.record import JournalEntry, Record
from dra.sim.node import SimulatedNode
from dra.telemetry.metrics import Registry, render
from dra.values import Quantity

SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')


class PatientSampler(Sampler):
    """Waits for the whole round, however busy the machine is: a scrape that gives up leaves a round under way."""

    def sample(self, *, wait_seconds: float = 60.0) -> Snapshot:
        return super().sample(wait_seconds=wait_seconds)


class MetricsNode:
    """A node; `hold` prepares a claim as far as records go. Its sampler asks again at each scrape."""

    def __init__(self, profile: str, root, *, min_interval_seconds: float = 0.0) -> None:
        self.node = SimulatedNode(profile, root)
        self.control = self.node.control
        self.paths = HostPaths(**self.node.paths_kwargs())
        self.session = session_of(self.paths, library=self.node.library)
        self.scanner = Scanner(self.session, self.paths)
        self.inventory = self.scanner.scan()
        self.records: dict[str, Record] = {}
        self.conditions: list[DeviceCondition] = []
        self.sampler = PatientSampler(
            self.session,
            lambda: self.inventory,
            held=lambda: [r.device for record in self.records.values() for r in record.results],
            min_interval_seconds=min_interval_seconds,
            call_seconds=60.0,
        )
        self.registry = Registry()
        self.registry.add(
            DeviceCollector(
                self.sampler,
                self.held,
                conditions=lambda: self.conditions,
                place_of=functools.partial(place_of, self.paths),
                command_of=functools.partial(command_of, self.paths),
            )
        )

    def close(self) -> None:
        self.control.clear()
        self.session.close()

    def rescan(self) -> None:
        self.inventory = self.scanner.scan(profiles=True)

    def uuid(self, minor: int) -> str:
        return next(gpu.uuid for gpu in self.inventory.gpus if gpu.minor == minor)

    def held(self, inventory):
        return allocations(
            self.records.values(), inventory, boot_id="boot", prepared_at=lambda _uid: 1_000_000.0
        )

    def hold(
        self, name: str, *devices: str, share: str | None = None, memory: str = "", pods=("pod-1",), admin=False,
        journal: tuple[JournalEntry, ...] = (), state="prepared",
    ) -> str:  # fmt: skip
        """Have a claim that is prepared; gives its UID."""
        uid = f"uid-{name}"
        capacity = {"memory": Quantity.parse(memory)} if memory else {}
        self.records[uid] = Record(
            ref=ClaimRef("team", name, uid),
            state=state,
            boot_id="boot",
            results=tuple(
                AllocatedDevice("gpu", "gpu.nvidia.com", "node-a", device, share, admin, capacity)
                for device in devices
            ),
            consumers=tuple(Consumer("pods", pod, pod_uid(pod)) for pod in pods),
            journal=journal,
        )
        return uid

    def run(self, minor: int, pid: int, *, pod: str | None = "", command: str = "python3", **options) -> None:
        """Let a process use a GPU; in a pod, on the host (empty), or where nobody can see it (None)."""
        self.control.add_process(minor, pid, **options)
        if pod is None:
            return
        folder = self.paths.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        text = "0::/system.slice/sshd.service\n"
        if pod:
            text = (
                f"0::/kubepods.slice/kubepods-pod{pod_uid(pod).replace('-', '_')}.slice/"
                f"cri-containerd-{'a' * 64}.scope\n"
            )
        (folder / "cgroup").write_text(text)
        (folder / "comm").write_text(command + "\n")

    def scrape(self) -> dict[str, float]:
        """Give each series, with its labels sorted, and its value."""
        body, _ = render(self.registry.collect())
        return parse(body.decode())

    def sampling_threads(self) -> int:
        return sum(thread.name == "telemetry" for thread in threading.enumerate())


def pod_uid(pod: str) -> str:
    return f"00000000-0000-4000-8000-{sum(pod.encode()):012x}"


def parse(text: str) -> dict[str, float]:
    """Read the text format; labels that are empty are left out, as Prometheus does."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SERIES.fullmatch(line)
        assert match, line
        labels = sorted((name, value) for name, value in LABEL.findall(match["labels"] or "") if value)
        key = match["name"] + "{" + ",".join(f"{name}={value}" for name, value in labels) + "}"
        assert key not in found, f"twice: {key}"
        found[key] = float(match["value"])
    return found


def of(found: dict[str, float], family: str) -> dict[str, float]:
    """Give the series of one family, by their labels."""
    head = family + "{"
    return {key[len(head) : -1]: value for key, value in found.items() if key.startswith(head)}
