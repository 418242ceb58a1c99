"""Verbs that read: get, list (paging, old revisions) and watch."""

from __future__ import annotations

import base64
import json
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import DecodeError, parse_json
from dra.sim.apiserver import tables
from dra.sim.apiserver.call import Call, options_invalid, parse_int
from dra.sim.apiserver.convert import from_storage
from dra.sim.apiserver.exchange import Response
from dra.sim.apiserver.selectors import INDEXED, Matcher, field_matcher, indexed_value, label_matcher, lookup
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import bad_request, expired, internal, too_large_version
from dra.sim.apiserver.storage import ExpiredError, Key
from dra.sim.apiserver.watch import Trigger, WatchPlan, stream

Json = dict[str, Any]

TOO_OLD_CONTINUE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list "
    "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
    "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
    "modified, or deleted between the time the first chunk was returned and now may show up in the list."
)


def get(api: ServerState, call: Call) -> Json:
    """Give one object as stored.

    Raises:
        ApiFailure: 404, 504 for a version of the future.
    """
    wanted = revision_of(call)
    if wanted is not None and wanted > api.storage.revision:
        raise too_large_version(wanted, api.storage.revision)
    obj = api.storage.get(call.resource.key, call.key)
    if obj is None:
        raise call.not_found()
    return obj


def revision_of(call: Call) -> int | None:
    """Give the resourceVersion of the query.

    Raises:
        ApiFailure: 400.
    """
    text = call.query.get("resourceVersion", "")
    if not text:
        return None
    if not text.isdigit():
        why = f'strconv.ParseUint: parsing "{text}": invalid syntax'
        raise bad_request(f'invalid resource version: resourceVersion: Invalid value: "{text}": {why}')
    return int(text)


def matcher(call: Call) -> tuple[Matcher, bool]:
    """Give the test of a call's namespace and selectors, and whether there are selectors.

    Raises:
        ApiFailure: 400.
    """
    extra = (
        tuple(getattr(call.resource.custom, "selectable", {}).get(call.version, ()))
        if call.resource.custom
        else ()
    )
    fields = field_matcher(
        call.resource.key, call.group_version, call.query.get("fieldSelector", ""), extra=extra
    )
    labels = label_matcher(call.query.get("labelSelector", ""))
    namespace, name = call.namespace, call.name

    def matches(obj: Json) -> bool:
        meta = obj["metadata"]
        if namespace and call.resource.namespaced and meta.get("namespace") != namespace:
            return False
        if name and meta.get("name") != name:
            return False
        return (fields is None or fields(obj)) and (labels is None or labels(obj))

    return matches, fields is not None or labels is not None


def trigger_of(api: ServerState, call: Call) -> Trigger | None:
    """Give the index and the value to which a call's field selector comes down, None where there is no such."""
    value = indexed_value(call.resource.key, call.query.get("fieldSelector", ""))
    if value is None:
        return None
    field = INDEXED[call.resource.key]
    return Trigger(api.storage.index(call.resource.key, field, lambda obj: lookup(obj, field)), value)


def check_list_options(call: Call, *, watch: bool) -> None:
    """Check how the options of a list or watch go together.

    Raises:
        ApiFailure: 422.
    """
    match = call.query.get("resourceVersionMatch", "")
    version = call.query.get("resourceVersion", "")

    def fail(field: str, detail: str, reason: str = "FieldValueForbidden") -> None:
        raise options_invalid("ListOptions", Cause(reason, field, detail))

    initial = call.query.get("sendInitialEvents")
    unsupported = '": supported values: "Exact", "NotOlderThan", ""'
    if watch:
        if initial is not None and match != "NotOlderThan":
            causes = [
                Cause(
                    "FieldValueForbidden",
                    "resourceVersionMatch",
                    "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
                )
            ]
            if match:
                detail = f'Unsupported value: "{match}": supported values: "NotOlderThan"'
                causes.append(Cause("FieldValueNotSupported", "resourceVersionMatch", detail))
            raise options_invalid("ListOptions", *causes)
        if initial is None and match:
            fail(
                "resourceVersionMatch",
                "Forbidden: resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            )
        return
    if initial is not None:
        fail("sendInitialEvents", "Forbidden: sendInitialEvents is forbidden for list")
    if not match:
        return
    if not version:
        fail(
            "resourceVersionMatch",
            "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided",
        )
    if call.query.get("continue"):
        fail("resourceVersionMatch", "Forbidden: resourceVersionMatch is forbidden when continue is provided")
    if match not in {"Exact", "NotOlderThan"}:
        fail("resourceVersionMatch", f'Unsupported value: "{match}{unsupported}', "FieldValueNotSupported")
    if match == "Exact" and version == "0":
        fail(
            "resourceVersionMatch",
            'Forbidden: resourceVersionMatch "exact" is forbidden for resourceVersion "0"',
        )


def _encode_continue(revision: int, key: Key) -> str:
    start = "/".join(part for part in key if part) + "\0"
    raw = json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": start}, separators=(",", ":"))
    return base64.urlsafe_b64encode(raw.encode()).decode().rstrip("=")


def _decode_continue(token: str) -> tuple[int, str]:
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode("latin-1")
    except ValueError as error:
        raise bad_request(f"invalid continue token: continue key is not valid: {error}") from error
    try:
        content = parse_json(raw)
    except DecodeError as error:
        why = (
            str(error).replace(raw[:1], f"\\x{ord(raw[0]):02x}") if raw and ord(raw[0]) > 126 else str(error)
        )
        raise bad_request(f"invalid continue token: continue key is not valid: {why}") from error
    if not isinstance(content, dict) or content.get("v") != "meta.k8s.io/v1":
        raise bad_request(
            "invalid continue token: continue key is not valid: server does not recognize this encoded version"
        )
    return int(content.get("rv", 0)), str(content.get("start", ""))


def list_objects(api: ServerState, call: Call) -> tuple[list[Json], Json]:
    """Give the objects of a list (as stored) and the list's metadata.

    Raises:
        ApiFailure: 400, 410, 422, 504.
    """
    limit = parse_int(call.query["limit"]) if call.query.get("limit") else 0
    if call.query.get("timeoutSeconds"):
        parse_int(call.query["timeoutSeconds"])
    check_list_options(call, watch=False)
    wanted = revision_of(call)
    matches, selective = matcher(call)
    token = call.query.get("continue", "")
    start, at = "", None
    if token:
        if wanted:
            raise bad_request("specifying resource version is not allowed when using continue")
        at, start = _decode_continue(token)
        if at < 0:
            at = None
    elif wanted and (
        call.query.get("resourceVersionMatch") == "Exact"
        or (limit > 0 and not call.query.get("resourceVersionMatch"))
    ):
        at = wanted
    if wanted and wanted > api.storage.revision:
        raise too_large_version(wanted, api.storage.revision)
    try:
        trigger = trigger_of(api, call) if at is None else None
        if trigger is None:
            revision, objects = api.storage.snapshot(call.resource.key, at)
        else:
            revision, objects = api.storage.selected(call.resource.key, trigger.index, trigger.value)
    except ExpiredError as error:
        if token:
            raw = json.dumps({"v": "meta.k8s.io/v1", "rv": -1, "start": start}, separators=(",", ":"))
            fresh = base64.urlsafe_b64encode(raw.encode()).decode().rstrip("=")
            raise expired(TOO_OLD_CONTINUE, continue_token=fresh) from error
        raise expired("The resourceVersion for the provided list is too old.") from error
    rest = [(k, o) for k, o in objects.items() if "/".join(p for p in k if p) >= start and matches(o)]
    meta: Json = {"resourceVersion": str(revision)}
    if limit > 0 and len(rest) > limit:
        meta["continue"] = _encode_continue(revision, rest[limit - 1][0])
        if not selective:
            meta["remainingItemCount"] = len(rest) - limit
        rest = rest[:limit]
    return [obj for _, obj in rest], meta


def _watch_revision(call: Call) -> int | None:
    text = call.query.get("resourceVersion", "")
    if text and not text.isdigit():
        why = f'strconv.ParseUint: parsing "{text}": invalid syntax'
        raise internal(f'resourceVersion: Invalid value: "{text}": {why}')
    return int(text) if text else None


def watch(api: ServerState, call: Call) -> Response:
    """Open a watch.

    Raises:
        ApiFailure: 400, 422; an expired version is an ERROR event on the stream.
    """
    timeout = parse_int(call.query["timeoutSeconds"]) if call.query.get("timeoutSeconds") else 0
    check_list_options(call, watch=True)
    matches, _ = matcher(call)
    version = _watch_revision(call)
    send = call.query.get("sendInitialEvents")
    initial = (version in (None, 0) and send is None) or (
        send is not None and call.request.flag("sendInitialEvents")
    )
    bookmarks = call.request.flag("allowWatchBookmarks")
    encode = tables.EventEncoder(api, call)
    after = version or api.storage.revision
    plan = WatchPlan(
        resource=call.resource.key,
        after=after,
        initial=initial,
        initial_end=initial and bookmarks and send is not None,
        bookmarks=bookmarks,
        timeout_seconds=float(timeout or api.options.watch_seconds) * api.options.time_scale,
        matches=matches,
        trigger=trigger_of(api, call),
        encode=encode.event,
        bookmark=encode.bookmark_event,
        bookmark_seconds=api.options.bookmark_seconds,
        second=api.options.time_scale,
    )
    return Response(200, stream=stream(api.storage, plan, stopped=api.stopped))


def plain(call: Call, obj: Json) -> Json:
    """Give a stored object in the version of the call, kind first."""
    shown = from_storage(call.resource, call.version, obj)
    return {"kind": shown["kind"], "apiVersion": shown["apiVersion"], **shown}
