"""What the tests of health look at: taints, the stream, Events, the daemon's threads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.process.harness import DRIVER, RESOURCE_API, Node, wait_until

XID, LOST, ECC = "gpu.nvidia.com/xid", "gpu.nvidia.com/gpu-lost", "gpu.nvidia.com/ecc"
# What happens every ten seconds happens twice a second.
SOON = {
    "dra.health.monitor:HealthMonitor.check_seconds": 0.5,
    "dra.health.monitor:HealthMonitor.fast_seconds": 0.1,
    "dra.health.monitor:HealthMonitor.deadline_seconds": 4.0,
    "dra.health.monitor:HealthMonitor.rescan_seconds": 0.5,
    "dra.health.book:HealthBook.clear_seconds": 0.2,
    "dra.health.book:HealthBook.flap_seconds": 0.0,
}


def taints(node: Node) -> dict[str, dict[str, tuple[str, str]]]:
    """The published taints: {device: {key: (value, effect)}}; devices without any are left out."""
    return {
        device["name"]: {each["key"]: (each.get("value", ""), each["effect"]) for each in device["taints"]}
        for obj in node.slices()
        for device in obj["spec"].get("devices") or ()
        if device.get("taints")
    }


def published(node: Node) -> set[str]:
    """Names of the published devices."""
    return {device["name"] for obj in node.slices() for device in obj["spec"].get("devices") or ()}


def added(node: Node, device: str, key: str) -> str:
    """When a taint was added."""
    return next(
        taint["timeAdded"]
        for obj in node.slices()
        for each in obj["spec"].get("devices") or ()
        if each["name"] == device
        for taint in each.get("taints") or ()
        if taint["key"] == key
    )


def wait_taints(node: Node, wanted: dict[str, dict[str, tuple[str, str]]], *, seconds: float = 60) -> None:
    """Wait until exactly these taints are published."""
    try:
        wait_until(lambda: taints(node) == wanted, seconds=seconds)
    except AssertionError:
        raise AssertionError(f"published are {taints(node)}, wanted {wanted}") from None


def wait_well(node: Node) -> None:
    """Wait until no taint keeps anybody away; remarks may stay."""
    wait_until(
        lambda: all(effect == "None" for each in taints(node).values() for _, effect in each.values()),
        what="all GPUs are well",
    )


def streamed(kubelet: object) -> dict[str, tuple[str, str]]:
    """What the kubelet was told last: {device: (state, message)}."""
    return {device: told for (driver, _, device), told in kubelet.health().items() if driver == DRIVER}


def ill(node: Node, kubelet: object) -> dict[str, str]:
    """The published devices that are streamed as unhealthy, with their messages.

    The kubelet remembers what it was told about devices that are not published any more.
    """
    there = published(node)
    return {
        device: text
        for device, (state, text) in streamed(kubelet).items()
        if state == "Unhealthy" and device in there
    }


def reasons(node: Node, name: str) -> Counter[str]:
    """Reasons of the Events on an object, with how often each was counted."""
    _, answer = node.api.request("GET", "/api/v1/events")
    found: Counter[str] = Counter()
    for event in answer["items"]:
        if event["involvedObject"]["name"] == name:
            found[event["reason"]] += int(event.get("count") or 1)
    return found


def device_status(node: Node, claim: str) -> dict[str, tuple[str, str]]:
    """The conditions of a claim's first device in the API: {type: (status, reason)}."""
    _, found = node.api.request("GET", f"{RESOURCE_API}/namespaces/default/resourceclaims/{claim}")
    entries = found["status"].get("devices") or [{"conditions": []}]
    return {each["type"]: (each["status"], each["reason"]) for each in entries[0]["conditions"]}


def threads(pid: int) -> int:
    """How many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def started(
    node: Node, *arguments: str, minor: int = 36, environment: dict[str, str] | None = None, **periods: float
):
    """Start daemon and kubelet; gives both once the GPUs are published and watched. Whole GPUs, if not told else."""
    if not any(argument.startswith("--mig-mode") for argument in arguments):
        arguments = ("--mig-mode=static", *arguments)
    daemon = node.daemon(*arguments, periods={**SOON, **periods}, **environment or {})
    kubelet = node.kubelet(minor=minor)
    kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    wait_watched(daemon)
    return daemon, kubelet


def wait_watched(daemon: object, *, times: int = 1) -> None:
    """Wait until events have been watched for so many times."""
    wait_until(
        lambda: sum(bool(e["gpus"]) for e in daemon.logged("nvml_events_watched")) >= times,
        what="NVML's events are watched",
    )
