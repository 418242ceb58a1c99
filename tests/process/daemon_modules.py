"""Start the daemon as `dra plugin` does, on a node without a driver, and print what it has loaded once it has published.

`python daemon_modules.py ARGUMENTS…`: the arguments of `dra plugin`. The answer is a JSON list of module names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from dra.cli.plugin import add_arguments, settings_from
from dra.telemetry import log


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, {})
    log.configure(level="error")
    settings = settings_from(parser.parse_args(), {})
    from dra.plugin.daemon import Daemon
    from dra.plugin.machine import real_machine

    daemon = Daemon(settings, real_machine(settings))
    daemon.start()
    end = time.monotonic() + 60
    while not daemon.publisher.ready and time.monotonic() < end:
        time.sleep(0.02)
    print(json.dumps([daemon.publisher.ready, sorted(sys.modules)]), flush=True)
    daemon.stop(grace_seconds=0)
    os._exit(0)


if __name__ == "__main__":
    main()
