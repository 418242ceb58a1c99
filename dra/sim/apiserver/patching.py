"""The verb patch: of all types but apply, which has a module of its own."""

from __future__ import annotations

import json
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.decode import DecodeError, Findings, decode, parse_json
from dra.api.rules.schema import Type
from dra.sim.apiserver import apply, bodies, write
from dra.sim.apiserver.call import Call, options_invalid
from dra.sim.apiserver.custom import shape
from dra.sim.apiserver.patch import json_patch, merge_patch, strategic_patch
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, bad_request, invalid

Json = dict[str, Any]


def patch(api: ServerState, call: Call) -> tuple[Json, bool]:
    """Apply a patch of any type; the second value says whether the object was made by it.

    Raises:
        ApiFailure: 400, 404, 409, 415, 422.
    """
    media = bodies.media_type(call)
    if media == "application/apply-patch+yaml":
        return apply.apply_patch(api, call)
    kinds = {
        "application/merge-patch+json": "merge",
        "application/json-patch+json": "json",
        "application/strategic-merge-patch+json": "strategic",
    }
    kind = kinds.get(media)
    if kind == "strategic" and call.resource.custom is not None:
        types = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
        text = "the body of the request was in an unknown format - accepted media types include: "
        raise ApiFailure(415, "UnsupportedMediaType", text + types)
    if kind is None:
        raise bodies.unsupported_media_type()
    if "force" in call.query:
        detail = "Forbidden: may not be specified for non-apply patch"
        raise options_invalid("PatchOptions", Cause("FieldValueForbidden", "force", detail))
    if api.storage.get(call.resource.key, call.key) is None:
        raise call.not_found()
    document = _patch_document(call, kind)

    def patched(current: Json) -> Json:
        if kind == "merge":
            result = merge_patch(current, document)
        elif kind == "json":
            result = json_patch(current, document)
        else:
            ref = call.resource.versions[call.version]
            result = strategic_patch(current, document, Type("struct", ref=ref) if ref else Type("any"))
        return _reshape(call, result)

    return write.update(api, call, patched, kind="PatchOptions")[0], False


def _patch_document(call: Call, kind: str) -> Any:
    try:
        document = parse_json(call.request.body.decode("utf-8", "replace"))
    except DecodeError as error:
        raise bad_request(f"error decoding patch: {error}") from error
    expected, go_type = (
        (list, "[]handlers.jsonPatchOp") if kind == "json" else (dict, "map[string]interface {}")
    )
    if not isinstance(document, expected):
        word = "array" if isinstance(document, list) else "object" if isinstance(document, dict) else "string"
        raise bad_request(
            f"error decoding patch: json: cannot unmarshal {word} into Go value of type {go_type}"
        )
    return document


def _reshape(call: Call, result: Any) -> Json:
    """Decode a patched object again; what does not fit is an invalid patch.

    Raises:
        ApiFailure: 422, 400 for a changed name.
    """
    ref = call.resource.versions[call.version]
    shown = json.dumps(result, separators=(",", ":"), sort_keys=True)

    def bad(why: str) -> ApiFailure:
        quoted = json.dumps(shown)
        return invalid("", "", "", [Cause("FieldValueInvalid", "patch", f"Invalid value: {quoted}: {why}")])

    if not isinstance(result, dict):
        raise bad("json: cannot unmarshal array into Go value")
    wanted = (call.resource.kind, call.group_version)
    given = (result.get("kind"), result.get("apiVersion"))
    if given != wanted:
        if not given[0]:
            raise bad("Object 'Kind' is missing in '" + shown + "'")
        if call.resource.custom is not None:
            raise bad_request(f"{given[1]}, Kind={given[0]} is not {wanted[1]}, Kind={wanted[0]}")
        raise bad(f'no kind "{given[0]}" is registered for version "{given[1]}" {bodies.SCHEME}')
    findings = Findings()
    try:
        shaped = (
            decode(result, ref, findings)
            if ref
            else shape(result, call.resource.custom.schemas.get(call.version) or {}, findings)
        )
    except DecodeError as error:
        raise bad(str(error)) from error
    strictness = call.query.get("fieldValidation") or "Warn"
    if findings.problems and strictness == "Strict":
        raise bad(f"strict decoding error: {', '.join(findings.problems)}")
    if strictness != "Ignore":
        for problem in findings.problems:
            call.warn(problem)
    write.check_name(call, shaped.get("metadata") or {})
    return {**shaped, "kind": call.resource.kind, "apiVersion": call.group_version}
