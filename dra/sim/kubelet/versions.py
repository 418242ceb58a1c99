"""How kubelets of different versions differ towards a DRA driver, and their time limits.

Source: kubelet 1.32 to 1.37, plugin manager and DRA manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OLDEST, NEWEST = 32, 37

# Name of the health stream's service in `supported_versions`, and what 1.34 to 1.36 open unasked.
HEALTH_V1, HEALTH_V1ALPHA1 = "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"


@dataclass(frozen=True, slots=True)
class KubeletVersion:
    """A minor version of Kubernetes 1."""

    minor: int = 36

    @property
    def prepare_versions(self) -> tuple[str, ...]:
        """The strings in `supported_versions` that this kubelet knows."""
        return ("v1beta1.DRAPlugin",) if self.minor < 34 else ("v1.DRAPlugin", "v1beta1.DRAPlugin")

    @property
    def monitors_connections(self) -> bool:
        """Whether the end of a connection is noticed and slices are wiped after a delay, not at once."""
        return self.minor >= 34

    @property
    def validates_endpoint(self) -> bool:
        """Whether name and endpoint of a plugin are checked at registration."""
        return self.minor >= 37

    @property
    def replaces_devices(self) -> bool:
        """Whether a repeated prepare replaces the remembered devices; older ones append them again."""
        return self.minor >= 37

    def choose_prepare(self, supported: Sequence[str]) -> str:
        """Give the first of the plugin's versions that this kubelet knows; empty if none."""
        return next((name for name in supported if name in self.prepare_versions), "")

    def choose_health(self, supported: Sequence[str]) -> str:
        """Give the health service to stream from; empty if none is opened."""
        if self.minor < 36:
            return ""  # the feature is off by default
        if self.minor < 37:
            return HEALTH_V1ALPHA1
        return next((name for name in (HEALTH_V1, HEALTH_V1ALPHA1) if name in supported), "")


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a real kubelet; tests shorten those that they would have to wait for."""

    scan: float = 0.2
    dial: float = 10.0
    get_info: float = 1.0
    notify: float = 5.0
    call: float = 45.0
    first_back_off: float = 0.5
    longest_back_off: float = 122.0
    wipe_delay: float = 30.0
    health_retry: float = 5.0
    health_default_timeout: float = 30.0
    prepare_retry: float = 60.0
    unprepare_retry: float = 10.0
    reconcile: float = 60.0
