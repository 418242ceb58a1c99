"""What is to be placed: a mix that somebody wrote, or the claims of manifests. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from dra.api.rules.classes import TYPE_OF_CLASS, class_expression
from dra.diagnose.mig_plan.model import WHOLE, GpuState, Wanted
from dra.errors import ConfigError, DraError
from dra.slices.mig_classes import mig_classes, profiles_in

Json = Mapping[str, Any]
_MOST = 1000
_ITEM = re.compile(r"([^=\s]+)(?:=([0-9]{1,4000}))?", re.ASCII)
_DRIVER = "gpu.nvidia.com"
_PARENT = (f"{_DRIVER}/parentUUID", "parentUUID")


class Selector(Protocol):
    """A compiled expression."""

    def evaluate(self, device: Json, *, driver: str = "") -> bool:
        """Whether a device matches. Raises DraError."""
        ...


Compile = Callable[[str], Selector]


def parse_mix(text: str, gpus: Sequence[GpuState]) -> Wanted:
    """Read `3g.40gb=1,1g.10gb=4`; `gpu` is a whole one, a number may be left out.

    Raises:
        ConfigError: DRA-MIG-WANT: no such profile on any of the GPUs, or not of this form.
    """
    known = list(dict.fromkeys(name for gpu in gpus for name in gpu.by_name))
    mix: Counter[str] = Counter()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _ITEM.fullmatch(part)
        name, count = (match[1], int(match[2] or 1)) if match else (part, 0)
        if not 0 < count <= _MOST or (name != WHOLE and name not in known):
            ask_for_less = count > _MOST and name in {WHOLE, *known}
            raise ConfigError(
                "DRA-MIG-WANT",
                f"{part!r} is more than {_MOST} of a kind"
                if ask_for_less
                else f"{part!r} is no profile of these GPUs with a count",
                remedy=f"Write for example {(known or ['1g.10gb'])[0]}=2. There are {', '.join([*known, WHOLE])}.",
            )
        mix[name] += count
    if not mix:
        raise ConfigError(
            "DRA-MIG-WANT", "nothing is wanted", remedy="Write for example 3g.40gb=1,1g.10gb=4."
        )
    return Wanted(text, dict(mix))


def wanted_in(
    objects: Iterable[Json],
    gpus: Sequence[GpuState],
    *,
    compile_selector: Compile,
    classes: Iterable[Json] = (),
) -> list[Wanted]:
    """Give what the ResourceClaims and ResourceClaimTemplates among objects (v1) ask of these GPUs.

    A request takes the smallest profile that its class and selectors allow, as the scheduler does; a whole GPU only where
    no partition will do. Requests that `matchAttribute` on `parentUUID` binds go on one GPU. Claims that are allocated
    already, requests for other devices and those with admin access are left out.

    Raises:
        ConfigError: DRA-MIG-CLAIM: a request that none of these GPUs could ever meet, or one of `allocationMode: All`.
    """
    every = {str(each["metadata"]["name"]): each for each in (*_built_in(gpus), *classes)}
    devices: dict[str, Json] = {}
    for gpu in gpus:
        for name, device in gpu.devices.items():
            devices.setdefault(name, device)
    order = sorted(devices, key=lambda name: _rank(name, gpus))
    found: list[Wanted] = []
    for each in objects:
        spec = _claim_spec(each)
        if spec is None:
            continue
        asked = _Asked(every, {name: devices[name] for name in order}, compile_selector)
        found += asked.of_claim(f"{each['kind']} {each['metadata']['name']}", spec)
    return found


def _claim_spec(each: Json) -> Json | None:
    if each.get("kind") == "ResourceClaimTemplate":
        spec: Json = each["spec"].get("spec") or {}
        return spec
    if each.get("kind") != "ResourceClaim" or (each.get("status") or {}).get("allocation"):
        return None
    claim: Json = each.get("spec") or {}
    return claim


def _rank(name: str, gpus: Sequence[GpuState]) -> tuple[int, int, int, int]:
    for gpu in gpus:
        if name in gpu.by_name:
            profile = gpu.by_name[name]
            engines = sum(
                profile.amounts.get(key, 0) for key in ("decoders", "encoders", "jpegEngines", "ofaEngines")
            )
            return 0, profile.size, profile.amounts.get("multiprocessors", 0), engines
    return 1, 0, 0, 0


def _built_in(gpus: Sequence[GpuState]) -> list[Json]:
    specs = [{"driver": _DRIVER, "devices": list(gpu.devices.values())} for gpu in gpus]
    ours: list[Json] = [
        {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": class_expression(name)}}]}}
        for name in TYPE_OF_CLASS
    ]
    return [*ours, *mig_classes(profiles_in(specs))]


class _Asked:
    """The requests of claims, as profiles."""

    def __init__(self, classes: Mapping[str, Json], devices: Mapping[str, Json], compile_: Compile) -> None:
        self._classes, self._devices, self._compile = classes, devices, compile_

    def of_claim(self, what: str, spec: Json) -> list[Wanted]:
        """Give what one claim wants, by the groups that have to be on one GPU."""
        body = spec.get("devices") or {}
        bound = [
            constraint.get("requests") or [request["name"] for request in body.get("requests") or ()]
            for constraint in body.get("constraints") or ()
            if constraint.get("matchAttribute") in _PARENT
        ]
        groups: dict[int, Counter[str]] = {}
        for request in body.get("requests") or ():
            profile, count = self._of_request(what, request)
            if profile:
                group = next((n for n, names in enumerate(bound) if request["name"] in names), -1)
                groups.setdefault(group, Counter())[profile] += count
        return [
            Wanted(what, dict(mix), same_gpu=group >= 0 and WHOLE not in mix) for group, mix in groups.items()
        ]

    def _of_request(self, what: str, request: Json) -> tuple[str, int]:
        # Of alternatives the first that these GPUs could meet.
        asked = [request["exactly"]] if "exactly" in request else list(request.get("firstAvailable") or ())
        for each in asked:
            if each.get("adminAccess"):
                return "", 0
            if each.get("allocationMode") == "All":
                raise self._cannot(what, request, "it asks for all devices, which is no mix")
            profile = self._profile_for(each)
            if profile:
                return profile, int(each.get("count") or 1)
        if any(each.get("deviceClassName") in self._classes for each in asked):
            raise self._cannot(what, request, "no profile of these GPUs meets its class and selectors")
        return "", 0

    def _profile_for(self, asked: Json) -> str:
        found = self._classes.get(str(asked.get("deviceClassName")))
        if found is None:
            return ""
        parts = ((found.get("spec") or {}).get("selectors"), asked.get("selectors"))
        selectors = [each["cel"]["expression"] for part in parts for each in part or () if "cel" in each]
        compiled = [self._compile(expression) for expression in selectors]
        for name, device in self._devices.items():
            if all(_matches(selector, device) for selector in compiled):
                return name
        return ""

    @staticmethod
    def _cannot(what: str, request: Json, why: str) -> ConfigError:
        return ConfigError(
            "DRA-MIG-CLAIM",
            f"{what}, request {request['name']}: {why}",
            remedy="Compare it with dra inventory -o slices; dra explain says more about a claim in a cluster.",
        )


def _matches(selector: Selector, device: Json) -> bool:
    try:
        return selector.evaluate(device, driver=_DRIVER)
    except DraError:
        return False
