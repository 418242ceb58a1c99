"""A plugin process for tests: `prepare_process.py ROOT [KILL_AT]`, a line of JSON in, a line of JSON out.

With KILL_AT it kills itself with SIGKILL when it comes to that step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prepare_fakes import Node

from dra.api.claim import ClaimRef


def main() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The log of an unconfigured logger.
    root, kill_at = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""

    def step(name: str) -> None:
        if name == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    node = Node(root)
    node.ports = {"step": step}
    engine = node.restart()
    for claim in json.loads((root / "claims.json").read_text()):
        node.api.put(claim)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        verb, *parts = json.loads(line)
        ref = ClaimRef(*parts)
        outcome = getattr(engine, verb)([ref])[ref.uid]
        if isinstance(outcome, tuple):
            answer = [[device.device, *device.cdi_ids] for device in outcome]
        else:
            answer = None if outcome is None else str(outcome)
        print(json.dumps(answer), file=answers, flush=True)


main()
