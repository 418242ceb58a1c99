"""A small API server in this process: nodes, slices, claims and events over real HTTP, with faults by script.

It keeps resource versions, preconditions, selectors and watches as the real one does, and no more; what the
real server answers is tested against the real one. A test adds functions to `faults`: the first that gives
something decides what happens to the request.
"""

from __future__ import annotations

import copy
import json
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from dra.api.versions import from_v1, to_v1

GROUPS = {"resource.k8s.io": "resource.k8s.io", "": ""}
KINDS = {
    "resourceslices": "ResourceSlice", "resourceclaims": "ResourceClaim", "nodes": "Node", "events": "Event",
    "pods": "Pod", "deviceclasses": "DeviceClass",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: object
    headers: dict[str, str]
    at: float

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "1"

    @property
    def plural(self) -> str:
        return next((part for part in self.path.split("/") if part in KINDS), "")

    def is_(self, method: str, plural: str) -> bool:
        return self.method == method and self.plural == plural and not self.is_watch


@dataclass(frozen=True)
class Answer:
    """Answer this instead. With `cut_after`, send so many bytes of the body and reset the connection."""

    status: int = 200
    body: object = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    delay: float = 0.0


@dataclass(frozen=True)
class Reset:
    """Reset the connection without an answer."""


@dataclass(frozen=True)
class Hang:
    """Say nothing until the server stops."""


@dataclass(frozen=True)
class Stall:
    """Of a watch: send the headers, then nothing, the connection open."""


@dataclass(frozen=True)
class CloseAtOnce:
    """Of a watch: end it in order at once, after these events."""

    events: tuple[dict, ...] = ()


Fault = Answer | Reset | Hang | Stall | CloseAtOnce


def kubeconfig_text(url: str, token: str = "t0ken") -> str:
    return f"""\
apiVersion: v1
kind: Config
current-context: main
clusters: [{{name: c, cluster: {{server: "{url}"}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: main, context: {{cluster: c, user: u}}}}]
"""


def status_body(code: int, reason: str, message: str, **details: object) -> dict:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": message, "details": details,
    }  # fmt: skip


class ApiFailure(Exception):
    def __init__(self, code: int, reason: str, message: str, **details: object) -> None:
        self.code = code
        self.body = status_body(code, reason, message, **details)


class TinyApi:
    def __init__(self, *, versions: tuple[str, ...] = ("v1",), minor: str = "36", port: int = 0) -> None:
        self.versions = versions
        self.minor = minor
        self.faults: list[Callable[[Request], Fault | None]] = []
        self.requests: list[Request] = []
        self.validate: Callable[[dict], list[dict]] = lambda _obj: []
        self.on_store: Callable[[dict], None] = lambda _obj: None
        self.closing = threading.Event()
        self.token: str | None = None
        self._objects: dict[tuple[str, str, str], dict] = {}
        self._history: list[tuple[int, str, str, dict]] = []
        self._version = 100
        self._oldest = 0
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.closing.set()
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    # -- what tests do directly, as another client would ------------------------------------------------

    def put(self, plural: str, obj: dict, namespace: str = "") -> dict:
        with self._changed:
            key = (plural, namespace, obj["metadata"]["name"])
            return self._store(key, copy.deepcopy(obj), "MODIFIED" if key in self._objects else "ADDED")

    def edit(self, plural: str, name: str, change: Callable[[dict], None], namespace: str = "") -> dict:
        with self._changed:
            obj = copy.deepcopy(self._objects[(plural, namespace, name)])
            change(obj)
            return self._store((plural, namespace, name), obj, "MODIFIED")

    def remove(self, plural: str, name: str, namespace: str = "") -> None:
        with self._changed:
            self._drop((plural, namespace, name))

    def wipe(self, plural: str) -> None:
        with self._changed:
            for key in [key for key in self._objects if key[0] == plural]:
                self._drop(key)

    def all(self, plural: str) -> list[dict]:
        with self._changed:
            return [copy.deepcopy(self._objects[key]) for key in sorted(self._objects) if key[0] == plural]

    def forget_history(self) -> None:
        """Compact: watches from before now are answered with 410."""
        with self._changed:
            self._history.clear()
            self._version += 1
            self._oldest = self._version

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait for a state of the server; fail after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, "the expected state did not come"
                self._changed.wait(min(left, 0.02))

    def count(self, method: str, plural: str) -> int:
        return sum(1 for request in list(self.requests) if request.is_(method, plural))

    def watches(self, plural: str) -> list[Request]:
        return [request for request in list(self.requests) if request.is_watch and request.plural == plural]

    # -- storage -----------------------------------------------------------------------------------------

    def _store(self, key: tuple[str, str, str], obj: dict, event: str) -> dict:
        self._version += 1
        metadata = obj.setdefault("metadata", {})
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata["resourceVersion"] = str(self._version)
        self.on_store(obj)
        for device in obj.get("spec", {}).get("devices") or []:
            for taint in device.get("taints") or []:
                taint.setdefault("timeAdded", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        self._objects[key] = obj
        self._history.append((self._version, key[0], event, copy.deepcopy(obj)))
        self._changed.notify_all()
        return copy.deepcopy(obj)

    def _drop(self, key: tuple[str, str, str]) -> None:
        obj = self._objects.pop(key)
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, key[0], "DELETED", obj))
        self._changed.notify_all()

    # -- requests ----------------------------------------------------------------------------------------

    def act(self, request: Request) -> tuple[int, dict]:
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        if parts == ["version"]:
            return 200, {"major": "1", "minor": self.minor, "gitVersion": f"v1.{self.minor}.2"}
        if parts[0] == "apis" and len(parts) == 2:
            if parts[1] not in GROUPS:
                raise ApiFailure(404, "", "404 page not found")
            versions = [{"groupVersion": f"{parts[1]}/{v}", "version": v} for v in self.versions]
            return 200, {"kind": "APIGroup", "name": parts[1], "versions": versions}
        version, rest = (parts[2], parts[3:]) if parts[0] == "apis" else (parts[1], parts[2:])
        if parts[0] == "apis" and version not in self.versions:
            raise ApiFailure(404, "NotFound", "the server could not find the requested resource")
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        with self._changed:
            code, obj = self._verb(request, plural, namespace, name, version)
        return code, obj

    def _verb(
        self, request: Request, plural: str, namespace: str, name: str, version: str
    ) -> tuple[int, dict]:
        key = (plural, namespace, name)
        kind = KINDS[plural]
        body = request.body if isinstance(request.body, dict) else {}
        if plural == "resourceslices" or plural == "resourceclaims":
            body = to_v1(body, version=version, kind=kind)

        def out(obj: dict) -> dict:
            return _shown(obj, plural, version)

        if request.method == "GET" and not name:
            items = [
                out(o)
                for k, o in sorted(self._objects.items())
                if self._chosen(k, o, request, plural, namespace)
            ]
            limit, start = int(request.query.get("limit", "500")), int(request.query.get("continue", "0"))
            metadata = {"resourceVersion": str(self._version)}
            if start + limit < len(items):
                metadata["continue"] = str(start + limit)
            return 200, {"kind": f"{kind}List", "metadata": metadata, "items": items[start : start + limit]}
        if request.method == "POST":
            return 201, out(self._create(plural, namespace, body))
        if request.method == "DELETE" and not name:
            for k in [k for k, o in self._objects.items() if self._chosen(k, o, request, plural, namespace)]:
                self._drop(k)
            return 200, {"kind": "Status", "status": "Success"}
        if key not in self._objects and "apply-patch" in request.headers.get("content-type", ""):
            return 201, out(self._create(plural, namespace, body))
        if key not in self._objects:
            raise ApiFailure(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural)
        stored = self._objects[key]
        if request.method == "GET":
            return 200, out(copy.deepcopy(stored))
        if request.method == "DELETE":
            conditions = body.get("preconditions") or {}
            for which in ("uid", "resourceVersion"):
                if conditions.get(which) not in (None, stored["metadata"][which]):
                    raise ApiFailure(409, "Conflict", f"the {which} does not match", name=name)
            self._drop(key)
            return 200, {"kind": "Status", "status": "Success"}
        if request.method == "PATCH":
            merged = copy.deepcopy(stored)
            _merge(merged, body)
            body = merged
        if body["metadata"].get("resourceVersion") not in (None, stored["metadata"]["resourceVersion"]):
            raise ApiFailure(409, "Conflict", f'"{name}": the object has been modified', name=name)
        self._check(body)
        body["metadata"]["uid"] = stored["metadata"]["uid"]
        return 200, out(self._store(key, copy.deepcopy(body), "MODIFIED"))

    def _create(self, plural: str, namespace: str, body: dict) -> dict:
        metadata = body.setdefault("metadata", {})
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        name = metadata["name"]
        if (plural, namespace, name) in self._objects:
            raise ApiFailure(409, "AlreadyExists", f'{plural} "{name}" already exists', name=name)
        self._check(body)
        return self._store((plural, namespace, name), copy.deepcopy(body), "ADDED")

    def _check(self, body: dict) -> None:
        causes = self.validate(body)
        if causes:
            text = ", ".join(f"{c['field']}: {c['message']}" for c in causes)
            raise ApiFailure(422, "Invalid", text, name=body["metadata"]["name"], causes=causes)

    def _chosen(
        self, key: tuple[str, str, str], obj: dict, request: Request, plural: str, namespace: str
    ) -> bool:
        if key[0] != plural or (namespace and key[1] != namespace):
            return False
        for term in filter(None, request.query.get("fieldSelector", "").split(",")):
            path, _, value = term.partition("=")
            found: object = obj
            for step in path.split("."):
                found = found.get(step, "") if isinstance(found, dict) else ""
            if found != value:
                return False
        return True

    def watch(self, request: Request, send: Callable[[dict], None]) -> None:
        """Send the events of a watch until its time is over."""
        plural = request.plural
        version = next(part for part in request.path.split("/") if part.startswith("v1"))
        since = int(request.query.get("resourceVersion") or 0)
        end = time.monotonic() + float(request.query.get("timeoutSeconds", "300"))
        with self._changed:
            if since < self._oldest:
                message = f"too old resource version: {since} ({self._oldest})"
                send({"type": "ERROR", "object": status_body(410, "Expired", message)})
                return
            while not self.closing.is_set() and time.monotonic() < end:
                for at, kind, event, obj in [entry for entry in self._history if entry[0] > since]:
                    since = at
                    key = (kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])
                    if self._chosen(key, obj, request, plural, ""):
                        send({"type": event, "object": _shown(obj, plural, version)})
                self._changed.wait(min(0.05, max(0.0, end - time.monotonic())))


def _shown(obj: dict, plural: str, version: str) -> dict:
    """Give an object as the server shows it: always with its kind."""
    group = "resource.k8s.io/" if plural in ("resourceslices", "resourceclaims", "deviceclasses") else ""
    shown = {"apiVersion": f"{group}{version}", **obj, "kind": KINDS[plural]}
    return from_v1(shown, version=version, kind=KINDS[plural]) if "resource" in plural else shown


def _merge(target: dict, patch: dict) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _handler(api: TinyApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve()

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_args: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except (ConnectionError, ValueError, OSError):
                self.close_connection = True

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length) if length else b""
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Request(
                self.command, parts.path, dict(parse_qsl(parts.query)), json.loads(text) if text else None,
                headers, time.monotonic(),
            )  # fmt: skip
            api.requests.append(request)
            if (
                api.token is not None
                and headers.get("authorization", "").lower() != f"bearer {api.token}".lower()
            ):
                self._send(401, status_body(401, "Unauthorized", "Unauthorized"))
                return
            for rule in list(api.faults):
                fault = rule(request)
                if fault is not None:
                    self._fault(fault)
                    return
            if request.is_watch:
                self._stream(lambda send: api.watch(request, send))
                return
            try:
                code, obj = api.act(request)
            except ApiFailure as failure:
                code, obj = failure.code, failure.body
            self._send(code, obj)

        def _fault(self, fault: Fault) -> None:
            if isinstance(fault, Answer):
                if fault.delay:
                    api.closing.wait(fault.delay)
                self._send(fault.status, fault.body, fault.headers, cut_after=fault.cut_after)
            elif isinstance(fault, Hang):
                api.closing.wait(60)
                self.close_connection = True
            elif isinstance(fault, Stall):
                self._stream(lambda _send: api.closing.wait(60) and None)
            elif isinstance(fault, CloseAtOnce):
                self._stream(lambda send: [send(event) for event in fault.events] and None)
            else:
                self._reset()

        def _send(
            self, code: int, body: object, headers: dict[str, str] | None = None, cut_after: int | None = None
        ) -> None:
            text = body.encode() if isinstance(body, str) else json.dumps(body or {}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if cut_after is not None:
                self.wfile.write(text[:cut_after])
                self.wfile.flush()
                self._reset()
                return
            self.wfile.write(text)

        def _stream(self, produce: Callable[[Callable[[dict], None]], None]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()

            def send(event: dict) -> None:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()

            produce(send)
            self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

    return Handler
