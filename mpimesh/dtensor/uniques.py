"""The different elements of an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import moved_to, refuse_given
from mpimesh.dtensor.masks import of_rows
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_reshape import ravel, reshape
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import LayoutError
from mpimesh.layout import Layout
from mpimesh.layout.axis_rules import rows_placement

__all__ = ["unique"]


@implements(np.unique)
def unique(
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: Any = None,
    *,
    equal_nan: bool = True,
    sorted: bool = True,  # noqa: A002
) -> Any:
    """Return the different elements of the array, sorted, on every rank. Collective.

    Also, if asked for: where each comes first, counted in C order; for every element which one of
    them it is, laid out as the array; and how often each comes.

    Cost:
        Every rank gets the different elements of each block.
    """
    refuse_given("unique", axis=axis)
    x = ravel(settled(ar))
    x = moved_to(x, rows_placement(x.placement, x.shape, 1))
    if not x.is_member:
        raise LayoutError(f"rank {x.mesh.rank} is not in the mesh, and knows no elements of {ar!r}")
    values, first, counts = np.unique(
        x.local, return_index=True, return_counts=True, equal_nan=equal_nan
    )
    first += x.global_offset[0]
    rows = [of_rows(x, part, (), {0: 0}).full() for part in (values, first, counts)]
    # With the index NumPy's sort is stable: each NaN keeps its place among the others.
    every, _, which = np.unique(rows[0], True, return_inverse=True, equal_nan=equal_nan)
    found: list[Any] = [every]
    least = np.full(len(every), x.size, first.dtype)
    np.minimum.at(least, which, rows[1])
    if return_index:
        found.append(least)
    if return_counts:
        total = np.zeros(len(every), counts.dtype)
        np.add.at(total, which, rows[2])
        found.append(total)
    alike = Layout.replicated(x.mesh)
    results: list[Any] = [DTensor(x.mesh, alike, one.shape, one.dtype, one) for one in found]
    if return_inverse:
        mine = np.searchsorted(every, x.local)
        if not equal_nan and x.dtype.kind in "fc":
            mine[np.isnan(x.local)] = _own(every, least, x)
        row = DTensor(x.mesh, x.layout, x.shape, mine.dtype, mine)
        results.insert(1 + return_index, reshape(row, ar.shape))
    return results[0] if len(results) == 1 else tuple(results)


def _own(every: Any, first: Any, x: DTensor) -> Any:
    """Return which element each NaN of a row is, where no two are the same: that of its place."""
    places = np.flatnonzero(np.isnan(x.local)) + x.global_offset[0]
    nans = np.flatnonzero(np.isnan(every))
    order = nans[np.argsort(first[nans])]
    return order[np.searchsorted(first[order], places)]


@implements(np.unique_values)
def unique_values(x: Any, /) -> Any:
    """Return the different elements. Here and in the next ones, no NaN is like another."""
    return unique(x, equal_nan=False)


@implements(np.unique_counts)
def unique_counts(x: Any, /) -> Any:
    """Return the different elements, and how often each comes."""
    return np.lib._arraysetops_impl.UniqueCountsResult(
        *unique(x, return_counts=True, equal_nan=False)
    )


@implements(np.unique_inverse)
def unique_inverse(x: Any, /) -> Any:
    """Return the different elements, and for every element which one it is."""
    return np.lib._arraysetops_impl.UniqueInverseResult(
        *unique(x, return_inverse=True, equal_nan=False)
    )


@implements(np.unique_all)
def unique_all(x: Any, /) -> Any:
    """Return all that :func:`unique` knows."""
    return np.lib._arraysetops_impl.UniqueAllResult(*unique(x, True, True, True, equal_nan=False))
