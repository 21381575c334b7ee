"""Arrays of a fake GPU: host memory behind a door that only streams go through."""

from __future__ import annotations

import ctypes
import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.devices.fake_streams import Clock

__all__ = ["Allocation", "FakeArray", "Library", "MemoryPointer"]

POISON = 0x6B
_OWN_REFERENCES = 3
_IN_PLACE = ["add", "sub", "mul", "truediv", "and", "or", "xor"]
_OPERATORS = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rshift", "lshift", "neg", "invert"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
]


class Allocation:
    """The block of the pool that one allocation gave, with its address and size."""

    def __init__(
        self,
        nbytes: int,
        identity: str = "Memory",
        device_id: int = 0,
        take: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        # The last part of a larger block, as a pool cuts them.
        self.base_offset = 512 if nbytes else 0
        room = max(nbytes, 1) + self.base_offset
        self.block = np.empty(room, np.uint8) if take is None else take(room)
        self.block[:] = POISON
        self.base = self.block.ctypes.data
        self.ptr = self.base + self.base_offset
        self.size = nbytes
        self.identity = identity
        self.device_id = device_id


class MemoryPointer:
    """An address inside a block."""

    def __init__(self, mem: Any, offset: int = 0) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def at_address(ptr: int, shape: Any, dtype: Any) -> Any:
    """Return an array over memory that somebody else keeps alive."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(ptr) if nbytes else bytearray()
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


class Library:
    """The functions of NumPy, made to work on a stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.identity = "Memory"
        self.array_class: type[FakeArray] = FakeArray
        self.take: Callable[[int], np.ndarray] | None = None
        # Kept a while, since a real pool gives memory back in the order of its stream.
        self.blocks: deque[Allocation] = deque(maxlen=20_000)

    def new(self, shape: Any, dtype: Any) -> FakeArray:
        """Return an array that holds nothing sensible."""
        dtype = np.dtype(dtype)
        block = self.allocate(math.prod(shape) * dtype.itemsize, self.identity)
        host = block.block[block.base_offset :][: block.size].view(dtype).reshape(shape)
        return self.array_class(host, block, self)

    def allocate(self, nbytes: int, identity: str) -> Allocation:
        """Return memory of a kind, on the current device."""
        block = Allocation(nbytes, identity, self.clock.device(), take=self.take)
        with self.clock.lock:
            self.blocks.append(block)
        return block

    def free_blocks(self) -> list[Allocation]:
        """Forget the blocks that nobody else has, and return them."""
        with self.clock.lock:
            # Those of a block here: the list, the name in the loop, the argument.
            free = [block for block in self.blocks if sys.getrefcount(block) <= _OWN_REFERENCES]
            for block in free:
                self.blocks.remove(block)
        return free

    def all_blocks(self) -> list[Allocation]:
        with self.clock.lock:
            return list(self.blocks)

    def host(self, value: Any) -> Any:
        if isinstance(value, FakeArray):
            return value.on_host
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if isinstance(value, tuple | list):
            return type(value)(self.host(item) for item in value)
        return value

    def call(self, function: Callable[..., Any], args: Any, options: Any) -> Any:
        """Let a function of NumPy happen on the current stream."""
        given = self.host(args)
        named = {name: self.host(value) for name, value in options.items()}
        stream = self.clock.stream()
        out = options.get("out")

        def happen() -> Any:
            with np.errstate(all="ignore"):
                return function(*given, **named)

        if out is not None:

            def write() -> None:
                happen()

            stream.put(write)
            return out
        example = self._example(happen, stream)
        return self._wrapped(example, happen, args, stream)

    def _example(self, happen: Callable[[], Any], stream: Any) -> Any:
        """Return a result of shape and type only: the values may not be there yet."""
        try:
            with self.clock.lock:
                return happen()
        except IndexError:  # places that are not there yet
            stream.synchronize()
        with self.clock.lock:
            return happen()

    def _wrapped(self, example: Any, happen: Any, args: Any, stream: Any) -> Any:
        if isinstance(example, list | tuple):
            return type(example)(
                self._wrapped(one, lambda k=k: happen()[k], args, stream)
                for k, one in enumerate(example)
            )
        if not isinstance(example, np.ndarray | np.generic):
            return example
        for given in _arrays_in(args):
            if isinstance(example, np.ndarray) and np.may_share_memory(example, given.on_host):
                return self.array_class(example, given.block, self)
        result = self.new(example.shape, example.dtype)

        def fill() -> None:
            result.on_host[...] = happen()

        stream.put(fill)
        return result


def _arrays_in(value: Any) -> list[FakeArray]:
    if isinstance(value, FakeArray):
        return [value]
    if isinstance(value, tuple | list):
        return [found for item in value for found in _arrays_in(item)]
    return []


class FakeArray:
    """An array "on the device"."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, on_host: np.ndarray, block: Any, library: Library) -> None:
        self.on_host = on_host
        self.block = block
        self.library = library

    def __array__(self, *args: object, **options: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`")

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self.block, self.on_host.ctypes.data - self.block.ptr)

    @property
    def device(self) -> Any:
        return self.library.device(self.block.device_id)  # type: ignore[attr-defined]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.on_host.shape,
            "typestr": self.on_host.dtype.str,
            "descr": self.on_host.dtype.descr,
            "data": (self.on_host.ctypes.data, False),
            "strides": None if self.on_host.flags.c_contiguous else self.on_host.strides,
            "stream": 1,
            "version": 3,
        }

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "flags", "ndim", "size", "nbytes", "itemsize", "shape", "strides"):
            return getattr(self.on_host, name)
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(type(self.on_host), name)
        if callable(found):
            return lambda *args, **options: self.library.call(found, (self, *args), options)
        return self.library.call(lambda x: getattr(x, name), (self,), {})

    def fill(self, value: Any) -> None:
        self[...] = value

    def get(self) -> np.ndarray:
        self.library.clock.stream().synchronize()
        return self.on_host.copy()

    def set(self, values: np.ndarray) -> None:
        kept = values.copy()
        self.library.clock.stream().put(lambda: self.on_host.__setitem__(..., kept))

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __getitem__(self, place: Any) -> Any:
        return self.library.call(lambda x, at: np.asarray(x[at]), (self, place), {})

    def __setitem__(self, place: Any, value: Any) -> None:
        at, new = self.library.host(place), self.library.host(value)
        self.library.clock.stream().put(lambda: self.on_host.__setitem__(at, new))

    def __len__(self) -> int:
        return len(self.on_host)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __repr__(self) -> str:
        return f"FakeArray({self.on_host.shape}, {self.on_host.dtype})"


def _operator(name: str) -> Any:
    function = getattr(np.ndarray, f"__{name}__")

    def apply(self: FakeArray, *other: Any) -> Any:
        return self.library.call(function, (self, *other), {})

    return apply


def _in_place(name: str) -> Any:
    function = getattr(np.ndarray, f"__i{name}__")

    def apply(self: FakeArray, other: Any) -> FakeArray:
        given = self.library.host(other)

        def happen() -> None:
            with np.errstate(all="ignore"):
                function(self.on_host, given)

        self.library.clock.stream().put(happen)
        return self

    return apply


for _name in _OPERATORS:
    setattr(FakeArray, f"__{_name}__", _operator(_name))
for _name in _IN_PLACE:
    setattr(FakeArray, f"__i{_name}__", _in_place(_name))
