"""Layers that make one array of several, or one vector of a sequence's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpimesh.arrays.namespace import namespace
from mpimesh.arrays.types import Array, DType
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn.checks import check_sequence, parted, sum_dtype
from mpimesh.nn.context import Context
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import is_float_dtype

__all__ = ["Add", "Concat", "MeanPool"]


class _Merge(Module):
    """The base of both: the arrays are of one float dtype, or become so, and have no gradient."""

    def forward(self, x: tuple[Array, ...], ctx: Context | None = None) -> Array:
        """Return the arrays as one."""
        if not isinstance(x, tuple) or not x or not all(hasattr(one, "shape") for one in x):
            raise ModuleError(f"{self!r}: x must be a tuple of arrays, got {_kinds(x)}")
        floats = sorted({str(one.dtype) for one in x if _is_float(one)})
        if len(floats) != 1:
            raise DTypeError(
                f"{self!r}: the arrays must be of one float dtype, beside integers and booleans, "
                f"got {', '.join(str(one.dtype) for one in x)}"
            )
        dtype: DType = next(one.dtype for one in x if _is_float(one))
        y = self._merged(tuple(one.astype(dtype, copy=False) for one in x))
        return self._save(ctx, y, [(_is_float(one), tuple(one.shape)) for one in x])

    def backward_input(self, dy: Array, ctx: Context) -> tuple[Array | None, ...]:
        """Return each array's gradient; None for integers and booleans."""
        (kept,) = self._take(dy, ctx)
        parts = self._split(dy, [shape for _, shape in kept])
        return tuple(
            part if floating else None for part, (floating, _) in zip(parts, kept, strict=True)
        )

    @abstractmethod
    def _merged(self, x: tuple[Array, ...]) -> Array: ...

    @abstractmethod
    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]: ...


class Concat(_Merge):
    """The arrays of a tuple one after the other along an axis.

    Shapes:
        x[i]: (rows, ...), the same but along `axis`. Integers and booleans take the dtype of
            the others, which are floats of one dtype.
        result: (rows, ...).

    Args:
        axis: The axis; not 0, that of the rows.

    Raises:
        ModuleError: If `axis` is 0 or no whole number.

    Example:
        >>> y = nn.Concat()((np.ones((2, 3)), np.zeros((2, 1))))
        >>> y.shape
        (2, 4)
    """

    def __init__(self, axis: int = -1) -> None:
        if not isinstance(axis, int) or axis == 0:
            raise ModuleError(f"axis must be a whole number other than 0, the rows, got {axis!r}")
        self.axis = axis

    def _merged(self, x: tuple[Array, ...]) -> Array:
        shapes = [tuple(one.shape) for one in x]
        ndim = len(shapes[0])
        if not -ndim < self.axis < ndim:
            raise ShapeError(f"{self!r}: the arrays need that axis after the rows, got {shapes}")
        place = self.axis % ndim
        if len({(len(shape), shape[:place], shape[place + 1 :]) for shape in shapes}) > 1:
            raise ShapeError(f"{self!r}: the arrays may differ along that axis only, got {shapes}")
        return namespace(x[0]).concatenate(x, axis=place)

    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
        ends: list[int] = []
        for shape in shapes[:-1]:
            ends.append((ends[-1] if ends else 0) + shape[self.axis])
        parts: list[Array] = namespace(dy).split(dy, ends, axis=self.axis)
        return parts

    def __repr__(self) -> str:
        return f"Concat(axis={self.axis})"


class Add(_Merge):
    """The sum of the arrays of a tuple, from first to last.

    Shapes:
        x[i], result: the same; nothing is broadcast. Integers and booleans take the dtype of the
            others, which are floats of one dtype.

    Example:
        >>> nn.Add()((np.ones(2), np.array([1, 2])))
        array([2., 3.])
    """

    def _merged(self, x: tuple[Array, ...]) -> Array:
        shapes = [tuple(one.shape) for one in x]
        if len(set(shapes)) > 1:
            raise ShapeError(f"{self!r}: the arrays must have the same shape, got {shapes}")
        y = x[0].copy()
        for one in x[1:]:
            y += one
        return y

    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
        return [dy] * len(shapes)


class MeanPool(Module):
    """The mean of a sequence's vectors, without those of padding; 0 where there is no token.

    Shapes:
        x: (batch, tokens, features), or that and a mask of shape (batch, tokens), True where
            there is a token, in a tuple.
        result: (batch, features).

    Cost:
        Saves the mask.
    """

    def forward(self, x: Any, ctx: Context | None = None) -> Array:
        """Return the means.

        Raises:
            ShapeError: If `x` has another shape, or the mask does not fit it.
            DTypeError: If `x` is no float array, or the mask not boolean.
            ModuleError: If `x` is a tuple of something else.
        """
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        share = self._share(x.shape, mask, sum_dtype(x.dtype), namespace(x))
        y = (x * share[..., None]).sum(axis=1, dtype=share.dtype).astype(x.dtype, copy=False)
        return self._save(ctx, y, share, mask is not None)

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return to each token its share of `dy`; with a mask, a tuple of that and None."""
        share, masked = self._take(dy, ctx)
        dx = (share[..., None] * dy[:, None]).astype(dy.dtype, copy=False)
        return (dx, None) if masked else dx

    @staticmethod
    def _share(shape: tuple[int, ...], mask: Array | None, wide: Any, xp: Any) -> Array:
        """Return what each token's vector counts in the mean: (batch, tokens)."""
        if mask is None:
            return xp.full(shape[:2], 1.0 / max(shape[1], 1), wide)
        share = mask.astype(wide)
        share /= xp.maximum(share.sum(axis=1, keepdims=True), wide.type(1))
        return share


def _is_float(x: Array) -> bool:
    return is_float_dtype(x.dtype)


def _kinds(x: Any) -> str:
    """Return what was given instead of a tuple of arrays."""
    if not isinstance(x, tuple):
        return type(x).__name__
    return f"({', '.join(type(one).__name__ for one in x)})"
