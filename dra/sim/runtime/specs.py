"""CDI specs as a container engine reads them: strict, by directory, with conflicts and precedence.

Written from the CDI specification and apart from `dra.cdi`, so that a fault there does not hide here.
Source: CDI SPEC.md and the rules of its Go library (parse, validate, minimum version, cache).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

_VENDOR_OR_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
_HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


class SpecError(ValueError):
    """A spec file is not valid: the text says where and why."""


class UnresolvableError(LookupError):
    """Devices that were asked for do not exist; `names` holds all of them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("unresolvable CDI devices " + ", ".join(names))
        self.names = tuple(names)


@dataclass(frozen=True, slots=True)
class Spec:
    """One valid file."""

    path: Path
    version: str
    kind: str
    edits: Mapping[str, Any]
    devices: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ResolvedDevice:
    """One device with the file that defines it."""

    name: str
    spec: Spec
    edits: Mapping[str, Any]


# --- strict reading ---------------------------------------------------------------------------------------------

Check = Callable[[Any, str], None]


def _fail(where: str, why: str) -> None:
    raise SpecError(f"{where}: {why}")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        _fail(where, "must be a string")


def _filled(value: Any, where: str) -> None:
    _text(value, where)
    if not value:
        _fail(where, "must not be empty")


def _integer(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(where, "must be an integer")


def _unsigned(value: Any, where: str) -> None:
    _integer(value, where)
    if not 0 <= value < 1 << 32:
        _fail(where, "must fit 32 bits without a sign")


def _flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        _fail(where, "must be true or false")


def _environment(value: Any, where: str) -> None:
    _text(value, where)
    if value.find("=") < 1:
        _fail(where, f"{value!r} is not NAME=VALUE")


def _one_of(*allowed: str) -> Check:
    def check(value: Any, where: str) -> None:
        _text(value, where)
        if value not in allowed:
            _fail(where, f"{value!r} is none of {', '.join(allowed)}")

    return check


def _permissions(value: Any, where: str) -> None:
    _text(value, where)
    if set(value) - set("rwm"):
        _fail(where, f"{value!r} has other letters than r, w and m")


def _file_mode(value: Any, where: str) -> None:
    _unsigned(value, where)
    if value & ~0o777:
        _fail(where, f"{value} has other bits than permissions")


def _list(item: Check) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            _fail(where, "must be a list")
        for index, entry in enumerate(value):
            item(entry, f"{where}[{index}]")

    return check


def _annotations(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        _fail(where, "must be a map")
    for key, text in value.items():
        _text(text, f"{where}.{key}")


def _object(fields: Mapping[str, Check], *, required: Iterable[str] = ()) -> Check:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _fail(where, "must be an object")
        for key, entry in value.items():
            if key not in fields:
                _fail(where, f"unknown field {key!r}")
            fields[key](entry, f"{where}.{key}")
        for key in required:
            if key not in value:
                _fail(where, f"{key} is missing")

    return check


_EDITS = _object(
    {
        "env": _list(_environment),
        "deviceNodes": _list(
            _object(
                {
                    "path": _filled, "hostPath": _text, "type": _one_of("b", "c", "u", "p", ""),
                    "major": _integer, "minor": _integer, "fileMode": _file_mode, "permissions": _permissions,
                    "uid": _unsigned, "gid": _unsigned,
                },
                required=("path",),
            )
        ),
        "netDevices": _list(_object({"hostInterfaceName": _filled, "name": _filled}, required=("hostInterfaceName", "name"))),
        "hooks": _list(
            _object(
                {
                    "hookName": _one_of(*_HOOKS), "path": _filled, "args": _list(_text),
                    "env": _list(_environment), "timeout": _integer,
                },
                required=("hookName", "path"),
            )
        ),
        "mounts": _list(
            _object(
                {"hostPath": _filled, "containerPath": _filled, "options": _list(_text), "type": _text},
                required=("hostPath", "containerPath"),
            )
        ),
        "intelRdt": _object(
            {
                "closID": _text, "l3CacheSchema": _text, "memBwSchema": _text, "enableCMT": _flag,
                "enableMBM": _flag, "schemata": _list(_text), "enableMonitoring": _flag,
            }
        ),
        "additionalGids": _list(_unsigned),
    }
)  # fmt: skip

_SPEC = _object(
    {
        "cdiVersion": _text, "kind": _text, "annotations": _annotations, "containerEdits": _EDITS,
        "devices": _list(
            _object(
                {"name": _text, "annotations": _annotations, "containerEdits": _EDITS},
                required=("name", "containerEdits"),
            )
        ),
    },
    required=("cdiVersion", "kind", "devices"),
)  # fmt: skip


def parse_spec(text: str, path: Path, *, engine_version: str = VERSIONS[-1]) -> Spec:
    """Read one file's content.

    Args:
        text: JSON or YAML.
        path: where it stands, for error texts.
        engine_version: the highest CDI version that the engine knows.

    Raises:
        SpecError: the first thing that makes the file invalid.
    """
    data = _load(text)
    _SPEC(data, "spec")
    version = data["cdiVersion"].removeprefix("v")
    if version not in VERSIONS:
        raise SpecError(f"unknown CDI version {data['cdiVersion']!r}")
    if _rank(version) > _rank(engine_version):
        raise SpecError(f"CDI version {version} is above {engine_version}, which the engine supports")
    _check_kind(data["kind"])
    if not data["devices"]:
        raise SpecError("spec.devices: at least one device is needed")
    devices: dict[str, Mapping[str, Any]] = {}
    for device in data["devices"]:
        name = device["name"]
        if not _DEVICE.fullmatch(name):
            raise SpecError(f"invalid device name {name!r}")
        if name in devices:
            raise SpecError(f"device {name!r} is defined twice in the file")
        if not any(device["containerEdits"].values()):
            raise SpecError(f"device {name!r} has no edits")
        devices[name] = device["containerEdits"]
    needed = minimum_version(data)
    if _rank(version) < _rank(needed):
        raise SpecError(f"CDI version {version} is below {needed}, which the content needs")
    return Spec(path, version, data["kind"], data.get("containerEdits", {}), devices)


def _load(text: str) -> Any:
    if not text.strip():
        raise SpecError("the file is empty")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError:
        pass
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"neither JSON nor YAML: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise SpecError(f"a key stands twice: {sorted(key for key, _ in pairs)}")
    return found


def _check_kind(kind: str) -> None:
    vendor, slash, device_class = kind.partition("/")
    for part in (vendor, device_class):
        if not slash or not _VENDOR_OR_CLASS.fullmatch(part):
            raise SpecError(f"invalid kind {kind!r}")


def _rank(version: str) -> int:
    return VERSIONS.index(version)


def minimum_version(data: Mapping[str, Any]) -> str:
    """Give the lowest CDI version that allows everything a spec uses."""
    devices = data["devices"]
    edits = [data.get("containerEdits", {}), *(device["containerEdits"] for device in devices)]
    rdt = [entry["intelRdt"] for entry in edits if entry.get("intelRdt")]
    if any(entry.get("netDevices") for entry in edits):
        return "1.1.0"
    if any(entry.get("schemata") or entry.get("enableMonitoring") for entry in rdt):
        return "1.1.0"
    if rdt or any(entry.get("additionalGids") for entry in edits):
        return "0.7.0"
    if data.get("annotations") or any(device.get("annotations") for device in devices):
        return "0.6.0"
    if "." in data["kind"].partition("/")[2]:
        return "0.6.0"
    nodes = [node for entry in edits for node in entry.get("deviceNodes", ())]
    if any(node.get("hostPath") for node in nodes) or any(device["name"][0].isdigit() for device in devices):
        return "0.5.0"
    if any(mount.get("type") for entry in edits for mount in entry.get("mounts", ())):
        return "0.4.0"
    return "0.3.0"


# --- directories ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SpecCache:
    """The devices of some directories; later directories win over earlier ones.

    `errors` says for each file that was left out, or had a device left out, why.
    """

    directories: tuple[Path, ...]
    engine_version: str = VERSIONS[-1]
    devices: dict[str, ResolvedDevice] = field(default_factory=dict)
    errors: dict[Path, list[str]] = field(default_factory=dict)

    def refresh(self) -> Mapping[str, ResolvedDevice]:
        """Read all directories again and give the devices. Engines do so before each injection; safe from threads."""
        devices: dict[str, ResolvedDevice] = {}
        errors: dict[Path, list[str]] = {}
        for directory in self.directories:
            devices.update(self._read(directory, errors))
        self.devices, self.errors = devices, errors
        return devices

    def _read(self, directory: Path, errors: dict[Path, list[str]]) -> dict[str, ResolvedDevice]:
        found: dict[str, ResolvedDevice] = {}
        conflicts: set[str] = set()
        for path in _spec_files(directory):
            try:
                spec = parse_spec(path.read_text(), path, engine_version=self.engine_version)
            except (SpecError, OSError, UnicodeDecodeError) as error:
                errors.setdefault(path, []).append(str(error))
                continue
            for name, edits in spec.devices.items():
                qualified = f"{spec.kind}={name}"
                other = found.get(qualified)
                if other is not None:
                    conflicts.add(qualified)
                    for both in (path, other.spec.path):
                        errors.setdefault(both, []).append(f"conflicting device {qualified}")
                found.setdefault(qualified, ResolvedDevice(qualified, spec, edits))
        return {name: device for name, device in found.items() if name not in conflicts}

    def resolve(self, names: Sequence[str]) -> list[ResolvedDevice]:
        """Give the devices of these qualified names, in order.

        Raises:
            UnresolvableError: with all names that do not exist; nothing is applied then.
        """
        devices = self.refresh()
        missing = [name for name in names if name not in devices]
        if missing:
            raise UnresolvableError(missing)
        return [devices[name] for name in names]


def _spec_files(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []  # a missing directory is no error
    return [path for path in entries if path.suffix in (".json", ".yaml") and path.is_file()]
