"""The function library of device selectors. Importing this package makes it complete."""

from dra.cel.functions import (
    convert,
    format_strings,
    formats,
    lists,
    net,
    optional,
    quantities,
    regexes,
    standard,
    strings,
    times,
    urls,
)
from dra.cel.functions.registry import FUNCTIONS, Function, Overload

__all__ = [
    "FUNCTIONS",
    "Function",
    "Overload",
    "convert",
    "format_strings",
    "formats",
    "lists",
    "net",
    "optional",
    "quantities",
    "regexes",
    "standard",
    "strings",
    "times",
    "urls",
]
