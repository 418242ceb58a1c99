"""`dra validate`: manifests checked offline, as the API server, the scheduler and prepare would judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dra.api.fraction_pods import is_opted_in, rewritten
from dra.api.fractions import FractionRules
from dra.cel import Selector
from dra.diagnose.validate_cel import check_selectors
from dra.diagnose.validate_config import check_configs
from dra.diagnose.validate_fit import Fit, KnownDevice
from dra.diagnose.validate_model import Finding, Json, Report, in_order
from dra.diagnose.validate_object import Subject, check_object, read_object
from dra.diagnose.validate_pods import check_names, check_references
from dra.diagnose.validate_source import MAX_DEPTH, Manifest, is_too_deep, read_manifests
from dra.errors import ClaimError

_FATAL = frozenset({"DRA-MANIFEST-UNREADABLE", "DRA-MANIFEST-SYNTAX"})


def validate_paths(paths: Sequence[str], *, known_devices: Callable[[], Iterable[KnownDevice]]) -> Report:
    """Check all objects of files, folders and `-`. Never raises for what stands in them.

    Args:
        paths: files (YAML, JSON), folders, `-` for standard input.
        known_devices: gives the devices that known machines publish; called once, if at all.
    """
    manifests, findings, files = read_manifests(paths)
    report = validate_manifests(manifests, known_devices=known_devices)
    report.findings = in_order([*findings, *report.findings], files)
    report.unreadable = any(finding.code in _FATAL for finding in findings)
    return report


def validate_manifests(
    manifests: Sequence[Manifest], *, known_devices: Callable[[], Iterable[KnownDevice]]
) -> Report:
    """Check objects that were read; those that name each other are checked together."""
    report = Report()
    subjects: list[Subject] = []
    namespaces = {}
    labelled = _namespaces(manifests)
    for manifest in manifests:
        found = _read(manifest, labelled)
        if isinstance(found, Subject):
            subjects.append(found)
        elif isinstance(found, Finding):
            report.findings.append(found)
        else:
            report.skipped += 1
            if manifest.value.get("kind") == "Namespace":
                meta = manifest.value.get("metadata")
                namespaces[str(meta.get("name") if isinstance(meta, dict) else "")] = manifest.value
    report.objects = len(subjects)
    sound = [subject for subject in subjects if subject.sound]
    compiled: dict[int, dict[str, list[Selector] | None]] = {}
    for subject in sound:
        check_object(subject)
        compiled[id(subject)] = check_selectors(subject)
        check_configs(subject)
    check_names(sound)
    check_references(sound, namespaces)
    classes = {one.name: compiled[id(one)]["spec"] for one in sound if one.kind == "DeviceClass"}
    fit = Fit(known_devices, classes)
    for subject in sound:
        fit.check(subject, compiled[id(subject)])
    report.findings += [finding for subject in subjects for finding in subject.findings]
    return report


def _namespaces(manifests: Sequence[Manifest]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for manifest in manifests:
        meta = manifest.value.get("metadata")
        if manifest.value.get("kind") == "Namespace" and isinstance(meta, dict):
            found[str(meta.get("name"))] = manifest.value
    return found


def _read(manifest: Manifest, namespaces: Mapping[str, Json]) -> Subject | Finding | None:
    """Read an object as the API server would have it: after the webhook where that is asked for."""
    if is_too_deep(manifest.value):
        why = f"it nests deeper than {MAX_DEPTH} levels"
        return Finding(manifest.file, manifest.spot.line, "error", "DRA-MANIFEST-SYNTAX", why)
    meta = manifest.value.get("metadata")
    namespace = namespaces.get(str(meta.get("namespace") or "default")) if isinstance(meta, dict) else None
    if not is_opted_in(manifest.value, namespace):
        return read_object(manifest)
    try:
        value = rewritten(manifest.value, FractionRules())
    except ClaimError as error:
        field = str(error.fields.get("field") or "")
        return Finding(
            manifest.file, manifest.spot.find(field)[0].line, "error", error.code, error.message,
            str(manifest.value.get("kind")), field, error.remedy,
        )  # fmt: skip
    return read_object(Manifest(manifest.file, value, manifest.spot))
