"""Counts of values, and functions that look each element up in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.dispatch import implements, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor, whole_of
from mpimesh.dtensor.elementwise import blockwise, call, plain, tried
from mpimesh.dtensor.linear import linear_for
from mpimesh.dtensor.reduce import reduce
from mpimesh.dtensor.run import (
    Work,
    as_tensors,
    implements_anew,
    implements_by_name,
    plain_values,
    reduced_anywhere,
    run,
    shape_of,
    whole_key,
)
from mpimesh.errors import DTypeError, NoRuleError, ShapeError
from mpimesh.layout.op_rules import KEEP, Pattern, broadcast_shape, elementwise_pattern

__all__: list[str] = []


@implements(np.histogram)
def histogram(
    a: Any,
    bins: Any = 10,
    range: Any = None,  # noqa: A002
    density: Any = None,
    weights: Any = None,
) -> tuple[DTensor, HostArray]:
    """Count values in bins: each block on its own, and the counts wait to be summed.

    Collective without a `range`, which the smallest and the largest value then give.

    Returns:
        The counts, and the edges of the bins as an ordinary array, the same on all ranks.

    Raises:
        NoRuleError: If `bins` is the name of a rule.
        ShapeError: If weights have another shape.
        DTypeError: If weights are truth values, and `bins` are edges.
    """
    if isinstance(bins, str):
        raise NoRuleError.everywhere(f"give a number of bins or their edges, not a rule: {bins!r}")
    if weights is not None and not isinstance(weights, DTensor):
        weights = np.asarray(weights)
    a, *others = (plain(a), *([] if weights is None else [plain(weights)]))
    if isinstance(a, DTensor):
        a = reduced_anywhere(a)
    if a.dtype == bool:  # differences between its values are needed
        a = a.astype(np.uint8)
    if others and shape_of(others[0]) != shape_of(a):
        raise ShapeError.everywhere(
            f"weights of shape {shape_of(others[0])} for values of shape {shape_of(a)}"
        )
    if others and others[0].dtype == bool and np.ndim(bins):
        raise DTypeError.everywhere(
            "np.histogram between edges adds up weights, and truth values are not added up: "
            "take weights.astype(int)"
        )
    bins = whole_key(bins)
    if range is None and np.ndim(bins) == 0 and 0 not in shape_of(a):
        # NumPy's numbers, which keep the dtype in all that follows.
        range = tuple(whole_of(reduce(one, a, None))[()] for one in (np.minimum, np.maximum))  # noqa: A001
    none = np.empty(0, a.dtype)
    weighing: dict[str, Any] = {"weights": np.empty(0, others[0].dtype)} if others else {}
    counts, edges = np.histogram(none, bins, range, **weighing)
    letters = tuple(np.arange(len(shape_of(a))).tolist())
    # Weights that are truth values say, as NumPy has it, whether any in a bin is true.
    op = "max" if counts.dtype == bool else "sum"
    pattern = Pattern((letters,) * (1 + len(others)), (KEEP,), op)

    def work(here: Work) -> Any:
        one = {"weights": here.blocks[1]} if others else {}
        return np.histogram(here.blocks[0], edges if np.ndim(bins) else bins, range, **one)[0]

    (made,) = run(work, [a, *others], pattern, counts.shape, [counts.dtype], refuses=False)
    if density:
        total = reduce(np.add, made)
        made = call(np.divide, (call(np.divide, (made, np.diff(edges).astype(float))), total))
    return made, edges


@implements(np.histogram_bin_edges)
def histogram_bin_edges(
    a: Any,
    bins: Any = 10,
    range: Any = None,  # noqa: A002
    weights: Any = None,
) -> HostArray:
    """Return the edges of the bins of :func:`histogram`, an ordinary array, on all ranks."""
    return histogram(a, bins, range, None, weights)[1]


@implements(np.histogramdd)
def histogramdd(
    sample: Any,
    bins: Any = 10,
    range: Any = None,  # noqa: A002
    density: Any = None,
    weights: Any = None,
) -> tuple[DTensor, list[HostArray]]:
    """Count points in boxes: each block on its own, and the counts wait to be summed.

    Collective where a `range` is missing, which the smallest and the largest value then give.

    Args:
        sample: A point in each row, or the list of their coordinates.
        bins: How many bins, or their edges, for all axes or for each.
        range: Where the bins of each axis begin and end, or None.
        density: Whether counts are divided by the volumes of the bins.
        weights: What each point counts.

    Returns:
        The counts, and the edges of each axis, ordinary arrays, the same on all ranks.
    """
    columns = list(sample) if isinstance(sample, list | tuple) else None
    points = sure_rule_of(np.stack)(columns, axis=-1) if columns else plain(sample)
    if len(points.shape) != 2:
        points = sure_rule_of(np.expand_dims)(points, -1)
    points = reduced_anywhere(points) if isinstance(points, DTensor) else points
    count, axes = points.shape
    each = list(bins) if hasattr(bins, "__len__") else [bins] * axes
    if len(each) != axes:
        raise ShapeError.everywhere(f"{len(each)} rows of bins do not fit {axes} axes")
    known = [[*row] if row is not None else None for row in (range or [None] * axes)]
    edges = [
        _edges(points[:, axis], one, limits)
        for axis, (one, limits) in enumerate(zip(each, known, strict=True))
    ]
    others = [] if weights is None else [plain(weights)]
    if others and shape_of(others[0]) != (count,):
        raise ShapeError.everywhere(f"weights of shape {shape_of(others[0])} for {count} points")
    _check_weights(others)
    pattern = Pattern(((0, KEEP), *((0,) for _ in others)), (KEEP,) * axes, "sum")

    def work(here: Work) -> Any:
        return np.histogramdd(here.blocks[0], edges, None, None, *here.blocks[1:])[0]

    (made,) = run(
        work, [points, *others], pattern, [len(e) - 1 for e in edges], [float], refuses=False
    )
    if density:
        total = reduce(np.add, made, None)
        for axis, one in enumerate(edges):
            shape = [1] * axes
            shape[axis] = -1
            made = call(np.divide, (made, np.diff(one).reshape(shape)))
        made = call(np.divide, (made, total))
    return made, edges


def _check_weights(weights: Sequence[Any]) -> None:
    """Raise NumPy's error of weights that it cannot add up, on ranks that have none, too."""
    for one in weights:
        np.bincount([0], np.ones(1, one.dtype))


def _edges(column: Any, bins: Any, limits: Any) -> HostArray:
    """Return the edges of the bins of one axis. Collective without `limits`.

    Raises:
        ShapeError: If there is no bin, or the edges do not grow.
        TypeError: If their number is no whole one.
    """
    bins = whole_key(bins)
    if np.ndim(bins) == 0:
        if bins < 1:
            raise ShapeError.everywhere(f"a histogram has at least 1 bin, got {bins!r}")
        # NumPy's limits: with them it makes the edges of one axis of a histogram of several.
        none = np.empty((0, 1), column.dtype)
        if limits is None and shape_of(column)[0]:
            best = [whole_of(reduce(one, column, None))[()] for one in (np.minimum, np.maximum)]
            none = np.asarray(best)[:, None]
        return np.histogramdd(none, [bins], None if limits is None else [limits])[1][0]
    edges = np.asarray(bins)
    if edges.ndim != 1 or (edges[:-1] > edges[1:]).any():
        raise ShapeError.everywhere(f"edges of bins are a row that grows, got {edges.tolist()}")
    return edges


@implements(np.histogram2d)
def histogram2d(
    x: Any,
    y: Any,
    bins: Any = 10,
    range: Any = None,  # noqa: A002
    density: Any = None,
    weights: Any = None,
) -> tuple[DTensor, HostArray, HostArray]:
    """Count pairs of numbers in boxes; see :func:`histogramdd`."""
    alike = hasattr(bins, "__len__") and len(bins) not in (1, 2)
    counts, (first, second) = histogramdd(
        [x, y], [bins, bins] if alike else bins, range, density, weights
    )
    return counts, first, second


@implements(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> DTensor:
    """Count how often each number stands in `x`. Collective: the largest gives the length.

    Raises:
        ShapeError: If there is a negative number, or `minlength` is one.
        TypeError: If they are no integers.
    """
    x, *others = (plain(x), *([] if weights is None else [plain(weights)]))
    if len(shape_of(x)) != 1 or any(shape_of(one) != shape_of(x) for one in others):
        raise ShapeError.everywhere(
            f"bincount takes one axis, and as many weights; got shape {shape_of(x)}"
        )
    tried(np.bincount, [x, *others])  # refuses what it does not count
    _check_weights(others)
    if minlength < 0:
        raise ShapeError.everywhere(f"bincount takes a minlength from 0 on, got {minlength}")
    kind = np.dtype(np.float64 if others and shape_of(x)[0] else np.intp)  # as NumPy has it
    length = minlength
    if shape_of(x)[0]:
        if isinstance(x, DTensor):
            x = reduced_anywhere(x)
        if x.min().item() < 0:
            raise ShapeError.everywhere("bincount takes no negative numbers")
        length = max(minlength, x.max().item() + 1)
    linear = linear_for(np.bincount, [x, *others], kind) if others else ()
    pattern = Pattern(((0,),) * (1 + len(others)), (KEEP,), "sum", linear)

    def work(here: Work) -> Any:
        counted, *weighed = here.blocks
        weight = weighed[0] if weighed else None
        return np.bincount(counted, weight, length)

    return run(work, [x, *others], pattern, (length,), [kind], refuses=False)[0]


def _each(function: Callable[..., Any], operands: Sequence[Any], *, refuses: bool) -> list[DTensor]:
    """Do a function element by element that may have several results."""
    operands = [plain(one) for one in operands]
    shapes = [shape_of(one) for one in operands]
    shape = broadcast_shape(shapes)
    kinds = tried(function, operands)

    def work(here: Work) -> Any:
        return function(*here.blocks)

    pattern = elementwise_pattern(shapes, shape)
    return list(run(work, operands, pattern, shape, kinds, refuses=refuses))


# -- in tables -------------------------------------------------------------------------------


@implements(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """Return in which bin each element is, laid out as `x`. Split bins are gathered."""
    edges = plain_values(bins)
    return blockwise(
        lambda block: np.digitize(block, edges, right), as_tensors([x, bins])[:1], refuses=False
    )


@implements(np.interp)
def interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    """Interpolate between the points of a table, laid out as `x`. A split table is gathered."""
    known, values = plain_values(xp), plain_values(fp)
    return blockwise(
        lambda block: np.interp(block, known, values, left, right, period),
        as_tensors([x, xp, fp])[:1],
        refuses=False,
    )


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """Return the values of a polynomial, laid out as `x`. Split coefficients are gathered."""
    if np.ndim(p) > 1:
        raise NoRuleError.everywhere(
            f"np.polyval takes coefficients of 1 axis, got {np.ndim(p)} axes"
        )
    coefficients = plain_values(p)
    return blockwise(
        lambda block: np.polyval(coefficients, block), as_tensors([x, p])[:1], refuses=False
    )


@implements(np.unravel_index)
def unravel_index(indices: Any, shape: Any, order: Any = "C") -> tuple[DTensor, ...]:
    """Return the indices along all axes of places that are counted in one row.

    Raises:
        ValueError: On every rank, if one is out of bounds.
    """

    def work(row: Any) -> Any:
        return np.unravel_index(row, shape, order)

    return tuple(_each(work, [indices], refuses=True))


@implements(np.ravel_multi_index)
def ravel_multi_index(
    multi_index: Any, dims: Any, mode: Any = "raise", order: Any = "C"
) -> DTensor:
    """Return the places, counted in one row, of indices along all axes.

    Raises:
        ValueError: On every rank, if one is out of bounds.
    """

    def work(*rows: Any) -> Any:
        return np.ravel_multi_index(rows, dims, mode, order)

    return _each(work, multi_index, refuses=mode == "raise")[0]


# -- among several arrays ----------------------------------------------------------------------


@implements(np.select)
def select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """Choose for each element from the first array whose condition holds."""
    conditions, choices = list(condlist), list(choicelist)
    if len(conditions) != len(choices) or not conditions:
        raise ShapeError.everywhere(
            f"np.select takes a condition for each choice, and at least one; got "
            f"{len(conditions)} and {len(choices)}"
        )
    half = len(conditions)

    def work(*blocks: Any) -> Any:
        rows = [np.asarray(one) for one in blocks[:half]]
        return np.select(rows, list(blocks[half:-1]), blocks[-1])

    return blockwise(work, [*conditions, *choices, default], refuses=False)


@implements_by_name(np.choose)
def choose(a: Any, choices: Any, mode: Any = "raise") -> DTensor:
    """Choose for each element from the array that its number says.

    Raises:
        ValueError: On every rank, if there is no such array, unless `mode` says what to do.
    """

    def work(number: Any, *blocks: Any) -> Any:
        return np.choose(number, list(blocks), mode=mode)

    return _each(work, [a, *choices], refuses=mode == "raise")[0]


@implements(np.piecewise)
def piecewise(x: Any, condlist: Any, funclist: Any, *args: Any, **kw: Any) -> Any:
    """Call each function on the elements for which its condition holds.

    The functions get elements of one block, and work element by element.
    """
    # As NumPy has it, what holds no arrays is one condition.
    several = len(condlist) > 0 and isinstance(condlist[0], DTensor | np.ndarray | list)
    rows = list(condlist) if several or not x.ndim else [condlist]

    def work(block: Any, *conditions: Any) -> Any:
        return np.piecewise(block, [np.asarray(one) for one in conditions], funclist, *args, **kw)

    return blockwise(work, [x, *rows], refuses=any(map(callable, funclist)))


@implements_anew(np.real_if_close)
def real_if_close(a: DTensor, tol: float = 100) -> DTensor:
    """Return the real parts, if no imaginary part is larger than `tol` says. Collective."""
    if a.dtype.kind != "c":
        return a
    x = reduced_anywhere(a)
    limit = tol * np.finfo(a.dtype).eps if tol > 1 else tol
    near = bool(np.all(np.less(np.absolute(np.imag(x)), limit)))
    found: DTensor = sure_rule_of(np.real)(x) if near else x
    return found


# -- one element becomes a row -------------------------------------------------------------------


@implements(np.vander)
def vander(x: DTensor, N: Any = None, increasing: bool = False) -> DTensor:
    """Return the powers of each element as a row, which is where the element is."""
    if x.ndim != 1:
        raise ShapeError.everywhere(f"np.vander takes one axis, got shape {x.shape}")
    count = x.shape[0] if N is None else int(N)
    kind = np.vander(np.ones(1, x.dtype), count).dtype

    def work(here: Work) -> Any:
        return np.vander(here.blocks[0], count, increasing)

    pattern = Pattern(((0,),), (0, KEEP))
    return run(work, [reduced_anywhere(x)], pattern, (x.shape[0], count), [kind], refuses=False)[0]


def _spread(function: Callable[..., Any]) -> None:
    """Register a function that makes numbers from each element of one array to that of another."""

    @implements(function)
    def do(start: Any, stop: Any, num: int = 50, *args: Any, axis: int = 0, **options: Any) -> Any:
        if options.pop("retstep", False):
            raise NoRuleError("numpy.linspace of split arrays takes no retstep")
        first, last = plain(start), plain(stop)
        shapes = [shape_of(first), shape_of(last)]
        stack = broadcast_shape(shapes)
        probe = [np.ones((), one.dtype) if hasattr(one, "dtype") else one for one in (first, last)]
        kind = function(*probe, 1, *args, **options).dtype
        pattern = elementwise_pattern(shapes, stack)

        def work(here: Work) -> Any:
            return function(*here.blocks, num, *args, **options)

        wanted = Pattern(pattern.inputs, (KEEP, *pattern.output))
        refuses = function is np.geomspace  # of zeros
        (made,) = run(work, [first, last], wanted, (num, *stack), [kind], refuses=refuses)
        return sure_rule_of(np.moveaxis)(made, 0, axis)


for _function in (np.linspace, np.logspace, np.geomspace):
    _spread(_function)
