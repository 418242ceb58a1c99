"""Follows GpuNodePolicies and the node's labels in the API, where their definition is installed.

Most clusters that try the driver have none of it: then one small question is asked, soon after the start twice a minute and
later every four minutes, so that thousands of nodes without policies are no load.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dra.errors import DraError, KubeError
from dra.kube.client import KubeClient
from dra.kube.reflector import Reflector, ReflectorOptions
from dra.kube.resources import GPU_NODE_POLICIES, NODES
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

log = get_logger()

# Between questions whether the definition is installed: at first, and at last, when it was missing all the while. Spread, so
# that a fleet does not ask at once.
ASK_SECONDS = 30.0
SELDOM_SECONDS = 240.0
RETRY_SECONDS = 5.0
_LOOK_SECONDS = 2.0
# What a server without the definition answers.
NOT_THERE = frozenset({"DRA-API-NOT-SERVED", "DRA-API-NOT-FOUND", "DRA-API-OTHER-NOT-FOUND"})


class PolicyWatch:
    """Tells all policies and the node's labels whenever they change.

    Args:
        policies: takes all policies that there are.
        node: takes the Node object.
        ask_seconds: between the first questions whether the definition is installed; each pause is a quarter longer than
            the one before, up to `seldom_seconds`.
    """

    def __init__(
        self,
        client: KubeClient,
        node_name: str,
        *,
        policies: Callable[[Iterable[Mapping[str, Any]]], None],
        node: Callable[[Mapping[str, Any]], None],
        ask_seconds: float = ASK_SECONDS,
        seldom_seconds: float = SELDOM_SECONDS,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._node_name = client, node_name
        self._tell_policies, self._tell_node = policies, node
        self._first_seconds, self._seldom_seconds = ask_seconds, seldom_seconds
        self._ask_seconds, self._rng = ask_seconds, rng or random.SystemRandom()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.served = False

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        thread = threading.Thread(target=self._run, name="policy-watch", daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self, *, timeout_seconds: float = 5.0) -> bool:
        """End; whether the thread is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._client.list(GPU_NODE_POLICIES, resource_version="0")
            except KubeError as error:
                self._stop.wait(self._not_now(error))
                continue
            except DraError as error:
                log.warning("policies_not_readable", **error_fields(error))
                self._stop.wait(RETRY_SECONDS)
                continue
            try:
                self._follow()
            except DraError as error:
                log.warning("policies_not_followed", **error_fields(error))
                self._stop.wait(RETRY_SECONDS)

    def _not_now(self, error: KubeError) -> float:
        """Take that policies cannot be read; give the seconds until the next question."""
        if error.code in NOT_THERE:
            # Installed nowhere, or taken away: there are no policies.
            self.served = False
            self._tell_policies(())
            self._tell_node({})
            pause = self._ask_seconds
            self._ask_seconds = min(pause * 1.25, self._seldom_seconds)
            return pause * self._rng.uniform(0.8, 1.2)
        log.warning("policies_not_readable", **error_fields(error))
        return RETRY_SECONDS * self._rng.uniform(1.0, 2.0)

    def _follow(self) -> None:
        """Follow until the definition is taken away, or the end."""
        self.served, self._ask_seconds = True, self._first_seconds
        log.info("policies_followed")
        policies = Reflector(
            self._client, GPU_NODE_POLICIES,
            on_change=lambda _change: self._copy(policies), on_list=lambda _list: self._copy(policies),
        )  # fmt: skip
        node = Reflector(
            self._client, NODES, on_change=lambda change: self._tell_node(change.object),
            options=ReflectorOptions(field_selector=f"metadata.name={self._node_name}"),
        )  # fmt: skip
        try:
            policies.start()
            node.start()
            while not self._stop.wait(_LOOK_SECONDS):
                error = policies.error
                if isinstance(error, KubeError) and error.code in NOT_THERE:
                    return
        finally:
            policies.stop()
            node.stop()

    def _copy(self, policies: Reflector) -> None:
        # Before the first complete list it is only a part.
        if policies.synced.is_set():
            self._tell_policies(policies.objects())
