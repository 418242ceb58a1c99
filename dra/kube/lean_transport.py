"""Importing the transport of `kubernetes` without what it names and never uses.

As they stand, `ApiClient` and what is below it load OAuth, pydantic, process pools, the reader of package metadata and
more: some 20 MiB in a daemon on every GPU node.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dra.lean import InTyping, NamesOnly, standing_in


@contextmanager
def transport_alone() -> Iterator[None]:
    """Let modules of `kubernetes` be imported without running the package's own `__init__`.

    That imports everything the package has (websockets, OAuth, YAML, informers): 7 MiB and 80 ms more than
    the transport needs, in a daemon on every GPU node. The empty stand-ins are taken away again, so that
    `import kubernetes` elsewhere in the process gives the real package.

    Of other packages the transport only asks for names, for the parts of the client that are not used here: of
    pydantic and dateutil for models, of multiprocessing for calls in a pool of its own, of the metadata of packages for
    HTTP/2, of urllib.request for proxies. What nothing else has loaded yet is spared: another 10 MiB and 100 ms.
    """
    names = (
        "kubernetes",
        "kubernetes.client",
        "kubernetes.client.models",
        "kubernetes.config",
        "kubernetes.utils",
    )
    spec = importlib.util.find_spec("kubernetes")
    places = spec.submodule_search_locations if spec is not None else None
    if not places or any(name in sys.modules for name in names):
        yield
        return
    stand_ins: dict[str, types.ModuleType] = {name: _Package(name) for name in names}
    for name, empty in stand_ins.items():
        empty.__path__ = [str(Path(place, *name.split(".")[1:])) for place in places]
    with standing_in({**stand_ins, **_unused_parts()}):
        yield


def _unused_parts() -> dict[str, types.ModuleType]:
    """Give the stand-ins for modules of which only names are wanted."""
    names = (
        "pydantic",
        "dateutil",
        "dateutil.parser",
        "multiprocessing",
        "multiprocessing.pool",
        "importlib.metadata",
        "urllib.request",
    )
    made: dict[str, types.ModuleType] = {name: NamesOnly(name) for name in names}
    # How many connections there are is decided here, but the default is worked out all the same.
    made["multiprocessing"].cpu_count = lambda: os.cpu_count() or 1  # type: ignore[attr-defined]
    made["urllib.request"].getproxies = _proxies  # type: ignore[attr-defined]
    made["typing_extensions"] = InTyping("typing_extensions")
    return made


def _proxies() -> dict[str, str]:
    """Give the proxies by scheme; what reads them is loaded where there can be any, on Linux in the environment alone."""
    if sys.platform != "linux" or any(name.lower().endswith("_proxy") for name in os.environ):
        proxies: dict[str, str] = importlib.import_module("urllib.request").getproxies()
        return proxies
    return {}


class _Package(types.ModuleType):
    """A package whose own code does not run; of its names it gives those that the transport's modules ask it for."""

    def __getattr__(self, name: str) -> Any:
        module = _DEFINED_IN.get(name)
        if module is None:
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)


_DEFINED_IN = {
    "ApiClient": "kubernetes.client.api_client",
    "Configuration": "kubernetes.client.configuration",
}


class _WithParts(types.ModuleType):
    """A package whose modules are imported once one of them is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        importlib.import_module(f"{self.__name__}.{name}")
        return getattr(sys.modules[self.__name__], name)


def _oauth_session(*args: Any, **options: Any) -> Any:
    return importlib.import_module("requests_oauthlib").OAuth2Session(*args, **options)


@contextmanager
def without_oauth() -> Iterator[None]:
    """Let the loader of kubeconfigs be imported without OAuth, and the whole of `requests` behind it.

    Only users that log in through OpenID Connect need them; for them they are loaded at the first renewal.
    """
    if "oauthlib" in sys.modules or "requests_oauthlib" in sys.modules:
        yield
        return
    names = ("oauthlib", "oauthlib.oauth2", "requests_oauthlib")
    stand_ins = {name: _WithParts(name) for name in names}
    stand_ins["requests_oauthlib"].OAuth2Session = _oauth_session  # type: ignore[attr-defined]
    with standing_in(stand_ins):
        yield
