"""The bookkeeping of field managers in `metadata.managedFields`.

Source: k8s.io/apimachinery/pkg/util/managedfields and structured-merge-diff's Updater.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dra.sim.apiserver.fieldset import Difference, Path, Paths, from_json, show, to_json
from dra.sim.apiserver.status import ApiFailure

Json = dict[str, Any]

# Fields that nobody owns.
_IGNORED: frozenset[Path] = frozenset(
    {("f:apiVersion",), ("f:kind",), ("f:metadata",)}
    | {
        ("f:metadata", f"f:{name}")
        for name in (
            "name", "namespace", "creationTimestamp", "selfLink", "uid", "generation", "managedFields",
            "resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
        )
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManagerId:
    """Who: a manager's name, how it writes (Apply or Update), in which version, through which subresource."""

    operation: str
    manager: str
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        """Give the text of conflict messages."""
        through = f' with subresource "{self.subresource}"' if self.subresource else ""
        version = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.manager}"{through}{version}'


@dataclass(frozen=True, slots=True)
class Owned:
    """What a manager owns, since when."""

    paths: Paths
    time: str | None


Managers = dict[ManagerId, Owned]


def ownable(paths: Iterable[Path], *, subresource: str, has_status: bool) -> Paths:
    """Give the paths that a write through this (sub)resource can own."""
    found: set[Path] = set()
    for path in paths:
        if path in _IGNORED or path[:2] in _IGNORED or path[0] in {"f:apiVersion", "f:kind"}:
            continue
        if has_status and not subresource and path[0] == "f:status":
            continue
        if subresource == "status" and path[0] == "f:spec":
            continue
        found.add(path)
    return frozenset(found)


def read(obj: Json) -> Managers:
    """Read the managers of an object."""
    managers: Managers = {}
    for entry in obj["metadata"].get("managedFields") or []:
        if not entry.get("operation"):
            continue
        # An applier is one manager whatever version it last used.
        identity = ManagerId(
            entry["operation"],
            entry.get("manager", ""),
            entry.get("apiVersion", ""),
            entry.get("subresource", ""),
        )
        managers[identity] = Owned(from_json(entry.get("fieldsV1") or {}), entry.get("time"))
    return managers


def write(obj: Json, managers: Mapping[ManagerId, Owned]) -> None:
    """Write the managers into an object."""
    entries: list[tuple[tuple[str, ...], Json]] = []
    for who, owned in managers.items():
        if not owned.paths:
            continue
        entry: Json = {"manager": who.manager, "operation": who.operation, "apiVersion": who.api_version}
        if owned.time:
            entry["time"] = owned.time
        entry["fieldsType"] = "FieldsV1"
        entry["fieldsV1"] = to_json(owned.paths)
        if who.subresource:
            entry["subresource"] = who.subresource
        order = (who.operation, owned.time or "", who.manager, who.api_version, who.subresource)
        entries.append((order, entry))
    if entries:
        obj["metadata"]["managedFields"] = [entry for _, entry in sorted(entries, key=lambda e: e[0])]
    else:
        obj["metadata"].pop("managedFields", None)


def take_over(managers: Managers, who: ManagerId, difference: Difference) -> Managers:
    """Give the managers after `who` made a change: others lose what was changed or removed."""
    result: Managers = {}
    for other, owned in managers.items():
        if other == who:
            result[other] = owned
            continue
        paths = owned.paths - difference.changed - _gone(owned.paths, difference.removed)
        if paths:
            result[other] = replace(owned, paths=frozenset(paths))
    return result


def _gone(paths: Paths, removed: set[Path]) -> set[Path]:
    """Give the paths at or under something that was removed."""
    return {path for path in paths if any(path[:n] in removed for n in range(1, len(path) + 1))}


def after_update(
    managers: Managers, who: ManagerId, difference: Difference, mine: Paths, now: str
) -> Managers:
    """Give the managers after an update by `who`; `mine`: the changed paths that it can own."""
    result = take_over(managers, who, difference)
    before = managers.get(who)
    kept = before.paths - _gone(before.paths, difference.removed) if before is not None else frozenset()
    paths = kept | mine
    if before is not None and paths == before.paths:
        result[who] = before
    elif paths:
        result[who] = Owned(paths, now)
    else:
        result.pop(who, None)
    return result


def conflicts(managers: Managers, who: ManagerId, difference: Difference) -> list[tuple[ManagerId, Path]]:
    """Give what an apply would take away from other managers, in the order of messages."""
    found = [
        (other, path)
        for other, owned in managers.items()
        if other != who
        for path in owned.paths & difference.changed
    ]
    return sorted(found, key=lambda pair: (str(pair[0]), show(pair[1])))


def conflict_failure(found: list[tuple[ManagerId, Path]]) -> ApiFailure:
    """409 that lists the conflicts by manager."""
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": show(path)}
        for who, path in found
    ]
    if len(found) == 1:
        text = f"Apply failed with 1 conflict: conflict with {found[0][0]}: {show(found[0][1])}"
    else:
        lines: list[str] = []
        for who in dict.fromkeys(who for who, _ in found):
            lines.append(f"conflicts with {who}:")
            lines += [f"- {show(path)}" for other, path in found if other == who]
        text = f"Apply failed with {len(found)} conflicts: " + "\n".join(lines)
    return ApiFailure(409, "Conflict", text, details={"causes": causes})
