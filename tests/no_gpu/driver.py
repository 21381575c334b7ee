"""The real CuPy without a GPU: its calls of CUDA end in host memory.

CuPy's modules find each other's C functions through capsules. Before CuPy itself is imported, those
of `cupy_backends.cuda.api.runtime` and `driver` are replaced by functions of Python: memory of the
"device" is host memory, copies are done at once, streams and events are numbers, and a kernel that
is launched does nothing. All else is CuPy's own: arrays, pools, the types of arguments and results,
the choice and the source text of kernels, which a compiler may check (`test_kernels.py`).
`by_numpy.py` lets NumPy do what the kernels would have done.

It holds for the whole process: `python -m pytest -p tests.no_gpu.plugin tests/no_gpu`.
"""

from __future__ import annotations

import ctypes
import operator
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Driver"]

_TYPES: dict[str, Any] = {
    "int": ctypes.c_int,
    "int __pyx_skip_dispatch": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "CUdevice": ctypes.c_int,
    "intptr_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "PyObject *": ctypes.py_object,
}
_NOT_SUPPORTED, _INVALID_VALUE = 801, 1
_MAJOR, _MINOR = 75, 76
"""CUDA's numbers of two attributes, which tell for which processors kernels are compiled."""
_RESERVED = 5
"""CUDA's number for how much memory the asynchronous pool has."""

_PROPERTIES = {
    "name": b"Nothing",
    "totalGlobalMem": 1 << 34,
    "multiProcessorCount": 4,
    "major": 8,
    "minor": 0,
    "uuid": bytes(range(1, 17)),
    "maxThreadsPerBlock": 1024,
    "sharedMemPerBlock": 48 << 10,
    "warpSize": 32,
}

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_signature: Any = ctypes.pythonapi.PyCapsule_GetName
_signature.restype = ctypes.c_char_p
_signature.argtypes = [ctypes.py_object]


class Driver:
    """CuPy's stand-in for CUDA.

    Args:
        devices: How many GPUs there seem to be.

    Attributes:
        sources: Of all kernels that were made: their text, and the options for the compiler.
        launched: How many kernels were started.
        problems: What went wrong in CUDA's place, where nothing can be raised.
    """

    def __init__(self, devices: int = 1) -> None:
        from cupy_backends.cuda.api import driver, runtime
        from cupy_backends.cuda.libs import nvrtc

        self.sources: list[tuple[str, tuple[str, ...]]] = []
        self.launched = 0
        self.problems: list[str] = []
        self._devices = devices
        self._runtime: Any = runtime
        self._version = int(runtime.runtimeGetVersion())
        self._local = threading.local()
        self._memory: dict[int, Any] = {}
        self._last_handle = 0x5000
        for module, functions in ((runtime, self._of_runtime()), (driver, self._of_driver())):
            for name in list(module.__pyx_capi__):
                self._replace(module, name, functions.get(name))
            for name, function in functions.items():
                text = getattr(getattr(module, name, None), "__doc__", None)
                if text:
                    setattr(module, name, _checked(name, text, function))
        for name, function in self._of_processes().items():
            setattr(runtime, name, _checked(name, getattr(runtime, name).__doc__, function))
        try:
            nvrtc.getVersion()
        except Exception:  # where there is no NVRTC, its version is asked for, though
            version = self._version // 1000, self._version % 1000 // 10
            if "getVersion" in nvrtc.__pyx_capi__:
                self._replace(nvrtc, "getVersion", lambda: version)
            nvrtc.getVersion = lambda: version
        self._take_compiler()

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return base and size of the allocation around `ptr`, as `cuMemGetAddressRange` does."""
        for base, memory in list(self._memory.items()):
            if base <= ptr < base + memory.size:
                return base, memory.size
        raise self._runtime.CUDARuntimeError(_INVALID_VALUE)

    # -- how it takes CUDA's place -----------------------------------------------------------

    def _replace(self, module: Any, name: str, function: Callable[..., Any] | None) -> None:
        capsules = module.__pyx_capi__
        signature = _signature(capsules[name])
        parsed = re.match(r"(.+?) ?\((.*)\)$", signature.decode())
        if parsed is None:
            return  # a number
        result, parameters = parsed[1], parsed[2].split(", ")
        if result.startswith("struct"):
            result = "PyObject *"
        types = [_TYPES.get(one, ctypes.c_void_p) for one in parameters if one != "void"]
        if result not in _TYPES:
            return  # of textures and the like
        count = sum("__pyx" not in one for one in parameters if one != "void")

        def call(*arguments: Any) -> Any:
            try:
                if function is None:
                    raise NotImplementedError
                return function(*arguments[:count])
            except Exception as error:
                self.problems.append(f"{name}{arguments[:count]}: {error!r}")
                return None if result == "PyObject *" else 0

        kept = ctypes.PYFUNCTYPE(_TYPES[result], *types)(call)
        for one in (kept, signature):  # CuPy's memory calls them to the very end of the process
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        address = ctypes.cast(kept, ctypes.c_void_p)
        capsules[name] = _new_capsule(address, signature, None)

    def _take_compiler(self) -> None:
        from cupy.cuda import compiler, function

        def compiled(source: str, options: Any = (), *_: Any, **others: Any) -> Any:
            self.sources.append((source, options))
            module = function.Module()
            module.load(b"no kernel")
            names = others.get("name_expressions") or ()
            module._set_mapping({name: name for name in names})
            return module

        compiler._compile_module_with_cache = compiled

    # -- what CUDA does -----------------------------------------------------------------------

    def _handle(self, *_: Any) -> int:
        self._last_handle += 16
        return self._last_handle

    def _allocate(self, size: int, *_: Any) -> int:
        memory = np.full(size + 512, 0x6B, np.uint8)
        memory = memory[-memory.ctypes.data % 512 :][:size]
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def _free(self, ptr: int, *_: Any) -> None:
        self._memory.pop(ptr, None)

    def _current(self) -> int:
        return getattr(self._local, "device", 0)

    def _set_device(self, device: int) -> None:
        if not 0 <= device < self._devices:
            raise self._runtime.CUDARuntimeError(101)
        self._local.device = device

    def _launch(self, *_: Any) -> None:
        self.launched += 1

    def _attributes(self, ptr: int) -> Any:
        known = any(base <= ptr < base + one.size for base, one in list(self._memory.items()))
        kind = self._runtime.memoryTypeDevice if known else self._runtime.memoryTypeUnregistered
        return self._runtime.PointerAttributes(0 if known else -2, ptr, 0, kind)

    def _of_runtime(self) -> dict[str, Callable[..., Any]]:
        def copy(target: int, source: int, size: int, *_: Any) -> None:
            if size:
                ctypes.memmove(target, source, size)

        def fill(target: int, value: int, size: int, *_: Any) -> None:
            ctypes.memset(target, value, size)

        names: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(["memcpy", "memcpyAsync"], copy),
            **dict.fromkeys(["memset", "memsetAsync"], fill),
            **dict.fromkeys(
                ["malloc", "mallocManaged", "mallocAsync", "hostAlloc"], self._allocate
            ),
            **dict.fromkeys(["free", "freeAsync", "freeHost"], self._free),
            **dict.fromkeys(["streamCreateWithPriority", "streamCreateWithFlags"], self._handle),
            **dict.fromkeys(["streamCreate", "eventCreateWithFlags"], self._handle),
        }
        nothing = ["streamDestroy", "streamSynchronize", "streamWaitEvent", "eventDestroy"]
        nothing += ["eventRecord", "eventSynchronize", "_ensure_context", "deviceSetMemPool"]
        nothing += ["memPoolSetAttribute", "memPoolTrimTo"]
        zero = ["streamQuery", "eventQuery", "streamIsCapturing", "deviceCanAccessPeer"]
        return {
            **names,
            **dict.fromkeys(nothing, lambda *_: None),
            **dict.fromkeys(zero, lambda *_: 0),
            **dict.fromkeys(["driverGetVersion", "runtimeGetVersion"], lambda: self._version),
            **dict.fromkeys(["deviceGetMemPool", "deviceGetDefaultMemPool"], lambda device: 16),
            "_getCUDAMajorVersion": lambda: self._version // 1000,
            "getDeviceCount": lambda: self._devices,
            "getDevice": self._current,
            "setDevice": self._set_device,
            "deviceGetAttribute": lambda kind, device: {_MAJOR: 8, _MINOR: 0}.get(kind, 1024),
            "deviceGetPCIBusId": lambda device: f"0000:{device:02X}:00.0",
            "getDeviceProperties": lambda device: dict(_PROPERTIES),
            "memGetInfo": lambda: (1 << 33, 1 << 34),
            "memPoolGetAttribute": lambda pool, kind: (1 << 30) * (kind == _RESERVED),
            "pointerGetAttributes": self._attributes,
            "pointerGetMemoryType": lambda ptr: self._attributes(ptr).type,
        }

    def _of_driver(self) -> dict[str, Callable[..., Any]]:
        return {
            **dict.fromkeys(["moduleLoadData", "moduleGetFunction"], self._handle),
            **dict.fromkeys(["moduleUnload", "funcSetAttribute"], lambda *_: None),
            "launchKernel": self._launch,
            "funcGetAttribute": lambda *_: 1024,
            "occupancyMaxActiveBlocksPerMultiprocessor": lambda *_: 8,
            "occupancyMaxPotentialBlockSize": lambda *_: (128, 128),
            "get_build_version": lambda: self._version,
            "ctxGetCurrent": lambda: 16,
        }

    def _of_processes(self) -> dict[str, Callable[..., Any]]:
        """Return what Python calls only: no other process can open anything."""

        def refuse(*_: Any) -> None:
            raise self._runtime.CUDARuntimeError(_NOT_SUPPORTED)

        def handle(ptr: int) -> bytes:
            if self.address_range(ptr)[0] != ptr:
                refuse()
            return ptr.to_bytes(64, "little")

        return {
            "ipcGetMemHandle": handle,
            "ipcGetEventHandle": lambda event: event.to_bytes(64, "little"),
            "ipcOpenMemHandle": refuse,
            "ipcOpenEventHandle": refuse,
            "ipcCloseMemHandle": refuse,
        }


def _checked(name: str, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes what CuPy's own takes, by the signature in its docstring."""
    found = re.match(rf"{name}\((.*?)\)", text)
    if found is None:
        raise ValueError(f"{name} has no signature in {text!r}")
    parameters = [one.strip() for one in found[1].split(",") if one.strip()]
    needed = sum("=" not in one for one in parameters)
    kinds = [one.partition("=")[0].rpartition(" ")[0] for one in parameters]

    def call(*arguments: Any) -> Any:
        if not needed <= len(arguments) <= len(kinds):
            raise TypeError(f"{text.splitlines()[0]} got {len(arguments)} arguments")
        for kind, one in zip(kinds, arguments, strict=False):
            if kind == "bytes":
                if type(one) is not bytes:
                    raise TypeError(f"{name}: expected bytes, got {type(one)}")
            elif kind and operator.index(one) < 0 and kind in ("size_t", "unsigned int"):
                raise OverflowError(f"{name}: can't convert negative value to {kind}")
        return function(*arguments)

    call.__doc__ = text
    return call
