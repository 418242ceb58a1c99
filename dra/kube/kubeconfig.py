"""What can be wrong with a kubeconfig, said with the file's name.

The loader of the package `kubernetes` takes the file's shape for granted, and goes on without credentials where a
user's command fails; both would show as something else later. Loaded only where there is a kubeconfig.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from dra.errors import KubeError
from dra.telemetry.log import get_logger

_LISTS = (("clusters", "cluster"), ("contexts", "context"), ("users", "user"))


def unusable(path: str, reason: str) -> KubeError:
    """Give the error of a kubeconfig that cannot be used."""
    return KubeError(
        "DRA-API-CREDENTIALS",
        f"cannot use the kubeconfig {path}: {reason}",
        remedy="Correct that file (kubectl --kubeconfig FILE cluster-info shows whether it works), or give another "
        "with --kubeconfig or KUBECONFIG.",
        path=path,
    )


def check_file(path: Path) -> None:
    """Refuse a file that is no kubeconfig.

    Raises:
        KubeError: DRA-API-CREDENTIALS, with what is wrong in it.
    """
    try:
        # As a stream: the error then has the place of what is wrong and not its text, which may be a secret.
        with path.open("rb") as stream:
            content = yaml.safe_load(stream)
    except OSError as error:
        raise unusable(str(path), error.strerror or str(error)) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise unusable(str(path), f"it is not YAML: {error}") from error
    if not isinstance(content, dict):
        found = {type(None): "empty", list: "a list", str: "plain text"}.get(type(content), "no mapping")
        raise unusable(str(path), f"it is {found}, not an object of kind Config")
    for plural, singular in _LISTS:
        entries = content.get(plural)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise unusable(str(path), f"{plural} is not a list")
        for index, entry in enumerate(entries):
            _check_entry(path, f"{plural}[{index}]", entry, singular)


def _check_entry(path: Path, where: str, entry: Any, singular: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise unusable(str(path), f"{where} has no name")
    inner = entry.get(singular)
    if inner is not None and not isinstance(inner, dict):
        raise unusable(str(path), f"{where} ({entry['name']}): {singular} is not an object")
    if not isinstance((inner or {}).get("server", ""), str):
        raise unusable(str(path), f"{where} ({entry['name']}): server is not a text")


def check_server(path: str, host: str) -> None:
    """Refuse the URL of an API server that nothing can be sent to.

    Raises:
        KubeError: DRA-API-CREDENTIALS.
    """
    if not host:
        raise unusable(path, "the cluster of its current context has no server")
    try:
        url = urlsplit(host)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise unusable(path, f"its server {host!r} is not a URL such as https://10.0.0.1:6443")


def without_objects(text: str) -> str:
    """Give what the loader says without the parts of the file that it quotes: they may hold a token."""
    return re.sub(r"\{.*\}", "{...}", text, flags=re.DOTALL)


class LoaderLog:
    """Stands in the loader's module for `logging`, to which it says what it then swallows."""

    def __init__(self) -> None:
        self._local = threading.local()

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        """Give the list to which this thread's complaints go."""
        heard: list[str] = []
        self._local.heard = heard
        try:
            yield heard
        finally:
            self._local.heard = None

    def error(self, text: object, *_args: object) -> None:
        """Take a complaint; one that comes when credentials are renewed goes to our log."""
        heard: list[str] | None = getattr(self._local, "heard", None)
        if heard is not None:
            heard.append(str(text))
        else:
            get_logger().warning("credentials_not_renewed", error=str(text))

    warning = info = debug = exception = error


LOADER_LOG = LoaderLog()
