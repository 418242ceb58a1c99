"""The CDI specification as far as we write it: names, versions, and a check that is stricter than the engines'.

A spec that an engine refuses makes every device in it unresolvable, so what we write is checked before it is
written, and read back. Source: container-device-interface SPEC.md 1.1.0 and its Go validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dra.cdi.model import SpecDict
from dra.errors import BugError, HostError

CLASS = "claim"
# Engines of 2023 read 0.5.0 (containerd 1.7.0); a claim's UID that starts with a digit needs it.
FLOOR = "0.5.0"
VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
HOOK_STAGES = (
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop",
)  # fmt: skip

# One-character vendors and classes make older readers panic; hence at least two.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)
# Line breaks and characters that YAML does not take as they are, and JSON would leave so.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# Half of a surrogate pair stands for a byte that is no UTF-8.
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_PERMISSIONS = re.compile(r"[rwm]{1,3}", re.ASCII)

Json = Mapping[str, Any]
Problems = Iterator[str]
Check = Callable[[Any, str], Problems]


def kind_of(driver: str) -> str:
    """Give the kind of a DRA driver's specs (`k8s.gpu.nvidia.com/claim`)."""
    return f"k8s.{driver}/{CLASS}"


def device_name(claim_uid: str, device: str, share_id: str | None = None) -> str:
    """Give a device's name in its claim's spec: `<uid>-<device>`, with a share `-<first 8 of its id>` behind."""
    return f"{claim_uid}-{device}" + (f"-{share_id[:8]}" if share_id else "")


def qualified_name(driver: str, claim_uid: str, device: str, *, share_id: str | None = None) -> str:
    """Give the id the kubelet hands to the engine: `k8s.gpu.nvidia.com/claim=<uid>-gpu-0`."""
    return f"{kind_of(driver)}={device_name(claim_uid, device, share_id)}"


def is_kind(text: str) -> bool:
    """Whether text is `vendor/class` as every reader takes it."""
    vendor, _, name = text.partition("/")
    return _NAME.fullmatch(vendor) is not None and _NAME.fullmatch(name) is not None


def is_device_name(text: str) -> bool:
    """Whether text may be a device's name."""
    return _DEVICE.fullmatch(text) is not None


def minimum_version(spec: Json) -> str:
    """Give the lowest version that knows all that a spec uses.

    Source: the CDI library's version requirements, newest feature first.
    """
    devices = spec.get("devices") or []
    edits = [spec.get("containerEdits") or {}, *((device.get("containerEdits") or {}) for device in devices)]
    rdt = [edit["intelRdt"] for edit in edits if edit.get("intelRdt")]
    nodes = [node for edit in edits for node in edit.get("deviceNodes") or []]
    mounts = [mount for edit in edits for mount in edit.get("mounts") or []]
    needs = (
        ("1.1.0", any(edit.get("netDevices") for edit in edits)
            or any("schemata" in one or "enableMonitoring" in one for one in rdt)),
        ("0.7.0", bool(rdt) or any(edit.get("additionalGids") for edit in edits)),
        ("0.6.0", "." in str(spec.get("kind", "")).partition("/")[2] or bool(spec.get("annotations"))
            or any(device.get("annotations") for device in devices)),
        ("0.5.0", any(node.get("hostPath") for node in nodes)
            or any(str(device.get("name", ""))[:1].isdigit() for device in devices)),
        ("0.4.0", any(mount.get("type") for mount in mounts)),
    )  # fmt: skip
    return next((version for version, needed in needs if needed), "0.3.0")


def version_for(spec: Json) -> str:
    """Give the version a spec is written with: what it needs, the floor at least."""
    return max(FLOOR, minimum_version(spec), key=VERSIONS.index)


def encode(spec: Json) -> bytes:
    """Give a spec's bytes: JSON, which readers of YAML take as well. The same spec gives the same bytes."""
    return f"{{{inner_json(spec)}}}\n".encode()


def inner_json(content: Json) -> str:
    """Give the JSON of an object without its braces, as `encode` writes it."""
    # No escapes for letters beyond ASCII: YAML reads surrogate pairs otherwise than JSON.
    text = json.dumps(dict(content), ensure_ascii=False, separators=(",", ": "))[1:-1]
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse(data: bytes) -> SpecDict:
    """Read a spec of ours and check it strictly.

    Raises:
        HostError: DRA-CDI-UNREADABLE: not JSON, a key twice, or something in it is wrong.
    """
    try:
        spec = json.loads(data, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise HostError("DRA-CDI-UNREADABLE", f"not a CDI spec of ours: {error}") from error
    problems = list(problems_of(spec))
    if problems:
        raise HostError("DRA-CDI-UNREADABLE", f"not a CDI spec of ours: {'; '.join(problems[:5])}")
    return dict(spec)


def check(spec: Json) -> None:
    """Refuse a spec that some engine would refuse, or that breaks our own rules.

    Raises:
        BugError: DRA-CDI-INVALID with what is wrong.
    """
    problems = list(problems_of(spec))
    if problems:
        raise BugError(
            "DRA-CDI-INVALID",
            f"a CDI spec was made that container engines refuse: {'; '.join(problems[:5])}",
            remedy="Report this; as a way around, narrow --driver-capabilities.",
        )


def problems_of(spec: Any) -> Problems:
    """Give everything that is wrong with a spec, in words, with the place (`devices[0].containerEdits...`)."""
    yield from _SPEC(spec, "spec")
    if not isinstance(spec, Mapping) or not isinstance(spec.get("devices"), list):
        return
    names = [device.get("name") for device in spec["devices"] if isinstance(device, Mapping)]
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f"device {name} is there twice"
    if not spec["devices"]:
        yield "devices is empty"
    version = spec.get("cdiVersion")
    if version in VERSIONS and VERSIONS.index(minimum_version(spec)) > VERSIONS.index(version):
        yield f"cdiVersion {version} is below {minimum_version(spec)}, which its content needs"


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _fields(known: Mapping[str, Check], *required: str) -> Check:
    def check_fields(value: Any, at: str) -> Problems:
        if not isinstance(value, Mapping):
            yield f"{at} is no object"
            return
        for key in required:
            if key not in value:
                yield f"{at} has no {key}"
        for key, item in value.items():
            rule = known.get(key)
            if rule is None:
                yield f"{at}.{key} is unknown"
            else:
                yield from rule(item, f"{at}.{key}")

    return check_fields


def _each(rule: Check) -> Check:
    def check_each(value: Any, at: str) -> Problems:
        if not isinstance(value, list):
            yield f"{at} is no list"
            return
        for index, item in enumerate(value):
            yield from rule(item, f"{at}[{index}]")

    return check_each


def _that(words: str, test: Callable[[Any], bool]) -> Check:
    def check_that(value: Any, at: str) -> Problems:
        if not test(value):
            yield f"{at} {words}: {value!r}"

    return check_that


def _is_absolute(value: Any) -> bool:
    if not (isinstance(value, str) and value.startswith("/")) or _NOT_UTF8.search(value) or "\0" in value:
        return False
    return not {"..", "."} & set(value.split("/"))


def _is_outside_proc(value: Any) -> bool:
    # runc refuses a mount below /proc.
    return _is_absolute(value) and not (value + "/").startswith("/proc/")


def _is_env(value: Any) -> bool:
    return (
        isinstance(value, str)
        and value.find("=") > 0
        and "\0" not in value
        and _NOT_UTF8.search(value) is None
    )


def _is_number(top: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= top


_ENV = _each(_that("is not NAME=VALUE", _is_env))
_PATH = _that("is no absolute path", _is_absolute)
_TARGET = _that("is no absolute path outside /proc", _is_outside_proc)
_U32 = _that("is no number of 32 bits", _is_number(2**32 - 1))
_NODE = _fields(
    {
        "path": _TARGET,
        "hostPath": _PATH,
        "type": _that("is not c", lambda value: value == "c"),
        "major": _that("is no major number", lambda value: _is_number(2**32 - 1)(value) and value > 0),
        "minor": _U32,
        "fileMode": _that("is no permission bits", _is_number(0o777)),
        "permissions": _that(
            "is not of r, w and m",
            lambda value: (
                isinstance(value, str)
                and _PERMISSIONS.fullmatch(value) is not None
                and len(set(value)) == len(value)
            ),
        ),
        "uid": _U32,
        "gid": _U32,
    },
    # With a major but no type engines trust a stale number; so all of them, or none.
    "path", "type", "major", "minor", "fileMode", "permissions",
)  # fmt: skip
_MOUNT = _fields(
    {
        "hostPath": _PATH,
        "containerPath": _TARGET,
        "options": _each(_that("is no option", lambda value: isinstance(value, str) and bool(value))),
    },
    "hostPath", "containerPath", "options",
)  # fmt: skip
_HOOK = _fields(
    {
        "hookName": _that("is no stage", lambda value: value in HOOK_STAGES),
        "path": _PATH,
        "args": _each(_that("is no text", lambda value: isinstance(value, str))),
        # Without one a hook inherits the image's, LD_PRELOAD included.
        "env": lambda value, at: iter([f"{at} is empty"]) if value == [] else _ENV(value, at),
        "timeout": _that("is no time", _is_number(3600)),
    },
    "hookName", "path", "args", "env",
)  # fmt: skip
_EDITS = _fields(
    {
        "env": _ENV,
        "deviceNodes": _each(_NODE),
        "mounts": _each(_MOUNT),
        "hooks": _each(_HOOK),
        "additionalGids": _each(_U32),
    }
)
_DEVICES = _each(
    _fields(
        {
            "name": _that(
                "is no device name", lambda value: isinstance(value, str) and is_device_name(value)
            ),
            "containerEdits": lambda value, at: iter([f"{at} is empty"]) if not value else _EDITS(value, at),
        },
        "name", "containerEdits",
    )
)  # fmt: skip
_SPEC = _fields(
    {
        "cdiVersion": _that("is no known version", lambda value: value in VERSIONS),
        "kind": _that("is no vendor/class", lambda value: isinstance(value, str) and is_kind(value)),
        "devices": _DEVICES,
        "containerEdits": _EDITS,
    },
    "cdiVersion", "kind", "devices",
)  # fmt: skip
