"""Claims and templates of GPUs that are passed through: what prepare would refuse, as far as names of classes tell."""

from __future__ import annotations

from collections.abc import Sequence

from dra.api.claim import AllocatedDevice
from dra.api.config import DecodedConfig, effective_config
from dra.api.passthrough import backend_policy, backends_error, mixed_error
from dra.api.rules.classes import DRIVER, TYPE_OF_CLASS
from dra.diagnose.validate_cel import requests_of
from dra.diagnose.validate_object import Subject
from dra.errors import ConfigError


def check_passthrough(subject: Subject, configs: Sequence[DecodedConfig]) -> None:
    """Report a claim that cannot be prepared whatever it is allocated.

    Args:
        subject: what was read.
        configs: its valid configurations of our driver, in their order.
    """
    claim = subject.claim_spec()
    if claim is None:
        return
    types: dict[str, set[str | None]] = {}
    for name, _, request in requests_of(claim[1], claim[0]):
        # Access for monitoring binds nothing, and mixes with everything.
        if not request.get("adminAccess"):
            kind = TYPE_OF_CLASS.get(str(request.get("deviceClassName")))
            types.setdefault(name.partition("/")[0], set()).add(kind)
    through = [name for name, kinds in types.items() if kinds == {"vfio"}]
    others = [name for name, kinds in types.items() if not kinds & {None, "vfio"}]
    if through and others:
        _report(subject, f"{claim[0]}.devices.requests", mixed_error(through, others))
    policies = {
        backend_policy(config): name for name in through if (config := _config(name, configs)) is not None
    }
    if len(policies) > 1:
        _report(subject, f"{claim[0]}.devices.config", backends_error(policies))


def _config(request: str, configs: Sequence[DecodedConfig]) -> DecodedConfig | None:
    """Give what configures a request; None where that is the class's affair, or wrong, which was said."""
    try:
        return effective_config(AllocatedDevice(request, DRIVER, "", request), configs, device_type="vfio")
    except ConfigError:
        return None


def _report(subject: Subject, path: str, error: ConfigError) -> None:
    subject.report("error", error.code, path, error.message, remedy=error.remedy)
