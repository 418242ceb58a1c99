"""A DeviceClass for each MIG profile that a cluster has, with the extended resource that people know. Pure.

NVIDIA's device plugin calls partitions `nvidia.com/mig-1g.10gb`; with these classes pods that ask so get theirs through
DRA, static or made on demand. A name that another class has is never taken.

Source: resource names of k8s-device-plugin's MIG strategy `mixed`; KEP-5004 for extended resources of DeviceClasses.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dra.values import is_dns_subdomain

DRIVER = "gpu.nvidia.com"
RESOURCE_DOMAIN = "nvidia.com"
# On classes of this kind, with the profile as its value; what lacks it is somebody else's.
LABEL = "gpudra.dev/mig-profile"
_PROFILE = re.compile(r"[0-9]+[a-z]*\.[0-9]+gb([+-][a-z0-9.]+)*", re.ASCII)

Json = dict[str, Any]


def profiles_in(slices: Iterable[Mapping[str, Any]], *, driver: str = DRIVER) -> list[str]:
    """Give the MIG profiles in the specs of ResourceSlices (v1 shape), each once, by size.

    Slices of other drivers do not count; a profile whose name nobody could write in a class is left out.
    """
    found = {
        str(((device.get("attributes") or {}).get("profile") or {}).get("string", ""))
        for spec in slices
        if spec.get("driver") == driver
        for device in spec.get("devices") or ()
    }
    return sorted(filter(_PROFILE.fullmatch, found), key=_rank)


def resource_name(profile: str) -> str:
    """Give the extended resource of a profile: `nvidia.com/mig-1g.10gb`, `nvidia.com/mig-1g.10gb.me` of `1g.10gb+me`."""
    return f"{RESOURCE_DOMAIN}/mig-{_dotted(profile)}"


def class_name(profile: str) -> str:
    """Give the name of a profile's class: `mig-1g.10gb.nvidia.com`."""
    return f"mig-{_dotted(profile)}.{RESOURCE_DOMAIN}"


def mig_classes(
    profiles: Iterable[str],
    *,
    driver: str = DRIVER,
    existing: Collection[Mapping[str, Any]] = (),
    extended: bool = True,
) -> list[Json]:
    """Give the DeviceClasses (v1) of profiles.

    Args:
        profiles: names of MIG profiles, as `profiles_in` gives them.
        driver: the driver's name.
        existing: the DeviceClasses of the cluster. One of ours whose name somebody else's class has is left out; one
            whose extended resource somebody else's class has comes without it.
        extended: whether the server knows extended resources of classes (only v1 of the API does).
    """
    others = [each for each in existing if LABEL not in ((each.get("metadata") or {}).get("labels") or {})]
    names = {(each.get("metadata") or {}).get("name") for each in others}
    resources = {(each.get("spec") or {}).get("extendedResourceName") for each in others}
    return [
        _class(
            profile, driver, resource_name(profile) if extended and resource_name(profile) not in resources else ""
        )
        for profile in profiles
        if class_name(profile) not in names and is_dns_subdomain(class_name(profile))
    ]  # fmt: skip


def _class(profile: str, driver: str, resource: str) -> Json:
    attributes = f"device.attributes['{driver}']"
    selector = (
        f"device.driver == '{driver}' && {attributes}.type == 'mig' && {attributes}.profile == '{profile}'"
    )
    spec: Json = {"selectors": [{"cel": {"expression": selector}}]}
    if resource:
        spec = {"extendedResourceName": resource, **spec}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": class_name(profile), "labels": {LABEL: _dotted(profile)}},
        "spec": spec,
    }


def _dotted(profile: str) -> str:
    # The characters of NVIDIA's names that a resource's name must not have.
    return profile.replace("+", ".")


def _rank(profile: str) -> tuple[int, int, str]:
    slices, memory = map(int, re.findall(r"[0-9]+", profile)[:2])
    return slices, memory, profile
