"""The daemon with shorter periods: what a test would have to wait minutes for happens in seconds.

Runs the same command as `python -m dra.cli.plugin`. `DRA_TEST_PERIODS` is a JSON object from
`module:Class.parameter` to the default that this keyword argument of the class gets.
"""

from __future__ import annotations

import importlib
import json
import os


def shorten(periods: dict[str, float]) -> None:
    """Set defaults of keyword arguments. KeyError: there is no such argument."""
    for path, value in periods.items():
        module, _, rest = path.partition(":")
        name, _, parameter = rest.partition(".")
        defaults = getattr(importlib.import_module(module), name).__init__.__kwdefaults__
        defaults[parameter] = type(defaults[parameter])(value)


if __name__ == "__main__":
    shorten(json.loads(os.environ["DRA_TEST_PERIODS"]))
    from dra.cli.plugin import main

    raise SystemExit(main())
