"""The daemon with shorter periods: what a test would have to wait minutes for happens in seconds.

Runs the same as `python -m dra.cli.plugin`, or as `dra fleet` where that is the first argument. `DRA_TEST_PERIODS` is a JSON object from
`module:Class.parameter` to the default that this parameter of the class gets.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def shorten(periods: dict[str, float]) -> None:
    """Set defaults of parameters. ValueError: no such parameter with a default."""
    for path, value in periods.items():
        module, _, rest = path.partition(":")
        name, _, parameter = rest.partition(".")
        made = getattr(importlib.import_module(module), name).__init__
        if parameter in (made.__kwdefaults__ or {}):
            made.__kwdefaults__[parameter] = value
            continue
        code, defaults = made.__code__, list(made.__defaults__ or ())
        with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        defaults[with_default.index(parameter)] = value
        made.__defaults__ = tuple(defaults)


if __name__ == "__main__":
    shorten(json.loads(os.environ["DRA_TEST_PERIODS"]))
    if sys.argv[1:2] == ["fleet"]:
        from dra.cli.main import main
    else:
        from dra.cli.plugin import main

    raise SystemExit(main())
