"""From a request to an answer: discovery, routing, verbs. No sockets here.

`Api.handle` may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dra.sim.apiserver import bodies, deletion, discovery, patching, read, tables, write
from dra.sim.apiserver.call import Call, check_write_options
from dra.sim.apiserver.encoding import encode, to_yaml
from dra.sim.apiserver.exchange import Request, Response, dump, text
from dra.sim.apiserver.identity import ADMIN, User, acting
from dra.sim.apiserver.kinds import special
from dra.sim.apiserver.negotiate import negotiate
from dra.sim.apiserver.registry import DEPRECATED, DRA, Resource
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, method_not_allowed, no_such_resource, unauthorized

Json = dict[str, Any]


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


class Api(ServerState):
    """The API over one storage."""

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
            return special.answer(self, call, verb)
        if verb in _OPTIONS:
            check_write_options(call, _OPTIONS[verb])
        if verb == "get":
            return tables.reply(self, call, read.get(self, call))
        if verb == "watch":
            return read.watch(self, call)
        if verb == "list":
            objects, meta = read.list_objects(self, call)
            return encode(call.wanted, 200, tables.many(self, call, objects, meta))
        if verb == "create":
            body = bodies.shape_body(call, bodies.parse_body(call))
            return tables.reply(self, call, write.create(self, call, body), 201)
        if verb == "update":
            obj, created = write.put(self, call)
            return tables.reply(self, call, obj)
        if verb == "patch":
            obj, created = patching.patch(self, call)
            return tables.reply(self, call, obj, 201 if created else 200)
        if verb == "delete":
            return self._delete(call)
        return self._delete_collection(call)

    def _delete(self, call: Call) -> Response:
        obj, gone = deletion.delete(self, call, deletion.read_options(call))
        if gone and not call.resource.returns_deleted:
            return encode(call.wanted, 200, deletion.success(call, obj, gone=gone))
        return tables.reply(self, call, obj)

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
        return encode(call.wanted, 200, tables.many(self, call, objects, meta))


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
