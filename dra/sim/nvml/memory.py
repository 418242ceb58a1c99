"""Read and write what pynvml passes: `byref` arguments, buffers, arrays, opaque pointers.

The simulated functions get the very objects that the C library would get addresses of, and fill them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml


class Status(Exception):  # noqa: N818
    """Ends a simulated function with an NVML status."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def target(argument: Any) -> Any:
    """Give the object that an argument points to: behind `byref`, behind a pointer, or itself (an array, a buffer).

    Raises:
        TypeError: a structure itself, which C gets by value: the real library would crash the process.
    """
    if argument is None:
        return None
    inner = getattr(argument, "_obj", None)
    if inner is not None:
        return inner
    if isinstance(argument, ctypes._Pointer):
        return argument.contents
    if isinstance(argument, ctypes.Structure | ctypes.Union):
        raise TypeError(f"{type(argument).__name__} is passed by value; the library takes its address")
    return argument


def put(argument: Any, value: float) -> None:
    """Store a number behind an argument."""
    pointed = target(argument)
    if pointed is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    pointed.value = value


def put_text(buffer: Any, length: Any, text: str) -> None:
    """Store a string and its NUL in a buffer of that length."""
    data = text.encode()
    if buffer is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if len(data) + 1 > number(length):
        raise Status(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    target(buffer).value = data


def put_handle(argument: Any, address: int) -> None:
    """Store an address in an opaque pointer."""
    point(target(argument), address)


def point(pointer: Any, address: int) -> None:
    """Make a ctypes pointer object hold an address. It is never followed."""
    ctypes.c_void_p.from_buffer(pointer).value = address


def address_of(handle: Any) -> int:
    """Give the address an opaque pointer holds, 0 for null."""
    if handle is None:
        return 0
    if isinstance(handle, int):
        return handle
    return ctypes.cast(target_pointer(handle), ctypes.c_void_p).value or 0


def target_pointer(handle: Any) -> Any:
    """Give the pointer itself where a caller passed it by reference."""
    inner = getattr(handle, "_obj", None)
    return handle if inner is None else inner


def number(argument: Any) -> int:
    """Give an integer argument, plain or ctypes."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """Give a string argument: `c_char_p`, bytes or str."""
    value = getattr(argument, "value", argument)
    if value is None:
        raise Status(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return value.decode() if isinstance(value, bytes) else str(value)


def fill(structure: Any, **values: Any) -> None:
    """Store fields of a structure; strings become bytes."""
    for name, value in values.items():
        setattr(structure, name, value.encode() if isinstance(value, str) else value)


def check_version(structure: Any, *versions: int) -> int:
    """Give a structure's version.

    Raises:
        Status: ARGUMENT_VERSION_MISMATCH for one that this library does not know.
    """
    if structure.version not in versions:
        raise Status(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    return int(structure.version)


def put_array(array: Any, count: Any, items: Sequence[Any]) -> None:
    """Follow NVML's two-step protocol for lists: the caller asks for the size, then gives room.

    `items` are functions or values: values are stored, callables are called with the element.
    """
    counter = target(count)
    room = counter.value
    counter.value = len(items)
    if not items:
        return
    if array is None or room < len(items):
        raise Status(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    store(array, items)


def store(array: Any, items: Sequence[Any]) -> None:
    """Store items from the start of an array."""
    elements = target(array) if not isinstance(array, ctypes.Array | ctypes._Pointer) else array
    for position, item in enumerate(items):
        if callable(item):
            item(elements[position])
        else:
            elements[position] = item
