"""Reading request bodies into objects of the expected kind, with the server's errors and strictness."""

from __future__ import annotations

import json
from typing import Any

from dra.api.rules.decode import DecodeError, Findings, decode, parse_json
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.custom import DEFINITIONS, shape
from dra.sim.apiserver.status import ApiFailure, bad_request
from dra.sim.apiserver.validation.structural import unknown_words

Json = dict[str, Any]

SCHEME = 'in scheme "k8s.io/kubernetes/pkg/api/legacyscheme/scheme.go:30"'
_PROTOBUF_PREFIX = b"k8s\x00"


def media_type(call: Call) -> str:
    """Give the content type of the request without parameters."""
    return call.request.headers.get("content-type", "").partition(";")[0].strip().lower()


def unsupported_media_type() -> ApiFailure:
    """415."""
    return ApiFailure(415, "UnsupportedMediaType", "415: Unsupported Media Type", details={})


def parse_body(call: Call) -> Any:
    """Read JSON, YAML or (for a few kinds) protobuf.

    Raises:
        ApiFailure: 400, 415.
    """
    kind = call.resource.kind
    media = media_type(call) or "application/json"
    unrecognized = f"the object provided is unrecognized (must be of type {kind}): "
    if media == "application/vnd.kubernetes.protobuf":
        if not call.request.body.startswith(_PROTOBUF_PREFIX):
            raise bad_request(
                f"{unrecognized}provided data does not appear to be a protobuf message, "
                "expected prefix [107 56 115 0]"
            )
        from dra.sim.apiserver.protobuf import decode_object

        return decode_object(call.request.body)
    text = call.request.body.decode("utf-8", "replace")
    if media == "application/yaml":
        return load_yaml(text)
    if media != "application/json":
        raise ApiFailure(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: application/json, "
            "application/yaml, application/vnd.kubernetes.protobuf",
        )
    try:
        value = parse_json(text)
    except DecodeError as error:
        shown = text[:30] or "<empty>"
        raise bad_request(
            f"{unrecognized}couldn't get version/kind; json parse error: {error} ({shown})"
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        shape = 'struct { APIVersion string "json:\\"apiVersion,omitempty\\""; Kind string "json:\\"kind,omitempty\\"" }'
        word = "array" if isinstance(value, list) else "string" if isinstance(value, str) else "number"
        raise bad_request(
            f"{unrecognized}couldn't get version/kind; json parse error: json: cannot unmarshal {word} "
            f"into Go value of type {shape}"
        )
    return value


def load_yaml(text: str) -> Any:
    """Read YAML.

    Raises:
        ApiFailure: 400.
    """
    import yaml

    try:
        return _plain(yaml.load(text, Loader=_yaml_loader(yaml)))  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        problem = str(getattr(error, "problem", None) or "")
        if "expected the node content" in problem:
            problem = "did not find expected node content"
        raise bad_request(
            f"error decoding YAML: error converting YAML to JSON: yaml: line {line}: {problem}"
        ) from error


def _yaml_loader(yaml: Any) -> Any:
    """A safe loader that leaves timestamps as text, as YAML to JSON conversion does."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def shape_body(call: Call, value: Any, *, expect_version: bool = True) -> Json:
    """Check kind and version of a body and decode it strictly as the client asked.

    Raises:
        ApiFailure: 400.
    """
    kind, version = call.resource.kind, call.group_version
    given_kind = value.get("kind") or kind
    given_version = value.get("apiVersion") or version
    if not value.get("kind") and not call.resource.versions[call.version]:
        shown = json.dumps(value, separators=(",", ":"))
        raise bad_request(
            f"the object provided is unrecognized (must be of type {kind}): "
            f"Object 'Kind' is missing in '{shown}'"
        )
    if call.resource.custom is not None and given_version == version:
        decoded = decode_as(
            call, value, " ", f'{given_kind} in version "{call.version}" cannot be handled as a {kind}'
        )
        return {**decoded, "kind": given_kind, "apiVersion": version}
    known = _known(call, given_version, given_kind)
    short = given_version.rpartition("/")[2]
    handled = f'{given_kind} in version "{short}" cannot be handled as a {kind}'
    if not known:
        raise bad_request(
            f'{handled}: no kind "{given_kind}" is registered for version "{given_version}" {SCHEME}'
        )
    ref = call.resource.versions[call.version]
    if given_kind != kind or given_version != version:
        ref = known
    decoded = decode_as(call, value, ref, handled)
    if given_kind != kind:
        raise bad_request(
            f'{handled}: no kind "{given_kind}" is registered for version "{given_version}" {SCHEME}'
        )
    if expect_version and given_version != version:
        raise bad_request(
            f"the API version in the data ({given_version}) does not match the expected API version ({version})"
        )
    return {**decoded, "kind": kind, "apiVersion": version}


def _known(call: Call, version: str, kind: str) -> str:
    """Give the schema of a kind that the server knows in that version; ' ' for one without schema."""
    from dra.api.rules.schema import load_struct

    if kind == call.resource.kind and version == call.group_version:
        return call.resource.versions[call.version] or " "
    group, _, short = version.rpartition("/")
    module = f"{(group or 'core').partition('.')[0]}_{short}"
    try:
        load_struct(f"{module}.{kind}")
    except (KeyError, FileNotFoundError):
        return ""
    return f"{module}.{kind}"


def decode_as(call: Call, value: Any, ref: str, handled: str) -> Json:
    """Decode with the field validation the client asked for (Strict, Warn, Ignore).

    Raises:
        ApiFailure: 400 for wrong types, and for unknown fields with Strict.
    """
    findings = Findings()
    try:
        if ref.strip():
            decoded = decode(value, ref, findings)
        else:
            decoded = shape(value, call.resource.custom.schemas.get(call.version) or {}, findings)
    except DecodeError as error:
        raise bad_request(f"{handled}: {error}") from error
    if call.resource.key == DEFINITIONS:
        unknown_words(value, findings)
    strictness = call.query.get("fieldValidation") or "Warn"
    if findings.problems and strictness == "Strict":
        raise bad_request(f"{handled}: strict decoding error: {', '.join(findings.problems)}")
    if strictness != "Ignore":
        for problem in findings.problems:
            call.warn(problem)
    return decoded
