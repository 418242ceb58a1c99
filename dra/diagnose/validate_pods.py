"""Pods and what they name: claims, templates and requests across all the objects of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dra.api.fractions import CLAIM_PREFIX
from dra.api.rules import claims as claim_rules
from dra.api.rules.claims import request_names, validate_admin
from dra.diagnose.validate_config import has_sharing
from dra.diagnose.validate_model import Json, guess
from dra.diagnose.validate_mps import MpsUses
from dra.diagnose.validate_object import Subject

_KIND_OF_KEY = {"resourceClaimName": "ResourceClaim", "resourceClaimTemplateName": "ResourceClaimTemplate"}


def check_references(subjects: Sequence[Subject], namespaces: dict[str, Json]) -> None:
    """Report what names nothing, what is named by nobody, and sharing that shares nothing.

    Args:
        subjects: all objects of the files whose values have their types.
        namespaces: the Namespace objects of the files, by name.
    """
    known = {(one.kind, one.namespace, one.name): one for one in subjects}
    # For each template: how many containers of one pod use its claim, for every entry that names it.
    users: dict[int, list[int]] = {}
    mps = MpsUses()
    for subject in subjects:
        for path, claim in _entries(subject):
            used = _uses(subject, str(claim.get("name")))
            _check_used(subject, path, claim, used)
            target = _target(subject, path, claim, known)
            if target is None:
                continue
            users.setdefault(id(target), []).append(len({container for container, _ in used}))
            _check_requests(subject, target, used)
            mps.add(subject, str(claim.get("name")), target, used)
        _check_admin(subject, namespaces)
    mps.report()
    for subject in subjects:
        counts = users.get(id(subject), [])
        if subject.kind == "ResourceClaimTemplate" and counts and max(counts) <= 1:
            for path in has_sharing(subject):
                subject.report(
                    "warning", "DRA-CONFIG-NOTHING-SHARES", path,
                    "sharing is set up, but each claim of this template is used by one container only",
                    remedy="Let several containers of the pod name the claim, or use one ResourceClaim for several pods; "
                    "it still serves several processes of the one container.",
                )  # fmt: skip


def _entries(subject: Subject) -> Iterator[tuple[str, Json]]:
    found = subject.pod_spec()
    if found is not None:
        for index, claim in enumerate(found[1].get("resourceClaims") or []):
            yield f"{found[0]}.resourceClaims[{index}]", claim


def _uses(subject: Subject, name: str) -> list[tuple[str, tuple[str, str]]]:
    """Give each use of a pod's claim by a container: the container's path, the path and name of the request."""
    found = subject.pod_spec()
    uses = []
    for key in ("initContainers", "containers") if found else ():
        for i, container in enumerate(found[1].get(key) or []):  # type: ignore[index]
            at = f"{found[0]}.{key}[{i}]"  # type: ignore[index]
            for j, use in enumerate((container.get("resources") or {}).get("claims") or []):
                if use.get("name") == name:
                    uses.append((at, (f"{at}.resources.claims[{j}].request", use.get("request") or "")))
    return uses


def _check_used(subject: Subject, path: str, claim: Json, used: Sequence[object]) -> None:
    if not used and claim.get("name"):
        subject.report(
            "warning", "DRA-POD-CLAIM-UNUSED", path,
            f"claim {claim['name']} is allocated for the pod, but no container uses it",
            remedy="Name it in resources.claims of the containers that shall see the devices.",
        )  # fmt: skip


def _target(
    subject: Subject, path: str, claim: Json, known: dict[tuple[str, str, str], Subject]
) -> Subject | None:
    """Give the claim or template that a pod's entry names, where the files have it."""
    given = [(key, str(claim[key])) for key in _KIND_OF_KEY if claim.get(key)]
    if len(given) != 1:
        return None  # the rules said so
    key, name = given[0]
    kind = _KIND_OF_KEY[key]
    target = known.get((kind, subject.namespace, name))
    if target is not None:
        return target
    other_key, other = next((k, v) for k, v in _KIND_OF_KEY.items() if v != kind)
    if (other, subject.namespace, name) in known:
        subject.report(
            "warning", "DRA-POD-CLAIM-KIND", f"{path}.{key}",
            f"the files have no {kind} {name}, but a {other} of that name", remedy=f"Write {other_key}: {name}.",
        )  # fmt: skip
        return None
    elsewhere = [space for (k, space, n) in known if k == kind and n == name]
    if elsewhere:
        subject.report(
            "warning", "DRA-POD-CLAIM-NAMESPACE", f"{path}.{key}",
            f"{kind} {name} is in namespace {elsewhere[0]}, the pod is in {subject.namespace}",
            remedy="A pod can use only claims and templates of its own namespace.",
        )  # fmt: skip
        return None
    if str(claim.get("name")).startswith(CLAIM_PREFIX) and key == "resourceClaimTemplateName":
        return None  # the driver makes it for a fraction of a GPU
    near = guess(name, [n for (k, space, n) in known if k == kind and space == subject.namespace])
    subject.report(
        "info", "DRA-POD-CLAIM-ELSEWHERE", f"{path}.{key}", f"{kind} {name} is not in the files.{near}"
    )
    return None


def _check_requests(subject: Subject, target: Subject, used: Sequence[tuple[str, tuple[str, str]]]) -> None:
    spec = target.claim_spec()
    assert spec is not None
    known = sorted(name for name in request_names(spec[1]) if "/" not in name)
    for _, (path, request) in used:
        if request and request not in known:
            subject.report(
                "error", "DRA-POD-REQUEST-UNKNOWN", path,
                f"{target.title} has no request {request}: the container would start without a device."
                f"{guess(request, known)}",
                remedy=f"Name one of {', '.join(known) or 'its requests (there are none)'}, or leave request out.",
            )  # fmt: skip


def _check_admin(subject: Subject, namespaces: dict[str, Json]) -> None:
    found = subject.claim_spec()
    if found is None:
        return
    path, spec = found
    places = list(claim_rules.admin_requests(spec))
    if not places:
        return
    namespace = namespaces.get(subject.namespace)
    at = [f"{path}.devices.requests[{i}].exactly.adminAccess" for i in places]
    remedy = f'Label the namespace: kubectl label ns {subject.namespace} {claim_rules.ADMIN_LABEL}="true"'
    if namespace is None:
        for where in at:
            subject.report(
                "info", "DRA-CLAIM-ADMIN-NAMESPACE", where,
                f"namespace {subject.namespace} is not in the files: admin access needs a label on it", remedy=remedy,
            )  # fmt: skip
    elif validate_admin(spec, namespace):
        for where in at:
            subject.report(
                "error", "DRA-CLAIM-ADMIN-NAMESPACE", where,
                f"namespace {subject.namespace} does not allow admin access", remedy=remedy,
            )  # fmt: skip


def check_names(subjects: Sequence[Subject]) -> None:
    """Report objects that stand twice: the second overwrites the first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in subjects:
        if not (one.obj.get("metadata") or {}).get("name"):
            continue
        key = (one.kind, one.namespace, one.name)
        counts[key] += 1
        if counts[key] == 2:
            one.report(
                "warning", "DRA-MANIFEST-TWICE", "metadata.name", "the files have this object twice",
                remedy="Give one of them another name.",
            )  # fmt: skip
