"""The services by name: full method paths with the classes of their requests and responses.

Servers and clients are built from these tables; there are no generated service stubs, because those refuse a
grpcio older than their generator. Source: the definitions in `proto/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from dra.pb import (
    dra_v1_pb2,
    dra_v1beta1_pb2,
    grpc_health_pb2,
    health_v1_pb2,
    health_v1alpha1_pb2,
    registration_pb2,
)

# The type that the kubelet's plugin watcher looks a handler up for.
PLUGIN_TYPE = "DRAPlugin"

# What a driver says it serves, its preference first: the kubelet takes the first prepare version that it
# knows. These are short historical names, not the proto packages. Source: kubelet 1.32 to 1.37.
SUPPORTED_VERSIONS = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)


@dataclass(frozen=True, slots=True)
class Method:
    """One remote call."""

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    response_streams: bool = False

    @property
    def path(self) -> str:
        """The path on the wire: `/<package>.<Service>/<Method>`."""
        return f"/{self.service}/{self.name}"


_DRA_V1 = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_DRA_V1BETA1 = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"

GET_INFO = Method(
    "pluginregistration.Registration", "GetInfo", registration_pb2.InfoRequest, registration_pb2.PluginInfo
)
NOTIFY_REGISTRATION_STATUS = Method(
    "pluginregistration.Registration",
    "NotifyRegistrationStatus",
    registration_pb2.RegistrationStatus,
    registration_pb2.RegistrationStatusResponse,
)
PREPARE_V1 = Method(
    _DRA_V1,
    "NodePrepareResources",
    dra_v1_pb2.NodePrepareResourcesRequest,
    dra_v1_pb2.NodePrepareResourcesResponse,
)
UNPREPARE_V1 = Method(
    _DRA_V1,
    "NodeUnprepareResources",
    dra_v1_pb2.NodeUnprepareResourcesRequest,
    dra_v1_pb2.NodeUnprepareResourcesResponse,
)
PREPARE_V1BETA1 = Method(
    _DRA_V1BETA1,
    "NodePrepareResources",
    dra_v1beta1_pb2.NodePrepareResourcesRequest,
    dra_v1beta1_pb2.NodePrepareResourcesResponse,
)
UNPREPARE_V1BETA1 = Method(
    _DRA_V1BETA1,
    "NodeUnprepareResources",
    dra_v1beta1_pb2.NodeUnprepareResourcesRequest,
    dra_v1beta1_pb2.NodeUnprepareResourcesResponse,
)
WATCH_HEALTH_V1ALPHA1 = Method(
    "v1alpha1.DRAResourceHealth",
    "NodeWatchResources",
    health_v1alpha1_pb2.NodeWatchResourcesRequest,
    health_v1alpha1_pb2.NodeWatchResourcesResponse,
    response_streams=True,
)
WATCH_HEALTH_V1 = Method(
    "v1.DRAResourceHealth",
    "NodeWatchResources",
    health_v1_pb2.NodeWatchResourcesRequest,
    health_v1_pb2.NodeWatchResourcesResponse,
    response_streams=True,
)
HEALTH_CHECK = Method(
    "grpc.health.v1.Health", "Check", grpc_health_pb2.HealthCheckRequest, grpc_health_pb2.HealthCheckResponse
)
HEALTH_WATCH = Method(
    "grpc.health.v1.Health",
    "Watch",
    grpc_health_pb2.HealthCheckRequest,
    grpc_health_pb2.HealthCheckResponse,
    response_streams=True,
)

ALL_METHODS = (
    GET_INFO,
    NOTIFY_REGISTRATION_STATUS,
    PREPARE_V1,
    UNPREPARE_V1,
    PREPARE_V1BETA1,
    UNPREPARE_V1BETA1,
    WATCH_HEALTH_V1ALPHA1,
    WATCH_HEALTH_V1,
    HEALTH_CHECK,
    HEALTH_WATCH,
)
