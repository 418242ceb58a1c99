"""From a request to an answer: discovery, routing, verbs. No sockets here.

`Api.handle` may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from dra.api.rules.cause import CelCheck
from dra.sim.apiserver import bodies, deletion, discovery, read, tables, write
from dra.sim.apiserver.admission import Services
from dra.sim.apiserver.call import Call, check_write_options
from dra.sim.apiserver.exchange import Request, Response, dump, text
from dra.sim.apiserver.identity import ADMIN, User, acting
from dra.sim.apiserver.kinds import table as kind_table
from dra.sim.apiserver.kinds.base import Rules, Strategy
from dra.sim.apiserver.negotiate import Wanted, negotiate
from dra.sim.apiserver.registry import DEPRECATED, DRA, Registry, Resource
from dra.sim.apiserver.status import ApiFailure, method_not_allowed, no_such_resource, unauthorized
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


@dataclass(slots=True)
class Path:
    """A resource path taken apart."""

    group: str
    version: str
    namespace: str
    plural: str
    name: str
    subresource: str
    old_watch: bool


class Api:
    """The API over one storage."""

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
            found = kind_table.strategy_for(resource, self.rules)
            self._strategies[resource.key] = found
        return found

    def created(self, call: Call, obj: Json) -> None:
        """Do what controllers do at once after a creation."""
        kind_table.created(self, call, obj)

    def handle(self, request: Request) -> Response:
        """Answer a request."""
        warnings: list[str] = []
        try:
            response = self._route(request, warnings)
        except PageNotFound as failure:
            response = plain_text(failure)
        except ApiFailure as failure:
            response = self._failure(request, failure)
        response.warnings.extend(warnings)
        return response

    def _failure(self, request: Request, failure: ApiFailure) -> Response:
        body = failure.body()
        if request.headers.get("accept", "").strip().startswith("application/yaml"):
            return Response(failure.code, to_yaml(body), "application/yaml", headers=dict(failure.headers))
        return Response(failure.code, dump(body), headers=dict(failure.headers))

    def _user(self, request: Request) -> User:
        given = request.headers.get("authorization", "")
        token = given.removeprefix("Bearer ").strip() if given.startswith("Bearer ") else None
        user = self.users.get(token or "")
        if user is None:
            if self.options.token is not None and token != self.options.token:
                raise unauthorized()
            user = ADMIN
        return acting(user, request.headers)

    def _route(self, request: Request, warnings: list[str]) -> Response:
        path = request.path
        known = discovery.answer(self, request)
        if known is not None:
            return known
        user = self._user(request)
        parts = [part for part in path.split("/") if part]
        place = split_path(parts)
        if place is None:
            raise (
                no_such_resource()
                if parts[:1] in (["api"], ["apis"]) and len(parts) > 1
                else _page_not_found()
            )
        if not self.registry.serves(place.group):
            raise _page_not_found()
        resource = self.registry.find(place.group, place.version, place.plural)
        if resource is None:
            raise no_such_resource()
        return self._resource(request, place, resource, user, warnings)

    def _resource(
        self, request: Request, place: Path, resource: Resource, user: User, warnings: list[str]
    ) -> Response:
        if place.namespace and not resource.namespaced:
            raise no_such_resource()
        if (
            not place.namespace
            and resource.namespaced
            and (place.name or request.method not in {"GET", "HEAD"})
        ):
            raise no_such_resource() if place.name else method_not_allowed()
        if place.subresource and place.subresource not in resource.subresources:
            if resource.key == "/pods" and place.subresource in {"attach", "exec", "portforward"}:
                why = f"pods/{place.subresource} is not simulated: the programs in containers are only played"
                raise ApiFailure(501, "NotImplemented", why)
            raise no_such_resource()
        watching = (
            request.method == "GET"
            and not place.subresource
            and (place.old_watch or (request.flag("watch") and not place.name))
        )
        if request.method in {"GET", "POST", "PUT", "PATCH", "DELETE"}:
            wanted = negotiate(
                request.headers.get("accept"),
                user_agent=request.headers.get("user-agent", ""),
                pretty=request.query.get("pretty", ""),
                watch=watching,
            )
        else:
            raise method_not_allowed()
        call = Call(
            request,
            resource,
            place.version,
            place.namespace,
            place.name,
            place.subresource,
            wanted,
            user,
            warnings,
        )
        self._warn_deprecated(call)
        verb = verb_of(request.method, call, watching=watching)
        allowed = resource.subresources.get(place.subresource, ()) if place.subresource else resource.verbs
        if verb not in allowed:
            raise method_not_allowed()
        return self._verb(call, verb)

    def _warn_deprecated(self, call: Call) -> None:
        # The newest version of device taint rules is a beta.
        if call.resource.group != DRA or call.version == call.resource.storage:
            return
        since, gone = DEPRECATED.get(call.version, (99, 0))
        if self.options.minor >= since:
            kind = f"{call.group_version} {call.resource.kind}"
            call.warn(f"{kind} is deprecated in v1.{since}+, unavailable in v1.{gone}+")

    def _verb(self, call: Call, verb: str) -> Response:
        if call.subresource not in {"", "status"} or call.resource.verbs == ("create",):
            return kind_table.answer_special(self, call, verb)
        if verb in _OPTIONS:
            check_write_options(call, _OPTIONS[verb])
        if verb == "get":
            return self.reply(call, read.get(self, call))
        if verb == "watch":
            return read.watch(self, call)
        if verb == "list":
            objects, meta = read.list_objects(self, call)
            return self.encode(call, 200, tables.many(self, call, objects, meta))
        if verb == "create":
            body = bodies.shape_body(call, bodies.parse_body(call))
            return self.reply(call, write.create(self, call, body), 201)
        if verb == "update":
            obj, created = write.put(self, call)
            return self.reply(call, obj)
        if verb == "patch":
            obj, created = write.patch(self, call)
            return self.reply(call, obj, 201 if created else 200)
        if verb == "delete":
            return self._delete(call)
        return self._delete_collection(call)

    def _delete(self, call: Call) -> Response:
        obj, gone = deletion.delete(self, call, deletion.read_options(call))
        if gone and not call.resource.returns_deleted:
            return self.encode(call, 200, deletion.success(call, obj, gone=gone))
        return self.reply(call, obj)

    def _delete_collection(self, call: Call) -> Response:
        options = deletion.read_options(call)
        objects, meta = read.list_objects(self, call)
        for obj in objects:
            about = obj["metadata"]
            one = replace(call, name=about["name"], namespace=about.get("namespace") or "")
            try:
                deletion.delete(self, one, options)
            except ApiFailure as failure:
                # What went meanwhile is deleted.
                if failure.reason != "NotFound":
                    raise
        return self.encode(call, 200, tables.many(self, call, objects, meta))

    def reply(self, call: Call, obj: Json, status: int = 200) -> Response:
        """Answer with one stored object."""
        return self.encode(call, status, tables.one(self, call, obj))

    def encode(self, call: Call, status: int, body: Json) -> Response:
        """Answer with a body in the encoding the client wants."""
        return encode(call.wanted, status, body)


def encode(wanted: Wanted, status: int, body: Any) -> Response:
    """Answer in JSON or YAML."""
    if wanted.encoding == "yaml":
        return Response(status, to_yaml(body), "application/yaml")
    return Response(status, dump(body, pretty=wanted.pretty))


def to_yaml(body: Any) -> bytes:
    """Give YAML with sorted keys, as the server writes it."""
    import yaml

    return str(yaml.safe_dump(body, default_flow_style=False, sort_keys=True)).encode()


def _page_not_found() -> PageNotFound:
    return PageNotFound()


_OPTIONS = {"create": "CreateOptions", "update": "UpdateOptions", "patch": "PatchOptions"}


class PageNotFound(ApiFailure):
    """404 for a path that no part of the server owns: plain text."""

    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found")


def split_path(parts: list[str]) -> Path | None:
    """Take a resource path apart, None where it is none."""
    if parts[:1] == ["api"] and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    old_watch = rest[0] == "watch" and len(rest) > 1
    if old_watch:
        rest = rest[1:]
    namespace = ""
    if (
        rest[0] == "namespaces"
        and len(rest) >= 3
        and not (len(rest) == 3 and rest[2] in {"status", "finalize"})
    ):
        namespace, rest = rest[1], rest[2:]
    if len(rest) > 3:
        return None
    rest += [""] * (3 - len(rest))
    return Path(group, version, namespace, rest[0], rest[1], rest[2], old_watch)


def verb_of(method: str, call: Call, *, watching: bool) -> str:
    """Give the verb of a request."""
    if method == "GET":
        return "watch" if watching else "get" if call.name else "list"
    if method == "POST":
        return "create" if not call.name or call.subresource else "none"
    if method == "DELETE":
        return "delete" if call.name else "deletecollection"
    if not call.name:
        return "none"
    return {"PUT": "update", "PATCH": "patch"}.get(method, "none")


def plain_text(failure: ApiFailure) -> Response:
    """Answer a failure that is not a Status."""
    return text(failure.code, failure.message + "\n")
