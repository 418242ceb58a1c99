"""Known flaws of schedulers that decide otherwise than we do. Source: the issues of kubernetes/kubernetes named here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dra.allocator.model import DeviceId
from dra.diagnose.explain.cluster import NODE, SLICE, Cluster, Json
from dra.diagnose.explain.holders import Holdings

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Facts:
    version: Version
    claims: list[Json]
    slices: list[Json]
    holdings: Holdings

    @property
    def counting_pools(self) -> set[tuple[str, str]]:
        """Pools with shared counters."""
        return {
            (item["spec"]["driver"], item["spec"]["pool"]["name"])
            for item in self.slices
            if item["spec"].get("sharedCounters")
        }

    def bodies(self) -> Iterator[Json]:
        """All requests and sub-requests."""
        for claim in self.claims:
            for request in ((claim.get("spec") or {}).get("devices") or {}).get("requests") or []:
                yield from request.get("firstAvailable") or [request.get("exactly") or {}]

    def constraints(self) -> Iterator[Json]:
        """All constraints."""
        for claim in self.claims:
            yield from ((claim.get("spec") or {}).get("devices") or {}).get("constraints") or []


def flaws(cluster: Cluster, claims: list[Json], holdings: Holdings) -> list[str]:
    """Give the flaws of this cluster's scheduler that these claims can meet; none where its version is not known."""
    version, where = _version(cluster)
    if version is None:
        return []
    facts = _Facts(version, claims, list(cluster.all(SLICE)), holdings)
    return [f"{where}: {text}" for check in _CHECKS for text in check(facts)]


def _version(cluster: Cluster) -> tuple[Version | None, str]:
    if version := parse_version(cluster.version):
        return version, f"the cluster runs {cluster.version}"
    kubelets = [
        parse_version(str(((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion") or ""))
        for node in cluster.all(NODE)
    ]
    newest = max((item for item in kubelets if item), default=None)
    if newest is None:
        return None, ""
    return newest, f"if the scheduler is of the kubelets' version v{'.'.join(map(str, newest))}"


def parse_version(text: str) -> Version | None:
    """Read `v1.36.2`; None if it is none."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _pool_names(facts: _Facts) -> Iterator[str]:
    if not (1, 36, 0) <= facts.version <= (1, 36, 2):
        return
    drivers: dict[str, set[str]] = {}
    for item in facts.slices:
        drivers.setdefault(item["spec"]["pool"]["name"], set()).add(item["spec"]["driver"])
    for driver, pool in sorted(facts.counting_pools):
        if len(drivers[pool]) > 1:
            yield (
                f"it remembers counters by the pool's name without the driver (#140434), and {len(drivers[pool])} drivers"
                f" have a pool {pool}: it may refuse or over-commit devices of {driver} there"
            )
            return


def _leak(facts: _Facts) -> Iterator[str]:
    if facts.version <= (1, 36, 2) and facts.counting_pools and any(True for _ in facts.constraints()):
        yield (
            "counters and constraints of a rejected candidate are not given back (#140436, #140431): it may refuse a"
            " claim with constraints on partitionable devices that fits"
        )


def _distinct(facts: _Facts) -> Iterator[str]:
    counts = any((body.get("count") or 1) > 2 for body in facts.bodies())
    if (
        facts.version < (1, 37, 0)
        and counts
        and any(item.get("distinctAttribute") for item in facts.constraints())
    ):
        yield (
            "distinctAttribute compares only the last device of a request with a count: it may allocate equal devices"
            " where explain says that they are not distinct"
        )


def _admin(facts: _Facts) -> Iterator[str]:
    if facts.counting_pools and any(body.get("adminAccess") for body in facts.bodies()):
        yield "admin access takes from shared counters (#140729): on full GPUs it may be refused"


def _unpublished(facts: _Facts) -> Iterator[str]:
    pools = facts.counting_pools
    if not pools:
        return
    published = {
        DeviceId(item["spec"]["driver"], item["spec"]["pool"]["name"], device["name"])
        for item in facts.slices
        for device in item["spec"].get("devices") or []
    }
    gone = [item for item in facts.holdings.by_device if item[:2] in pools and item not in published]
    if gone:
        yield (
            f"allocated device {gone[0]} is no longer published; what it takes of the shared counters is forgotten"
            " (#140802), so that its GPU may be given out twice. explain counts as the scheduler does"
        )


def _incomplete(facts: _Facts) -> Iterator[str]:
    if facts.version < (1, 35, 0) and _incomplete_pools(facts.slices):
        yield "it also allocates from pools of which some slices are missing; explain does not"


def _all_mode(facts: _Facts) -> Iterator[str]:
    if (1, 35, 0) <= facts.version < (1, 37, 0) and any(
        body.get("allocationMode") == "All" for body in facts.bodies()
    ):
        names = sorted(_incomplete_pools(facts.slices) & {pool for _, pool in facts.counting_pools})
        if names:
            yield (
                f"counters of every node's pool concern every node, so that mode All fails everywhere while pool"
                f" {names[0]} is being updated"
            )


def _incomplete_pools(slices: list[Json]) -> set[str]:
    newest: dict[tuple[str, str], int] = {}
    for item in slices:
        key = (item["spec"]["driver"], item["spec"]["pool"]["name"])
        newest[key] = max(newest.get(key, 0), item["spec"]["pool"].get("generation") or 0)
    found: dict[tuple[str, str], int] = {}
    wanted: dict[tuple[str, str], int] = {}
    for item in slices:
        pool = item["spec"]["pool"]
        key = (item["spec"]["driver"], pool["name"])
        if (pool.get("generation") or 0) == newest[key]:
            found[key] = found.get(key, 0) + 1
            wanted[key] = pool.get("resourceSliceCount") or 0
    return {key[1] for key, count in found.items() if count != wanted[key]}


def _lists(facts: _Facts) -> Iterator[str]:
    kinds = {"ints", "bools", "strings", "versions"}
    for item in facts.slices:
        for device in item["spec"].get("devices") or []:
            for name, value in (device.get("attributes") or {}).items():
                if kinds & value.keys():
                    yield (
                        f"attribute {name} of {item['spec']['driver']} is a list: with the gate"
                        " DRAListTypeAttributes off every selector fails on such a device, with it on 1.36 has"
                        " faults (#139332, #140326)"
                    )
                    return


_CHECKS = (_pool_names, _leak, _distinct, _admin, _unpublished, _incomplete, _all_mode, _lists)
