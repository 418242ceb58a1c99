"""DeviceClasses that the fleet needs and nobody else owns: one for each MIG profile, and one for shared cards.

With them pods that ask for `nvidia.com/mig-1g.10gb` or `nvidia.com/gpu.shared`, as the device plugin has them, get
theirs through DRA. A class of somebody else with the same name, or with the same extended resource, is left alone, and
ours goes without. Classes are never deleted: pods that wait for a node which is not there yet name them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dra.errors import KubeError
from dra.fleet.copies import Copies
from dra.kube.client import KubeClient
from dra.kube.resources import DEVICE_CLASSES, RESOURCE_SLICES
from dra.slices.mig_classes import mig_classes, profiles_in
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop

log = get_logger()
Json = dict[str, Any]

LOOK_SECONDS = 30.0
# On every class that is made here.
LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "dra-fleet"
SHARED_CLASS, SHARED_RESOURCE = "shared.gpu.nvidia.com", "nvidia.com/gpu.shared"


def wanted_classes(
    slices: Iterable[Mapping[str, Any]],
    existing: Collection[Mapping[str, Any]],
    *,
    driver: str,
    extended: bool,
) -> list[Json]:
    """Give the classes that are to be made or changed; one that is there with its `resourceVersion`. Pure.

    Args:
        slices: specs of all ResourceSlices (v1).
        existing: the DeviceClasses that there are.
        driver: whose devices.
        extended: whether the server knows extended resources of classes.
    """
    listed = list(slices)
    wanted = mig_classes(
        profiles_in(listed, driver=driver), driver=driver, existing=existing, extended=extended
    )
    if _has_shared(listed, driver):
        wanted += _shared(driver, existing, extended=extended)
    known = {(each.get("metadata") or {}).get("name"): each for each in existing}
    found = []
    for each in wanted:
        there = known.get(each["metadata"]["name"])
        if there is None or (there.get("spec") or {}) != each["spec"]:
            labels = {**each["metadata"].get("labels", {}), LABEL: MANAGED_BY}
            metadata = {**each["metadata"], "labels": labels}
            spec = each["spec"]
            if there is not None:
                # Only over what was looked at, and all of it: a field that is not wanted any more goes.
                metadata["resourceVersion"] = there["metadata"].get("resourceVersion")
                spec = {**dict.fromkeys(there.get("spec") or {}), **spec}
            found.append({**each, "metadata": metadata, "spec": spec})
    return found


def _has_shared(slices: Iterable[Mapping[str, Any]], driver: str) -> bool:
    return any(
        device.get("allowMultipleAllocations")
        for spec in slices
        if spec.get("driver") == driver
        for device in spec.get("devices") or ()
    )


def _shared(driver: str, existing: Collection[Mapping[str, Any]], *, extended: bool) -> list[Json]:
    others = [each for each in existing if not _is_ours(each)]
    if any((each.get("metadata") or {}).get("name") == SHARED_CLASS for each in others):
        return []
    taken = any((each.get("spec") or {}).get("extendedResourceName") == SHARED_RESOURCE for each in others)
    expression = (
        f"device.driver == '{driver}' && device.attributes['{driver}'].type == 'gpu' && "
        "device.attributes['gpudra.dev'].?sharing.orValue('exclusive') in ['shares', 'unlimited']"
    )
    spec: Json = {"selectors": [{"cel": {"expression": expression}}]}
    if extended and not taken:
        spec["extendedResourceName"] = SHARED_RESOURCE
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": SHARED_CLASS},
            "spec": spec,
        }
    ]


def _is_ours(body: Mapping[str, Any]) -> bool:
    return ((body.get("metadata") or {}).get("labels") or {}).get(LABEL) == MANAGED_BY


class ClassKeeper:
    """A part of `dra fleet`: looks twice a minute while it leads."""

    def __init__(
        self,
        client: KubeClient,
        *,
        driver: str,
        copies: Copies | None = None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._client, self._driver = client, driver
        self._copies = copies or Copies(client, driver=driver)
        self._loop = Loop("device-classes", self.look, seconds=look_seconds)

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        self._loop.start()

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """End; the classes stay."""
        self._loop.stop(timeout_seconds=timeout_seconds)

    def look(self) -> None:
        """Make what is missing and mend what is ours. Raises DraError."""
        slices = [each["spec"] for each in self._copies.all(RESOURCE_SLICES)]
        existing = self._client.list(DEVICE_CLASSES).items
        extended = self._client.served_version(DEVICE_CLASSES) == "v1"
        for body in wanted_classes(slices, existing, driver=self._driver, extended=extended):
            name = body["metadata"]["name"]
            there = "resourceVersion" in body["metadata"]
            try:
                if there:
                    self._client.patch(DEVICE_CLASSES, name, body)
                else:
                    self._client.create(DEVICE_CLASSES, body)
            except KubeError as error:
                # One class that the server refuses, or that somebody made or changed meanwhile, keeps no other from
                # being made.
                log.warning("device_class_not_made", device_class=name, **error_fields(error))
            else:
                log.info("device_class_made", device_class=name)
