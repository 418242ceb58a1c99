"""`dra validate`: manifests checked offline, as the API server, the scheduler and prepare would judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dra.cel import Selector
from dra.diagnose.validate_cel import check_selectors
from dra.diagnose.validate_config import check_configs
from dra.diagnose.validate_fit import Fit, KnownDevice
from dra.diagnose.validate_model import Finding, Report, in_order
from dra.diagnose.validate_object import Subject, check_object, read_object
from dra.diagnose.validate_pods import check_names, check_references
from dra.diagnose.validate_source import Manifest, read_manifests

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
    for manifest in manifests:
        found = read_object(manifest)
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
