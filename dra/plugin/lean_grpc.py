"""grpc without `grpc.aio`, which nothing here uses: some 20 ms and 1 MiB of every start.

Imported before anything that imports grpc. Who asks for `grpc.aio` later gets the real one.
"""

from __future__ import annotations

import sys
import types

_AIO = "grpc.aio"

if "grpc" not in sys.modules:
    # The package imports it for its own namespace as the last thing, and takes what is there.
    sys.modules[_AIO] = types.ModuleType(_AIO)
    try:
        import grpc

        vars(grpc).pop("aio", None)
    finally:
        sys.modules.pop(_AIO, None)
