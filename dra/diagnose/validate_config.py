"""Opaque configurations of our driver in claims, templates and classes: what prepare would refuse, and what does nothing.

Errors are what NVIDIA's driver refuses or fails on; what it takes and runs is at most a warning.
Source: resource.nvidia.com/v1beta1, strict decoding; precedence and matching of NVIDIA's DRA driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.api.claim import OpaqueConfig
from dra.api.config import KIND_OF_TYPE, DecodedConfig, decode_configs
from dra.api.rules.classes import DRIVER, TYPE_OF_CLASS
from dra.diagnose.validate_cel import requests_of
from dra.diagnose.validate_model import Json
from dra.diagnose.validate_object import Subject
from dra.diagnose.validate_passthrough import check_passthrough
from dra.errors import ConfigError

_OTHER_KINDS = frozenset({"ComputeDomainChannelConfig", "ComputeDomainDaemonConfig"})
_TYPE_WORDS = {"gpu": "a whole GPU", "mig": "a MIG device", "vfio": "a GPU passed through"}


def check_configs(subject: Subject) -> None:
    """Report every configuration of our driver that is wrong or without effect."""
    named: dict[str, int] = {}
    known: list[DecodedConfig] = []
    requests = _types(subject)
    for index, path, config in opaque_configs(subject):
        at = f"{path}.opaque.parameters"
        parameters = (config.get("opaque") or {}).get("parameters")
        if not isinstance(parameters, dict):
            continue  # the rules said so
        names = tuple(config.get("requests") or ())
        try:
            (decoded,) = decode_configs([OpaqueConfig("FromClaim", names, DRIVER, parameters)])
        except ConfigError as error:
            where = str(error.fields.get("field") or "")
            subject.report(
                "error", error.code, f"{at}.{where}" if where else at, error.message, remedy=error.remedy
            )
            continue
        for warning in decoded.warnings:
            subject.report("warning", "DRA-CONFIG-IDLE", at, warning, remedy="Remove what does nothing.")
        if subject.kind != "DeviceClass":
            _check_kind(subject, at, decoded.kind, names, requests)
            _check_hidden(subject, path, names, named, index)
            known.append(decoded)
    check_passthrough(subject, known)


def opaque_configs(subject: Subject) -> Iterator[tuple[int, str, Json]]:
    """Give the entries that are for our driver: place, path, content."""
    if subject.kind == "DeviceClass":
        path, items = "spec.config", (subject.obj.get("spec") or {}).get("config")
    elif claim := subject.claim_spec():
        path, items = f"{claim[0]}.devices.config", (claim[1].get("devices") or {}).get("config")
    else:
        return
    for index, item in enumerate(items or []):
        if (item.get("opaque") or {}).get("driver") == DRIVER:
            yield index, f"{path}[{index}]", item


def _types(subject: Subject) -> dict[str, str | None]:
    """Give the type of device of each request, as far as the name of its class tells."""
    claim = subject.claim_spec()
    if claim is None:
        return {}
    return {
        name: TYPE_OF_CLASS.get(str(request.get("deviceClassName")))
        for name, _, request in requests_of(claim[1], claim[0])
    }


def _check_kind(
    subject: Subject, path: str, kind: str, names: tuple[str, ...], requests: dict[str, str | None]
) -> None:
    if names:
        for request, kind_of_device in requests.items():
            if kind_of_device is None or not ({request, request.partition("/")[0]} & set(names)):
                continue
            wanted = KIND_OF_TYPE[kind_of_device]  # type: ignore[index]
            if kind != wanted:
                subject.report(
                    "error", "DRA-CONFIG-KIND-MISMATCH", f"{path}.kind",
                    f"{kind} cannot configure request {request}, which asks for {_TYPE_WORDS[kind_of_device]}",
                    remedy=f"Write kind: {wanted}, or list another request.",
                )  # fmt: skip
        return
    if kind in _OTHER_KINDS:
        subject.report(
            "warning", "DRA-CONFIG-IDLE", f"{path}.kind", f"{kind} does nothing for driver {DRIVER}",
            remedy="Remove it, or write the driver compute-domain.nvidia.com.",
        )  # fmt: skip
    elif requests and all(one is not None and KIND_OF_TYPE[one] != kind for one in requests.values()):  # type: ignore[index]
        subject.report(
            "warning", "DRA-CONFIG-IDLE", f"{path}.kind", f"no request asks for what {kind} configures",
            remedy="Remove it, or write the kind that fits the requests.",
        )  # fmt: skip


def _check_hidden(
    subject: Subject, path: str, names: tuple[str, ...], named: dict[str, int], index: int
) -> None:
    for name in names:
        if name in named:
            subject.report(
                "warning", "DRA-CONFIG-HIDDEN", f"{path}.requests",
                f"request {name} is configured by entry {named[name]} too, which has no effect: the last entry wins as a whole",
                remedy="Keep one entry for each request.",
            )  # fmt: skip
        named[name] = index


def has_sharing(subject: Subject) -> list[str]:
    """Give the paths of configurations that set up sharing."""
    found = []
    for _, path, config in opaque_configs(subject):
        parameters: Any = (config.get("opaque") or {}).get("parameters")
        if isinstance(parameters, dict) and parameters.get("sharing"):
            found.append(f"{path}.opaque.parameters.sharing")
    return found
