"""The seven invariants that hold after every fault, whatever happened to the node.

I1 no device is prepared for two claims that want it alone; I2 each prepared claim has exactly one CDI file, with
its devices, and the reverse; I3 every MIG instance belongs to a claim or to the layout somebody made by hand; I4 the
slices in the API are the machine's GPUs and their taints; I5 the driver lives and answers; I6 it holds no more
descriptors and threads than it needs; I7 its log names what went wrong and what to do.

What is true is read from the simulated machine, the files and the API server, never from the driver's own classes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.yaml_text import read

if TYPE_CHECKING:
    from tests.process.harness import DaemonProcess, Node

# A driver at rest has some 20 threads and 40 descriptors (sockets, locks, idle connections to the API server);
# its pools end their threads after ten idle seconds, so that no fault may keep it beyond these.
MOST_THREADS = 80
MOST_DESCRIPTORS = 120


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a process holds, from `/proc`."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Vitals:
        """Look at a process."""
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return cls(
            len(list((proc / "fd").iterdir())),
            len(list((proc / "task").iterdir())),
            pages * os.sysconf("SC_PAGE_SIZE"),
        )


def check_invariants(
    node: Node,
    daemon: DaemonProcess | None = None,
    *,
    told: Sequence[str] = (),
    noted: Sequence[str] = (),
    slices_within_seconds: float = 60.0,
) -> None:
    """Check I1 to I7.

    Args:
        daemon: the living driver; the one started last if not given.
        told: error codes of which the log has a line with a cause and a remedy (I7).
        noted: events that the log has, for faults that need nobody to do anything (I7).
        slices_within_seconds: how long the slices may take to be right (I4).
    """
    daemon = daemon or node.daemons[-1]
    check_exclusive(node)
    check_files(node)
    check_partitions(node)
    check_slices(node, within_seconds=slices_within_seconds)
    check_alive(daemon)
    check_log(daemon, told=told, noted=noted)


def check_exclusive(node: Node) -> None:
    """I1: the records name no device twice, except for monitoring and for shares."""
    holders = Counter(
        (result["device"], result["share_id"])
        for record in node.read_records().values()
        for result in record["results"]
        if not result["admin_access"]
    )
    assert not [device for device, count in holders.items() if count > 1], holders
    shared = {device for device, share in holders if share}
    assert not {device for device, share in holders if not share} & shared


def check_files(node: Node) -> None:
    """I2: records and CDI files go together, each names its claim and its devices, and no write is half done."""
    records = node.read_records()
    assert {record["state"] for record in records.values()} <= {"prepared"}
    assert set(records) == node.cdi_files()
    for uid, record in records.items():
        spec = read(node.cdi_file(uid).read_text())
        wanted = {name for device in record["devices"] for name in device["cdi_ids"]}
        assert {f"{spec['kind']}={device['name']}" for device in spec["devices"]} == wanted
        assert {device["device"] for device in record["devices"]} == {r["device"] for r in record["results"]}
        assert record["claim"]["uid"] == uid
    assert [name for name in node.leftovers() if name.endswith(".dra-tmp")] == []


def check_partitions(node: Node) -> None:
    """I3: no instance that nobody made by hand; no claim of these tests makes one."""
    found = {gpu.uuid: len(gpu.instances) for gpu in node.machine.control.state.gpus if gpu.instances}
    assert found == node.partitions


def check_slices(node: Node, *, within_seconds: float) -> None:
    """I4: the API has the machine's GPUs by name and UUID, the lost ones with a taint that keeps pods away."""
    from tests.process.harness import wait_until

    seen: list[Any] = []

    def right() -> bool:
        seen[:] = [found := published(node), wanted := expected(node)]
        return found == wanted

    try:
        wait_until(right, seconds=within_seconds)
    except AssertionError:
        assert seen[0] == seen[1], f"the slices differ from the machine after {within_seconds:g} s"
        raise


def expected(node: Node) -> dict[str, tuple[str, bool]]:
    """Give UUID and whether it is kept from new pods, for each device that the machine has or that a claim holds."""
    state = node.machine.control.state
    held = {
        result["device"]
        for record in node.read_records().values()
        for result in record["results"]
        if record["boot_id"] == state.boot_id
    }
    devices = {}
    for slot in node.machine.profile.gpus:
        gpu, name = state.gpu(slot.uuid), f"gpu-{slot.minor}"
        if gpu is None or not (gpu.present or name in held):
            continue
        devices[name] = (slot.uuid, gpu.lost or not gpu.present)
    return devices


def published(node: Node) -> dict[str, tuple[str, bool]]:
    """Give the same from the API. The pool must be whole: one generation, the count that it says, one owner.

    Partitions that could be made are left out: they have no UUID.
    """
    slices = [each for each in node.slices() if each["spec"]["driver"] == "gpu.nvidia.com"]
    pools = {(s["spec"]["pool"]["generation"], s["spec"]["pool"]["resourceSliceCount"]) for s in slices}
    if len(pools) != 1 or next(iter(pools))[1] != len(slices):
        return {}
    owners = {(o["kind"], o["uid"]) for s in slices for o in s["metadata"].get("ownerReferences", ())}
    if owners != {("Node", node.uid)}:
        return {}
    return {
        device["name"]: (
            device["attributes"].get("uuid", {}).get("string", ""),
            any(taint["effect"] != "None" for taint in device.get("taints", ())),
        )
        for each in slices
        for device in each["spec"].get("devices", ())
        if not is_possible(device)
    }


def is_possible(device: Mapping[str, Any]) -> bool:
    """Whether a published device is a partition that could be made."""
    attributes = device["attributes"]
    return attributes.get("type") == {"string": "mig"} and "uuid" not in attributes


def check_alive(daemon: DaemonProcess) -> None:
    """I5 and I6: it runs, and what it holds is within bounds once the threads of a burst of calls had time to end."""
    from tests.process.harness import wait_until

    assert daemon.process.poll() is None, daemon.log.read_text()[-3000:]
    wait_until(
        lambda: Vitals.of(daemon.process.pid).threads <= MOST_THREADS,
        seconds=60,
        what=f"no more than {MOST_THREADS} threads",
    )
    vitals = Vitals.of(daemon.process.pid)
    assert vitals.descriptors <= MOST_DESCRIPTORS, vitals


def check_log(daemon: DaemonProcess, *, told: Sequence[str] = (), noted: Sequence[str] = ()) -> None:
    """I7: a line for each code with a cause and a remedy, for each event a line; and no bug of the driver's own.

    A line may come a moment after what it tells of.
    """
    from tests.process.harness import wait_until

    def missing() -> set[str]:
        events = daemon.events
        return set(told) - {entry.get("error_code") for entry in events} | set(noted) - {
            entry["event"] for entry in events
        }

    wait_until(lambda: not missing(), what=f"the log tells of {', '.join((*told, *noted))}")
    lines = [entry for entry in daemon.events if entry.get("error_code") in told]
    assert all(entry["error"] and entry["remedy"] for entry in lines), lines
    bugs = [e for e in daemon.events if e.get("error_code") == "DRA-BUG" or "exception" in e]
    assert not bugs, bugs
    text = daemon.log.read_text()
    assert "Traceback" not in "".join(line for line in text.splitlines() if not line.startswith("{"))
