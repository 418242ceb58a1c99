"""Which resources the server knows: names, scope, versions, verbs, subresources.

Source: the discovery documents of Kubernetes 1.36 for the kinds that a DRA cluster uses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dra.sim.apiserver.gates import taint_rule_versions

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource in one group.

    `storage` is the version objects are kept in; `versions` maps each served version to the schema of its kind
    (`module.Kind`, empty: no schema). `store_as` names the resource whose objects this one is a view of; `hashed` is what the storage version hash is
    made of where it is not group/version/kind of the storage.
    """

    group: str
    plural: str
    kind: str
    namespaced: bool
    versions: dict[str, str]
    storage: str = "v1"
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    verbs: tuple[str, ...] = ALL_VERBS
    returns_deleted: bool = False
    list_kind: str = ""
    store_as: str = ""
    hashed: str = ""
    custom: Any = None

    @property
    def key(self) -> str:
        """Where the objects are kept: `group/plural`."""
        return self.store_as or f"{self.group}/{self.plural}"

    @property
    def kind_of_list(self) -> str:
        """The kind of a list answer."""
        return self.list_kind or f"{self.kind}List"

    @property
    def singular_name(self) -> str:
        """The singular for discovery."""
        return self.singular or self.kind.lower()

    def api_version(self, version: str) -> str:
        """Give `group/version`, or `v1` for the core group."""
        return f"{self.group}/{version}" if self.group else version


_STATUS: dict[str, tuple[str, ...]] = {"status": ("get", "patch", "update")}
_SCALE: dict[str, tuple[str, ...]] = {"scale": ("get", "patch", "update"), **_STATUS}


def _core() -> list[Resource]:
    def core(plural: str, kind: str, *, namespaced: bool = True, **more: Any) -> Resource:
        return Resource("", plural, kind, namespaced, {"v1": f"core_v1.{kind}"}, **more)

    pod_subresources: dict[str, tuple[str, ...]] = {
        "binding": ("create",),
        "ephemeralcontainers": ("get", "patch", "update"),
        "eviction": ("create",),
        "log": ("get",),
        "resize": ("get", "patch", "update"),
        **_STATUS,
    }
    return [
        core("bindings", "Binding", verbs=("create",)),
        core("configmaps", "ConfigMap", short_names=("cm",)),
        core("endpoints", "Endpoints", short_names=("ep",), singular="endpoints"),
        core("events", "Event", short_names=("ev",)),
        core("limitranges", "LimitRange", short_names=("limits",)),
        core(
            "namespaces",
            "Namespace",
            namespaced=False,
            short_names=("ns",),
            subresources={"finalize": ("update",), **_STATUS},
            returns_deleted=True,
            verbs=("create", "delete", "get", "list", "patch", "update", "watch"),
        ),
        core("nodes", "Node", namespaced=False, short_names=("no",), subresources=_STATUS),
        core("persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",), subresources=_STATUS),
        core(
            "pods",
            "Pod",
            short_names=("po",),
            categories=("all",),
            subresources=pod_subresources,
            returns_deleted=True,
        ),
        core("podtemplates", "PodTemplate"),
        core(
            "replicationcontrollers",
            "ReplicationController",
            short_names=("rc",),
            categories=("all",),
            subresources=_SCALE,
        ),
        core("resourcequotas", "ResourceQuota", short_names=("quota",), subresources=_STATUS),
        core("secrets", "Secret"),
        core("serviceaccounts", "ServiceAccount", short_names=("sa",), subresources={"token": ("create",)}),
        core(
            "services",
            "Service",
            short_names=("svc",),
            categories=("all",),
            subresources=_STATUS,
            returns_deleted=True,
        ),
    ]


def _workloads() -> list[Resource]:
    def of(group: str, plural: str, kind: str, *short: str, **more: Any) -> Resource:
        module = group.partition(".")[0]
        more.setdefault("subresources", _STATUS)
        return Resource(group, plural, kind, True, {"v1": f"{module}_v1.{kind}"}, short_names=short, **more)

    every: dict[str, Any] = {"categories": ("all",)}
    return [
        of("apps", "controllerrevisions", "ControllerRevision", subresources={}),
        of("apps", "daemonsets", "DaemonSet", "ds", **every),
        of("apps", "deployments", "Deployment", "deploy", subresources=_SCALE, **every),
        of("apps", "replicasets", "ReplicaSet", "rs", subresources=_SCALE, **every),
        of("apps", "statefulsets", "StatefulSet", "sts", subresources=_SCALE, **every),
        of("batch", "cronjobs", "CronJob", "cj", **every),
        of("batch", "jobs", "Job", **every),
        of("coordination.k8s.io", "leases", "Lease", subresources={}),
        of("policy", "poddisruptionbudgets", "PodDisruptionBudget", "pdb"),
    ]


def _cluster() -> list[Resource]:
    events = Resource(
        "events.k8s.io", "events", "Event", True, {"v1": "events_v1.Event"},
        short_names=("ev",), store_as="/events", hashed="/v1/Event",
    )  # fmt: skip
    definitions = Resource(
        "apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", False,
        {"v1": "apiextensions_v1.CustomResourceDefinition"},
        short_names=("crd", "crds"), categories=_EXTENSIONS, subresources=_STATUS,
        hashed="apiextensions.k8s.io/v1beta1/CustomResourceDefinition",
    )  # fmt: skip
    priorities = Resource(
        "scheduling.k8s.io", "priorityclasses", "PriorityClass", False,
        {"v1": "scheduling_v1.PriorityClass"}, short_names=("pc",),
    )  # fmt: skip
    return [events, definitions, *_rbac(), *_admission(), priorities, *_reviews()]


_EXTENSIONS = ("api-extensions",)


def _rbac() -> list[Resource]:
    def of(plural: str, kind: str, *, namespaced: bool) -> Resource:
        return Resource("rbac.authorization.k8s.io", plural, kind, namespaced, {"v1": f"rbac_v1.{kind}"})

    return [
        of("clusterroles", "ClusterRole", namespaced=False),
        of("clusterrolebindings", "ClusterRoleBinding", namespaced=False),
        of("roles", "Role", namespaced=True),
        of("rolebindings", "RoleBinding", namespaced=True),
    ]


def _admission() -> list[Resource]:
    def of(plural: str, kind: str, **more: Any) -> Resource:
        versions = {"v1": f"admissionregistration_v1.{kind}"}
        group = "admissionregistration.k8s.io"
        return Resource(group, plural, kind, False, versions, categories=_EXTENSIONS, **more)

    policy = {"singular": "validatingadmissionpolicy", "subresources": _STATUS}
    return [
        of("mutatingwebhookconfigurations", "MutatingWebhookConfiguration"),
        of("validatingwebhookconfigurations", "ValidatingWebhookConfiguration"),
        of("validatingadmissionpolicies", "ValidatingAdmissionPolicy", **policy),
        of("validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
    ]


def _reviews() -> list[Resource]:
    def of(group: str, plural: str, kind: str) -> Resource:
        module = f"{group.partition('.')[0]}_v1"
        return Resource(group, plural, kind, False, {"v1": f"{module}.{kind}"}, verbs=("create",))

    return [
        of("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview"),
        of("authorization.k8s.io", "selfsubjectrulesreviews", "SelfSubjectRulesReview"),
        of("authorization.k8s.io", "subjectaccessreviews", "SubjectAccessReview"),
        of("authentication.k8s.io", "selfsubjectreviews", "SelfSubjectReview"),
        of("authentication.k8s.io", "tokenreviews", "TokenReview"),
    ]


DRA = "resource.k8s.io"
# Since which minor version a version of resource.k8s.io is deprecated, and from which it is gone.
DEPRECATED = {"v1beta1": (35, 38), "v1beta2": (36, 39), "v1alpha3": (36, 39)}


def _dra(served: tuple[str, ...], minor: int) -> list[Resource]:
    def of(plural: str, kind: str, *, namespaced: bool, **more: Any) -> Resource:
        versions = {v: f"resource_{v}.{kind}" for v in served if v != "v1alpha3"}
        return Resource(DRA, plural, kind, namespaced, versions, storage="v1", returns_deleted=True, **more)

    resources = [
        of("deviceclasses", "DeviceClass", namespaced=False),
        of("resourceclaims", "ResourceClaim", namespaced=True, subresources=_STATUS),
        of("resourceclaimtemplates", "ResourceClaimTemplate", namespaced=True),
        of("resourceslices", "ResourceSlice", namespaced=False),
    ]
    # The rule has had one shape since its first version.
    shape = "resource_v1beta2.DeviceTaintRule"
    rules = {v: shape for v in served if v in taint_rule_versions(minor)}
    if rules:
        resources.append(
            Resource(
                DRA,
                "devicetaintrules",
                "DeviceTaintRule",
                False,
                rules,
                storage=next(iter(rules)),
                subresources=_STATUS,
                returns_deleted=True,
                hashed=f"{DRA}/v1alpha3/DeviceTaintRule",
            )
        )
    return resources


class Registry:
    """All resources by group, version and plural; custom ones come and go. Safe for threads."""

    def __init__(self, dra_versions: tuple[str, ...], *, minor: int = 36) -> None:
        self._lock = threading.Lock()
        self._builtin = [*_core(), *_workloads(), *_cluster(), *_dra(dra_versions, minor)]
        self.dra_versions = dra_versions
        self._index: dict[tuple[str, str, str], Resource] = {}
        for resource in self._builtin:
            for version in resource.versions:
                self._index[resource.group, version, resource.plural] = resource

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """Give the resource that answers this path."""
        return self._index.get((group, version, plural))

    def by_kind(self, group: str, kind: str) -> Resource | None:
        """Give the resource of a kind, whatever the version."""
        return next((r for r in self.resources() if r.group == group and r.kind == kind), None)

    def resources(self) -> list[Resource]:
        """Give every resource once, in discovery's order."""
        with self._lock:
            return list({id(r): r for r in self._index.values()}.values())

    def serves(self, group: str) -> bool:
        """Whether any version of a group is served."""
        return any(each == group for each, _, _ in self._index)

    def group_versions(self) -> dict[str, list[str]]:
        """Give the served versions of each group, best first; the core group is ''."""
        found: dict[str, list[str]] = {}
        for group, version, _ in list(self._index):
            versions = found.setdefault(group, [])
            if version not in versions:
                versions.append(version)
        return {group: sorted(versions, key=version_rank) for group, versions in found.items()}

    def in_version(self, group: str, version: str) -> Iterator[Resource]:
        """Give the resources of one group version by name."""
        found = [r for (g, v, _), r in list(self._index.items()) if (g, v) == (group, version)]
        return iter(sorted(found, key=lambda r: r.plural))

    def add(self, resource: Resource) -> None:
        """Serve a custom resource; one of the same name is replaced."""
        with self._lock:
            index = {
                k: r
                for k, r in self._index.items()
                if (r.group, r.plural) != (resource.group, resource.plural)
            }
            for version in resource.versions:
                index[resource.group, version, resource.plural] = resource
            self._index = index

    def remove(self, group: str, plural: str) -> None:
        """Stop serving a custom resource."""
        with self._lock:
            self._index = {k: r for k, r in self._index.items() if (r.group, r.plural) != (group, plural)}


def version_rank(version: str) -> tuple[int, int, int, str]:
    """Sort key that puts v2 before v1, GA before beta before alpha. Source: version priority of kube-aware names."""
    import re

    match = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if match is None:
        return (3, 0, 0, version)
    stage = {None: 0, "beta": 1, "alpha": 2}[match[2]]
    return (stage, -int(match[1]), -int(match[3] or 0), version)
