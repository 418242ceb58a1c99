"""One pass over a pool: read what is stored, plan, write, compare what came back.

What is stored is read from the API server at each pass, never from a cache: a watch that lags behind our own
writes would make us create slices twice, or miss that they were wiped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dra.controller.dropped import DroppedFields, describe, dropped_fields
from dra.controller.plan import Memory, PoolPlan, plan_pool
from dra.controller.refusal import Refusal, device_limit, plan_refusals, split, without_refused
from dra.controller.shape import PoolIdentity, content_in, normal_form, taint_keys, taint_times
from dra.errors import KubeError
from dra.kube.client import KubeClient
from dra.kube.clock import Clock
from dra.kube.resources import NODES, RESOURCE_SLICES

Json = dict[str, Any]
# Attempts in one pass: each conflict or refusal starts the plan anew from what is stored then.
ATTEMPTS = 12
CONFLICTS = 3
REQUEST_SECONDS = 10.0
# The node's UID is asked for again after this long, and before slices are created.
OWNER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass found and left: `writes` is 0 if the pool was already the wanted one."""

    generation: int
    slices: int
    devices: int
    writes: int
    only_creates: bool
    versions: Mapping[str, str]
    last_writer: str = ""


class PoolReconciler:
    """Brings the stored slices of one driver on one node to a wanted content. One thread uses it.

    Args:
        on_write: told the name and resourceVersion of each object that was written, and the name and UID of
            each that was deleted, so that the watch can tell our changes from those of others.
    """

    def __init__(
        self,
        client: KubeClient,
        identity: PoolIdentity,
        *,
        clock: Clock,
        on_write: Callable[[str, str], None],
    ) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock
        self._on_write = on_write
        self._memory = Memory()
        self._owner_at: float | None = None
        self._owner_is_fresh = False
        self._refusals: tuple[Refusal, ...] = ()
        self._limit: int | None = None
        self._dropped: DroppedFields = describe(set())
        self._altered = False
        self._writes = 0

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What the server did not take of the content of the last pass."""
        return self._refusals

    @property
    def dropped(self) -> DroppedFields:
        """What the server left out of the content of the last pass."""
        return self._dropped

    @property
    def altered(self) -> bool:
        """Whether the server stores other values than we sent (a mutating webhook does that)."""
        return self._altered

    @property
    def identity(self) -> PoolIdentity:
        """The pool, with the UID of the node as last seen."""
        return self._identity

    def forget_server(self) -> None:
        """The API server is another one now: try again what the old one refused or left out."""
        self._refusals = ()
        self._limit = None
        self._memory = replace(self._memory, accepted={})
        self._owner_at = None

    def run(self, contents: Sequence[Json], *, forms: Sequence[Json] = ()) -> Outcome:
        """Make the stored pool equal to the contents, less what the server refuses.

        Args:
            contents: what the slices shall say.
            forms: their normal forms, if the caller has them already: in a large pool they are no small work.

        Raises:
            KubeError: what stands in the way; what was written so far is right and the next pass goes on.
        """
        self._writes = 0
        self._owner_is_fresh = False
        self._refusals = _still_refused(self._refusals, contents)
        conflicts = 0
        only_creates, last_writer = True, ""
        for attempt in range(ATTEMPTS):
            wanted = split(without_refused(contents, self._refusals), self._limit)
            wanted_forms = _forms_of(wanted, known=tuple(zip(contents, forms, strict=False)))
            identity = self._owned(fresh=False)
            stored = self._stored()
            times = {**self._memory.times, **taint_times(stored)}
            self._memory = replace(self._memory, times=times)
            plan = plan_pool(wanted, stored, identity=identity, memory=self._memory, forms=wanted_forms)
            if plan.create and not self._owner_is_fresh:
                # Slices that vanish are also how a node goes that is made again under its name.
                identity = self._owned(fresh=True)
                plan = plan_pool(wanted, stored, identity=identity, memory=self._memory, forms=wanted_forms)
            if attempt == 0:
                only_creates, last_writer = (
                    plan.only_creates,
                    _last_writer(stored, self._client.field_manager),
                )
            try:
                versions = self._execute(plan, wanted, wanted_forms)
            except KubeError as error:
                if error.code == "DRA-API-INVALID" and self._learn(error):
                    continue
                conflicts += 1
                if error.code not in ("DRA-API-CONFLICT", "DRA-API-NOT-FOUND") or conflicts > CONFLICTS:
                    raise
                if error.reason == "AlreadyExists":
                    self._yield_name(error)
                continue
            self._remember(plan, wanted, wanted_forms)
            return Outcome(
                generation=plan.generation,
                slices=len(wanted),
                devices=sum(len(content.get("devices") or []) for content in wanted),
                writes=self._writes,
                only_creates=only_creates,
                versions=versions,
                last_writer=last_writer,
            )
        raise KubeError(
            "DRA-SLICE-REFUSED",
            f"the API server refused the pool {self._identity.pool_name} {ATTEMPTS} times in a row",
            remedy="Look at the refusals before this one; the next pass goes on with them.",
        )

    # -- reading -----------------------------------------------------------------------------------

    def _owned(self, *, fresh: bool) -> PoolIdentity:
        """Give the identity with the UID of the node, asked for again if it may have changed."""
        now = self._clock.now()
        if fresh or self._owner_at is None or now - self._owner_at > OWNER_SECONDS:
            try:
                node = self._client.get(NODES, self._identity.node_name, timeout_seconds=REQUEST_SECONDS)
            except KubeError as error:
                if error.code != "DRA-API-NOT-FOUND":
                    raise
                raise KubeError(
                    "DRA-NODE-NOT-FOUND",
                    f"there is no Node {self._identity.node_name} in the API",
                    remedy="Check --node-name; if the kubelet has not registered the node yet, nothing is to do.",
                    status=404,
                    reason="NotFound",
                ) from error
            self._identity = replace(self._identity, node_uid=str(node["metadata"]["uid"]))
            self._owner_at = now
            self._owner_is_fresh = True
        return self._identity

    def _stored(self) -> tuple[Json, ...]:
        listed = self._client.list(
            RESOURCE_SLICES, field_selector=pool_selector(self._identity), timeout_seconds=REQUEST_SECONDS
        )
        return listed.items

    # -- writing -----------------------------------------------------------------------------------

    def _execute(self, plan: PoolPlan, wanted: Sequence[Json], forms: Sequence[Json]) -> dict[str, str]:
        """Make the calls of a plan; give the versions of all slices afterwards, by name."""
        versions = {obj["metadata"]["name"]: _version(obj) for obj in plan.kept}
        for obj in plan.delete:
            self._delete(obj)
        for index, body in plan.update:
            name = body["metadata"]["name"]
            replacing = partial(self._client.replace, RESOURCE_SLICES, name, body)
            versions[name] = self._write(index, wanted[index], forms[index], replacing)
        for index, body in plan.create:
            creating = partial(self._client.create, RESOURCE_SLICES, body)
            versions[body["metadata"]["name"]] = self._write(index, wanted[index], forms[index], creating)
        return versions

    def _delete(self, obj: Json) -> None:
        metadata = obj["metadata"]
        self._on_write(metadata["name"], metadata["uid"])
        try:
            self._client.delete(
                RESOURCE_SLICES,
                metadata["name"],
                uid=metadata["uid"],
                resource_version=metadata["resourceVersion"],
                timeout_seconds=REQUEST_SECONDS,
            )
        except KubeError as error:
            if error.code != "DRA-API-NOT-FOUND":
                raise
        self._writes += 1

    def _write(self, index: int, content: Json, sent_form: Json, act: Callable[..., Json]) -> str:
        """Write one slice; compare what the server made of it; give its new resourceVersion."""
        try:
            stored = act(timeout_seconds=REQUEST_SECONDS)
        except KubeError as error:
            if error.code == "DRA-API-INVALID":
                # Which content the paths of the error point into.
                error.fields["content"] = content
            raise
        self._writes += 1
        self._on_write(stored["metadata"]["name"], _version(stored))
        spec = stored.get("spec") or {}
        # Most servers store it as it was sent.
        stored_form = sent_form if content_in(spec) == content else normal_form(spec)
        accepted = dict(self._memory.accepted)
        accepted.pop(index, None)
        if sent_form != stored_form:
            accepted[index] = (sent_form, stored_form)
        times = {**self._memory.times, **taint_times((stored,))}
        self._memory = replace(self._memory, accepted=accepted, times=times)
        return _version(stored)

    # -- learning ----------------------------------------------------------------------------------

    def _learn(self, error: KubeError) -> bool:
        """Take a refusal into account; whether there is anything new to try."""
        causes = error.fields.get("causes")
        content = error.fields.pop("content", None)
        if not isinstance(causes, tuple) or not isinstance(content, dict):
            return False
        limit = device_limit(causes)
        if limit is not None and (self._limit is None or limit < self._limit):
            self._limit = limit
            return True
        known = set(self._refusals)
        fresh = [refusal for refusal in plan_refusals(causes, content) if refusal not in known]
        self._refusals += tuple(fresh)
        return bool(fresh)

    def _yield_name(self, error: KubeError) -> None:
        """After AlreadyExists: if the object of that name is somebody else's, use other names."""
        name = str(error.fields.get("name") or "")
        try:
            spec = self._client.get(RESOURCE_SLICES, name, timeout_seconds=REQUEST_SECONDS).get("spec") or {}
        except KubeError as failure:
            if failure.code != "DRA-API-NOT-FOUND":
                raise
            return
        if (spec.get("driver"), spec.get("nodeName")) != (self._identity.driver, self._identity.node_name):
            self._memory = replace(self._memory, salt=f"{self._memory.salt}+")

    def _remember(self, plan: PoolPlan, wanted: Sequence[Json], forms: tuple[Json, ...]) -> None:
        accepted = {
            index: pair
            for index, pair in self._memory.accepted.items()
            if index < len(forms) and pair[0] == forms[index]
        }
        dropped = [dropped_fields(sent, kept) for sent, kept in accepted.values()]
        self._altered = any(not one for one in dropped)
        self._dropped = describe({path for one in dropped for path in one.fields})
        # The time of a taint that was lifted must not come back with a new taint.
        present = taint_keys(wanted)
        self._memory = replace(
            self._memory,
            generation=plan.generation,
            contents=forms,
            accepted=accepted,
            times={key: at for key, at in self._memory.times.items() if key in present},
        )


def _forms_of(contents: Sequence[Json], *, known: Sequence[tuple[Json, Json]]) -> tuple[Json, ...]:
    """Give the normal forms; of a content that is the same object as a known one, the known one."""
    by_id = {id(content): form for content, form in known}
    return tuple(by_id.get(id(content)) or normal_form(content) for content in contents)


def pool_selector(identity: PoolIdentity) -> str:
    """Give the field selector for all slices of the driver on the node."""
    return f"spec.driver={identity.driver},spec.nodeName={identity.node_name}"


def _still_refused(refusals: Sequence[Refusal], contents: Sequence[Json]) -> tuple[Refusal, ...]:
    """Forget refusals of values that are not wanted any more."""
    kept: tuple[Refusal, ...] = ()
    for refusal in refusals:
        if without_refused(contents, (*kept, refusal)) != without_refused(contents, kept):
            kept = (*kept, refusal)
    return kept


def _last_writer(stored: Sequence[Json], ourselves: str) -> str:
    """Give the field manager, not ourselves, that changed one of the slices last."""
    entries = [
        (str(entry.get("time") or ""), str(entry.get("manager") or ""))
        for obj in stored
        for entry in (obj.get("metadata") or {}).get("managedFields") or []
        if entry.get("manager") != ourselves
    ]
    return max(entries)[1] if entries else ""


def _version(obj: Json) -> str:
    return str((obj.get("metadata") or {}).get("resourceVersion") or "")
