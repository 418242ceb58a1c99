"""Claim templates for shares: made where pods name them, collected where nobody does any more.

The webhook writes the name of a template into a pod and nothing else; the pod says in an annotation what the template
holds, and the name follows from that. A pod that is refused after all, or a dry run, leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from dra.api.fractions import LABEL, MANAGED_BY, MANAGED_LABEL, Ask, asks_of_pod
from dra.errors import ClaimError, KubeError
from dra.fleet.copies import keeper_of
from dra.kube.client import KubeClient
from dra.kube.clock import Clock, SystemClock
from dra.kube.events import EventRecorder, ObjectReference
from dra.kube.reflector import Reflector, ReflectorOptions
from dra.kube.resources import PODS, RESOURCE_CLAIM_TEMPLATES, Resource
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import Loop
from dra.telemetry.told import Told

log = get_logger()
Json = Mapping[str, Any]
Key = tuple[str, str]

# A template that no pod names is kept so long: a Deployment that rolls names it again in a moment.
COLLECT_SECONDS = 600.0
# News within this time are dealt with together.
_GATHER_SECONDS = 0.1
_RETRY_SECONDS = 5.0
_LOOK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the pods of a cluster need: templates by (namespace, name), and pods whose annotation is wrong."""

    asks: Mapping[Key, Ask]
    wrong: tuple[tuple[Json, ClaimError], ...] = ()


def wanted_by(pods: tuple[Json, ...]) -> Wanted:
    """Give what pods need. One that has ended needs nothing, and one that is going has its claims."""
    asks: dict[Key, Ask] = {}
    wrong = []
    for pod in pods:
        metadata = pod.get("metadata") or {}
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if ended or metadata.get("deletionTimestamp"):
            continue
        try:
            found = asks_of_pod(metadata.get("annotations") or {})
        except ClaimError as error:
            wrong.append((pod, error))
            continue
        named = {
            str(entry.get("resourceClaimTemplateName"))
            for entry in (pod.get("spec") or {}).get("resourceClaims") or ()
        }
        for name, ask in found.items():
            if name in named:
                asks[str(metadata.get("namespace")), name] = ask
    return Wanted(asks, tuple(wrong))


class TemplateKeeper:
    """Follows pods and templates, and makes the templates as the pods need them.

    Args:
        events: where a pod is told what is wrong with its annotation.
        collect_seconds: how long a template that nobody names is kept.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        events: EventRecorder | None = None,
        collect_seconds: float = COLLECT_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._client, self._events, self._collect_seconds = client, events, collect_seconds
        self._clock = clock or SystemClock()
        self._loop = Loop(
            "claim-templates", self._round, seconds=_LOOK_SECONDS, retry_seconds=_RETRY_SECONDS,
            first_seconds=_LOOK_SECONDS,
        )  # fmt: skip
        self._unused_since: dict[str, float] = {}
        # By the UID of the pod.
        self._told: Told[str] = Told()
        self._pods = self._follow(PODS, f"{LABEL}=true")
        self._templates = self._follow(RESOURCE_CLAIM_TEMPLATES, f"{MANAGED_LABEL}={MANAGED_BY}")

    def start(self) -> None:
        """Begin. Raises HostError: DRA-HOST-NO-THREADS."""
        self._pods.start()
        self._templates.start()
        self._loop.start()

    def stop(self, *, timeout_seconds: float = 5.0) -> None:
        """End; what was made stays."""
        self._loop.stop(timeout_seconds=timeout_seconds)
        for part in (self._pods, self._templates):
            part.stop(timeout_seconds=timeout_seconds)

    def _follow(self, resource: Resource, selector: str) -> Reflector:
        # A change that we made ourselves wakes us once more, to nothing.
        return Reflector(
            self._client,
            resource,
            on_change=lambda _change: self._loop.wake(),
            on_list=lambda _listed: self._loop.wake(),
            options=ReflectorOptions(label_selector=selector),
            keep=keeper_of(resource),
            clock=self._clock,
        )

    def _round(self) -> float:
        if self._loop.pause(_GATHER_SECONDS):
            return _LOOK_SECONDS
        # What is not known yet would look as if it were not there.
        if not (self._pods.synced.is_set() and self._templates.synced.is_set()):
            return _RETRY_SECONDS
        return self._reconcile()

    def _reconcile(self) -> float:
        """Make and collect; gives after how many seconds to look again."""
        wanted = wanted_by(self._pods.objects())
        there = {_key(each): each for each in self._templates.objects()}
        for pod, error in wanted.wrong:
            self._tell(pod, "ClaimTemplateRefused", error)
        self._told.only({_uid(pod) for pod, _ in wanted.wrong})
        complete = True
        for key, ask in wanted.asks.items():
            if key not in there:
                complete = self._attempt("make", key, partial(self._make, key, ask)) and complete
        for key, template in there.items():
            if key not in wanted.asks:
                complete = self._collect(key, template) and complete
            else:
                self._unused_since.pop(_uid(template), None)
        known = {_uid(each) for each in there.values()}
        self._unused_since = {uid: at for uid, at in self._unused_since.items() if uid in known}
        if not complete:
            return _RETRY_SECONDS
        return min(_LOOK_SECONDS, max(0.05, self._collect_seconds)) if self._unused_since else _LOOK_SECONDS

    def _make(self, key: Key, ask: Ask) -> None:
        namespace, name = key
        try:
            self._client.create(RESOURCE_CLAIM_TEMPLATES, ask.template(namespace), namespace)
        except KubeError as error:
            if error.reason == "AlreadyExists":
                # The copy is behind, or somebody made one by hand; its name says what it should hold.
                return
            if error.status == 403 and "being terminated" in error.message:
                return
            raise
        log.info("claim_template_made", namespace=namespace, template=name, asks=str(ask))

    def _collect(self, key: Key, template: Json) -> bool:
        since = self._unused_since.setdefault(_uid(template), self._clock.now())
        if self._clock.now() - since < self._collect_seconds:
            return True
        return self._attempt("collect", key, lambda: self._delete(key, template))

    def _delete(self, key: Key, template: Json) -> None:
        namespace, name = key
        try:
            # A pod that comes at this very moment sees none, and gets a new one.
            self._client.delete(
                RESOURCE_CLAIM_TEMPLATES, name, namespace, uid=_uid(template),
                resource_version=template["metadata"]["resourceVersion"],
            )  # fmt: skip
        except KubeError as error:
            if error.code not in ("DRA-API-NOT-FOUND", "DRA-API-CONFLICT"):
                raise
            return
        log.info("claim_template_collected", namespace=namespace, template=name)

    def _attempt(self, verb: str, key: Key, act: Callable[[], None]) -> bool:
        try:
            act()
        except KubeError as error:
            log.warning(
                "claim_template_failed", verb=verb, namespace=key[0], template=key[1], **error_fields(error)
            )
            return False
        return True

    def _tell(self, pod: Json, reason: str, error: ClaimError) -> None:
        metadata, uid = pod["metadata"], _uid(pod)
        if not self._told.is_news(uid, str(error)):
            return
        log.warning(
            "pod_asks_for_nothing",
            pod=f"{metadata.get('namespace')}/{metadata.get('name')}",
            **error_fields(error),
        )
        if self._events is not None:
            about = ObjectReference("v1", "Pod", str(metadata["name"]), uid, str(metadata.get("namespace")))
            self._events.emit(about, "Warning", reason, str(error))


def _key(obj: Json) -> Key:
    return str(obj["metadata"].get("namespace")), str(obj["metadata"]["name"])


def _uid(obj: Json) -> str:
    return str(obj["metadata"].get("uid"))
