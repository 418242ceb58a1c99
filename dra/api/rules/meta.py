"""Object metadata: names, labels, annotations, owners, finalizers, and what may not change.

Source: k8s.io/apimachinery/pkg/api/validation (ValidateObjectMeta, ValidateObjectMetaUpdate).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dra.api.rules.cause import Cause
from dra.api.rules.dns import SUBDOMAIN_TEXT, dns_subdomain_error
from dra.api.rules.fields import bad, forbidden, immutable, required

Json = dict[str, Any]

_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", re.ASCII)
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", re.ASCII)
_NAME_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_SLASHES_TEXT = (
    "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with "
    "an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. "
    "'example.com/MyName')"
)
_STANDARD_FINALIZERS = {"kubernetes", "orphan", "foregroundDeletion"}
_ANNOTATIONS_LIMIT = 256 * 1024


def qualified_name_errors(text: str) -> list[str]:
    """Give what is wrong with a label key (`prefix/name`)."""
    prefix, slash, name = text.rpartition("/")
    found: list[str] = []
    if text.count("/") > 1:
        return [_SLASHES_TEXT]
    if slash:
        if prefix == "":
            found.append("prefix part must be non-empty")
        elif (why := dns_subdomain_error(prefix)) is not None:
            found.append(f"prefix part {why}")
    if name == "":
        found.append("name part must be non-empty")
    elif len(name) > 63:
        found.append("name part must be no more than 63 characters")
    if not _NAME.fullmatch(name):
        found.append(_NAME_TEXT)
    return found


def label_value_errors(text: str) -> list[str]:
    """Give what is wrong with a label value."""
    found = ["must be no more than 63 bytes"] if len(text) > 63 else []
    return found if _VALUE.fullmatch(text) else [*found, _VALUE_TEXT]


def validate_labels(labels: Json | None, field: str) -> list[Cause]:
    """Find bad label keys and values."""
    found: list[Cause] = []
    for key, value in sorted((labels or {}).items()):
        found += [bad(field, key, why) for why in qualified_name_errors(key)]
        found += [bad(field, value, why) for why in label_value_errors(str(value))]
    return found


def validate_annotations(annotations: Json | None, field: str) -> list[Cause]:
    """Find bad annotation keys and too much content."""
    found: list[Cause] = []
    size = 0
    for key, value in sorted((annotations or {}).items()):
        found += [bad(field, key, why) for why in qualified_name_errors(key.lower())]
        size += len(key.encode()) + len(str(value).encode())
    if size > _ANNOTATIONS_LIMIT:
        found.append(
            Cause("FieldValueTooLong", field, f"Too long: may not be more than {_ANNOTATIONS_LIMIT} bytes")
        )
    return found


def validate_meta(
    obj: Json,
    *,
    namespaced: bool,
    check_name: Callable[[str], str | None],
    check_prefix: Callable[[str], str | None],
) -> list[Cause]:
    """Find what is wrong with an object's metadata; what a name must look like depends on the kind."""
    meta = obj["metadata"]
    found: list[Cause] = []
    name, prefix = meta.get("name") or "", meta.get("generateName") or ""
    if prefix and (why := check_prefix(prefix)):
        found.append(bad("metadata.generateName", prefix, why))
    if not name:
        found.append(required("metadata.name", "name or generateName is required"))
    elif why := check_name(name):
        found.append(bad("metadata.name", name, why))
    if not namespaced and meta.get("namespace"):
        found.append(forbidden("metadata.namespace", "not allowed on this type"))
    found += validate_labels(meta.get("labels"), "metadata.labels")
    found += validate_annotations(meta.get("annotations"), "metadata.annotations")
    found += _owners(meta.get("ownerReferences") or [])
    found += _finalizers(meta.get("finalizers") or [])
    return found


def _owners(owners: list[Json]) -> list[Cause]:
    found: list[Cause] = []
    controller = ""
    for owner in owners:
        at = "metadata.ownerReferences"
        version = owner.get("apiVersion") or ""
        if not version or version.count("/") > 1:
            found.append(bad(f"{at}.apiVersion", version, "version must not be empty"))
        found += [
            bad(f"{at}.{key}", "", "must not be empty")
            for key in ("kind", "name", "uid")
            if not owner.get(key)
        ]
        if owner.get("controller"):
            if controller:
                why = (
                    "Only one reference can have Controller set to true. Found "
                    f'"true" in references for {controller} and {owner.get("name")}'
                )
                found.append(bad(at, owner, why))
            controller = str(owner.get("name"))
    return found


def _finalizers(finalizers: list[str]) -> list[Cause]:
    found: list[Cause] = []
    if "orphan" in finalizers and "foregroundDeletion" in finalizers:
        found.append(
            bad(
                "metadata.finalizers",
                finalizers,
                "finalizer orphan and foregroundDeletion cannot be both set",
            )
        )
    for i, name in enumerate(finalizers):
        if "/" not in name and name not in _STANDARD_FINALIZERS:
            why = "name is neither a standard finalizer name nor is it fully qualified"
            found.append(bad(f"metadata.finalizers[{i}]", name, why))
        found += [bad("metadata.finalizers", name, why) for why in qualified_name_errors(name)]
    return found


def validate_meta_update(new: Json, old: Json) -> list[Cause]:
    """Find metadata that may not change."""
    found: list[Cause] = []
    meta, kept = new["metadata"], old["metadata"]
    keys = ("name", "namespace", "uid", "deletionTimestamp", "deletionGracePeriodSeconds")
    found += [immutable(f"metadata.{key}", meta.get(key)) for key in keys if meta.get(key) != kept.get(key)]
    if kept.get("deletionTimestamp"):
        added = [f for f in meta.get("finalizers") or [] if f not in (kept.get("finalizers") or [])]
        if added:
            why = f"no new finalizers can be added if the object is being deleted, found new finalizers {_go(added)}"
            found.append(forbidden("metadata.finalizers", why))
    # The real server checks this twice: for every kind and again for each; the message shows it once.
    return found * 2


def _go(names: list[str]) -> str:
    return "[]string{" + ", ".join(f'"{n}"' for n in names) + "}"


__all__ = [
    "SUBDOMAIN_TEXT",
    "label_value_errors",
    "qualified_name_errors",
    "validate_labels",
    "validate_meta",
    "validate_meta_update",
]
