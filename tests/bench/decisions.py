"""Figures of CEL and of the allocator, beside the recorded ones of the real allocator (Go, same kind of machine)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dra.allocator.allocate import Allocator, allocated_state
from dra.cel import compile_selector
from tests.bench.figure import Figure

DRIVER = "gpu.nvidia.com"
_GPU = f'device.attributes["{DRIVER}"]'
_CLASS = f'device.driver == "{DRIVER}" && {_GPU}.type == "{{kind}}"'
_H100 = (
    f'{_GPU}.productName.lowerAscii().contains("h100") && '
    f'device.capacity["{DRIVER}"].memory.compareTo(quantity("40Gi")) >= 0'
)
# (profile, memory slices, how many devices of it a GPU has): synthetic, as the recorded scenario.
_PROFILES = (
    ("1g.10gb", 1, 7),
    ("1g.20gb", 2, 4),
    ("2g.20gb", 2, 3),
    ("3g.40gb", 4, 2),
    ("4g.40gb", 4, 1),
    ("7g.80gb", 8, 1),
)


def figures() -> list[Figure]:
    """Measure; some seconds."""
    return [
        Figure("CEL, class and request selector, one evaluation", _cel(), "us", 10, "8-18 (Go)"),
        Figure("allocator, 1000 nodes x 8 GPUs, the last fits", _last_node(), "ms", 1000, "153-167 (Go)"),
        Figure("allocator, 56 claims of 1g on 8 partitionable GPUs", _partitions(), "s", 1, "0.23-0.26 (Go)"),
    ]


def _best(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _cel() -> float:
    device = _gpu("gpu-0", "NVIDIA H100 80GB HBM3")
    selectors = [compile_selector(_CLASS.format(kind="gpu")), compile_selector(_H100)]

    def many() -> None:
        for _ in range(2000):
            for selector in selectors:
                selector.evaluate(device, driver=DRIVER)

    return _best(many, 5) / 4000 * 1e6


def _gpu(name: str, product: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {"type": {"string": "gpu"}, "productName": {"string": product}}
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": "80Gi"}}}


def _class(kind: str) -> dict[str, Any]:
    return {
        "metadata": {"name": kind},
        "spec": {"selectors": [{"cel": {"expression": _CLASS.format(kind=kind)}}]},
    }


def _claim(kind: str, expression: str, name: str) -> dict[str, Any]:
    exactly = {"deviceClassName": kind, "selectors": [{"cel": {"expression": expression}}]}
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": exactly}]}},
    }


def _slice(name: str, node: str, count: int, **spec: Any) -> dict[str, Any]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": count}
    return {"metadata": {"name": name}, "spec": {"driver": DRIVER, "pool": pool, "nodeName": node, **spec}}


def _last_node() -> float:
    names = [f"node-{index:04}" for index in range(1000)]
    slices = [
        _slice(
            f"0-{name}", name, 1,
            devices=[_gpu(f"gpu-{i}", "NVIDIA H100" if name == names[-1] else "NVIDIA A100") for i in range(8)],
        )
        for name in names
    ]  # fmt: skip
    claim = _claim("gpu", _H100, "c")

    def scan() -> None:
        allocator = Allocator(
            slices=slices,
            classes=[_class("gpu")],
            allocated=allocated_state([]),
            compile_selector=compile_selector,
        )
        found = [allocator.allocate({"metadata": {"name": name}}, [claim]) for name in names]
        if sum(item is not None for item in found) != 1:
            raise RuntimeError("only the last node fits")

    return _best(scan, 3) * 1000


def _partitions() -> float:
    counters = [
        {"name": f"gpu-{i}", "counters": {f"memory-slice-{n}": {"value": "1"} for n in range(8)}}
        for i in range(8)
    ]
    slices = [_slice("0-counters", "n", 9, sharedCounters=counters)]
    slices += [_slice(f"{gpu + 1}-gpu", "n", 9, devices=_placements(gpu)) for gpu in range(8)]
    expression = f'{_GPU}.profile == "1g.10gb"'

    def fill() -> None:
        claims: list[dict[str, Any]] = []
        for index in range(56):
            allocator = Allocator(
                slices=slices, classes=[_class("mig")], allocated=allocated_state(claims),
                compile_selector=compile_selector,
            )  # fmt: skip
            claim = _claim("mig", expression, f"c{index}")
            found = allocator.allocate({"metadata": {"name": "n"}}, [claim])
            if found is None:
                raise RuntimeError(f"claim {index} does not fit")
            claims.append({**claim, "status": {"allocation": found[0]}})

    return _best(fill, 3)


def _placements(gpu: int) -> list[dict[str, Any]]:
    devices = []
    for profile, size, count in _PROFILES:
        for index in range(count):
            start = index * size
            used = {f"memory-slice-{n}": {"value": "1"} for n in range(start, min(start + size, 8))}
            devices.append(
                {
                    "name": f"gpu-{gpu}-mig-{profile.replace('.', '')}-{start}",
                    "attributes": {"type": {"string": "mig"}, "profile": {"string": profile}},
                    "consumesCounters": [{"counterSet": f"gpu-{gpu}", "counters": used}],
                }
            )
    return devices
