"""Exact, hashable values without I/O: quantities, versions, names, addresses.

Nothing here knows Kubernetes objects, files or devices; everything else may import it.
"""

from dra.values.names import (
    is_dns_label,
    is_dns_subdomain,
    is_qualified_name,
    is_uid,
    qualify,
    split_qualified_name,
)
from dra.values.pci import PciAddress
from dra.values.quantity import Quantity
from dra.values.semver import Semver, is_api_version, normalise_version

__all__ = [
    "PciAddress",
    "Quantity",
    "Semver",
    "is_api_version",
    "is_dns_label",
    "is_dns_subdomain",
    "is_qualified_name",
    "is_uid",
    "normalise_version",
    "qualify",
    "split_qualified_name",
]
