"""Variances, averages, quantiles, covariances, and reductions that skip NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.dtensor.contract import matmul
from mpimesh.dtensor.dispatch import implements, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor, common_mesh
from mpimesh.dtensor.elementwise import call, plain
from mpimesh.dtensor.joining import concatenate
from mpimesh.dtensor.reduce import (
    count,
    mean,
    reduce,
    reduce_blocks,
    reduced_axes,
    strict_axes,
)
from mpimesh.dtensor.reshape import atleast_2d, permuted, squeeze
from mpimesh.dtensor.run import (
    Work,
    as_tensor,
    axes_of,
    implements_by_name,
    plain_values,
    reduced_anywhere,
    shape_of,
)
from mpimesh.errors import DTypeError, ShapeError

__all__: list[str] = []


@implements_by_name(np.var)
def var(
    a: DTensor,
    axis: Any = None,
    dtype: Any = None,
    ddof: float = 0,
    keepdims: bool = False,
    *,
    where: Any = True,
    mean: Any = None,
    correction: Any = None,
) -> DTensor:
    """Return the variance: the mean first, then the sum of squared distances from it.

    Two passes, as NumPy does it and as is sound however large the mean is: Chan, Golub and LeVeque,
    "Algorithms for computing the sample variance", The American Statistician 37 (1983). The parts
    of a split axis differ by nothing then, for all have the mean of the whole.

    Cost:
        The mean is put together on all ranks, which moves as many bytes as it has; the result
        waits as `Partial`.
    """
    if correction is not None and ddof != 0:
        raise ShapeError.everywhere(f"give ddof or correction, not both: {ddof} and {correction}")
    x = reduced_anywhere(a)
    axes = strict_axes(axis, x.ndim, where)
    short = dtype is None and x.dtype == np.float16
    acc = np.float32 if short else dtype
    if acc is None and x.dtype.kind in "biu":
        acc = np.float64
    middle = _mean(x, axes, acc, True, where=where) if mean is None else mean
    masks = [] if where is True else [plain(where)]
    # As NumPy has it, only the sum is in the dtype that is asked for.
    middle = plain(middle)
    tried_with = np.empty(0, middle.dtype) if hasattr(middle, "dtype") else middle
    tried = _squares(np.empty(0, x.dtype), tried_with)
    kind = np.asarray(np.add.reduce(tried, dtype=acc)).dtype

    def work(here: Work) -> None:
        apart = _squares(here.blocks[0], here.blocks[1])
        mask = here.blocks[2] if masks else True
        np.add.reduce(apart, axis=axes, dtype=acc, keepdims=keepdims, where=mask, out=here.out[0])

    operands = [x, middle, *masks]
    total = reduce_blocks(
        work, operands, axes, "sum", kind, keepdims=keepdims, into=True, refuses=False
    )
    rest = ddof if correction is None else correction
    many = count(x, axes, keepdims, where)
    many = max(many - rest, 0) if isinstance(many, int) else np.maximum(many - rest, 0)
    made: DTensor = call(np.divide, (total, many))
    wanted = np.dtype(np.float16) if short else kind
    if made.dtype != wanted:
        made = call(np.positive, (made,), dtype=wanted, casting="unsafe")
    return made


def _squares(values: Any, middle: Any) -> Any:
    """Return the squares of distances, in the dtype that NumPy's variance has for them."""
    apart = np.asarray(np.subtract(values, middle))
    if values.dtype.kind in "iuf":
        return np.multiply(apart, apart, out=apart)
    if apart.dtype.kind == "c":
        return apart.real**2 + apart.imag**2
    return np.square(apart)


_mean = mean  # which an argument of var is called, too


@implements_by_name(np.std)
def std(a: DTensor, **options: Any) -> DTensor:
    """Return the standard deviation; see :func:`var`."""
    square = var(a, **options)
    # NumPy writes roots over the squares, which refuses a dtype that cannot hold them.
    made: DTensor = call(np.sqrt, (square,), out=square if square.ndim else None)
    if made.dtype != square.dtype:
        made = call(np.positive, (made,), dtype=square.dtype, casting="unsafe")
    return made


@implements_by_name(np.average)
def average(
    a: DTensor,
    axis: Any = None,
    weights: Any = None,
    returned: bool = False,
    *,
    keepdims: bool = False,
) -> Any:
    """Return the weighted mean.

    Raises:
        ShapeError: If the weights have neither the shape of `a` nor that of its axes `axis`.
        ZeroDivisionError: On every rank, if weights add up to nothing; without weights, if the
            result has no elements.
    """
    axes = strict_axes(axis, len(shape_of(a)), lists=True)
    if weights is None:
        made = mean(a, axes, keepdims=keepdims)
        if not made.size:
            raise ZeroDivisionError(f"np.average of shape {a.shape} over {axes} has no elements")
        total: Any = count(a, axes, keepdims, True)
        total = sure_rule_of(np.full_like)(made, total)
        return (made, total) if returned else made
    w = plain(weights)
    if shape_of(w) != shape_of(a):
        given = axes if axis is None else axes_of(axis, a.ndim)
        if axis is None or shape_of(w) != tuple(a.shape[one] for one in given):
            raise ShapeError.everywhere(
                f"weights of shape {shape_of(w)} fit neither the shape {shape_of(a)} nor "
                f"the axes of it that are named by axis={axis}"
            )
        w = _along(w, given, a.ndim)
    kind = np.result_type(a.dtype, w.dtype, *(["f8"] if a.dtype.kind in "biu" else []))
    weighted = call(np.multiply, (a, w), dtype=kind)
    ones = call(np.multiply, (sure_rule_of(np.ones_like)(a, dtype=w.dtype), w))
    total = reduced_anywhere(reduce(np.add, ones, axes, kind, keepdims=keepdims))
    if shape_of(w) == shape_of(a):
        is_zero = reduce(np.logical_or, call(np.equal, (total, 0)), None)
    else:
        is_zero = w.sum(dtype=kind) == 0  # for an array without elements, too
    if bool(is_zero):
        raise ZeroDivisionError("the weights of an average add up to zero")
    made = call(np.divide, (reduce(np.add, weighted, axes, keepdims=keepdims), total))
    return (made, total) if returned else made


def _along(w: Any, axes: Sequence[int], ndim: int) -> Any:
    """Return the axes of weights as those axes of an array of `ndim` axes, on all ranks."""
    whole = plain_values(w) if isinstance(w, DTensor) else w
    turned = whole.transpose(np.argsort(axes))
    return np.expand_dims(turned, [axis for axis in range(ndim) if axis not in axes])


# -- quantiles: of axes that are brought whole --------------------------------------------


def _quantile(function: Callable[..., Any]) -> None:
    @implements_by_name(function)
    def do(
        a: DTensor,
        q: Any,
        axis: Any = None,
        method: str = "linear",
        keepdims: bool = False,
        weights: Any = None,
        overwrite_input: bool = False,
    ) -> DTensor:
        levels = plain_values(q)
        options: dict[str, Any] = {"method": method, "keepdims": keepdims}
        if not a.size and (weights is None or function in (np.nanquantile, np.nanpercentile)):
            # NumPy's answer to no elements at all is an error, or of another shape.
            none = function(np.empty(a.shape, a.dtype), levels, axis=axis, **options)
            return as_tensor(none, a.mesh)
        probe = np.ones((1,) * a.ndim, a.dtype)
        kind = np.asarray(function(probe, levels, method=method)).dtype
        axes = strict_axes(axis, a.ndim, lists=True)
        operands, axis_weights = [a], None
        if weights is not None:
            weights = plain(weights if isinstance(weights, DTensor) else np.asarray(weights))
            one = np.ones((1,) * len(shape_of(weights)), weights.dtype)
            function(probe, levels, axis=axes, weights=one, method=method)
            if shape_of(weights) == a.shape:
                operands.append(weights)
                if bool(np.any(np.less(weights, 0))):  # on one rank, perhaps
                    raise ShapeError.everywhere("weights of quantiles are not negative")
            elif shape_of(weights) == tuple(a.shape[axis] for axis in axes):
                axis_weights = plain_values(weights)
            else:
                raise ShapeError.everywhere(
                    f"weights of shape {shape_of(weights)} fit neither the shape {a.shape} nor "
                    f"axes {axes} of it"
                )

        def work(here: Work) -> Any:
            weight = here.blocks[1] if len(here.blocks) > 1 else axis_weights
            return function(here.blocks[0], levels, axis=axes, weights=weight, **options)

        lead = np.shape(levels)
        return reduce_blocks(work, operands, axes, "", kind, keepdims=keepdims, lead=lead)


def _median(function: Callable[..., Any]) -> None:
    @implements_by_name(function)
    def do(
        a: DTensor, axis: Any = None, overwrite_input: bool = False, keepdims: bool = False
    ) -> DTensor:
        axes = strict_axes(axis, a.ndim, lists=True)
        kind = np.asarray(function(np.ones(1, a.dtype))).dtype

        def work(here: Work) -> Any:
            return function(here.blocks[0], axis=axes, keepdims=keepdims)

        return reduce_blocks(work, [a], axes, "", kind, keepdims=keepdims)


for _function in (np.quantile, np.percentile, np.nanquantile, np.nanpercentile):
    _quantile(_function)
for _middle in (np.median, np.nanmedian):
    _median(_middle)


# -- what passes NaN over --------------------------------------------------------------------


def _numbers(a: DTensor, where: Any) -> Any:
    """Return where `a` is no NaN, and where the caller says so."""
    if a.dtype.kind not in "fc":
        return where
    found = call(np.equal, (a, a))
    return found if where is True else call(np.logical_and, (found, where))


def _passing_over(function: Callable[..., Any], plainly: Callable[..., Any]) -> None:
    @implements_by_name(function)
    def do(
        a: DTensor, axis: Any = None, dtype: Any = None, where: Any = True, **options: Any
    ) -> DTensor:
        _refuse_whole_numbers(function, a, dtype)
        if plainly is np.mean and a.dtype.kind in "fc":
            axis = reduced_axes(axis, a.ndim)
        if where is True and options.get("initial", 0) is None:
            del options["initial"]  # NumPy's has no mask then, which would need one
        x = reduced_anywhere(a)
        found: DTensor = plainly(x, axis, dtype, where=_numbers(x, where), **options)
        return found


def _refuse_whole_numbers(function: Callable[..., Any], a: DTensor, dtype: Any) -> None:
    divides = function not in (np.nansum, np.nanprod)
    if divides and a.dtype.kind in "fc" and dtype is not None and np.dtype(dtype).kind not in "fc":
        raise DTypeError.everywhere(f"np.{function.__name__} of {a.dtype} is not of {dtype}")


def _nan_spread(function: Callable[..., Any], plainly: Callable[..., Any]) -> None:
    """Register a variance that passes NaN over, and is NaN of fewer elements than it takes."""

    @implements_by_name(function)
    def do(
        a: DTensor,
        axis: Any = None,
        dtype: Any = None,
        ddof: float = 0,
        keepdims: bool = False,
        *,
        where: Any = True,
        correction: Any = None,
        **options: Any,
    ) -> DTensor:
        _refuse_whole_numbers(function, a, dtype)
        x = reduced_anywhere(a)
        numbers = _numbers(x, where)
        rest = ddof if correction is None else correction
        options |= {"ddof": rest, "keepdims": keepdims, "where": numbers}
        if x.dtype.kind not in "fc":
            found: DTensor = plainly(x, axis, dtype, **options)
            return found
        axes = reduced_axes(axis, x.ndim)
        found = plainly(x, axes, dtype, **options)
        enough = call(np.greater, (count(x, axes, keepdims, numbers), rest))
        found = sure_rule_of(np.where)(enough, found, found.dtype.type(np.nan))
        return found


def _nan_best(function: Callable[..., Any], ufunc: np.ufunc, worst: float) -> None:
    @implements_by_name(function)
    def do(
        a: DTensor,
        axis: Any = None,
        keepdims: bool = False,
        initial: Any = np._NoValue,
        where: Any = True,
    ) -> DTensor:
        x = reduced_anywhere(a)
        if x.dtype.kind in "cmM":  # the larger of these is no reduction of MPI
            passing = np.fmin if ufunc is np.minimum else np.fmax
            return reduce(passing, x, axis, None, keepdims, initial, where)
        if x.dtype.kind != "f":
            return reduce(ufunc, x, axis, None, keepdims, initial, where)
        if where is not True and initial in (None, np._NoValue):
            raise ShapeError.everywhere(f"np.{function.__name__} with where= takes initial=")
        initial = np._NoValue if initial is None else initial
        if initial is np._NoValue and any(x.shape[one] == 0 for one in reduced_axes(axis, x.ndim)):
            raise ShapeError.everywhere(
                f"np.{function.__name__} of no elements: shape {x.shape}, axis {axis}"
            )
        mask = _numbers(x, where)
        begin = worst if initial is np._NoValue else initial
        best = reduce(ufunc, x, axis, None, keepdims, begin, mask)
        if initial is np._NoValue:
            # Where there is nothing but NaN, that is the result.
            some = reduce(np.logical_or, mask, axis, keepdims=keepdims)
            best = sure_rule_of(np.where)(some, best, x.dtype.type(np.nan))
        return best


_passing_over(np.nansum, np.sum)
_passing_over(np.nanprod, np.prod)
_passing_over(np.nanmean, np.mean)
_nan_spread(np.nanvar, np.var)
_nan_spread(np.nanstd, np.std)
_nan_best(np.nanmin, np.minimum, np.inf)
_nan_best(np.nanmax, np.maximum, -np.inf)


@implements(np.cov)
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: Any = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    """Return the covariances of variables, one in each row.

    Each rank works on the observations that it has; the products wait to be summed.
    """
    mesh = common_mesh([m, y, fweights, aweights])
    rows = [as_tensor(one, mesh) for one in (m, y) if one is not None]
    if any(one.ndim > 2 for one in rows):
        raise ShapeError.everywhere(
            f"np.cov takes at most two axes, got {[one.shape for one in rows]}"
        )
    kind = np.result_type(np.float64 if dtype is None else dtype, *[one.dtype for one in rows])
    if dtype is not None:
        kind = np.dtype(dtype)
    # As NumPy has it, a second array of one row stays as it is.
    flags = [rowvar or one.ndim < 2 or (n == 1 and one.shape[0] == 1) for n, one in enumerate(rows)]
    table = [
        atleast_2d(one) if flag else permuted(atleast_2d(one), (1, 0))
        for one, flag in zip(rows, flags, strict=True)
    ]
    x: Any = concatenate([one.astype(kind, copy=False) for one in table], 0)
    if not x.shape[0]:
        return as_tensor(np.empty((0, 0)), mesh)
    weights = _weights(mesh, x.shape[1], fweights, aweights)
    mean, total = average(x, axis=1, weights=weights, returned=True)
    # All variables have the same weights, so one sum says it.
    summed = float(np.real(total[0])) if x.shape[0] else float(x.shape[1])
    delta = (1 - bool(bias)) if ddof is None else ddof
    if weights is None or delta == 0 or aweights is None:
        count = summed - delta
    else:
        again = np.sum(weights * as_tensor(aweights, mesh))
        count = summed - delta * float(again) / summed
    apart = x - np.expand_dims(mean, 1)
    scaled = apart if weights is None else apart * weights
    turned = permuted(scaled, (1, 0))
    found = matmul(apart, turned.conj() if kind.kind == "c" else turned) / max(count, 0.0)
    return squeeze(found)


def _weights(mesh: Any, count: int, fweights: Any, aweights: Any) -> Any:
    rows = [as_tensor(one, mesh) for one in (fweights, aweights) if one is not None]
    for one in rows:
        if one.shape != (count,):
            raise ShapeError.everywhere(f"weights of shape {one.shape} for {count} observations")
        if bool(np.any(np.less(one, 0))):
            raise ShapeError.everywhere("weights of observations are not negative")
    if fweights is not None and rows[0].dtype.kind not in "biu":
        raise TypeError("fweights are whole numbers")
    if not rows:
        return None
    return rows[0] if len(rows) == 1 else rows[0] * rows[1]


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> Any:
    """Return the correlations of variables, one in each row."""
    table: Any = cov(x, y, rowvar, dtype=dtype)
    if table.ndim == 0:
        return table / table
    size: Any = np.sqrt(np.real(np.diagonal(table)))
    found: Any = table / np.expand_dims(size, 1) / np.expand_dims(size, 0)
    if found.dtype.kind != "c":
        return np.clip(found, -1, 1)
    return np.clip(np.real(found), -1, 1) + 1j * np.clip(np.imag(found), -1, 1)
