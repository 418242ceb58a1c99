"""Checks of CustomResourceDefinitions: names, versions, columns, subresources. Their schemas are checked in `structural`.

Source: k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.dns import dns_subdomain_error, label_1035_error
from dra.api.rules.fields import bad, immutable, required, unsupported
from dra.sim.apiserver.validation.structural import schema_at, schema_findings

Json = dict[str, Any]

_COLUMN_TYPES = ("boolean", "date", "integer", "number", "string")


def validate_definition(obj: Json, *, old: Json | None = None) -> list[Cause]:
    """Find what is wrong with a definition; `old` is the one before a change."""
    spec = obj.get("spec") or {}
    found = [*_names(obj, spec), *_versions(spec)]
    if old is not None:
        found += _changes(spec, old.get("spec") or {}, obj)
    versions = spec.get("versions") or []
    for i, version in enumerate(versions):
        at = _schema_path(spec, i)
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            found.append(required(f"spec.versions[{i}].schema.openAPIV3Schema"))
            if version.get("selectableFields"):
                why = "may only be set when validations.schema is included"
                found.append(bad("spec.selectableFields", "", why))
            continue
        if not isinstance(schema, dict):
            found.append(bad(at, schema, "must be an object"))
            continue
        found += schema_findings(schema, at)
        found += _version_parts(version, schema, f"spec.versions[{i}]" if len(versions) > 1 else "spec", i)
    return found


def _schema_path(spec: Json, index: int) -> str:
    if len(spec.get("versions") or []) == 1:
        return "spec.validation.openAPIV3Schema"
    return f"spec.versions[{index}].schema.openAPIV3Schema"


def _names(obj: Json, spec: Json) -> Iterator[Cause]:
    names = spec.get("names") or {}
    wanted = f"{names.get('plural')}.{spec.get('group')}"
    if obj["metadata"].get("name") != wanted:
        yield bad("metadata.name", obj["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group')
    group = spec.get("group") or ""
    if not group:
        yield required("spec.group")
    elif dns_subdomain_error(group):
        yield bad("spec.group", group, str(dns_subdomain_error(group)))
    elif "." not in group:
        yield bad("spec.group", group, "should be a domain with at least one dot")
    if not spec.get("scope"):
        yield required("spec.scope")
    elif spec["scope"] not in {"Namespaced", "Cluster"}:
        yield unsupported("spec.scope", spec["scope"], ["Cluster", "Namespaced"])
    for key in ("plural", "singular", "kind", "listKind"):
        value = names.get(key) or ""
        if not value:
            yield required(f"spec.names.{key}")
            continue
        # Kinds may have capital letters; otherwise they are labels too.
        mixed = key in {"kind", "listKind"}
        error = label_1035_error(value.lower() if mixed else value)
        if error:
            more = "may have mixed case, but should otherwise match: " if mixed else ""
            yield bad(f"spec.names.{key}", value, f"{more}{error}")
    if names.get("kind") and names.get("kind") == names.get("listKind"):
        yield bad("spec.names.listKind", names["listKind"], "kind and listKind may not be the same")
    for key in ("shortNames", "categories"):
        for i, value in enumerate(names.get(key) or []):
            if label_1035_error(value):
                yield bad(f"spec.names.{key}[{i}]", value, str(label_1035_error(value)))
    if spec.get("preserveUnknownFields"):
        yield bad(
            "spec.preserveUnknownFields",
            True,
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in "
            "spec.versions[*].schema instead",
        )


def _versions(spec: Json) -> Iterator[Cause]:
    versions = spec.get("versions") or []
    names = [version.get("name") or "" for version in versions]
    stored = [version.get("name") for version in versions if version.get("storage")]
    if len(set(names)) < len(names):
        yield bad("spec.versions", names, "must contain unique version names")
    for i, name in enumerate(names):
        if label_1035_error(name):
            yield bad(f"spec.versions[{i}].name", name, str(label_1035_error(name)))
    if len(stored) != 1:
        yield bad("spec.versions", names, "must have exactly one version marked as storage version")
    conversion = spec.get("conversion") or {}
    strategy, webhook = conversion.get("strategy"), conversion.get("webhook") or {}
    if strategy not in (None, "None", "Webhook"):
        yield unsupported("spec.conversion.strategy", strategy, ["None", "Webhook"])
    if strategy == "Webhook":
        if not webhook.get("clientConfig"):
            why = "required when strategy is set to Webhook"
            yield required("spec.conversion.webhookClientConfig", why)
        if not webhook.get("conversionReviewVersions"):
            yield required("spec.conversion.conversionReviewVersions")


def _changes(spec: Json, before: Json, obj: Json) -> Iterator[Cause]:
    """Find changes of what is fixed once a definition is established."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    if not any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions):
        return
    for field in ("scope", "group"):
        if spec.get(field) != before.get(field):
            yield immutable(f"spec.{field}", spec.get(field))
    for field in ("kind", "plural"):
        new, old = (spec.get("names") or {}).get(field), (before.get("names") or {}).get(field)
        if new != old:
            yield immutable(f"spec.names.{field}", new)
    names = {v.get("name") for v in spec.get("versions") or []}
    for i, stored in enumerate((obj.get("status") or {}).get("storedVersions") or []):
        if stored not in names:
            yield bad(
                f"status.storedVersions[{i}]", stored, "missing from spec.versions; "
                f"{stored} was previously a storage version, and must remain in spec.versions until a storage migration "
                "ensures no data remains persisted in it and removes it from status.storedVersions",
            )  # fmt: skip


_SIMPLE = "must be a simple json path starting with ."


def _version_parts(version: Json, schema: Json, at: str, index: int) -> Iterator[Cause]:
    """Check columns, scale, selectable fields and the deprecation of a version."""
    for i, column in enumerate(version.get("additionalPrinterColumns") or []):
        path = f"{at}.additionalPrinterColumns[{i}]"
        if not column.get("name"):
            yield required(f"{path}.name")
        types = f"must be one of {','.join(_COLUMN_TYPES)}"
        if not column.get("type"):
            yield required(f"{path}.type", types)
        elif column["type"] not in _COLUMN_TYPES:
            yield bad(f"{path}.type", column["type"], types)
        if not column.get("jsonPath"):
            yield required(f"{path}.JSONPath")
        elif not str(column["jsonPath"]).startswith("."):
            yield bad(f"{path}.JSONPath", column["jsonPath"], _SIMPLE)
    scale = (version.get("subresources") or {}).get("scale")
    if scale is not None:
        yield from _scale(scale, f"{at}.subresources.scale")
    for i, field in enumerate(version.get("selectableFields") or []):
        path = str(field.get("jsonPath") or "")
        if schema_at(schema, path) is None:
            why = "is an invalid path: does not refer to a valid field"
            yield bad(f"{at}.selectableFields[{i}].jsonPath", path, why)
    if version.get("deprecationWarning") and not version.get("deprecated"):
        why = "can only be set for deprecated versions"
        yield bad(f"spec.versions[{index}].deprecationWarning", version["deprecationWarning"], why)


def _scale(scale: Json, at: str) -> Iterator[Cause]:
    for key, root in (("specReplicasPath", ".spec"), ("statusReplicasPath", ".status")):
        path = str(scale.get(key) or "")
        if not path:
            yield required(f"{at}.{key}")
        elif not path.startswith("."):
            yield bad(f"{at}.{key}", path, _SIMPLE)
        elif not path.startswith(f"{root}."):
            yield bad(f"{at}.{key}", path, f"should be a json path under {root}")
