"""URLs.

Source: k8s.io/apiserver cel/library urls on Go's url.ParseRequestURI: an absolute URL or an absolute path.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, unquote_plus

from dra.cel import types as t
from dra.cel.errors import Failure
from dra.cel.functions.registry import declare, implement
from dra.cel.values import Opaque

declare(
    """
    string_to_url: url(string) -> URL
    is_url_string: isURL(string) -> bool
    url_get_scheme: URL~getScheme() -> string
    url_get_host: URL~getHost() -> string
    url_get_hostname: URL~getHostname() -> string
    url_get_port: URL~getPort() -> string
    url_get_escaped_path: URL~getEscapedPath() -> string
    url_get_query: URL~getQuery() -> map(string, list(string))
    """
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):", re.ASCII)
_ESCAPED = re.compile(r"%(?![0-9A-Fa-f]{2})", re.ASCII)
_PORT = re.compile(r":[0-9]*", re.ASCII)
_BAD_HOST = re.compile(r"[\x00-\x20\x7f\"<>\\^`{|}%]")
_SAFE_PATH = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~$&+,/:;=@!'()*[]")


class CelURL(Opaque):
    """A parsed URL."""

    __slots__ = ("host", "path", "query", "scheme", "text")
    cel_type = t.URL

    def __init__(self, text: str, scheme: str, host: str, path: str, query: str) -> None:
        self.text = text
        self.scheme = scheme
        self.host = host
        self.path = path
        self.query = query

    def same(self, other: CelURL) -> bool:
        """Whether the URLs are written the same."""
        return self.text == other.text

    def size(self) -> int:
        """Length of the text, for the cost."""
        return len(self.text)


def parse_request_uri(text: str) -> tuple[CelURL | None, str]:
    """Read a URL: the URL, or None and Go's reason."""
    why = _problem(text)
    if why:
        return None, f'parse "{text}": {why}'
    match = _SCHEME.match(text)
    scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("", text)
    rest, _, query = rest.partition("?")
    if not rest.startswith("/"):
        # An opaque part (`mailto:x`) has neither host nor path.
        return CelURL(text, scheme, "", "", query), ""
    host = ""
    if scheme and rest.startswith("//"):
        authority, slash, path = rest[2:].partition("/")
        host = authority.rpartition("@")[2]
        rest = slash + path
    return CelURL(text, scheme, host, rest, query), ""


def _problem(text: str) -> str:
    if not text:
        return "empty url"
    if any(char < " " or char == "\x7f" for char in text):
        return "net/url: invalid control character in URL"
    match = _SCHEME.match(text)
    if match is None:
        if text[0] == ":":
            return "missing protocol scheme"
        if text == "*" or text.startswith("/"):
            return _path_problem(text.partition("?")[0])
        return "invalid URI for request"
    rest = text[match.end() :].partition("?")[0]
    if not rest.startswith("/"):
        return "" if rest else "invalid URI for request"
    if rest.startswith("//"):
        authority, slash, path = rest[2:].partition("/")
        return _authority_problem(authority) or _path_problem(slash + path)
    return _path_problem(rest)


def _path_problem(path: str) -> str:
    match = _ESCAPED.search(path)
    return f'invalid URL escape "{path[match.start() : match.start() + 3]}"' if match else ""


def _authority_problem(authority: str) -> str:
    user, at, host = authority.rpartition("@")
    if at and re.search(r"[^A-Za-z0-9\-._:~!$&'()*+,;=%@]", user, re.ASCII):
        return "net/url: invalid userinfo"
    if host.startswith("["):
        inside, bracket, port = host[1:].partition("]")
        if not bracket:
            return "missing ']' in host"
        if _BAD_HOST.search(inside.partition("%25")[0]):
            return f'invalid character "{inside}" in host name'
    else:
        name, colon, digits = host.rpartition(":")
        port = colon + digits if colon else ""
        bad = _BAD_HOST.search(name if colon else host)
        if bad is not None:
            if bad[0] == "%":
                return f'invalid URL escape "{host[bad.start() : bad.start() + 3]}"'
            return f'invalid character "{bad[0]}" in host name'
    if port and not _PORT.fullmatch(port):
        return f'invalid port "{port}" after host'
    return ""


@implement("url", str)
def _url(text: str) -> CelURL:
    url, why = parse_request_uri(text)
    if url is None:
        raise Failure("net_parse", f"URL parse error during conversion from string: {why}")
    return url


@implement("isURL", str)
def _is_url(text: str) -> bool:
    return parse_request_uri(text)[0] is not None


@implement("getScheme", CelURL)
def _scheme(url: CelURL) -> str:
    return url.scheme


@implement("getHost", CelURL)
def _host(url: CelURL) -> str:
    return url.host


@implement("getHostname", CelURL)
def _hostname(url: CelURL) -> str:
    return _split_host(url.host)[0]


@implement("getPort", CelURL)
def _port(url: CelURL) -> str:
    return _split_host(url.host)[1]


def _split_host(host: str) -> tuple[str, str]:
    name, colon, port = host.rpartition(":")
    if not colon or not (port.isdigit() or not port):
        name, port = host, ""
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    return name, port


@implement("getEscapedPath", CelURL)
def _escaped_path(url: CelURL) -> str:
    raw = url.path.encode()
    if all(byte in _SAFE_PATH or byte == ord("%") for byte in raw):
        return url.path
    return "".join(
        [
            chr(byte) if byte in _SAFE_PATH - frozenset(b"!'()*[]") else f"%{byte:02X}"
            for byte in unquote(url.path).encode()
        ]
    )


@implement("getQuery", CelURL)
def _query(url: CelURL) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pair in url.query.split("&"):
        if not pair or ";" in pair or _ESCAPED.search(pair):
            continue
        key, _, value = pair.partition("=")
        out.setdefault(unquote_plus(key), []).append(unquote_plus(value))
    return out
