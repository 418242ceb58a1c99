"""Verbs that change objects: create, update, patch, delete and delete-collection.

Each runs under the storage lock from reading the old state to storing the new one, so that a patch never meets a
conflict that its client did not cause. Where webhooks must be asked, the lock is let go for that time, and a patch that was
overtaken is tried again.
"""

from __future__ import annotations

import copy
import secrets
import uuid
from collections.abc import Callable
from typing import Any

from dra.api.rules.decode import prune
from dra.api.rules.meta import validate_meta_update
from dra.sim.apiserver import bodies, deletion, tracking
from dra.sim.apiserver.admission.admission import Admission
from dra.sim.apiserver.call import Call, check_write_options, dry_run
from dra.sim.apiserver.convert import from_storage, to_storage
from dra.sim.apiserver.custom import as_stored
from dra.sim.apiserver.kinds.base import Strategy, keep
from dra.sim.apiserver.kinds.created import created
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import (
    already_exists,
    bad_request,
    conflict,
    forbidden,
    internal,
    invalid,
    not_found,
)

Json = dict[str, Any]

# The alphabet of the server's random name suffixes: no vowels, nothing that looks like another character.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_NAME_BASE = 58
# So often a change is tried again that another write overtook while webhooks were asked.
_MOST_RACES = 5


def create(api: ServerState, call: Call, body: Json, *, tracker: Any = None) -> Json:
    """Store a new object and give it (storage version).

    Raises:
        ApiFailure: 400, 403, 404 (namespace), 409, 422, and what webhooks say.
    """
    check_write_options(call, "CreateOptions")
    obj = to_storage(call.resource, call.version, body)
    meta: Json = dict(obj.get("metadata") or {})
    obj["metadata"] = meta
    check_namespace(call, meta)
    if call.name:
        check_name(call, meta)
        meta["name"] = call.name
    dry = dry_run(call, kind="CreateOptions")
    hooks = Admission(api, call, "CREATE", dry=dry)
    if not hooks:
        with api.storage.lock:
            return _store_new(api, call, _made(api, call, obj, tracker), dry=dry)
    require_namespace(api, call, meta)
    api.strategy(call.resource).default(obj, call)
    obj = hooks.mutated(obj)
    with api.storage.lock:
        made = _made(api, call, obj, tracker)
    hooks.validate(made)
    with api.storage.lock:
        require_namespace(api, call, made["metadata"])
        return _store_new(api, call, made, dry=dry)


def _made(api: ServerState, call: Call, obj: Json, tracker: Any) -> Json:
    """Give a new object as it is to be stored: named, defaulted, admitted, checked.

    Raises:
        ApiFailure: 403, 404, 422.
    """
    resource, meta = call.resource, obj["metadata"]
    require_namespace(api, call, meta)
    _identify(api, meta)
    strategy = api.strategy(resource)
    meta.pop("generation", None)
    if strategy.generation:
        meta["generation"] = 1
    strategy.prepare_create(obj, call)
    # Managers own what they sent and its defaults, not what admission adds.
    sent = pruned(call, obj)
    (tracker or tracking.track_create)(api, call, sent)
    owners = sent["metadata"].pop("managedFields", None)
    admission_adds = strategy.admit_create(obj, call)
    causes = [*strategy.validate_meta(obj, call), *strategy.validate_create(obj, call)]
    if causes:
        raise invalid(obj.get("kind") or resource.kind, call.invalid_group, meta.get("name") or "", causes)
    warn(strategy, obj, None, call)
    obj = pruned(call, obj) if admission_adds else sent
    if owners:
        obj["metadata"]["managedFields"] = owners
    return obj


def _identify(api: ServerState, meta: Json) -> None:
    """Set what only the server sets: UID, time, and the name where a prefix was given.

    Raises:
        ApiFailure: 500, there is a version already.
    """
    for name in ("uid", "resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds"):
        if name == "resourceVersion" and meta.get(name) not in (None, ""):
            raise internal("resourceVersion should not be set on objects to be created")
        meta.pop(name, None)
    meta["uid"] = str(uuid.uuid4())
    meta["creationTimestamp"] = api.now()
    if not meta.get("name") and meta.get("generateName"):
        suffix = "".join(secrets.choice(_ALPHABET) for _ in range(5))
        meta["name"] = meta["generateName"][:_NAME_BASE] + suffix


def _store_new(api: ServerState, call: Call, obj: Json, *, dry: bool) -> Json:
    """Store a new object, or only say that it could be.

    Raises:
        ApiFailure: 409.
    """
    resource, meta = call.resource, obj["metadata"]
    key = (meta.get("namespace", "") if resource.namespaced else "", meta["name"])
    existing = api.storage.get(resource.key, key)
    if existing is not None:
        gone = existing["metadata"].get("deletionTimestamp")
        prefix = "object is being deleted: " if gone else ""
        raise already_exists(resource.plural, resource.group, meta["name"], prefix=prefix)
    if resource.custom is not None:
        obj = as_stored(obj)
    if dry:
        return obj
    stored = api.storage.put(resource.key, key, obj)
    created(api, call, stored)
    return stored


def warn(strategy: Strategy, new: Json, old: Json | None, call: Call) -> None:
    """Collect a strategy's warnings."""
    for text in strategy.warnings(new, old, call):
        call.warn(text)


def pruned(call: Call, obj: Json) -> Json:
    """Give the stored form without empty fields."""
    ref = call.resource.versions.get(call.resource.storage) or _stored_ref(call)
    return prune(obj, ref) if ref else obj


def _stored_ref(call: Call) -> str:
    if call.resource.store_as == "/events":
        return "core_v1.Event"
    if call.resource.group == "resource.k8s.io":
        module = f"resource_{call.resource.storage}"
        return f"{module}.{call.resource.kind}"
    return ""


def check_namespace(call: Call, meta: Json) -> None:
    """Make the namespace of the object that of the path.

    Raises:
        ApiFailure: 400, they differ.
    """
    if not call.resource.namespaced:
        meta.pop("namespace", None)
        return
    given = meta.get("namespace") or call.namespace
    if given != call.namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    meta["namespace"] = call.namespace


def check_name(call: Call, meta: Json) -> None:
    """Make sure that a body names the object of the path.

    Raises:
        ApiFailure: 400.
    """
    given = meta.get("name") or ""
    if given and given != call.name:
        raise bad_request(
            f"the name of the object ({given}) does not match the name on the URL ({call.name})"
        )


def require_namespace(api: ServerState, call: Call, meta: Json) -> None:
    """Refuse objects in namespaces that do not exist or are going away.

    Raises:
        ApiFailure: 404, 403.
    """
    if not call.resource.namespaced:
        return
    namespace = api.storage.get("/namespaces", ("", call.namespace))
    if namespace is None:
        raise not_found("namespaces", "", call.namespace)
    if namespace["metadata"].get("deletionTimestamp"):
        failure = forbidden(
            call.resource.plural,
            call.resource.group,
            meta.get("name") or "",
            f"unable to create new content in namespace {call.namespace} because it is being terminated",
        )
        assert failure.details is not None
        failure.details["causes"] = [
            {
                "reason": "NamespaceTerminating",
                "message": f"namespace {call.namespace} is being terminated",
                "field": "metadata.namespace",
            }
        ]
        raise failure


Transform = Callable[[Json], Json]


def update(
    api: ServerState, call: Call, transform: Transform, *, kind: str, tracker: Any = None
) -> tuple[Json, bool]:
    """Change an object: `transform` makes the new state (request version) from the current one.

    Gives the stored object and whether something was written.

    Raises:
        ApiFailure: 404, 409, 422.
    """
    check_write_options(call, kind)
    dry = dry_run(call, kind=kind)
    hooks = Admission(api, call, "UPDATE", dry=dry)
    if not hooks:
        with api.storage.lock:
            new, old = _transformed(api, call, transform)
            return _store_changed(api, call, _changed(api, call, new, old, tracker), old, dry=dry)
    # Webhooks may write themselves: the object must still be the one that they were asked about.
    for _ in range(_MOST_RACES):
        with api.storage.lock:
            new, old = _transformed(api, call, transform)
        api.strategy(call.resource).default(new, call)
        new = hooks.mutated(new, old)
        with api.storage.lock:
            new = _changed(api, call, new, old, tracker)
        hooks.validate(new, old)
        with api.storage.lock:
            now = api.storage.get(call.resource.key, call.key)
            if now is not None and now["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]:
                return _store_changed(api, call, new, old, dry=dry)
    raise conflict(call.resource.plural, call.resource.group, call.name)


def _transformed(api: ServerState, call: Call, transform: Transform) -> tuple[Json, Json]:
    """Give the object that a client wants (storage version), and the stored one.

    Raises:
        ApiFailure: 404, 409, and what `transform` says.
    """
    resource = call.resource
    old = api.storage.get(resource.key, call.key)
    if old is None:
        raise call.not_found()
    versioned = transform(from_storage(resource, call.version, old))
    new = to_storage(resource, call.version, copy.deepcopy(versioned))
    check_versions(call, new, old)
    return new, old


def _changed(api: ServerState, call: Call, new: Json, old: Json, tracker: Any) -> Json:
    """Give a changed object as it is to be stored.

    Raises:
        ApiFailure: 422.
    """
    restore_meta(new, old)
    strategy = api.strategy(call.resource)
    status = call.subresource == "status"
    if status:
        strategy.prepare_status(new, old, call)
    else:
        strategy.prepare_update(new, old, call)
    causes = [*strategy.validate_meta(new, call), *validate_meta_update(new, old)]
    causes += strategy.validate_status(new, old, call) if status else strategy.validate_update(new, old, call)
    if causes:
        # A PUT of a custom object without a version is refused by another layer, which knows the plural only.
        kind_name = call.resource.kind if call.version_given else call.resource.plural
        raise invalid(kind_name, call.invalid_group, old["metadata"]["name"], causes)
    warn(strategy, new, old, call)
    new = pruned(call, new)
    if strategy.generation and not status and strategy.spec_of(new) != strategy.spec_of(old):
        new["metadata"]["generation"] = int(old["metadata"].get("generation") or 0) + 1
    (tracker or tracking.track_update)(api, call, new, old)
    return new


def _store_changed(api: ServerState, call: Call, new: Json, old: Json, *, dry: bool) -> tuple[Json, bool]:
    """Store a change, if it is one and not only tried; the second value says whether it is one."""
    if call.resource.custom is not None:
        new = as_stored(new)
    if same(new, old):
        return old, False
    if dry:
        return new, True
    if deletion.finished(new):
        api.storage.delete(call.resource.key, call.key, new)
        return new, True
    return api.storage.put(call.resource.key, call.key, new), True


def same(new: Json, old: Json) -> bool:
    """Whether a write would change nothing: then the server does not write, and the version stays."""
    return _without_version(new) == _without_version(old)


def _without_version(obj: Json) -> Json:
    meta = {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}
    return {**obj, "metadata": meta}


def check_versions(call: Call, new: Json, old: Json) -> None:
    """Compare the version and UID that a body carries with the stored ones.

    Raises:
        ApiFailure: 409, 500 for a version that is no number.
    """
    meta = new.setdefault("metadata", {})
    given = meta.get("resourceVersion") or ""
    if given and not given.isdigit():
        raise internal(f'strconv.ParseUint: parsing "{given}": invalid syntax')
    if given and given != "0" and given != old["metadata"]["resourceVersion"]:
        raise conflict(call.resource.plural, call.resource.group, old["metadata"]["name"])


def restore_meta(new: Json, old: Json) -> None:
    """Put back the metadata that only the server sets."""
    meta, kept = new["metadata"], old["metadata"]
    meta["resourceVersion"] = kept["resourceVersion"]
    for key in ("creationTimestamp", "generation", "generateName"):
        keep(meta, kept, key)
    for key in ("uid", "name", "namespace"):
        if not meta.get(key):
            keep(meta, kept, key)
    if "namespace" not in kept:
        meta.pop("namespace", None)
    for key in ("deletionTimestamp", "deletionGracePeriodSeconds"):
        if meta.get(key) is None:
            keep(meta, kept, key)
    meta.pop("selfLink", None)


def put(api: ServerState, call: Call) -> tuple[Json, bool]:
    """Replace an object.

    Raises:
        ApiFailure: as `update`, and 400 for the body.
    """
    body = bodies.shape_body(call, bodies.parse_body(call))
    meta = body.setdefault("metadata", {})
    if not meta.get("name"):
        raise bad_request(f"the name of the object () does not match the name on the URL ({call.name})")
    check_name(call, meta)
    call.version_given = bool(meta.get("resourceVersion"))
    if call.resource.namespaced:
        check_namespace(call, meta)

    def replaced(current: Json) -> Json:
        given = meta.get("uid")
        if given and given != current["metadata"]["uid"]:
            where = "/".join(part for part in (call.resource.plural, *call.key) if part)
            why = (
                f"StorageError: invalid object, Code: 4, Key: /registry/{where}, ResourceVersion: 0, "
                f"AdditionalErrorMsg: Precondition failed: UID in precondition: {given}, "
                f"UID in object meta: {current['metadata']['uid']}"
            )
            raise conflict(call.resource.plural, call.resource.group, call.name, why)
        return body

    if (
        api.strategy(call.resource).create_on_put
        and not call.subresource
        and api.storage.get(call.resource.key, call.key) is None
    ):
        return create(api, call, body), True
    return update(api, call, replaced, kind="UpdateOptions")
