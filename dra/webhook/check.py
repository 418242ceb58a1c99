"""Claims, templates and classes under admission, checked as `dra validate` does it.

Refused is only what our driver will not prepare: its opaque configurations, in whatever class or claim they stand. The
rest is the API server's to judge, which may be newer than this program; from us it is at most a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dra.diagnose.validate import validate_manifests
from dra.diagnose.validate_source import manifest_of

# Codes of findings that are ours to refuse, and of those that are worth a warning.
_OURS = "DRA-CONFIG-"


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found, as sentences with code, field and remedy."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def check_object(obj: Mapping[str, Any]) -> Checked:
    """Check one object of resource.k8s.io, in any served version."""
    report = validate_manifests([manifest_of(dict(obj))], known_devices=lambda: ())
    errors, warnings = [], []
    for finding in report.findings:
        if not finding.code.startswith(_OURS):
            continue
        text = f"{finding.code}: {finding.path}: {finding.message}"
        if finding.severity == "error":
            errors.append(f"{text}. {finding.remedy}".rstrip())
        elif finding.severity == "warning":
            warnings.append(text)
    return Checked(tuple(errors), tuple(warnings))
