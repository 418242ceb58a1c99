"""Deleting: preconditions, finalizers, grace, propagation; and when an object with finalizers is gone for good."""

from __future__ import annotations

from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import DecodeError, parse_json
from dra.sim.apiserver.admission.admission import Admission
from dra.sim.apiserver.call import Call, dry_run, options_invalid, parse_int
from dra.sim.apiserver.custom import CLEANUP
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import bad_request, conflict, forbidden

Json = dict[str, Any]
_POLICIES = ("Foreground", "Background", "Orphan")
_PROTECTED = {"default", "kube-system", "kube-public"}
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


def finished(obj: Json) -> bool:
    """Whether an object that is being deleted has nothing left to wait for."""
    meta = obj["metadata"]
    if not meta.get("deletionTimestamp") or meta.get("finalizers"):
        return False
    if obj.get("kind") == "Namespace":
        return not (obj.get("spec") or {}).get("finalizers")
    return not meta.get("deletionGracePeriodSeconds")


def read_options(call: Call) -> Json:
    """Read DeleteOptions from the body, or from the query where there is none.

    Raises:
        ApiFailure: 400, 422.
    """
    options: Json = {}
    body = call.request.body
    if body.startswith(b"k8s\x00"):
        from dra.sim.apiserver.protobuf import decode_object

        options = decode_object(body)
    elif body.strip():
        try:
            options = parse_json(body.decode("utf-8", "replace"))
        except DecodeError as error:
            raise bad_request(f"couldn't get version/kind; json parse error: {error}") from error
        if options.get("kind", "DeleteOptions") != "DeleteOptions":
            raise bad_request(
                f'no kind "{options["kind"]}" is registered for version "{options.get("apiVersion", "")}" '
                'in scheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme/register.go:27"'
            )
    if not options:
        if "gracePeriodSeconds" in call.query:
            options["gracePeriodSeconds"] = parse_int(call.query["gracePeriodSeconds"])
        if call.query.get("propagationPolicy"):
            options["propagationPolicy"] = call.query["propagationPolicy"]
        if "orphanDependents" in call.query:
            options["orphanDependents"] = call.request.flag("orphanDependents")
    _check_options(options)
    return options


def _check_options(options: Json) -> None:
    policy = options.get("propagationPolicy")
    if policy and "orphanDependents" in options:
        detail = f'Invalid value: "{policy}": orphanDependents and deletionPropagation cannot be both set'
        raise options_invalid("DeleteOptions", Cause("FieldValueInvalid", "propagationPolicy", detail))
    if policy and policy not in _POLICIES:
        listed = ", ".join(f'"{p}"' for p in (*_POLICIES, "nil"))
        detail = f'Unsupported value: "{policy}": supported values: {listed}'
        raise options_invalid("DeleteOptions", Cause("FieldValueNotSupported", "propagationPolicy", detail))


def delete(api: ServerState, call: Call, options: Json) -> tuple[Json, bool]:
    """Delete one object; gives its state and whether it is gone.

    Raises:
        ApiFailure: 404, 409, and what webhooks say.
    """
    dry = dry_run(call, options, kind="DeleteOptions")
    hooks = Admission(api, call, "DELETE", dry=dry)
    if hooks:
        current = api.storage.get(call.resource.key, call.key)
        if current is None:
            raise call.not_found()
        hooks.validate(None, current)
    with api.storage.lock:
        return _delete(api, call, options, dry=dry)


def _delete(api: ServerState, call: Call, options: Json, *, dry: bool) -> tuple[Json, bool]:
    resource = call.resource
    current = api.storage.get(resource.key, call.key)
    if current is None:
        raise call.not_found()
    if resource.key == "/namespaces" and current["metadata"]["name"] in _PROTECTED:
        raise forbidden("namespaces", "", current["metadata"]["name"], "this namespace may not be deleted")
    _check_preconditions(call, options, current)
    marked = _mark(api, call, current, options)
    if marked is None:
        return (current if dry else api.storage.delete(resource.key, call.key)), True
    if finished(marked) and not dry:
        return api.storage.delete(resource.key, call.key, marked), True
    if marked is current or dry:
        return marked, False
    return api.storage.put(resource.key, call.key, marked), False


def _check_preconditions(call: Call, options: Json, current: Json) -> None:
    wanted = options.get("preconditions") or {}
    meta = current["metadata"]
    if wanted.get("uid") not in (None, meta["uid"]):
        why = (
            f"the UID in the precondition ({wanted['uid']}) does not match the UID in record ({meta['uid']}). "
            "The object might have been deleted and then recreated"
        )
        raise conflict(call.resource.kind, call.resource.group, meta["name"], why)
    if wanted.get("resourceVersion") not in (None, meta["resourceVersion"]):
        why = (
            f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the "
            f"ResourceVersion in record ({meta['resourceVersion']}). The object might have been modified"
        )
        raise conflict(call.resource.kind, call.resource.group, meta["name"], why)


def grace_seconds(current: Json, options: Json) -> int | None:
    """Give the grace period of a pod's deletion, None where the kind has none or the pod needs none."""
    if current.get("kind") != "Pod":
        return None
    given = options.get("gracePeriodSeconds")
    spec, status = current.get("spec") or {}, current.get("status") or {}
    seconds = given if given is not None else spec.get("terminationGracePeriodSeconds", 30)
    if not spec.get("nodeName") or status.get("phase") in {"Failed", "Succeeded"}:
        return 0
    return max(int(seconds), 1) if int(seconds) < 0 else int(seconds)


def _mark(api: ServerState, call: Call, current: Json, options: Json) -> Json | None:
    """Give the object as it stays while its deletion waits; None where it can go at once."""
    meta = current["metadata"]
    finalizers = _finalizers(call, current, options)
    grace = grace_seconds(current, options)
    if current.get("kind") == "CustomResourceDefinition":
        return _mark_definition(api, current)
    if not (finalizers or grace is not None or (current.get("spec") or {}).get("finalizers")):
        return None
    marked_meta = dict(meta)
    if finalizers:
        marked_meta["finalizers"] = finalizers
    else:
        marked_meta.pop("finalizers", None)
    marked = {**current, "metadata": marked_meta}
    if not meta.get("deletionTimestamp"):
        marked_meta["deletionTimestamp"] = api.after(grace or 0)
        marked_meta["deletionGracePeriodSeconds"] = grace or 0
        if meta.get("generation"):
            marked_meta["generation"] = meta["generation"] + 1
        if current.get("kind") == "Namespace":
            marked_meta.pop("deletionGracePeriodSeconds")
            marked["status"] = {**(current.get("status") or {}), "phase": "Terminating"}
    elif grace is not None and grace < (meta.get("deletionGracePeriodSeconds") or 0):
        marked_meta["deletionTimestamp"] = api.after(grace)
        marked_meta["deletionGracePeriodSeconds"] = grace
    elif finalizers == (meta.get("finalizers") or []):
        return current
    return marked


def _mark_definition(api: ServerState, current: Json) -> Json:
    """Give a definition as it stays until its objects are gone."""
    if current["metadata"].get("deletionTimestamp"):
        return current
    finalizers = list(current["metadata"].get("finalizers") or [])
    if CLEANUP not in finalizers:
        finalizers.append(CLEANUP)
    meta = {**current["metadata"], "deletionTimestamp": api.after(0), "finalizers": finalizers}
    status = current.get("status") or {}
    waiting = {
        "type": "Terminating",
        "status": "True",
        "lastTransitionTime": api.now(),
        "reason": "InstanceDeletionPending",
        "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    }
    conditions = [*(status.get("conditions") or []), waiting]
    return {**current, "metadata": meta, "status": {**status, "conditions": conditions}}


def _finalizers(call: Call, current: Json, options: Json) -> list[str]:
    kept = list(current["metadata"].get("finalizers") or [])
    policy = options.get("propagationPolicy")
    if options.get("orphanDependents"):
        policy = "Orphan"
    if not policy:
        return kept
    kept = [f for f in kept if f not in {FOREGROUND, ORPHAN}]
    if policy == "Foreground":
        kept.append(FOREGROUND)
    if policy == "Orphan":
        kept.append(ORPHAN)
    return kept


def success(call: Call, obj: Json, *, gone: bool) -> Json:
    """Give the Status that kinds answer whose deletion does not return the object."""
    details: Json = {"name": obj["metadata"]["name"]}
    if call.resource.group:
        details["group"] = call.resource.group
    details["kind"] = call.resource.plural
    details["uid"] = obj["metadata"]["uid"]
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
