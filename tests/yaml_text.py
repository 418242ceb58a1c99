"""YAML that tests read: as PyYAML's safe loader reads it, by libyaml where that is there, which takes a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(text: str | bytes) -> Any:
    """Give the value of a document."""
    return yaml.load(text, _LOADER)


def read_all(text: str | bytes) -> Iterator[Any]:
    """Give the values of all documents."""
    return yaml.load_all(text, _LOADER)
