"""A stand-in for CuPy that refuses what CuPy refuses, on host memory.

Its arrays mix with each other and with scalars, never with NumPy arrays, and
NumPy's functions do not take them: code that passes finds its functions by the
array's own namespace. It knows only functions that CuPy has.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from tests.devices.fake_fuse import fuse

FUNCTIONS = {
    *(
        "abs",
        "absolute",
        "arange",
        "argsort",
        "asarray",
        "clip",
        "concatenate",
        "copysign",
        "copyto",
        "divide",
        "dot",
        "empty",
    ),
    *("empty_like", "exp", "flatnonzero", "floor", "full", "greater_equal", "isfinite", "log"),
    *("maximum", "minimum"),
    *("multiply", "negative", "ones", "right_shift", "sqrt", "square", "stack", "subtract"),
    *("take", "tanh"),
    *("unique", "where", "zeros", "zeros_like"),
}
TYPES = {"float32", "float64", "uint64"}
BINARY = ["add", "sub", "mul", "truediv", "matmul", "rshift", "xor", "and", "or"]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]
REFLECTED = ["radd", "rsub", "rmul", "rtruediv"]


def host(value: Any) -> Any:
    """Return what NumPy may work on; raise on a NumPy array, as CuPy does."""
    if isinstance(value, FakeArray):
        return value.on_host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(host(item) for item in value)
    return value


def device(value: Any) -> Any:
    """Return NumPy's result as CuPy would: also a single number stays on the device."""
    if isinstance(value, np.ndarray | np.generic):
        return FakeArray(np.asarray(value))
    return tuple(map(device, value)) if type(value) is tuple else value


def lifted(function: Any) -> Any:
    """Let a function of NumPy work on fake arrays."""

    def call(*args: Any, **options: Any) -> Any:
        result = function(*host(args), **{name: host(value) for name, value in options.items()})
        out = options.get("out")
        return device(result) if out is None else out

    return call


class FakeArray:
    """An array "on the device"."""

    __array_ufunc__ = None  # NumPy's functions and operators give way
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, on_host: np.ndarray) -> None:
        self.on_host = on_host

    def __array__(self, *args: object, **options: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.on_host.shape

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "flags", "ndim", "size"):
            return getattr(self.on_host, name)
        if name.startswith("__"):  # such as __array_interface__, which would let NumPy in
            raise AttributeError(name)
        found = getattr(self.on_host, name)
        return lifted(found) if callable(found) else device(found)

    def __getitem__(self, place: Any) -> FakeArray:
        return FakeArray(np.asarray(self.on_host[host(place)]))

    def __setitem__(self, place: Any, value: Any) -> None:
        self.on_host[host(place)] = host(value)

    def __bool__(self) -> bool:
        return bool(self.on_host)

    def __invert__(self) -> FakeArray:
        return FakeArray(~self.on_host)

    def __iter__(self) -> Iterator[FakeArray]:
        return map(FakeArray, self.on_host)

    def __int__(self) -> int:
        return int(self.on_host)

    def __float__(self) -> float:
        return float(self.on_host)


def _operator(name: str) -> Any:
    def apply(self: FakeArray, other: Any) -> Any:
        return device(getattr(self.on_host, name)(host(other)))

    return apply


def _in_place(name: str) -> Any:
    def apply(self: FakeArray, other: Any) -> FakeArray:
        getattr(self.on_host, name)(host(other))
        return self

    return apply


for _name in (*BINARY, *COMPARISONS, *REFLECTED):
    setattr(FakeArray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in BINARY:
    setattr(FakeArray, f"__i{_name}__", _in_place(f"__i{_name}__"))


class _Add:
    """`cupy.add`, and its scattered form."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return lifted(np.add)(*args, **options)

    @staticmethod
    def at(target: FakeArray, place: FakeArray, value: FakeArray) -> None:
        np.add.at(host(target), host(place), host(value))


class FakeCupy(ModuleType):
    """The module, to stand in `sys.modules` as "cupy"."""

    ndarray = FakeArray
    add = _Add()

    def __init__(self) -> None:
        super().__init__("cupy")

    def __getattr__(self, name: str) -> Any:
        if name in TYPES:
            return getattr(np, name)
        if name in FUNCTIONS:
            return lifted(getattr(np, name))
        raise AttributeError(f"the fake CuPy has no {name}")

    fuse = staticmethod(fuse)

    @staticmethod
    def asarray(values: Any) -> FakeArray:
        return values if isinstance(values, FakeArray) else FakeArray(np.array(values))

    @staticmethod
    def asnumpy(values: FakeArray) -> np.ndarray:
        return values.on_host.copy()
