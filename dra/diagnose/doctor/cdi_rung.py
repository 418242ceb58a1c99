"""The CDI directories: ours can be written, every spec can be read, nothing in them names what is not there any more.

Specs of others (NVIDIA's toolkit, other drivers) are read too: a stale one breaks pods that use it, and one that
defines a device of ours a second time makes engines refuse both.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dra.cdi.nodes import read_node
from dra.cdi.spec import kind_of
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, note, warning
from dra.host.paths import strip_root
from dra.host.proc import FRONTEND_NAMES, device_majors
from dra.host.rooted import resolve

CDI_DIRS = ("/etc/cdi", "/var/run/cdi")
_SUFFIXES = (".yaml", ".json")
_LARGEST_BYTES = 8 << 20


class SpecOnDisk:
    """A spec file: its path as the host spells it, and its content; `content` is None where it cannot be read."""

    def __init__(self, shown: str, data: bytes) -> None:
        self.shown = shown
        self.content, self.trouble = _parse(data)

    @property
    def kind(self) -> str:
        """`vendor/class`, empty where there is none."""
        return str((self.content or {}).get("kind") or "")

    def edits(self) -> Iterator[Mapping[str, Any]]:
        """Give the container edits, the common ones first."""
        content = self.content or {}
        for part in (content, *(content.get("devices") or [])):
            found = part.get("containerEdits") if isinstance(part, Mapping) else None
            if isinstance(found, Mapping):
                yield found

    def names(self) -> list[str]:
        """Give the devices' qualified names."""
        devices = (self.content or {}).get("devices") or []
        return [f"{self.kind}={each.get('name')}" for each in devices if isinstance(each, Mapping)]


def spec_dirs(ctx: NodeContext) -> dict[str, Path]:
    """Give the CDI directories that are there: as the host spells them -> as this process sees them."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    ours = ctx.paths.cdi_root
    named = [(directory, resolve(ctx.paths.host_root, directory)) for directory in CDI_DIRS]
    shown = strip_root(str(ours), str(ctx.paths.host_root)) or str(ours)
    for directory, view in [*named, (shown, ours)]:
        if view is not None and view.is_dir() and os.path.realpath(view) not in seen:
            seen.add(os.path.realpath(view))
            found[directory] = view
    return found


def specs_on_disk(ctx: NodeContext) -> list[SpecOnDisk]:
    """Read all specs in the CDI directories."""
    found = []
    for shown, view in spec_dirs(ctx).items():
        for path in sorted(view.iterdir()):
            name = path.name
            if name.endswith(_SUFFIXES) and path.is_file() and path.stat().st_size <= _LARGEST_BYTES:
                found.append(SpecOnDisk(f"{shown}/{name}", path.read_bytes()))
    return found


def _parse(data: bytes) -> tuple[dict[str, Any] | None, str]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        import yaml

        try:
            found = yaml.load(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - it is a safe one
        except (yaml.YAMLError, ValueError, RecursionError) as problem:
            return None, " ".join(str(problem).split())[:200]
    if not isinstance(found, dict) or not found.get("kind") or not found.get("cdiVersion"):
        return None, "it has no kind or no cdiVersion"
    return found, ""


def look_at_cdi(ctx: NodeContext) -> Looked:
    """Look at the directories and all specs in them."""
    findings: list[Finding] = []
    root = ctx.paths.cdi_root
    parent = next((each for each in (root, *root.parents) if each.exists()), Path("/"))
    if not os.access(parent, os.W_OK | os.X_OK):
        findings.append(
            error(
                "DRA-CDI-DIR-READ-ONLY",
                f"the CDI directory {root} cannot be written"
                + ("" if root.exists() else " and is not there"),
                "Mount it writable into the plugin's pod; the plugin runs as root.",
            )
        )
    elif not root.exists():
        findings.append(note("DRA-CDI-DIR-ABSENT", f"{root} is not there yet; the first prepare makes it"))
    specs = specs_on_disk(ctx)
    findings += [
        warning(
            "DRA-CDI-SPEC-UNREADABLE",
            f"{spec.shown} is no CDI spec: {spec.trouble}",
            "Remove it, or have its owner write it anew: engines skip it, and some refuse every device then.",
        )
        for spec in specs
        if spec.content is None
    ]
    findings += _doubles(specs)
    findings += _stale_numbers(ctx, specs)
    findings += _dangling(ctx, specs)
    ours = sum(1 for spec in specs if spec.kind == kind_of(ctx.driver))
    return Looked(f"{ours} specs of ours, {len(specs) - ours} of others in {', '.join(spec_dirs(ctx)) or 'no directory'}",
                  tuple(findings))  # fmt: skip


def _doubles(specs: list[SpecOnDisk]) -> Iterator[Finding]:
    owners: dict[str, list[str]] = defaultdict(list)
    for spec in specs:
        for name in spec.names():
            owners[name].append(spec.shown)
    for name, files in sorted(owners.items()):
        if len(set(files)) > 1:
            yield warning(
                "DRA-CDI-DEVICE-TWICE",
                f"device {name} is in {' and in '.join(sorted(set(files)))}: engines resolve it from neither",
                "Remove the file that its owner does not write any more.",
            )


def _stale_numbers(ctx: NodeContext, specs: list[SpecOnDisk]) -> Iterator[Finding]:
    """Find nodes written with a major that the loaded modules do not have any more, nvidia-uvm's above all."""
    majors = device_majors(ctx.paths)
    frontend = next((majors[name] for name in FRONTEND_NAMES if name in majors), None)
    for spec in specs:
        stale = next(_stale_nodes(spec, majors, frontend), None)
        if stale is not None:
            path, major, wanted = stale
            yield warning(
                "DRA-CDI-STALE-MAJOR",
                f"{spec.shown} gives {path} the major {major}, the loaded module has {wanted}",
                _REWRITE[spec.kind == kind_of(ctx.driver)],
            )


def _stale_nodes(
    spec: SpecOnDisk, majors: Mapping[str, int], frontend: int | None
) -> Iterator[tuple[str, int, int]]:
    for edit in spec.edits():
        for node in edit.get("deviceNodes") or []:
            path, major = str(node.get("path") or ""), node.get("major")
            wanted = _wanted_major(path, majors, frontend)
            if isinstance(major, int) and wanted is not None and major != wanted:
                yield path, major, wanted


_REWRITE = {
    True: "The next prepare of its claim writes it anew: restart the pod's sandbox, or the plugin's pod.",
    False: "Let its owner write it anew (nvidia-ctk cdi generate, or restart the toolkit or the other driver).",
}


def _wanted_major(path: str, majors: Mapping[str, int], frontend: int | None) -> int | None:
    name = path.rpartition("/")[2]
    if name.startswith("nvidia-uvm"):
        return majors.get("nvidia-uvm")
    if name.startswith("nvidia-cap"):
        return majors.get("nvidia-caps") if "imex" not in path else None
    if name.startswith("nvidia") and (name[6:].isdigit() or name == "nvidiactl"):
        return frontend
    return None


def _dangling(ctx: NodeContext, specs: list[SpecOnDisk]) -> Iterator[Finding]:
    """Find specs that name files or nodes of the host that are gone: their containers cannot be created."""
    for spec in specs:
        gone = missing_paths(ctx, spec)
        if gone:
            shown = ", ".join(gone[:3]) + ("…" if len(gone) > 3 else "")
            yield warning(
                "DRA-CDI-DANGLING",
                f"{spec.shown} names {len(gone)} paths that are not on the host: {shown}",
                _REWRITE[spec.kind == kind_of(ctx.driver)],
            )


def missing_paths(ctx: NodeContext, spec: SpecOnDisk) -> list[str]:
    """Give the host's paths that a spec names and that are gone; what cannot be seen from here is left out."""
    found: dict[str, None] = {}
    view_root, dev_spelling = ctx.paths.dev_root()
    for edit in spec.edits():
        for mount in edit.get("mounts") or []:
            path = str(mount.get("hostPath") or "")
            view = ctx.paths.view_of(path) if path.startswith("/") else None
            if view is not None and not os.path.lexists(view):
                found[path] = None
        for node in edit.get("deviceNodes") or []:
            path = str(node.get("hostPath") or node.get("path") or "")
            inside = strip_root(path, dev_spelling)
            if inside is None or node.get("major"):
                # With numbers the engine makes the node itself.
                continue
            if read_node(view_root, inside, stand_ins=ctx.paths.stand_in_nodes) is None:
                found[path] = None
    return list(found)
