"""The HTTP server as its clients see it: good ones, slow ones, broken ones."""

from __future__ import annotations

import gzip
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from structlog.testing import capture_logs

from dra.errors import ConfigError
from dra.telemetry.http import HttpServer, Response, Route, parse_endpoint


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture
def serve(request):
    """Start a server with these routes; its threads have a name of their own."""
    servers = []

    def start(routes, endpoint="127.0.0.1:0", **options):
        server = HttpServer(endpoint, routes, name=f"http-{len(servers)}-{request.node.name[:40]}", **options)
        server.thread_name = server._name
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        assert server.stop(timeout_seconds=30)
        wait_until(lambda server=server: not threads(server.thread_name))


def get(server, path, **headers):
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    return urllib.request.urlopen(asked, timeout=60)


def page(text, **options):
    return Route(lambda _request: Response(text.encode()), **options)


def test_pages_are_served_and_others_are_404_with_the_paths_there_are(serve):
    server = serve({"/metrics": page("m 1\n"), "/healthz": page("ok\n", quick=True)})
    assert get(server, "/metrics?name=x").read() == b"m 1\n"
    assert get(server, "/healthz").read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError) as found:
        get(server, "/debug/pprof/")
    assert found.value.code == 404
    assert found.value.read() == b"/healthz\n/metrics\n"


def test_what_is_not_a_get_is_refused(serve):
    server = serve({"/": page("x")})
    for request, status in (
        (b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, b"431"),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(request)
            assert client.recv(100).split()[1] == status


def test_a_big_page_is_packed_for_who_can_unpack_it(serve):
    text = "metric 1\n" * 10_000
    server = serve({"/m": page(text)})
    answer = get(server, "/m", **{"Accept-Encoding": "gzip"})
    packed = answer.read()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed).decode() == text
    assert len(packed) < len(text) / 10
    assert get(server, "/m").read().decode() == text


def test_a_page_that_fails_is_a_500_and_the_next_one_is_served(serve):
    def fail(_request):
        raise RuntimeError("broken")

    server = serve({"/bad": Route(fail), "/good": page("x")})
    with pytest.raises(urllib.error.HTTPError) as found:
        get(server, "/bad")
    assert (found.value.code, found.value.read()) == (500, b"RuntimeError: broken\n")
    assert get(server, "/good").read() == b"x"


@pytest.mark.fault("F43")
def test_slow_clients_hold_up_nobody_and_are_cut_off(serve):
    server = serve({"/big": page("y" * (64 << 20)), "/": page("x")}, read_seconds=2.0, write_seconds=0.2)
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(10)]
    for client in silent[:5]:
        client.sendall(b"GET / HT")
    reading = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    reading.sendall(b"GET /big HTTP/1.1\r\n\r\n")  # and never takes it
    assert get(server, "/").read() == b"x"
    assert len(threads(server.thread_name)) <= 2
    # Its time runs out later than that of the answer above.
    silent.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    for client in silent:
        assert client.recv(10) == b""
        client.close()
    taken = 0
    try:
        while data := reading.recv(1 << 20):
            taken += len(data)
    except ConnectionResetError:
        pass
    assert taken < 64 << 20
    reading.close()


@pytest.mark.fault("F43")
def test_more_clients_than_allowed_push_the_oldest_out(serve):
    server = serve({"/": page("x")}, max_connections=3)
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(6)]
    for client in clients[:3]:
        assert client.recv(10) == b""
    clients[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert clients[-1].recv(1000).endswith(b"x")
    for client in clients:
        client.close()


def test_a_page_that_takes_long_keeps_quick_ones_going_and_ends_with_the_server(serve):
    gate, entered = threading.Event(), threading.Event()

    def slow(_request):
        entered.set()
        gate.wait(60)
        return Response(b"late")

    server = serve({"/slow": Route(slow), "/healthz": page("ok", quick=True)})
    answers = []
    asker = threading.Thread(target=lambda: answers.append(get(server, "/slow").read()))
    asker.start()
    assert entered.wait(60)
    assert get(server, "/healthz").read() == b"ok"
    gate.set()
    asker.join(60)
    assert answers == [b"late"]
    wait_until(lambda: len(threads(server.thread_name)) == 1)


def test_an_address_that_is_taken_is_served_once_it_is_free(serve, monkeypatch):
    monkeypatch.setattr("dra.telemetry.http.BIND_SECONDS", 0.05)
    other = socket.create_server(("127.0.0.1", 0))
    with capture_logs() as logs:
        server = serve({"/": page("x")}, endpoint=f"127.0.0.1:{other.getsockname()[1]}")
        assert server.port == 0
        other.close()
        wait_until(lambda: server.port != 0)
    assert [entry["event"] for entry in logs] == ["http_endpoint_not_bound", "http_endpoint_bound"]
    assert get(server, "/").read() == b"x"


def test_many_scrapes_at_once_and_one_after_the_other_leave_nothing_behind(serve):
    server = serve({"/m": page("m 1\n" * 1000)})
    for _ in range(5):
        answers = []
        askers = [threading.Thread(target=lambda: answers.append(get(server, "/m").read())) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(60)
        assert len(answers) == 8
        assert len(set(answers)) == 1
    wait_until(lambda: len(threads(server.thread_name)) == 1)
    assert not server._asked
    assert not server._answered


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":8080", ("", 8080)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("localhost:65535", ("localhost", 65535)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_endpoints_are_read(text, expected):
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "8080", ":", ":99999", "a:b", "::1:80", "http://x:1/"])
def test_what_is_no_endpoint_is_an_error_with_the_flag(text):
    with pytest.raises(ConfigError, match="--http-endpoint"):
        parse_endpoint(text)


def test_the_address_of_all_interfaces_serves_both_families(serve):
    server = serve({"/": page("x")}, endpoint=":0")
    for address in ("127.0.0.1", "::1"):
        try:
            client = socket.create_connection((address, server.port), timeout=60)
        except OSError:
            assert address == "::1"
            continue
        with client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
