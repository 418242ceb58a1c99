"""What can be done about a cause, for who wrote the pod: in words of what stands in it, and with what can be changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dra.allocator.pod_filters import PodObstacle
from dra.api.fraction_pods import OPT_IN, OPT_IN_LABEL
from dra.api.fractions import Ask, FractionRules
from dra.diagnose.explain.misses import NearestMiss
from dra.diagnose.explain.requests import Asked
from dra.diagnose.explain.written import Written

TITLES = {
    "fragmented": "enough is free in total, but not on one GPU",
    "short": "what is left of the shared counters or capacity is not enough",
    "pool-incomplete": "the pool is incomplete",
    "pool-invalid": "the pool is invalid",
    "slice-missing": "the driver has not published its devices",
    "pool-empty": "the driver has published no devices",
    "capacity": "no device is large enough",
    "constraint": "a constraint cannot be met",
    "compete": "requests need the same devices",
}
REMEDIES = {
    "fragmented": "Wait until a GPU has that much free in one piece, ask for a smaller piece, or move a pod that holds one.",
    "short": "Wait until a holder ends, or ask for a smaller piece.",
    "pool-incomplete": "The driver is publishing it; if it stays so, look at the driver's log on that node.",
    "pool-invalid": "Correct what the driver publishes; its slices contradict each other.",
    "slice-missing": "Look at the driver's pod and log on that node; dra doctor there finds the broken step.",
    "pool-empty": "Run dra doctor on that node: the driver runs but sees no usable GPU, or a GpuNodePolicy holds all of them"
    " back (dra policy status).",
    "constraint": "Relax the constraint.",
    "compete": "Ask for fewer devices, or let requests share one.",
    "too-costly": "Simplify the selectors: the scheduler pays for their loops too, on every device.",
    "too-long": "Simplify the claim: fewer alternatives and constraints.",
}
GUARD = (
    'Test the driver first, and guard the attribute: device.driver == "…" && …, has(…) or .?name.orValue(…).'
)
_WIDE = "-o wide shows every device."


def no_match(asked: Asked | None, written: Written, miss: NearestMiss | None) -> tuple[str, str]:
    """Say what no device matches, and what can be done."""
    if written.ask is not None:
        return f"what {written.line} needs", _share_remedy(written.ask)
    class_name = asked.class_name if asked else ""
    if written.resource:
        what = f"class {class_name}, which stands for {written.line}"
        if miss is not None and any("sharing" in item.term for item in miss.trace.misses):
            return what, (
                "The GPUs are published in shares. Ask for one (nvidia.com/gpu.shared: 1) or for a part of a GPU"
                " (nvidia.com/gpu: 0.2), or have them published whole: by a GpuNodePolicy, or --sharing of the driver."
            )
        return what, f"Ask for a resource that the nodes have. {_WIDE}"
    if asked is not None and (miss is None or miss.trace.stage == "class"):
        return f"class {class_name}", f"Name a class that has such devices{written.how}. {_WIDE}"
    what = f"the selectors of request {asked.name}" if asked else "the request"
    return what, f"Correct the selector, or name a class that has such devices{written.how}. {_WIDE}"


def _share_remedy(ask: Ask) -> str:
    if ask.shares:
        return (
            f"Have GPUs cut into {ask.of} shares: --sharing {ask.of} of the driver on their nodes, or a GpuNodePolicy;"
            " --shares-per-card of the webhook must be the same number."
        )
    return "Have GPUs shared by memory: --sharing memory of the driver on their nodes, or a GpuNodePolicy."


def capacity(written: Written) -> str:
    """Say what to do where no device is as large as what is asked for."""
    if written.line:
        return f"No GPU has as much: ask for less than {written.line}."
    return f"Ask for less capacity, or for devices of another class{written.how}."


def taint(written: Written) -> str:
    """Say what to do about tainted devices."""
    repair = "Repair the device (dra doctor on its node says what is wrong)"
    if written.line:
        return f"{repair}. To tolerate the taint the pod needs a claim of its own in place of {written.line}."
    return f"{repair}, or tolerate the taint in the request{written.how}."


def failing(details: Iterable[str], remedy: str) -> str:
    """Say what to do about a selector that fails on a device; a name that is nearly right is most likely a slip."""
    near = next((line.partition("the device has ")[2] for line in details if "the device has " in line), "")
    return f"Write {near} if that is meant. {remedy or GUARD}" if near else remedy or GUARD


def obstacle_remedy(obstacles: Sequence[PodObstacle], namespace: str) -> str:
    """Say what to do about what keeps a pod away from nodes whose devices are free."""
    words = {
        "taint": "tolerate the node's taint",
        "node-selector": "correct the pod's nodeSelector or affinity (or the node's labels)",
        "resource": "free or ask for less of that resource",
        "unschedulable": "uncordon the node",
        "pods": "free a pod slot on the node",
        "plugin-short": "wait until the device plugin has some left, or ask for less",
    }
    kinds = {item.kind for item in obstacles}
    found = [words[kind] for kind in words if kind in kinds]
    missing = sorted(
        {item.text.removeprefix("Insufficient ") for item in obstacles if item.kind == "no-class"}
    )
    found += [_class_remedy(resource, namespace) for resource in missing]
    text = ", or ".join(found)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _class_remedy(resource: str, namespace: str) -> str:
    """Say what makes an extended resource mean something that nothing on the nodes or in the cluster stands for."""
    if resource in FractionRules().memory:
        return (
            f"have the webhook make a claim of {resource} (kubectl label namespace {namespace} {OPT_IN_LABEL}={OPT_IN})"
            " and make the pod anew"
        )
    if resource.startswith("nvidia.com/mig-"):
        return (
            f"check the name of the profile; dra fleet makes the DeviceClass for {resource} when a GPU with that profile"
            " is published"
        )
    if resource == "nvidia.com/gpu":
        return (
            "install the DeviceClass whole.gpu.nvidia.com, which the driver's chart has, or give another that"
            f" extendedResourceName: {resource}"
        )
    return f"give a DeviceClass that extendedResourceName: {resource}"
