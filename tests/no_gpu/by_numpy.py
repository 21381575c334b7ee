"""NumPy does the work of kernels without a GPU, after CuPy has been asked.

Every function and operator of CuPy is called first, so it checks its arguments, chooses its kernel
and makes its result; its kernel does nothing. Then NumPy does the same on the same memory, which is
host memory (`driver.py`). So each call shows, too, where CuPy's result has another dtype or shape
than NumPy's: that is an error. Functions that would ask a device while they run, or a library that
needs one, are NumPy's alone.
"""

from __future__ import annotations

import ctypes
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Numbers"]

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_METHODS = (
    *(f"__{name}__" for name in _OPERATORS),
    *(f"__r{name}__" for name in _OPERATORS),
    *(f"__i{name}__" for name in _OPERATORS if name != "matmul"),
    *(f"__{name}__" for name in ("neg", "pos", "invert", "abs", "lt", "le", "gt", "ge", "eq")),
    *("__ne__", "__getitem__", "__setitem__", "sum", "min", "max", "mean", "any", "all", "prod"),
    *("argmax", "argmin", "cumsum", "astype", "copy", "fill", "reshape", "ravel", "transpose"),
    *("take", "dot", "clip", "repeat", "argsort", "sort", "round", "swapaxes", "flatten"),
)
_VIEWS: tuple[str, ...] = (
    "__getitem__",
    "reshape",
    "ravel",
    "transpose",
    "swapaxes",
    "astype",
    "broadcast_to",
)
_VIEWS += ("ascontiguousarray", "squeeze", "expand_dims", "moveaxis", "split", "array_split")
_ALONE = {
    *("unique", "flatnonzero", "nonzero", "matmul", "__matmul__", "__rmatmul__", "dot", "argsort"),
    *("sort", "lexsort", "einsum", "tensordot", "array_equal"),
}
"""These ask the device how large their result is, or use a library that does not start here."""

_AS_THEY_ARE = {
    *("asnumpy", "asarray", "array", "empty", "empty_like", "dtype", "may_share_memory", "ndim"),
    *("shares_memory", "isscalar", "can_cast", "result_type", "promote_types", "finfo", "iinfo"),
    *("shape", "size", "broadcast_shapes", "issubdtype", "common_type", "min_scalar_type", "load"),
}
_OPTIONS = ("at", "reduce", "reduceat", "outer", "accumulate")


class Numbers:
    """Makes all functions of CuPy give NumPy's numbers.

    Args:
        cupy: The module, whose functions are replaced.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._array: Any = cupy.ndarray
        self._inside = threading.local()
        for name in _METHODS:
            self._take_method(name)
        for name in dir(np):
            real, own = getattr(cupy, name, None), getattr(np, name)
            plain = name.startswith("_") or name in _AS_THEY_ARE or isinstance(own, type)
            if not plain and callable(real) and callable(own):
                setattr(cupy, name, self._both(name, real, own))
        for name in ("array", "asarray"):
            setattr(cupy, name, self._made(getattr(cupy, name)))
        self._take_reads()
        self._take_fuse()
        self._take_erf()

    def host(self, value: Any) -> Any:
        """Return `value` with NumPy's view of its memory in the place of each array of CuPy."""
        if isinstance(value, self._array):
            return self._view(value)
        if isinstance(value, tuple | list):
            return type(value)(self.host(one) for one in value)
        if isinstance(value, dict):
            return {key: self.host(one) for key, one in value.items()}
        return value

    def _view(self, x: Any) -> Any:
        if x.size == 0:
            return np.empty(x.shape, x.dtype)
        steps = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
        low = sum(step for step in steps if step < 0)
        size = sum(abs(step) for step in steps) + x.itemsize
        raw = (ctypes.c_uint8 * size).from_address(x.data.ptr + low)
        return np.ndarray(x.shape, x.dtype, raw, -low, x.strides)

    def _arrays(self, value: Any) -> list[Any]:
        if isinstance(value, self._array):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, tuple | list):
            return [found for one in value for found in self._arrays(one)]
        return []

    # -- one function ------------------------------------------------------------------------

    def _both(self, name: str, real: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if getattr(self._inside, "deep", False):
                return real(*args, **options)
            self._inside.deep = True
            try:
                if name in _ALONE or (name == "__getitem__" and self._is_mask(args[1])):
                    return self._alone(name, own, args, options)
                return self._after(name, real, own, args, options)
            finally:
                self._inside.deep = False

        for option in _OPTIONS:
            if hasattr(real, option) and hasattr(own, option):
                both = self._both(f"{name}.{option}", getattr(real, option), getattr(own, option))
                setattr(call, option, both)
        return call

    def _after(self, name: str, real: Any, own: Any, args: Any, options: Any) -> Any:
        given = self._arrays([args, options])
        # CuPy copies some things without a kernel: they must not be done twice.
        before = [(x, x.copy()) for x in map(self._view, given)]
        result = real(*args, **options)
        if result is NotImplemented:
            return result
        for view, kept in before:
            view[...] = kept
        with np.errstate(all="ignore"):
            expected = own(*self.host(args), **self.host(options))
        if expected is not None:
            self._fill(name, result, expected, given)
        return result

    def _fill(self, name: str, result: Any, expected: Any, given: list[Any]) -> None:
        if isinstance(result, tuple | list):
            for one, right in zip(result, expected, strict=True):
                self._fill(name, one, right, given)
            return
        if not isinstance(result, self._array) or any(result is one for one in given):
            return
        expected = np.asarray(expected)
        got, right = (result.dtype, result.shape), (expected.dtype, expected.shape)
        kinds = [(one.dtype, one.shape) for one in given]
        assert got == right, f"{name} of {kinds} gives {got} in CuPy, {right} in NumPy"
        if name in _VIEWS and any(self._shares(result, one) for one in given):
            return
        with np.errstate(all="ignore"):
            self._view(result)[...] = expected

    def _shares_any(self, made: Any, values: Any) -> bool:
        return isinstance(values, self._array) and self._shares(made, values)

    @staticmethod
    def _shares(result: Any, one: Any) -> bool:
        return bool(result.size and result.data.mem is one.data.mem)

    def _alone(self, name: str, own: Any, args: Any, options: Any) -> Any:
        for one in args:
            if isinstance(one, np.ndarray) and one.ndim:
                raise TypeError(f"{name}: Unsupported type {type(one)}")
        with np.errstate(all="ignore"):
            found = own(*self.host(args), **self.host(options))
        return options["out"] if options.get("out") is not None else self._lifted(found)

    def _lifted(self, found: Any) -> Any:
        if isinstance(found, tuple):
            parts = [self._lifted(one) for one in found]
            return type(found)._make(parts) if hasattr(found, "_make") else tuple(parts)
        return self._cupy.asarray(found) if isinstance(found, np.ndarray | np.generic) else found

    def _is_mask(self, place: Any) -> bool:
        return any(one.dtype == bool and one.ndim for one in self._arrays([place]))

    # -- what needs more ---------------------------------------------------------------------

    def _take_method(self, name: str) -> None:
        real, own = getattr(self._array, name, None), getattr(np.ndarray, name, None)
        if name == "astype":  # whose options differ

            def own(x: Any, dtype: Any, **_: Any) -> Any:
                return x.astype(dtype)

        if real is None or own is None:
            return
        both = self._both(name, real, own)

        def method(array: Any, *args: Any, **options: Any) -> Any:
            return both(array, *args, **options)

        setattr(self._array, name, method)

    def _take_reads(self) -> None:
        """Let arrays be read that do not lie in one piece: CuPy copies them by a kernel first."""
        real = self._array.get

        def get(x: Any, *args: Any, **options: Any) -> Any:
            if x.flags.c_contiguous:
                return real(x, *args, **options)
            out = options.get("out")
            if out is None:
                return np.array(self._view(x))
            np.copyto(out, self._view(x))
            return out

        self._array.get = get
        self._cupy.asnumpy = lambda x: get(x) if isinstance(x, self._array) else np.asarray(x)

    def _made(self, real: Any) -> Callable[..., Any]:
        def call(values: Any, *args: Any, **options: Any) -> Any:
            made = real(values, *args, **options)
            if made is not values and not self._shares_any(made, values):
                self._view(made)[...] = np.asarray(self.host(values))
            return made

        return call

    def _take_fuse(self) -> None:
        real = self._cupy.fuse

        def fuse(*args: Any, **options: Any) -> Any:
            made = real(*args, **options)
            if args and callable(args[0]):
                return self._both("fuse", made, _on_host(args[0]))
            return lambda formula: self._both("fuse", made(formula), _on_host(formula))

        self._cupy.fuse = fuse

    def _take_erf(self) -> None:
        import cupyx.scipy.special as special

        def erf(x: Any) -> Any:
            return np.array([math.erf(one) for one in x.ravel()], x.dtype).reshape(x.shape)

        special.erf = self._both("erf", special.erf, erf)


def _on_host(formula: Any) -> Any:
    """Return a formula of `xp` with NumPy for `xp`."""
    names, cells = formula.__code__.co_freevars, formula.__closure__ or ()
    cells = tuple(
        types.CellType(np) if name == "xp" else cell
        for name, cell in zip(names, cells, strict=True)
    )
    return types.FunctionType(formula.__code__, formula.__globals__, "formula", None, cells)
