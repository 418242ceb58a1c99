"""Registration with the kubelet: answers from constants, in no time, whatever the driver does otherwise.

Source: kubelet's plugin manager: GetInfo has one second; a lost or late NotifyRegistrationStatus changes nothing
for the calls, which may come before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc

from dra.pb.registration_pb2 import InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse
from dra.pb.services import GET_INFO, NOTIFY_REGISTRATION_STATUS, PLUGIN_TYPE, SUPPORTED_VERSIONS
from dra.plugin.call_pool import CallPool
from dra.plugin.server import UnixServer, build_server
from dra.telemetry.log import get_logger

log = get_logger()


class Registration:
    """The registration service and what the kubelet said last. `on_status(accepted, error)` is told of each notice."""

    def __init__(
        self,
        driver: str,
        *,
        endpoint: Path,
        on_status: Callable[[bool, str], None] = lambda _ok, _error: None,
    ) -> None:
        self._info = PluginInfo(
            type=PLUGIN_TYPE, name=driver, endpoint=str(endpoint), supported_versions=SUPPORTED_VERSIONS
        )
        self._on_status = on_status
        # Two kubelet calls and a probe may come at once; nothing here waits for anything.
        self._pool = CallPool("registration", threads=4)

    def server(self, path: Path) -> UnixServer:
        """Give the server of this service at `path`, with a pool that nothing else uses."""
        return UnixServer(path, driver=self._info.name, build=self._build)

    def shut(self) -> None:
        """Let the idle threads go. Call after the server has stopped."""
        self._pool.shutdown(wait=False)

    def _build(self) -> grpc.Server:
        methods = ((GET_INFO, self._get_info), (NOTIFY_REGISTRATION_STATUS, self._notify))
        return build_server(methods, pool=self._pool)

    def _get_info(self, _request: InfoRequest, _context: grpc.ServicerContext) -> PluginInfo:
        log.debug("registration_info_asked", at=time.time())
        return self._info

    def _notify(
        self, request: RegistrationStatus, _context: grpc.ServicerContext
    ) -> RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("kubelet_registered_driver", driver=self._info.name)
        else:
            log.error("kubelet_refused_driver", driver=self._info.name, error=request.error)
        self._on_status(request.plugin_registered, request.error)
        return RegistrationStatusResponse()
