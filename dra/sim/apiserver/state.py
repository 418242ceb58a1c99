"""What the server knows and how it was set up; the verbs are functions of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dra.api.rules.cause import CelCheck
from dra.sim.apiserver.admission.caller import Services
from dra.sim.apiserver.identity import User
from dra.sim.apiserver.kinds.base import Rules, Strategy
from dra.sim.apiserver.kinds.strategies import strategy_for
from dra.sim.apiserver.registry import Registry, Resource
from dra.sim.apiserver.storage import Storage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How the server behaves. `gates` are feature gates by name; `minor` is the Kubernetes version (1.`minor`);
    `time_scale` is how long one second of a watch's timeoutSeconds lasts.
    """

    minor: int = 36
    gates: Mapping[str, bool] = field(default_factory=dict)
    dra_versions: tuple[str, ...] = ("v1", "v1beta2", "v1beta1", "v1alpha3")
    cel_check: CelCheck | None = None
    token: str | None = None
    watch_seconds: float = 1800.0
    bookmark_seconds: float = 60.0
    time_scale: float = 1.0
    node_lifecycle: bool = False
    clock: Callable[[], float] = time.time


class ServerState:
    """The API over one storage: what all verbs need."""

    def __init__(self, storage: Storage, registry: Registry, options: Options) -> None:
        self.storage = storage
        self.registry = registry
        self.options = options
        self.services = Services(storage.get)
        # Who comes with a token of his own; whoever else comes in is the administrator.
        self.users: dict[str, User] = {}
        # Gives what a container of a pod printed; None where nobody runs it.
        self.log_of: Callable[[Json, str], str | None] = lambda _pod, _container: None
        self.stopping = False
        self.rules = Rules(
            gates=options.gates,
            cel_check=options.cel_check,
            now=self.now,
            read=storage.get,
            minor=options.minor,
            node_lifecycle=options.node_lifecycle,
        )
        self._strategies: dict[str, Strategy] = {}

    def clock(self) -> float:
        """Seconds since the epoch, by the injected clock."""
        return self.options.clock()

    def now(self) -> str:
        """The time as objects carry it."""
        return self.after(0)

    def after(self, seconds: float) -> str:
        """The time some seconds from now as objects carry it."""
        return datetime.fromtimestamp(self.clock() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def stopped(self) -> bool:
        """Whether streams must end."""
        return self.stopping

    def strategy(self, resource: Resource) -> Strategy:
        """Give the rules of a resource."""
        found = self._strategies.get(resource.key)
        if found is None or resource.custom is not None:
            found = strategy_for(resource, self.rules)
            self._strategies[resource.key] = found
        return found
