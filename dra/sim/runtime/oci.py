"""CDI edits applied to an OCI runtime spec, as container engines do it.

Source: CDI `container-edits.go` and `oci.go`: order of edits, replacement by path, completion of device nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dra.sim.runtime.rootfs import follow
from dra.sim.runtime.specs import ResolvedDevice
from dra.sim.tree.nodes import DeviceNumbers, device_numbers

OciSpec = dict[str, Any]


class CreateError(RuntimeError):
    """The container cannot be created; the text is what the pod's status would show."""


def empty_oci_spec(*, env: Sequence[str] = (), uid: int = 0, gid: int = 0) -> OciSpec:
    """Give the spec of a container before anything is injected."""
    return {
        "ociVersion": "1.1.0",
        "process": {"env": list(env), "user": {"uid": uid, "gid": gid, "additionalGids": []}},
        "mounts": [],
        "hooks": {},
        "linux": {
            "devices": [],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "netDevices": {},
        },
    }


def inject(spec: OciSpec, devices: Sequence[ResolvedDevice], *, host_root: Path) -> None:
    """Apply the edits of devices in order: those of a file once, with its first device.

    Raises:
        CreateError: a device node of the host is missing or of another type.
    """
    seen: set[Path] = set()
    for device in devices:
        if device.spec.path not in seen:
            seen.add(device.spec.path)
            apply_edits(spec, device.spec.edits, host_root=host_root)
        apply_edits(spec, device.edits, host_root=host_root)
    spec["mounts"].sort(key=lambda mount: len(Path(mount["destination"]).parts))


def apply_edits(spec: OciSpec, edits: Mapping[str, Any], *, host_root: Path) -> None:
    """Apply one block of edits."""
    spec["process"]["env"].extend(edits.get("env", ()))
    for node in edits.get("deviceNodes", ()):
        _add_device(spec, complete_node(node, spec["process"]["user"], host_root=host_root), node)
    for device in edits.get("netDevices", ()):
        spec["linux"]["netDevices"][device["hostInterfaceName"]] = {"name": device["name"]}
    for mount in edits.get("mounts", ()):
        _add_mount(spec, mount)
    for hook in edits.get("hooks", ()):
        entry = {"path": hook["path"], "args": list(hook.get("args", ())), "env": list(hook.get("env", ()))}
        spec["hooks"].setdefault(hook["hookName"], []).append(entry)
    if edits.get("intelRdt"):
        spec["linux"]["intelRdt"] = dict(edits["intelRdt"])
    gids = spec["process"]["user"]["additionalGids"]
    gids.extend(gid for gid in dict.fromkeys(edits.get("additionalGids", ())) if gid and gid not in gids)


def _add_device(spec: OciSpec, device: dict[str, Any], node: Mapping[str, Any]) -> None:
    linux = spec["linux"]
    linux["devices"] = [entry for entry in linux["devices"] if entry["path"] != device["path"]]
    linux["devices"].append(device)
    if device["type"] in ("b", "c", "u"):
        linux["resources"]["devices"].append(
            {
                "allow": True,
                "type": "c" if device["type"] == "u" else device["type"],
                "major": device["major"],
                "minor": device["minor"],
                "access": node.get("permissions") or "rwm",
            }
        )


def _add_mount(spec: OciSpec, mount: Mapping[str, Any]) -> None:
    destination = mount["containerPath"]
    spec["mounts"] = [entry for entry in spec["mounts"] if entry["destination"] != destination]
    entry = {
        "source": mount["hostPath"],
        "destination": destination,
        "options": list(mount.get("options", ())),
    }
    if mount.get("type"):
        entry["type"] = mount["type"]
    spec["mounts"].append(entry)


def complete_node(node: Mapping[str, Any], user: Mapping[str, Any], *, host_root: Path) -> dict[str, Any]:
    """Fill in what a device node leaves open, from the host's node.

    A node with a type and a major number is taken as it is written; any other is looked up, and its absence is
    fatal. Numbers come from the host only where the major is 0.
    """
    device = {
        "path": node["path"],
        "type": node.get("type", ""),
        "major": node.get("major", 0),
        "minor": node.get("minor", 0),
        "fileMode": node.get("fileMode"),
        "uid": node.get("uid") if "uid" in node else (user["uid"] or None),
        "gid": node.get("gid") if "gid" in node else (user["gid"] or None),
    }
    if not device["type"] or (device["major"] == 0 and device["type"] != "p"):
        host_path = node.get("hostPath") or node["path"]
        found = _look_up(host_root, host_path)
        if device["type"] not in ("", found.kind):
            raise CreateError(f"CDI device {host_path} is of type {found.kind}, not {device['type']}")
        device["type"] = found.kind
        if device["major"] == 0:
            device["major"], device["minor"] = found.major, found.minor
        if device["fileMode"] is None:
            device["fileMode"] = found.mode
    return device


def _look_up(host_root: Path, host_path: str) -> DeviceNumbers:
    # lstat: the last part is not followed, the directories are.
    parent, _, name = host_path.rpartition("/")
    directory = follow(host_root, parent or "/")
    found = device_numbers(directory / name) if directory is not None else None
    if found is None:
        raise CreateError(f"failed to stat CDI host device {host_path!r}: no such device node")
    return found
