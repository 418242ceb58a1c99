"""What the API server says of a selector when a class or claim is created.

Source: resource.k8s.io validation of 1.36: at most 10 KiB, compiles in the environment of new expressions, estimated
cost at most 1,000,000.
"""

from __future__ import annotations

from dra.cel.errors import CelCompileError
from dra.cel.selector import COST_LIMIT, DEFAULT, CelFeatures, compile_selector

MAX_BYTES = 10 * 1024


def check_selector(expression: str, *, features: CelFeatures = DEFAULT) -> str | None:
    """Give why the API server would refuse a new selector, or None where it accepts it."""
    length = len(expression.encode("utf-8", "surrogatepass"))
    if length > MAX_BYTES:
        return f"may not be more than {MAX_BYTES} bytes, has {length}"
    try:
        selector = compile_selector(expression, features=features, new_expression=True)
    except CelCompileError as error:
        return error.message
    return "too complex, exceeds cost limit" if selector.max_cost > COST_LIMIT else None
