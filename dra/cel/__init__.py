"""CEL as DRA selectors use it: parser, checker, evaluator and the Kubernetes functions."""

from dra.cel.errors import CelCompileError, CelEvalError, Issue
from dra.cel.selector import CelFeatures, Selector, compile_selector, view_of

__all__ = [
    "CelCompileError",
    "CelEvalError",
    "CelFeatures",
    "Issue",
    "Selector",
    "compile_selector",
    "view_of",
]
