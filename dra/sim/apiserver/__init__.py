"""A simulated Kubernetes API server: storage, watches, patches and the rules of resource.k8s.io, on loopback.

`SimApiServer` is the door. It is test equipment: no TLS, no authorisation, everything in memory.
"""

from __future__ import annotations

from dra.sim.apiserver.server import SimApiServer

__all__ = ["SimApiServer"]
