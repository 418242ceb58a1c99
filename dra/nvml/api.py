"""pynvml at the seam: one open library, its handles, and calls by name.

pynvml keeps the library and its function pointers in module globals. They belong to one `Opened` at a time;
opening another library replaces them whole. Shutting down goes to the library object itself, so that it reaches
the right library even when a newer one has been opened meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml

from dra.errors import DraError, StackError
from dra.nvml.errors import (
    BUSY,
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    SESSION_LOST,
    translate,
)
from dra.nvml.lanes import abandoned_error, current_job
from dra.values import PciAddress

T = TypeVar("T")

# Opens even where no GPU is attached yet. Source: nvmlInitWithFlags.
INIT_FLAG_NO_GPUS = 1


@dataclass(slots=True, eq=False)
class Opened:
    """An initialised library. `handles` are by PCI address text; a handle's first look-up wakes its GPU."""

    library: Any
    generation: int
    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    handles: dict[str, Any] = field(default_factory=dict)
    # Answers that hold as long as the session does; see `NvmlApi.remembered`.
    answers: dict[tuple[object, ...], Any] = field(default_factory=dict)
    users: int = 0
    last_used: float = 0.0
    ended: bool = False
    shut_down: threading.Event = field(default_factory=threading.Event)


_globals_lock = threading.Lock()
_owner: Opened | None = None


def open_library(library: object, *, generation: int, now: float) -> Opened:
    """Initialise a library and read its version.

    Raises:
        StackError: as NVML says; DRA-NVML-BUSY if another session of this process is open.
    """
    global _owner
    opened = Opened(library, generation, last_used=now)
    with _globals_lock:
        if _owner is not None and not _owner.ended:
            raise StackError(
                BUSY,
                "NVML: another session of this process is open",
                remedy="Close it first; the binding holds one library.",
            )
        _reset_binding(library)
        _owner = opened
    try:
        pynvml.nvmlInitWithFlags(INIT_FLAG_NO_GPUS)
    except pynvml.NVMLError as error:
        opened.ended = True
        raise translate(error, doing="nvmlInitWithFlags") from error
    except BaseException:
        opened.ended = True
        raise
    try:
        opened.driver_version = _text(pynvml.nvmlSystemGetDriverVersion())
        opened.cuda_version = _cuda_version()
    except pynvml.NVMLError as error:
        retire(opened)
        raise translate(error, doing="nvmlSystemGetDriverVersion") from error
    return opened


def retire(opened: Opened) -> None:
    """Shut a library down that nobody is in any more. Never raises NVML's errors: there is nobody to tell."""
    global _owner
    opened.ended = True
    with contextlib.suppress(Exception):
        opened.library.nvmlShutdown()
    with _globals_lock:
        if _owner is opened:
            _reset_binding(None)
            _owner = None
    opened.handles.clear()
    opened.answers.clear()
    opened.shut_down.set()


def _reset_binding(library: object) -> None:
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml._nvmlLib_refcount = 0


def _cuda_version() -> tuple[int, int] | None:
    try:
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


class NvmlApi:
    """Calls into an open library; given to the callable of `NvmlSession.run` and good only inside it."""

    __slots__ = ("_opened",)

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    @property
    def driver_version(self) -> str:
        """NVML's driver version, as text."""
        return self._opened.driver_version

    @property
    def cuda_version(self) -> tuple[int, int] | None:
        """The driver's CUDA version."""
        return self._opened.cuda_version

    @property
    def generation(self) -> int:
        """Which opening of the library this is; handles and instances of another one are void."""
        return self._opened.generation

    def call(self, name: str, *args: object, subject: str = "", undoing: bool = False) -> Any:
        """Call `pynvml.<name>`; bytes come back as text.

        Args:
            name: pynvml's function.
            args: what it takes.
            subject: the GPU it is about, for errors.
            undoing: go on although nobody waits any more, to take back what was made.

        Raises:
            StackError, DeviceError: as NVML says; DRA-NVML-HUNG once nobody waits for the caller any more.
        """
        if not undoing:
            self.check_awaited()
        if self._opened.ended:
            raise StackError(SESSION_LOST, "NVML: the session was closed meanwhile", retryable=True)
        function: Callable[..., Any] | None = getattr(pynvml, name, None)
        try:
            if function is None:  # an older binding
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return _text_if_bytes(function(*args))
        except pynvml.NVMLError as error:
            raise translate(error, doing=name, subject=subject) from error

    @staticmethod
    def check_awaited() -> None:
        """Stop here if nobody waits for the result any more.

        Raises:
            StackError, DeviceError: DRA-NVML-HUNG.
        """
        job = current_job()
        if job is not None and job.abandoned:
            raise abandoned_error(job)

    def remembered(self, key: tuple[object, ...], ask: Callable[[], T]) -> T:
        """Give what `ask` gave for this key in this session; asks once. For what cannot change while it is open."""
        if key not in self._opened.answers:
            self._opened.answers[key] = ask()
        found: T = self._opened.answers[key]
        return found

    def optional(self, name: str, *args: object, subject: str = "") -> Any:
        """Do what `call` does, but give None where the GPU or the driver does not have it."""
        try:
            return self.call(name, *args, subject=subject)
        except DraError as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            raise

    def handle(self, address: PciAddress) -> Any:
        """Give the handle of the GPU at this address. The first time it wakes the GPU.

        Looked up by address: a look-up by UUID may wake other GPUs on the way.

        Source: nvmlDeviceGetHandleByPciBusId_v2.
        """
        subject = str(address)
        handle = self._opened.handles.get(subject)
        if handle is None:
            text = f"{address.domain:08X}:{address.bus:02X}:{address.device:02X}.{address.function}"
            handle = self.call("nvmlDeviceGetHandleByPciBusId", text, subject=subject)
            self._opened.handles[subject] = handle
        return handle

    def handle_by_index(self, index: int) -> tuple[PciAddress, Any]:
        """Give address and handle of NVML's GPU number `index`; for nodes whose /proc lists no GPUs."""
        handle = self.call("nvmlDeviceGetHandleByIndex", index, subject=f"index {index}")
        info = self.call("nvmlDeviceGetPciInfo", handle, subject=f"index {index}")
        address = PciAddress.parse(_text(info.busId))
        self._opened.handles[str(address)] = handle
        return address, handle


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _text_if_bytes(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
