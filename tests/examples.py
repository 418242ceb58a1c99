"""How many examples a property is tried with."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """For properties of which one example costs more than 20 ms: few in each run, many when new ones are looked for."""
    return count * 20 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else count
