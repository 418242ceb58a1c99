"""CEL as DRA selectors use it: parser, checker, evaluator and the Kubernetes functions."""

from dra.cel.admission import check_selector
from dra.cel.errors import CelCompileError, CelEvalError, Issue
from dra.cel.selector import CelFeatures, Selector, compile_selector, view_of
from dra.cel.trace import SubTerm

__all__ = [
    "CelCompileError",
    "CelEvalError",
    "CelFeatures",
    "Issue",
    "Selector",
    "SubTerm",
    "check_selector",
    "compile_selector",
    "view_of",
]
