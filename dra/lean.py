"""Importing a package without what it names and never uses here: a daemon on every GPU node loads what it needs.

While the package is imported, stand-ins are in the places of the modules that are to stay away; afterwards they are taken
away again, so that who imports the real ones later gets them. Only modules that nothing has loaded yet are stood in for.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Later(types.ModuleType):
    """A module that is imported once something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class InTyping(types.ModuleType):
    """Gives what Python's own `typing` has by now; for anything else it makes room for the real module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(typing, name):
            return getattr(typing, name)
        if name == "override":  # Python 3.12 has it too; only type checkers read the mark
            return lambda method: method
        del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class NamesOnly(types.ModuleType):
    """A module that has every public name, each a class that does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Nothing:
    """What a name stands for that nobody uses."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass


@contextmanager
def standing_in(stand_ins: Mapping[str, types.ModuleType | None]) -> Iterator[None]:
    """Put stand-ins in the places of modules that are not loaded; None makes their import fail."""
    placed = {name: made for name, made in stand_ins.items() if name not in sys.modules}
    modules: dict[str, Any] = sys.modules
    modules.update(placed)
    try:
        yield
    finally:
        for name, made in placed.items():
            if name in modules and modules[name] is made:
                del modules[name]
