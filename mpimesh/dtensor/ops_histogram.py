"""Counts of values of split arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.dtensor.ops_reduce import reduce
from mpimesh.dtensor.ops_ufunc import call, plain, tried
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.run import Work, resolved, run, shape_of
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout.rules import KEEP, Linear, Pattern


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
        ShapeError: If `bins` is the name of a rule, or weights have another shape.
    """
    if isinstance(bins, str):
        raise on_all_ranks(
            ShapeError(f"give a number of bins or their edges, not a rule: {bins!r}")
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


@implements(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> DTensor:
    """Count how often each number stands in `x`. Collective: the largest gives the length.

    Raises:
        ShapeError: If there is a negative number.
        TypeError: If they are no integers.
    """
    x, *others = (plain(x), *([] if weights is None else [plain(weights)]))
    if len(shape_of(x)) != 1 or any(shape_of(one) != shape_of(x) for one in others):
        raise on_all_ranks(
            ShapeError(f"bincount takes one axis, and as many weights; got shape {shape_of(x)}")
        )
    tried(np.bincount, [x, *others])  # refuses what it does not count
    kind = np.dtype(np.float64 if others else np.intp)
    length = minlength
    if shape_of(x)[0]:
        if isinstance(x, DTensor):
            x = resolved(x)
        if reduce(np.minimum, x).item() < 0:
            raise on_all_ranks(ShapeError("bincount takes no negative numbers"))
        length = max(minlength, reduce(np.maximum, x).item() + 1)
    linear = (Linear((1,)),) if others and kind == others[0].dtype else ()
    pattern = Pattern(((0,),) * (1 + len(others)), (KEEP,), "sum", linear)

    def work(here: Work) -> Any:
        counted, *weighed = here.blocks
        weight = weighed[0] if weighed else None
        return np.bincount(counted, weight, length)

    return run(work, [x, *others], pattern, (length,), [kind])[0]
