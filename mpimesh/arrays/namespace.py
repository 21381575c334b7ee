"""Arrays of NumPy and CuPy: the library, the device and the stream of an array.

A CuPy array can only exist once CuPy is imported, so looking into `sys.modules` is enough, and a
program that never uses a GPU never pays for one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from mpimesh.errors import DTypeError

__all__ = [
    "Array",
    "DType",
    "DTypeLike",
    "DTypeName",
    "Formula",
    "HostArray",
    "StreamScope",
    "check_current",
    "device_ready",
    "fused",
    "is_cupy",
    "made_current",
    "moved",
    "namespace",
    "to_numpy",
    "zeros_where_not",
]


if TYPE_CHECKING:
    import numpy.typing as npt

    HostArray: TypeAlias = npt.NDArray[Any]
    """A NumPy array of any dtype."""
else:
    # Importing `numpy.typing` would take a third of the time that importing NumPy does.
    HostArray = np.ndarray

Array: TypeAlias = Any
"""A NumPy or CuPy array. CuPy has no types to name, so this is `Any` to a type checker."""

DType: TypeAlias = np.dtype[Any]

DTypeName = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "longdouble", "complex64", "complex128",
    "int", "float", "complex", "half", "single", "double",
    "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16",
]  # fmt: skip
"""Dtypes by name, so that a type checker finds a misspelt one."""

DTypeLike: TypeAlias = DTypeName | DType | type[Any]
"""A dtype: its name, ``float``, ``numpy.float32``, or any other as ``numpy.dtype(">f4")``."""


_BITS: dict[int, DType] = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}


def is_cupy(x: object) -> bool:
    """Tell whether `x` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def namespace(*arrays: object) -> ModuleType:
    """Return the module, `numpy` or `cupy`, whose functions work on all `arrays`."""
    return sys.modules["cupy"] if any(is_cupy(x) for x in arrays) else np


def to_numpy(x: Array) -> Array:
    """Return `x` as a NumPy array; copies from the device where it lives on one."""
    return sys.modules["cupy"].asnumpy(x) if is_cupy(x) else np.asarray(x)


def moved(x: Array, library: ModuleType) -> Array:
    """Return `x` as an array of `library`, `numpy` or `cupy`; itself where it is one."""
    return to_numpy(x) if library is np else library.asarray(x)


def zeros_where_not(mask: Array, x: Array) -> Array:
    """Return `x` where `mask` is True and 0 elsewhere, whatever `x` is there, also NaN.

    Shapes:
        mask, x, result: the same; `mask` is boolean.

    Cost:
        On the host a tenth of what `numpy.where` takes, which does not run in vector registers:
        the bits of `x` and of a mask of ones and zeros.
    """
    bits = _BITS.get(x.dtype.itemsize)
    if bits is None or is_cupy(x):
        return namespace(x).where(mask, x, x.dtype.type(0))
    masked: Array = np.negative(mask.view(np.int8), dtype=bits)
    masked &= x.view(bits)
    return masked.view(x.dtype)


Formula = Callable[..., Any]
"""A function of arrays and numbers, elementwise."""

_kernels: dict[tuple[int, Callable[[ModuleType], Formula]], tuple[ModuleType, Formula]] = {}


def fused(xp: ModuleType, make: Callable[[ModuleType], Formula]) -> Formula:
    """Return the formula that `make` writes in the functions of `xp`, as one kernel of CuPy. Local.

    A kernel reads its operands once and writes its results once; a formula of ten operations on an
    array that fills a device otherwise reads and writes its memory ten times. For NumPy the callers
    compute in place, block by block.

    The formula takes arrays that are broadcast together, and numbers; it may have several
    results, and may change arrays in place. It is compiled with its first call for each set of
    dtypes.

    Args:
        xp: CuPy.
        make: Returns the formula; a function of a module, as it is the kernel's key.
    """
    key = (id(xp), make)
    cached = _kernels.get(key)
    if cached is None:
        # CuPy takes the name alone, and the formula in a second call.
        kernel: Formula = xp.fuse(kernel_name=make.__name__.strip("_"))(make(xp))
        # The reference to the library reserves its id.
        cached = _kernels[key] = (xp, kernel)
    return cached[1]


_PER_THREAD = 2
"""The pointer that stands for another stream in each thread."""

R = TypeVar("R")


def device_ready() -> bool:
    """Tell whether CuPy is in use in this process and has a device."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    runtime = cupy.cuda.runtime
    try:
        return int(runtime.getDeviceCount()) > 0
    except runtime.CUDARuntimeError:  # there is no driver
        return False


@contextmanager
def made_current(device: Any, stream: Any) -> Iterator[None]:
    """Make a device and one of its streams current, and afterwards those that were so before.

    CuPy's own ``with stream:`` goes back to the stream of the ``with`` around it, and so forgets
    one that a program has chosen by ``stream.use()``: its next kernels would go astray.
    """
    with device:
        before = sys.modules["cupy"].cuda.get_current_stream()
        stream.use()
        try:
            yield
        finally:
            before.use()


class StreamScope:
    """A device and one of its streams, on which one operation works from start to end.

    CuPy works on the device and the stream that are current in a thread. A queued operation may
    continue under another current stream, maybe in another thread. So it takes its scope along, and
    does all its own work there: its temporary memory is made, used and freed in the order of one
    stream.

    Attributes:
        device: CuPy's device.
        stream: CuPy's stream.
    """

    __slots__ = ("_cuda", "device", "stream")

    def __init__(self) -> None:
        """Take what is current in this thread; CuPy must be in use."""
        self._cuda: Any = sys.modules["cupy"].cuda
        self.device: Any = self._cuda.Device()
        self.stream: Any = self._cuda.get_current_stream()

    @classmethod
    def of(cls, x: Array) -> StreamScope | None:
        """Return the current scope if `x` is a CuPy array on a device, None for any other."""
        return cls() if is_cupy(x) and device_ready() else None

    @property
    def per_thread(self) -> bool:
        """True if the stream is the default one of each thread, and so another one in each."""
        return bool(self.stream.ptr == _PER_THREAD)

    def current(self) -> AbstractContextManager[None]:
        """Make the device and the stream current for a ``with`` block."""
        return made_current(self.device, self.stream)

    def call(self, function: Callable[[], R]) -> R:
        """Return what `function` returns, called on the device and stream."""
        with self.current():
            return function()

    def steps(self, steps: Generator[Any, None, R]) -> Generator[Any, None, R]:
        """Run each step there; between two steps the caller's device and stream are current."""
        while True:
            try:
                request = self.call(lambda: next(steps))
            except StopIteration as stop:
                return cast("R", stop.value)
            yield request

    def mark(self) -> Any:
        """Return an event after all work of the stream so far."""
        with self.device:
            event = self._cuda.Event(block=False, disable_timing=True)
            event.record(self.stream)
        return event

    def follow(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event of this scope's stream."""
        with self.device:
            current = self._cuda.get_current_stream()
            if current != self.stream or self.per_thread:
                current.wait_event(event)


def check_current(x: Array) -> None:
    """Refuse a CuPy array on another device than the current one.

    Raises:
        DTypeError: If it does: CuPy would work on it across devices, or not at all.
    """
    current = sys.modules["cupy"].cuda.runtime.getDevice()
    if x.device.id != current:
        raise DTypeError(
            f"an array is on GPU {x.device.id} while GPU {current} is current; make its GPU "
            "current before its arrays are made (mesh.use_device(), or `with x.device:`)"
        )
