"""What holds for each GPU of the node now, on disk: a restart goes on with it whatever the API server says.

Were it not kept, a GPU that several claims share would be published as exclusive after a restart until the policies
are read again. Pure, but for one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dra.api.gpu_settings import (
    BLOCKS,
    GpuSelector,
    GpuSettings,
    HealthSettings,
    MigSettings,
    NodeSettings,
    ReservedSettings,
    SettingsLayer,
    SharingSettings,
)
from dra.errors import DraError
from dra.host.files import ensure_dir, read_bytes, write_durable
from dra.telemetry.log import error_fields, get_logger

log = get_logger()

_VERSION = 1
SOURCE = "GpuNodePolicy"


@dataclass(frozen=True, slots=True)
class AppliedSettings:
    """What holds for each GPU that is not only as the flags say; by UUID.

    Args:
        settings: what is published and used.
        changing: GPUs whose change has begun: nothing of theirs is given out until it is over.
        draining: GPUs that are held back for a change that is to come: a restart must not give them out meanwhile.
    """

    settings: Mapping[str, GpuSettings] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()

    @property
    def held_back(self) -> frozenset[str]:
        """UUIDs of the GPUs that nobody new gets."""
        return self.changing | self.draining

    def with_gpu(self, uuid: str, settings: GpuSettings, *, changing: bool = False) -> AppliedSettings:
        """Give these with what holds for one GPU."""
        changed = self.changing | {uuid} if changing else self.changing - {uuid}
        return replace(self, settings={**self.settings, uuid: settings}, changing=changed)

    def over(self, base: NodeSettings) -> NodeSettings:
        """Give what holds on the node: the flags, and these above."""
        return base.over(
            SettingsLayer(
                GpuSelector(uuid=uuid), {name: getattr(settings, name) for name in BLOCKS}, source=SOURCE
            )
            for uuid, settings in sorted(self.settings.items())
        )


def settings_to_json(settings: GpuSettings) -> dict[str, Any]:
    """Give settings as JSON; keys of `health.xids` become text."""
    return asdict(settings)


def settings_from_json(body: Mapping[str, Any]) -> GpuSettings:
    """Read what `settings_to_json` gave, also of an older version.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    reserved = body.get("reserved")
    health = body.get("health") or {}
    capabilities = body.get("driver_capabilities")
    mig = body.get("mig") or {}
    return GpuSettings(
        sharing=SharingSettings(**body["sharing"]),
        mig=MigSettings(mig.get("mode"), tuple((str(a), int(b)) for a, b in mig.get("layout") or ())),
        reserved=None if reserved is None else ReservedSettings(**reserved),
        attributes={str(name): dict(value) for name, value in (body.get("attributes") or {}).items()},
        driver_capabilities=None if capabilities is None else tuple(capabilities),
        health=HealthSettings(
            {int(xid): effect for xid, effect in (health.get("xids") or {}).items()},
            health.get("temperature_celsius"),
        ),
        time_slice=body.get("time_slice"),
        telemetry_interval_seconds=body.get("telemetry_interval_seconds"),
    )


class AppliedFile:
    """The file. Writing raises HostError; a file that cannot be read is set aside and said."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> AppliedSettings:
        """Give what was written last; nothing if there is none or it is damaged."""
        try:
            data = read_bytes(self._path)
        except DraError as error:
            log.warning("policy_state_not_readable", **error_fields(error))
            return AppliedSettings()
        if data is None:
            return AppliedSettings()
        try:
            body = json.loads(data)
            return AppliedSettings(
                {str(uuid): settings_from_json(each) for uuid, each in body["gpus"].items()},
                frozenset(str(uuid) for uuid in body.get("changing", ())),
                frozenset(str(uuid) for uuid in body.get("draining", ())),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("policy_state_damaged", path=str(self._path), error=repr(error))
            return AppliedSettings()

    def save(self, applied: AppliedSettings) -> None:
        """Write it down. Raises HostError."""
        body = {
            "version": _VERSION,
            "gpus": {uuid: settings_to_json(each) for uuid, each in sorted(applied.settings.items())},
            "changing": sorted(applied.changing),
            "draining": sorted(applied.draining),
        }
        ensure_dir(self._path.parent, mode=0o750)
        write_durable(self._path, json.dumps(body).encode(), mode=0o600)
