"""The kinds of object this program reads and writes in the API: one small declarative record each."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from dra.api.versions import GROUP as RESOURCE_GROUP
from dra.api.versions import VERSIONS as RESOURCE_VERSIONS


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind in the API.

    `versions` are the ones we can speak, best first; with more than one the client negotiates.
    """

    group: str
    versions: tuple[str, ...]
    plural: str
    kind: str
    namespaced: bool

    @property
    def full_name(self) -> str:
        """The name as kubectl and RBAC messages write it: `resourceslices.resource.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(
        self, *, version: str, namespace: str | None = None, name: str | None = None, subresource: str = ""
    ) -> str:
        """Give the URL path of the collection, or of one object."""
        parts = ["apis", self.group, version] if self.group else ["api", version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/" + "/".join(quote(part, safe="") for part in parts)

    def api_version(self, version: str) -> str:
        """Give `group/version`, as objects carry it."""
        return f"{self.group}/{version}" if self.group else version


def _dra(plural: str, kind: str, *, namespaced: bool) -> Resource:
    return Resource(RESOURCE_GROUP, RESOURCE_VERSIONS, plural, kind, namespaced)


RESOURCE_SLICES = _dra("resourceslices", "ResourceSlice", namespaced=False)
RESOURCE_CLAIMS = _dra("resourceclaims", "ResourceClaim", namespaced=True)
RESOURCE_CLAIM_TEMPLATES = _dra("resourceclaimtemplates", "ResourceClaimTemplate", namespaced=True)
DEVICE_CLASSES = _dra("deviceclasses", "DeviceClass", namespaced=False)
NODES = Resource("", ("v1",), "nodes", "Node", namespaced=False)
PODS = Resource("", ("v1",), "pods", "Pod", namespaced=True)
EVENTS = Resource("", ("v1",), "events", "Event", namespaced=True)
NAMESPACES = Resource("", ("v1",), "namespaces", "Namespace", namespaced=False)
LEASES = Resource("coordination.k8s.io", ("v1",), "leases", "Lease", namespaced=True)
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", ("v1",), "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
# Our own, where their definitions are installed.
GPU_NODE_POLICIES = Resource(
    "gpudra.dev", ("v1alpha1",), "gpunodepolicies", "GpuNodePolicy", namespaced=False
)
GPU_NODES = Resource("gpudra.dev", ("v1alpha1",), "gpunodes", "GpuNode", namespaced=False)
