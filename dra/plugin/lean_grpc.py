"""grpc without `grpc.aio` and without asyncio, which nothing here uses: some 60 ms and 3 MiB of every start.

Imported before anything that imports grpc. Who asks for `grpc.aio` later gets the real one, and with it asyncio, of
which grpc's compiled part wants nothing until then.
"""

from __future__ import annotations

import sys
import types

from dra.lean import InTyping, Later, standing_in

_AIO = "grpc.aio"

if "grpc" not in sys.modules:
    # The package imports it for its own namespace as the last thing, and takes what is there.
    stand_ins = {
        _AIO: types.ModuleType(_AIO),
        "asyncio": Later("asyncio"),
        "typing_extensions": InTyping("typing_extensions"),
    }
    with standing_in(stand_ins):
        import grpc
        import grpc._server  # what a server is made of, which it would load when it is made

        vars(grpc).pop("aio", None)
