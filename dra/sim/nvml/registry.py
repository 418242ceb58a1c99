"""The table of simulated functions, and what each one is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar


class Subject(StrEnum):
    """What a function's first argument says about the GPU it concerns."""

    NONE = "none"
    GPU = "gpu"  # a device handle
    INDEX = "index"
    UUID = "uuid"
    PCI = "pci"
    SERIAL = "serial"
    GPU_INSTANCE = "gpu instance"
    COMPUTE_INSTANCE = "compute instance"


@dataclass(frozen=True, slots=True)
class Function:
    """One C function.

    `mig` says that it takes the handle of a MIG device too. `driver` is false for the few that answer without
    a kernel module. `since` is the first driver branch whose library exports it, 0 for all.
    """

    name: str
    body: Callable[..., int | None]
    subject: Subject
    mig: bool
    initialised: bool
    driver: bool
    since: int


FUNCTIONS: dict[str, Function] = {}

F = TypeVar("F", bound=Callable[..., Any])


def nvml(
    subject: Subject = Subject.GPU,
    *,
    mig: bool = False,
    initialised: bool = True,
    driver: bool = True,
    since: int = 0,
) -> Callable[[F], F]:
    """Enter a function in the table under its own name.

    The body gets the library, the subject (a `Device`, an instance or None) and the remaining arguments; it
    gives None for success, a status, or raises `Status`.
    """

    def register(body: F) -> F:
        FUNCTIONS[body.__name__] = Function(body.__name__, body, subject, mig, initialised, driver, since)
        return body

    return register


def also_as(*names: str) -> Callable[[F], F]:
    """Enter a registered function under older or newer names with the same arguments."""

    def register(body: F) -> F:
        first = FUNCTIONS[body.__name__]
        for name in names:
            FUNCTIONS[name] = Function(
                name, first.body, first.subject, first.mig, first.initialised, first.driver, first.since
            )
        return body

    return register
