"""A claim's CDI spec: what its containers get. Pure: everything about the node comes in as `NodeFiles`.

Root edits hold what does not depend on the device; an engine applies them once for each spec of which any device
is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dra.cdi.checked import RootPart, SpecParts
from dra.cdi.exposure import CommonEdits, common_edits, hook
from dra.cdi.model import CdiDevice, CdiOptions, DeviceNode, Mount, NodeFiles, SpecDict
from dra.cdi.spec import device_name, kind_of, version_for
from dra.errors import BugError
from dra.host.driver_lists import DISPLAY

# Cgroup access; leaving out `m` keeps a container from making nodes of its own.
PERMISSIONS = "rw"


def build_claim_spec(
    *, claim_uid: str, devices: Sequence[CdiDevice], node: NodeFiles, options: CdiOptions
) -> SpecDict:
    """Give the spec of a claim. The same input gives the same spec, in the same order.

    A device that is named twice (two requests that share it) stands in it once.

    Raises:
        StackError: DRA-CDI-HOOK-MISSING.
        BugError: DRA-CDI-DEVICES: no devices, or two different ones under one name.
    """
    shared = common_edits(node, options)
    spec = _own_spec(claim_uid, devices, node, options=options, env=shared.env)
    spec["containerEdits"] |= _edits(env=(), nodes=(), mounts=shared.mounts, hooks=shared.hooks)
    spec["cdiVersion"] = version_for(spec)
    return spec


def root_part(common: CommonEdits, *, kind: str) -> RootPart:
    """Give the part of the root edits that does not depend on the claim, for `complete_claim_spec`.

    Raises:
        BugError: DRA-CDI-INVALID.
    """
    return RootPart(_edits(env=(), nodes=(), mounts=common.mounts, hooks=common.hooks), kind=kind)


def complete_claim_spec(
    *,
    claim_uid: str,
    devices: Sequence[CdiDevice],
    node: NodeFiles,
    options: CdiOptions,
    env: tuple[str, ...],
    root: RootPart,
) -> SpecParts:
    """Give what `build_claim_spec` gives, checked and as text, from `env` and `root` of common edits that the caller has already.

    Raises:
        BugError: DRA-CDI-DEVICES, as `build_claim_spec`; DRA-CDI-INVALID.
    """
    return root.complete(_own_spec(claim_uid, devices, node, options=options, env=env))


def _own_spec(
    claim_uid: str,
    devices: Sequence[CdiDevice],
    node: NodeFiles,
    *,
    options: CdiOptions,
    env: tuple[str, ...],
) -> SpecDict:
    """Give a claim's spec without mounts and hooks in its root edits, and without a version."""
    made: dict[str, SpecDict] = {}
    for device in devices:
        name = device_name(claim_uid, device.name, device.share_id)
        entry = {"name": name, "containerEdits": _device_edits(device, node, options)}
        if made.setdefault(name, entry) != entry:
            raise BugError("DRA-CDI-DEVICES", f"two different devices would be named {name}")
    if not made:
        raise BugError("DRA-CDI-DEVICES", f"claim {claim_uid} has no devices to write a CDI spec for")
    return {
        "cdiVersion": "",
        "kind": kind_of(options.driver),
        "devices": [made[name] for name in sorted(made)],
        "containerEdits": _edits(env=env, nodes=node.control_nodes, mounts=(), hooks=()),
    }


def _device_edits(device: CdiDevice, node: NodeFiles, options: CdiOptions) -> SpecDict:
    if device.gpu_minor is None:
        # Access for monitoring to a function that may be passed through, among GPUs.
        return bare_edits()
    gpu = node.gpus[device.gpu_minor]
    hooks = []
    if node.hook_path and options.exposure in ("auto", "hooks") and gpu.links:
        args = [part for target, link in gpu.links for part in ("--link", f"{target}::{link}")]
        hooks.append(hook(node.hook_path, "create-symlinks", *args))
        if DISPLAY in options.capabilities:
            hooks.append(hook(node.hook_path, "chmod", "--mode", "755", "--path", "/dev/dri"))
    return _edits(
        env=device.extra_env,
        nodes=(gpu.node, *gpu.drm, *device.extra_nodes),
        mounts=device.extra_mounts,
        hooks=tuple(hooks),
    )


def bare_edits() -> SpecDict:
    """Give the edits of a device with which a container gets nothing: an engine refuses a device without any."""
    return {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


def device_nodes(nodes: Sequence[DeviceNode]) -> SpecDict:
    """Give the edits with which a container gets device nodes."""
    return _edits(env=(), nodes=tuple(nodes), mounts=(), hooks=())


def _edits(
    *,
    env: tuple[str, ...],
    nodes: tuple[DeviceNode, ...],
    mounts: tuple[Mount, ...],
    hooks: tuple[SpecDict, ...],
) -> SpecDict:
    """Give containerEdits without empty lists."""
    edits: SpecDict = {}
    if env:
        edits["env"] = list(env)
    if nodes:
        edits["deviceNodes"] = [_node(one) for one in nodes]
    if hooks:
        edits["hooks"] = list(hooks)
    if mounts:
        edits["mounts"] = [_mount(one) for one in mounts]
    return edits


def _node(node: DeviceNode) -> dict[str, Any]:
    # Type and numbers together: the engine then trusts them and looks at nothing on the host.
    found: dict[str, Any] = {"path": node.path}
    if node.host_path and node.host_path != node.path:
        found["hostPath"] = node.host_path
    found |= {
        "type": "c",
        "major": node.major,
        "minor": node.minor,
        "fileMode": node.mode,
        "permissions": PERMISSIONS,
    }
    if node.gid:
        found["gid"] = node.gid
    return found


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": list(mount.options),
    }
