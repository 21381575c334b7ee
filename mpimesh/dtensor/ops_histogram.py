"""Counts of values of split arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.ops_reduce import reduce
from mpimesh.dtensor.ops_ufunc import call, plain, tried
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.run import Work, resolved, run, shape_of
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import NoRuleError, ShapeError, on_all_ranks
from mpimesh.layout.op_rules import KEEP, Linearity, Pattern


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
    """
    if isinstance(bins, str):
        raise on_all_ranks(
            NoRuleError(f"give a number of bins or their edges, not a rule: {bins!r}")
        )
    a, *others = (plain(a), *([] if weights is None else [plain(weights)]))
    if isinstance(a, DTensor):
        a = resolved(a)
    if a.dtype == bool:  # differences between its values are needed
        a = a.astype(np.uint8)
    if others and shape_of(others[0]) != shape_of(a):
        raise on_all_ranks(
            ShapeError(f"weights of shape {shape_of(others[0])} for values of shape {shape_of(a)}")
        )
    if isinstance(bins, DTensor):
        bins = bins.full()
    if range is None and np.ndim(bins) == 0 and 0 not in shape_of(a):
        range = (reduce(np.minimum, a, None).item(), reduce(np.maximum, a, None).item())  # noqa: A001
    none = np.empty(0, a.dtype)
    weighing: dict[str, Any] = {"weights": np.empty(0, others[0].dtype)} if others else {}
    counts, edges = np.histogram(none, bins, range, **weighing)
    letters = tuple(np.arange(len(shape_of(a))).tolist())
    pattern = Pattern((letters,) * (1 + len(others)), (KEEP,), "sum")

    def work(here: Work) -> Any:
        one = {"weights": here.blocks[1]} if others else {}
        return np.histogram(here.blocks[0], edges if np.ndim(bins) else bins, range, **one)[0]

    (made,) = run(work, [a, *others], pattern, counts.shape, [counts.dtype])
    if density:
        total = call(np.multiply, (reduce(np.add, made), np.diff(edges)))
        made = call(np.divide, (made, total))
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
        density: Whether counts are divided by what lies in the boxes.
        weights: What each point counts.

    Returns:
        The counts, and the edges of each axis, ordinary arrays, the same on all ranks.
    """
    columns = list(sample) if isinstance(sample, list | tuple) else None
    points = sure_rule_of(np.stack)(columns, axis=-1) if columns else plain(sample)
    if len(points.shape) != 2:
        points = sure_rule_of(np.expand_dims)(points, -1)
    points = resolved(points) if isinstance(points, DTensor) else points
    count, axes = points.shape
    each = list(bins) if hasattr(bins, "__len__") else [bins] * axes
    if len(each) != axes:
        raise on_all_ranks(ShapeError(f"{len(each)} rows of bins do not fit {axes} axes"))
    known = [[*row] if row is not None else None for row in (range or [None] * axes)]
    edges = [
        _edges(points[:, axis], one, limits)
        for axis, (one, limits) in enumerate(zip(each, known, strict=True))
    ]
    others = [] if weights is None else [plain(weights)]
    if others and shape_of(others[0]) != (count,):
        raise on_all_ranks(ShapeError(f"weights of shape {shape_of(others[0])} for {count} points"))
    pattern = Pattern(((0, KEEP), *((0,) for _ in others)), (KEEP,) * axes, "sum")

    def work(here: Work) -> Any:
        return np.histogramdd(here.blocks[0], edges, None, None, *here.blocks[1:])[0]

    (made,) = run(work, [points, *others], pattern, [len(e) - 1 for e in edges], [float])
    if density:
        total = reduce(np.add, made, None)
        for axis, one in enumerate(edges):
            shape = [1] * axes
            shape[axis] = -1
            made = call(np.divide, (made, np.diff(one).reshape(shape)))
        made = call(np.divide, (made, total))
    return made, edges


def _edges(column: Any, bins: Any, limits: Any) -> HostArray:
    """Return the edges of the bins of one axis. Collective without `limits`.

    Raises:
        ShapeError: If there is no bin, or the edges do not grow.
        TypeError: If their number is no whole one.
    """
    bins = bins.full() if isinstance(bins, DTensor) else bins
    if np.ndim(bins) == 0:
        if bins < 1:
            raise on_all_ranks(ShapeError(f"a histogram has at least 1 bin, got {bins!r}"))
        # NumPy's limits: with them it makes the edges of one axis of a histogram of several.
        none = np.empty((0, 1), column.dtype)
        if limits is None and shape_of(column)[0]:
            best = [reduce(one, column, None).full()[()] for one in (np.minimum, np.maximum)]
            none = np.asarray(best)[:, None]
        return np.histogramdd(none, [bins], None if limits is None else [limits])[1][0]
    edges = np.asarray(bins)
    if edges.ndim != 1 or (edges[:-1] > edges[1:]).any():
        raise on_all_ranks(ShapeError(f"edges of bins are a row that grows, got {edges.tolist()}"))
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
        raise on_all_ranks(
            ShapeError(f"bincount takes one axis, and as many weights; got shape {shape_of(x)}")
        )
    tried(np.bincount, [x, *others])  # refuses what it does not count
    if minlength < 0:
        raise on_all_ranks(ShapeError(f"bincount takes a minlength from 0 on, got {minlength}"))
    kind = np.dtype(np.float64 if others else np.intp)
    length = minlength
    if shape_of(x)[0]:
        if isinstance(x, DTensor):
            x = resolved(x)
        if reduce(np.minimum, x).item() < 0:
            raise on_all_ranks(ShapeError("bincount takes no negative numbers"))
        length = max(minlength, reduce(np.maximum, x).item() + 1)
    linear = (Linearity((1,)),) if others and kind == others[0].dtype else ()
    pattern = Pattern(((0,),) * (1 + len(others)), (KEEP,), "sum", linear)

    def work(here: Work) -> Any:
        counted, *weighed = here.blocks
        weight = weighed[0] if weighed else None
        return np.bincount(counted, weight, length)

    return run(work, [x, *others], pattern, (length,), [kind])[0]
