"""A node for the tests of prepare: real directories, an API server and a renderer that can be told to fail."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from dra.api.claim import ClaimRef
from dra.errors import DraError, KubeError
from dra.inventory.model import Gpu, Inventory
from dra.prepare.engine import Engine, EnginePorts, EngineSettings
from dra.prepare.holds import footprint
from dra.prepare.janitor import Janitor
from dra.values import PciAddress

DRIVER = "gpu.nvidia.com"
POOL = "node-a"
KIND = "k8s.gpu.nvidia.com/claim"
GROUP_VERSION = "resource.nvidia.com/v1beta1"


class Killed(BaseException):
    """The process ends here."""


def uid_of(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def make_gpu(minor: int, **changes) -> Gpu:
    gpu = Gpu(
        minor=minor,
        uuid=f"GPU-{minor:08d}-0000-0000-0000-000000000000",
        pci_address=PciAddress(0, 0x10 + minor, 0, 0),
        product_name="NVIDIA H100 80GB HBM3",
        brand="Nvidia",
        architecture="Hopper",
        compute_capability=(9, 0),
        memory_bytes=80 << 30,
    )
    return replace(gpu, **changes)


def make_inventory(count: int = 8, **changes) -> Inventory:
    inventory = Inventory("580.95.05", (13, 0), tuple(make_gpu(minor) for minor in range(count)))
    return replace(inventory, **changes)


def result(device: str, *, request: str = "gpu", pool: str = POOL, driver: str = DRIVER, **more) -> dict:
    return {"request": request, "driver": driver, "pool": pool, "device": device, **more}


def opaque(parameters: dict, *, source: str = "FromClaim", requests=(), driver: str = DRIVER) -> dict:
    return {
        "source": source,
        "requests": list(requests),
        "opaque": {"driver": driver, "parameters": parameters},
    }


def make_claim(ref: ClaimRef, *results: dict, configs=(), pods=("pod-a",)) -> dict:
    reserved = [{"resource": "pods", "name": name, "uid": f"uid-of-{name}"} for name in pods]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid},
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(configs)}},
            "reservedFor": reserved,
        },
    }


class FakeApi:
    """Claims by namespace and name. `down`: no connection. `hang()`: accepts and does not answer until `release()`."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], dict] = {}
        self.down = False
        self.gets: Counter[str] = Counter()
        self.waiting = 0
        self.between = lambda: None
        self._go = threading.Event()
        self._go.set()

    def put(self, claim: dict) -> None:
        meta = claim["metadata"]
        self.claims[meta["namespace"], meta["name"]] = claim

    def delete(self, ref: ClaimRef) -> None:
        del self.claims[ref.namespace, ref.name]

    def hang(self) -> None:
        self._go.clear()

    def release(self) -> None:
        self._go.set()

    def _answer(self) -> None:
        self.waiting += 1
        self._go.wait(30)
        self.waiting -= 1
        if self.down:
            raise KubeError("DRA-KUBE-UNREACHABLE", "the API server refused the connection", status=0)

    def get(self, namespace: str, name: str, timeout_seconds: float) -> dict:
        self.gets[name] += 1
        self._answer()
        try:
            claim = self.claims[namespace, name]
        except KeyError:
            raise KubeError(
                "DRA-API-NOT-FOUND", f"no claim {name}", status=404, reason="NotFound", retryable=False
            ) from None
        self.between()
        return json.loads(json.dumps(claim))

    def list(self, timeout_seconds: float) -> list[dict]:
        self._answer()
        return [json.loads(json.dumps(claim)) for claim in self.claims.values()]


class FakeRenderer:
    """A spec that names what it was asked for. `fail`: raised instead. `salt`: as if driver files had changed."""

    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.salt = ""
        self.missing: list[str] = []

    def missing_files(self, spec):
        paths = [n["path"] for d in spec["devices"] for n in d["containerEdits"]["deviceNodes"]]
        return [path for path in paths if path in self.missing]

    def render(self, claim_uid, devices, *, driver_version):
        if self.fail is not None:
            raise self.fail
        return {
            "cdiVersion": "0.5.0",
            "kind": KIND,
            "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void", f"DRIVER={driver_version}{self.salt}"]},
            "devices": [
                {
                    "name": f"{claim_uid}-{d.name}" + (f"-{d.share_id[:8]}" if d.share_id else ""),
                    "containerEdits": {"deviceNodes": [_node(d.gpu_minor)]},
                }
                for d in devices
            ],
        }


def _node(minor: int) -> dict:
    numbers = {"type": "c", "major": 195, "minor": minor}
    return {"path": f"/dev/nvidia{minor}", **numbers, "fileMode": 0o666, "permissions": "rw"}


class Node:
    """One node. `engine()` makes a new plugin process' engine on the same disks."""

    def __init__(self, root: Path, *, gpus: int = 8) -> None:
        self.root = root
        self.state_dir = root / "plugins" / DRIVER
        self.cdi_root = root / "cdi"
        self.boot_id = "boot-1"
        self.api = FakeApi()
        self.renderer = FakeRenderer()
        self.inventory = make_inventory(gpus)
        self.fresh: Inventory | None = None
        self.notices: list = []
        self.conflicts: list[str] = []
        self.now = 1000.0
        self.in_use: set[str] = set()
        self.kill_at: str | None = None
        self.steps: list[str] = []
        self.ports: dict = {}
        self.settings: dict = {}
        self.the_engine = self.new_engine()

    def new_engine(self) -> Engine:
        ports = {
            "source": self.api,
            "inventory": lambda: self.inventory,
            "renderer": self.renderer,
            "fresh_inventory": (lambda: self.fresh or self.inventory),
            "notify": self.notices.append,
            "conflict": self.conflicts.append,
            "step": self._step,
            **self.ports,
        }
        settings = {
            "driver": DRIVER,
            "pool": POOL,
            "state_dir": self.state_dir,
            "cdi_root": self.cdi_root,
            "boot_id": self.boot_id,
            **self.settings,
        }
        engine = Engine(EngineSettings(**settings), EnginePorts(**ports))
        engine.open()
        return engine

    def restart(self) -> Engine:
        self.kill_at = None
        self.the_engine = self.new_engine()
        return self.the_engine

    def reboot(self, *, keep_cdi: bool = False) -> None:
        self.boot_id = f"boot-{int(self.boot_id.rpartition('-')[2]) + 1}"
        if not keep_cdi:
            for path in self.cdi_root.glob("*"):
                path.unlink()
        self.in_use.clear()
        self.restart()

    def janitor(self, *, confirm_seconds: float = 0.0, **more) -> Janitor:
        """Give a janitor that takes the API's first word, unless the test is about the second look."""
        return Janitor(
            self.the_engine,
            self.api,
            device_in_use=lambda record: record.ref.uid in self.in_use,
            notify=self.notices.append,
            monotonic=lambda: self.now,
            confirm_seconds=confirm_seconds,
            **more,
        )

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.kill_at:
            raise Killed(name)

    # -- shorthand

    def claim(self, number: int, *devices: str | dict, name: str = "", **more) -> ClaimRef:
        ref = ClaimRef("default", name or f"claim-{number}", uid_of(number))
        results = [result(d) if isinstance(d, str) else d for d in devices]
        self.api.put(make_claim(ref, *results, **more))
        return ref

    def prepare(self, ref: ClaimRef):
        return self.the_engine.prepare([ref])[ref.uid]

    def prepared(self, ref: ClaimRef):
        outcome = self.prepare(ref)
        assert not isinstance(outcome, DraError), outcome
        return outcome

    def refused(self, ref: ClaimRef) -> DraError:
        outcome = self.prepare(ref)
        assert isinstance(outcome, DraError), outcome
        return outcome

    def unprepare(self, ref: ClaimRef):
        return self.the_engine.unprepare([ref])[ref.uid]

    def cdi_file(self, ref: ClaimRef) -> Path:
        return self.cdi_root / f"k8s.gpu.nvidia.com-claim_{ref.uid}.yaml"

    def record_file(self, ref: ClaimRef) -> Path:
        return self.state_dir / "claims" / f"{ref.uid}.json"

    def record(self, ref: ClaimRef) -> dict:
        return json.loads(self.record_file(ref).read_bytes())

    def files(self) -> list[str]:
        """Everything on disk that a claim may leave behind."""
        found = []
        for path in (self.state_dir / "claims", self.cdi_root, self.state_dir / "locks"):
            found += [
                entry.name for entry in path.glob("*") if not entry.name.startswith(("gpu-", "claims.lock"))
            ]
        return sorted(found)

    def check_invariants(self, *, harmed=frozenset()) -> None:
        """I1: no device prepared for two claims. I2: prepared claims and CDI files belong together.

        `harmed`: claims whose spec the test itself removed.
        """
        records = [json.loads(path.read_bytes()) for path in (self.state_dir / "claims").glob("*.json")]
        taken: list[tuple[str, object, object]] = []
        for record in records:
            if record["boot_id"] != self.boot_id:
                continue
            for item in record["results"]:
                if item["admin_access"]:
                    continue
                mine = footprint(item["device"], self.inventory)
                for uid, other, share in taken:
                    if uid != record["claim"]["uid"] and mine.overlaps(other):
                        assert share and item["share_id"] and share != item["share_id"], (uid, record)
                taken.append((record["claim"]["uid"], mine, item["share_id"]))
        prepared = {
            r["claim"]["uid"] for r in records if r["state"] == "prepared" and r["boot_id"] == self.boot_id
        }
        known = {r["claim"]["uid"] for r in records}
        known |= {p.name.partition(".json")[0] for p in (self.state_dir / "claims").glob("*.corrupt-*")}
        specs = {p.stem.partition("_")[2] for p in self.cdi_root.glob("*.yaml")}
        assert specs <= known, specs - known
        missing = prepared - specs - set(harmed)
        assert not missing, missing


def wait_until(condition, seconds: float = 60.0) -> None:
    """Wait for another thread to get somewhere."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)
