"""Arrays of every dtype and memory order, with values that any rank can work out for any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import ml_dtypes
except ImportError:  # as on a bare machine with a GPU
    _OF_ML_DTYPES: list[np.dtype[Any]] = []
else:
    _OF_ML_DTYPES = [
        np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)
    ]

_NESTED = np.dtype([("a", "<i4"), ("b", [("c", ">f8"), ("d", "S3", (2,))])])
_PADDED = np.dtype([("flag", "?"), ("value", "f8"), ("small", "i2")], align=True)

FLOATS = [np.dtype(kind) for kind in ("f4", "f8", "g", ">f4", ">f8")]
HALVES = [np.dtype("f2"), np.dtype(">f2"), *_OF_ML_DTYPES[:2]]
COMPLEX = [np.dtype(kind) for kind in ("F", "D", "G", ">c8")]
INTEGERS = [np.dtype(kind) for kind in "bhilqBHILQ"] + [np.dtype(">i4"), np.dtype(">u2")]
OTHERS = [
    *(np.dtype(kind) for kind in ("?", "M8[ns]", "m8[D]", ">M8[s]", "S5", "U4", ">U3", "V7")),
    *(_NESTED, _PADDED, *_OF_ML_DTYPES[2:]),
]
NUMBERS = [*FLOATS, *HALVES, *COMPLEX, *INTEGERS]
ALL = [*NUMBERS, *OTHERS]


def values(rank: int, shape: Any, dtype: Any, seed: int = 0) -> Any:
    """Return an array that depends only on the arguments: small whole numbers where it has any."""
    dtype = np.dtype(dtype)
    shape = tuple(shape)
    if dtype.names is not None:
        whole = np.zeros(shape, dtype)
        for place, name in enumerate(dtype.names):
            base, extra = dtype[name].subdtype or (dtype[name], ())
            whole[name] = values(rank, (*shape, *extra), base, seed + 1 + place)
        return whole
    rng = np.random.default_rng([rank, seed, *shape])
    numbers = rng.integers(1, 4, size=shape)
    if dtype.kind == "b":
        return np.asarray(numbers > 1)
    if dtype.kind == "V" and dtype.type is np.void:
        raw = rng.integers(0, 256, size=(*shape, dtype.itemsize)).astype(np.uint8)
        return np.ascontiguousarray(raw).view(dtype).reshape(shape)
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.integers(0, 2, size=shape)
    return np.asarray(numbers).astype(dtype)


class Sub(np.ndarray):
    """An array type of somebody else."""


def _sliced(x: Any) -> Any:
    wide = np.zeros([2 * size + 1 for size in x.shape], x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def _unaligned(x: Any) -> Any:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def _read_only(x: Any) -> Any:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": np.array,
    "fortran": lambda x: np.array(x, order="F"),
    "backwards": lambda x: np.flip(np.flip(x).copy()),
    "sliced": _sliced,
    "inner axis first": lambda x: (
        np.moveaxis(np.moveaxis(x, -1, 0).copy(), 0, -1) if x.ndim else x.copy()
    ),
    "read-only": _read_only,
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape) if x.ndim and len(x) else x.copy(),
    "unaligned": _unaligned,
    "subclass": lambda x: x.view(Sub),
    "list": lambda x: x.tolist() if x.dtype in (np.int64, np.float64) else x.copy(),
}

WRITABLE = ("plain", "fortran", "backwards", "sliced", "unaligned")
"""The layouts that an output may have."""


def output(layout: str, shape: Any, dtype: Any) -> Any:
    """Return an array to write into; it holds nothing of the result yet."""
    return LAYOUTS[layout](np.zeros(shape, dtype))


def same(got: Any, expected: Any, what: object = "") -> None:
    """Fail unless `got` is the NumPy array `expected`, in shape, dtype and values; or both None."""
    if expected is None:
        assert got is None, f"{what}: got {got!r} instead of None"
        return
    assert isinstance(got, np.ndarray), f"{what}: got {type(got)}"
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, not {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: got dtype {got.dtype}, not {expected.dtype}"
    # One NaN is as good as another.
    alike = (got == expected) | ((got != got) & (expected != expected)) if got.size else np.True_
    assert np.all(alike), f"{what}: got\n{got}\nnot\n{expected}"
