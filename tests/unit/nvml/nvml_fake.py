"""A small NVML at pynvml's function seam: just enough to count calls, to fail and to hang them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

import pynvml


@dataclass
class FakeGpu:
    bus: int
    minor: int
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 81559 << 20
    persistence: int = 1
    mig: int | None = 0
    mig_devices: list = field(default_factory=list)  # (gi, ci, uuid, profile id, start, size)

    @property
    def address(self):
        return f"0000:{self.bus:02x}:00.0"


def gpus(count):
    return [FakeGpu(0x10 + i, i, f"GPU-00000000-0000-0000-0000-{i:012d}") for i in range(count)]


class FakeNvml:
    """`faults` maps (function, bus or None) to a code; `hangs` to an event that ends the hang."""

    def __init__(self, devices=(), *, driver="580.95.05", cuda=13000):
        self.gpus = list(devices)
        self.driver, self.cuda = driver, cuda
        self.faults: dict = {}
        self.hangs: dict = {}
        self.calls: Counter = Counter()
        self.touched: list[int] = []
        self.inits = 0
        self.shutdowns = 0
        self.references = 0
        self.entered = threading.Event()

    @property
    def open(self):
        return self.references > 0

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        body = getattr(FakeNvml, "_" + name, None)
        if body is None:
            raise AttributeError(name)

        def call(*args):
            self.calls[name] += 1
            bus = self._bus_of(name, args)
            for key in ((name, bus), (name, None)):
                if key in self.hangs:
                    self.entered.set()
                    self.hangs[key].wait(30)
                if key in self.faults:
                    return self.faults[key]
            if name not in ("nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString") and not self.open:
                return pynvml.NVML_ERROR_UNINITIALIZED
            try:
                return body(self, *args) or 0
            except LookupError:
                return pynvml.NVML_ERROR_NOT_FOUND

        return call

    def _bus_of(self, name, args):
        if name == "nvmlDeviceGetHandleByPciBusId_v2":
            return int(args[0].value.decode().split(":")[1], 16)
        if name == "nvmlDeviceGetHandleByIndex_v2":
            return self.gpus[args[0].value].bus if args[0].value < len(self.gpus) else None
        if name.startswith("nvmlDevice") and args and isinstance(args[0], pynvml.c_nvmlDevice_t):
            return self._gpu(args[0]).bus
        return None

    def _gpu(self, handle):
        number = _address(handle)
        return next(gpu for gpu in self.gpus if gpu.bus == number & 0xFF)

    def _nvmlInitWithFlags(self, flags):
        self.inits += 1
        self.references += 1

    def _nvmlShutdown(self):
        if not self.open:
            return pynvml.NVML_ERROR_UNINITIALIZED
        self.shutdowns += 1
        self.references -= 1

    def _nvmlSystemGetDriverVersion(self, buffer, size):
        buffer.value = self.driver.encode()

    def _nvmlSystemGetCudaDriverVersion_v2(self, out):
        out._obj.value = self.cuda

    def _nvmlDeviceGetCount_v2(self, out):
        out._obj.value = len(self.gpus)

    def _nvmlDeviceGetHandleByPciBusId_v2(self, text, out):
        bus = int(text.value.decode().split(":")[1], 16)
        gpu = next((gpu for gpu in self.gpus if gpu.bus == bus), None)
        if gpu is None:
            return pynvml.NVML_ERROR_NOT_FOUND
        self._touch(gpu, out)

    def _nvmlDeviceGetHandleByIndex_v2(self, index, out):
        if index.value >= len(self.gpus):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        self._touch(self.gpus[index.value], out)

    def _touch(self, gpu, out):
        self.touched.append(gpu.bus)
        _set_handle(out._obj, 0x1000 | gpu.bus)

    def _nvmlDeviceGetPciInfo_v3(self, handle, out):
        out._obj.busId = f"00000000:{self._gpu(handle).bus:02X}:00.0".encode()

    def _nvmlDeviceGetUUID(self, handle, buffer, size):
        number = _address(handle)
        if number >= 0x10000:
            buffer.value = self._gpu(handle).mig_devices[(number >> 16) - 1][2].encode()
        else:
            buffer.value = self._gpu(handle).uuid.encode()

    def _nvmlDeviceGetMinorNumber(self, handle, out):
        out._obj.value = self._gpu(handle).minor

    def _nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = self._gpu(handle).name.encode()

    def _nvmlDeviceGetBrand(self, handle, out):
        out._obj.value = pynvml.NVML_BRAND_NVIDIA

    def _nvmlDeviceGetArchitecture(self, handle, out):
        out._obj.value = pynvml.NVML_DEVICE_ARCH_HOPPER

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 9, 0

    def _nvmlDeviceGetMemoryInfo(self, handle, out):
        if self._gpu(handle).memory is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        out._obj.total = self._gpu(handle).memory

    def _nvmlDeviceGetAddressingMode(self, handle, out):
        out._obj.value = 1

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        if self._gpu(handle).mig is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        current._obj.value = pending._obj.value = self._gpu(handle).mig

    def _nvmlDeviceGetPersistenceMode(self, handle, out):
        out._obj.value = self._gpu(handle).persistence

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle, out):
        out._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index, out):
        gpu = self._gpu(handle)
        if index.value >= len(gpu.mig_devices):
            return pynvml.NVML_ERROR_NOT_FOUND
        _set_handle(out._obj, (index.value + 1) << 16 | 0x1000 | gpu.bus)

    def _mig(self, handle):
        return self._gpu(handle).mig_devices[(_address(handle) >> 16) - 1]

    def _nvmlDeviceGetGpuInstanceId(self, handle, out):
        out._obj.value = self._mig(handle)[0]

    def _nvmlDeviceGetComputeInstanceId(self, handle, out):
        out._obj.value = self._mig(handle)[1]

    def _nvmlDeviceGetGpuInstanceById(self, handle, gi, out):
        _set_handle(out._obj, gi << 16 | self._gpu(handle).bus)

    def _nvmlGpuInstanceGetInfo(self, instance, out):
        number = _address(instance)
        gpu = next(gpu for gpu in self.gpus if gpu.bus == number & 0xFF)
        device = next(each for each in gpu.mig_devices if each[0] == number >> 16)
        out._obj.id, out._obj.profileId = device[0], device[3]
        out._obj.placement.start, out._obj.placement.size = device[4], device[5]

    def _nvmlDeviceGetGpuInstanceProfileInfoV(self, handle, number, out):
        shapes = {0: (19, 1, 9984, 16, b"MIG 1g.10gb"), 2: (9, 3, 40192, 60, b"MIG 3g.40gb")}
        if number not in shapes:
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        info = out._obj
        info.id, info.sliceCount, info.memorySizeMB, info.multiprocessorCount, info.name = shapes[number]
        info.instanceCount, info.copyEngineCount = 7, 1

    def _nvmlDeviceGetGpuInstancePossiblePlacements_v2(self, handle, profile, room, count):
        places = [(start, 1) for start in range(7)] if profile == 19 else [(0, 4), (4, 4)]
        for place, (start, size) in zip(room, places, strict=False):
            place.start, place.size = start, size
        count._obj.value = len(places)


def _address(handle):
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _set_handle(handle, number):
    import ctypes

    pointer = ctypes.cast(ctypes.byref(handle), ctypes.POINTER(ctypes.c_void_p))
    pointer[0] = number
