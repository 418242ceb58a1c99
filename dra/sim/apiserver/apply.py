"""Server-side apply.

Source: KEP 555 and k8s.io/apiserver/pkg/endpoints/handlers/fieldmanager.
"""

from __future__ import annotations

import json
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import DecodeError, Findings, decode, parse_json
from dra.api.rules.schema import Type
from dra.sim.apiserver import bodies, managers, tracking, write
from dra.sim.apiserver.call import Call, check_write_options, options_invalid
from dra.sim.apiserver.custom import shape
from dra.sim.apiserver.fieldset import Path, ShapeError, compare, field_set, merge, remove
from dra.sim.apiserver.managers import ManagerId, Owned
from dra.sim.apiserver.shapes import shape_of
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, bad_request, internal

Json = dict[str, Any]
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_NOTE: Path = ("f:metadata", "f:annotations", f"f:{LAST_APPLIED}")


def apply_patch(api: ServerState, call: Call) -> tuple[Json, bool]:
    """Apply a configuration; the second value says whether the object was made by it.

    Raises:
        ApiFailure: 400, 404 (a status of nothing), 409 with the conflicts, 422, 500.
    """
    check_write_options(call, "PatchOptions")
    if not call.query.get("fieldManager"):
        detail = "Required value: is required for apply patch"
        raise options_invalid("PatchOptions", Cause("FieldValueRequired", "fieldManager", detail))
    config = _configuration(call)
    if api.storage.get(call.resource.key, call.key) is None:
        if call.subresource:
            raise call.not_found()
        try:
            return _create(api, call, config), True
        except ApiFailure as failure:
            # Somebody else was faster: then it is a change.
            if failure.reason != "AlreadyExists":
                raise
    session = _Session(call, config)
    return write.update(api, call, session.merged, kind="PatchOptions", tracker=session.track)[0], False


def _configuration(call: Call) -> Json:
    config = bodies.load_yaml(call.request.body.decode("utf-8", "replace"))
    if not isinstance(config, dict):
        config = {}
    version, kind = config.get("apiVersion", ""), config.get("kind", "")
    if (version, kind) != (call.group_version, call.resource.kind):
        shown = f"{version}, Kind={kind}" if version or kind else "/, Kind="
        raise bad_request(f"invalid object type: {shown}")
    meta = config.get("metadata") or {}
    if meta.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    given = meta.get("name") or ""
    if given and given != call.name:
        raise bad_request(
            f"the name of the object ({given}) does not match the name on the URL ({call.name})"
        )
    return _checked(call, config)


def _checked(call: Call, config: Json) -> Json:
    """Make sure that the configuration fits the schema.

    Raises:
        ApiFailure: 500, as the server answers here.
    """
    ref = call.resource.versions[call.version]
    where = f"{call.namespace}/{call.name}; {call.group_version}, Kind={call.resource.kind}"
    if not ref:
        return config
    findings = Findings()
    try:
        decode(config, ref, findings)
    except DecodeError as error:
        raise internal(f"failed to create typed patch object ({where}): {error}") from error
    unknown = [p.removeprefix('unknown field "').rstrip('"') for p in findings.problems]
    if unknown:
        raise internal(
            f"failed to create typed patch object ({where}): .{unknown[0]}: field not declared in schema"
        )
    try:
        field_set(config, shape_of(call.resource, call.version))
    except ShapeError as error:
        raise internal(f"failed to create typed patch object ({where}): {error}") from error
    return config


def _create(api: ServerState, call: Call, config: Json) -> Json:
    if (config.get("metadata") or {}).get("uid"):
        raise ApiFailure(
            409,
            "Conflict",
            f'Operation cannot be fulfilled on {call.resource.plural}.{call.resource.group} "{call.name}": '
            f"uid mismatch: the provided object specified uid {config['metadata']['uid']}, and no existing object "
            "was found",
            details={"name": call.name, "group": call.resource.group, "kind": call.resource.plural},
        )
    mine = tracking.own(call, set(field_set(config, shape_of(call.resource, call.version))))
    who = ManagerId("Apply", call.manager, call.group_version)

    def tracker(_api: ServerState, _call: Call, obj: Json) -> None:
        managers.write(obj, {who: Owned(mine, api.now())})

    body = bodies.shape_body(call, config)
    return write.create(api, call, body, tracker=tracker)


class _Session:
    """One apply on an existing object."""

    def __init__(self, call: Call, config: Json) -> None:
        self.call = call
        self.config = config
        self.shape: Type = shape_of(call.resource, call.version)
        self.who = ManagerId("Apply", call.manager, call.group_version, call.subresource)
        self.mine = tracking.own(call, set(field_set(config, self.shape)))
        self.known: managers.Managers = {}
        self.fresh = False

    def merged(self, live: Json) -> Json:
        """Give the object with the configuration laid over it and what the manager dropped removed.

        Raises:
            ApiFailure: 409, 500.
        """
        known = managers.read(live)
        current = {**live, "metadata": {k: v for k, v in live["metadata"].items() if k != "managedFields"}}
        self.fresh = not known
        if not known:
            before = compare(tracking.empty(self.call), current, self.shape)
            owner = ManagerId("Update", "before-first-apply", self.call.group_version)
            paths = managers.ownable(before.changed, subresource="", has_status=False)
            known[owner] = Owned(paths, live["metadata"].get("creationTimestamp"))
        # A manager that applied in another version is the same manager.
        for other in [o for o in known if o != self.who and self._is_mine(o)]:
            known[self.who] = known.pop(other)
        last = known.get(self.who)
        try:
            new = merge(current, self.config, self.shape)
            if last is not None:
                new = remove(new, self._dropped(last, known), self.shape)
        except ShapeError as error:
            raise internal(f"failed to merge: {error}") from error
        difference = compare(current, new, self.shape)
        found = managers.conflicts(known, self.who, difference)
        if found and not self.call.request.flag("force"):
            allowed = self._applied_before(live)
            found = [pair for pair in found if pair[1] not in allowed]
            if found:
                raise managers.conflict_failure(found)
        self.known = known
        return self._noted(_reshaped(self.call, new))

    def _applied_before(self, live: Json) -> set[Path]:
        """Give what kubectl applied itself before it used server-side apply, as far as nobody changed it: it may take that
        over. Source: managedfields/internal/lastappliedmanager.go.
        """
        text = (live["metadata"].get("annotations") or {}).get(LAST_APPLIED)
        if self.who.manager != "kubectl" or not text:
            return set()
        try:
            applied = parse_json(text)
            paths = set(field_set(applied, self.shape))
            different = compare(applied, live, self.shape)
        except (DecodeError, ShapeError, AttributeError, TypeError):
            return set()
        return paths - different.changed - different.removed

    def _noted(self, new: Json) -> Json:
        """Keep the note of kubectl's own apply in step. Source: managedfields/internal/lastappliedupdater.go."""
        notes = new["metadata"].get("annotations") or {}
        if self.who.manager != "kubectl" or LAST_APPLIED not in notes:
            return new
        meta = dict(self.config.get("metadata") or {})
        mine = {k: v for k, v in (meta.get("annotations") or {}).items() if k != LAST_APPLIED}
        config = {**self.config, "metadata": {**meta, "annotations": mine}}
        text = json.dumps(config, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
        for plain, escaped in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
            text = text.replace(plain, escaped)
        annotations = {**notes, LAST_APPLIED: f"{text}\n"}
        return {**new, "metadata": {**new["metadata"], "annotations": annotations}}

    def _is_mine(self, other: ManagerId) -> bool:
        same = (other.operation, other.manager, other.subresource)
        return same == (self.who.operation, self.who.manager, self.who.subresource)

    def _dropped(self, last: Owned, known: managers.Managers) -> set[Path]:
        kept: set[Path] = set(self.mine)
        for other, owned in known.items():
            if other != self.who:
                kept |= owned.paths
        holders = {path[:n] for path in kept for n in range(1, len(path) + 1)}
        return {path for path in last.paths if path not in holders}

    def track(self, api: ServerState, call: Call, new: Json, old: Json) -> None:
        """Note the new owner."""
        difference = tracking.difference(call, tracking.versioned(call, old), tracking.versioned(call, new))
        if _NOTE not in self.mine:
            # The server writes kubectl's note on nobody's behalf.
            difference.modified.discard(_NOTE)
        result = managers.take_over(self.known, self.who, difference)
        last = self.known.get(self.who)
        changed = bool(difference.changed or difference.removed)
        if last is not None and last.paths == self.mine and not changed:
            result[self.who] = last
        elif self.mine:
            result[self.who] = Owned(self.mine, None if self.fresh else api.now())
        else:
            result.pop(self.who, None)
        managers.write(new, result)


def _reshaped(call: Call, new: Json) -> Json:
    ref = call.resource.versions[call.version]
    shaped = (
        decode(new, ref, Findings())
        if ref
        else shape(new, call.resource.custom.schemas[call.version], Findings())
    )
    return {**shaped, "kind": call.resource.kind, "apiVersion": call.group_version}
