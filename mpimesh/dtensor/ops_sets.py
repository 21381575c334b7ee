"""Split arrays as sets of their elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor
from mpimesh.dtensor.masks import masked
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.ops_elementwise import blockwise
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_reshape import ravel
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.dtensor.uniques import unique
from mpimesh.layout import Layout

__all__: list[str] = []


@implements(np.isin)
def isin(
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: Any = None,
) -> DTensor:
    """Tell which elements are among others, laid out as they are. Collective, if those are split.

    Cost:
        Every rank gets the different ones of the others.
    """
    mesh = common_mesh([element, test_elements])
    others = _whole_set(test_elements)

    def found(block: Any) -> Any:
        return np.isin(block, others, invert=invert, kind=kind)

    return blockwise(found, [settled(as_tensor(element, mesh))])


if hasattr(np, "in1d"):  # NumPy before 2.4

    @implements(np.in1d)
    def in1d(
        ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
    ) -> DTensor:
        """Return :func:`isin` of the elements in a row."""
        mesh = common_mesh([ar1, ar2])
        return isin(ravel(as_tensor(ar1, mesh)), ar2, assume_unique, invert, kind=kind)


def _whole_set(x: Any) -> Any:
    """Return the different elements of a split array, on all ranks; a plain one as it is."""
    return unique(x).local if isinstance(x, DTensor) else x


def _alike(values: Any, like: DTensor) -> DTensor:
    """Return an array that all ranks have worked out from the same sets."""
    layout = Layout.replicated(like.mesh)
    return DTensor(like.mesh, layout, values.shape, values.dtype, values)


def _first_split(*arrays: Any) -> DTensor:
    return next(one for one in arrays if isinstance(one, DTensor))


@implements(np.union1d)
def union1d(ar1: Any, ar2: Any) -> DTensor:
    """Return the elements of both, sorted, on every rank. Collective."""
    common_mesh([ar1, ar2])
    return _alike(np.union1d(_whole_set(ar1), _whole_set(ar2)), _first_split(ar1, ar2))


@implements(np.intersect1d)
def intersect1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    """Return the elements that both have, sorted, on every rank. Collective.

    Also, if asked for, where each comes first in the two.
    """
    mesh = common_mesh([ar1, ar2])
    like = _first_split(ar1, ar2)
    if not return_indices:
        return _alike(np.intersect1d(_whole_set(ar1), _whole_set(ar2)), like)
    rows = [unique(as_tensor(one, mesh), return_index=True) for one in (ar1, ar2)]
    found, *places = np.intersect1d(
        rows[0][0].local, rows[1][0].local, assume_unique=True, return_indices=True
    )
    firsts = [row[1].local[place] for row, place in zip(rows, places, strict=True)]
    return tuple(_alike(one, like) for one in (found, *firsts))


@implements(np.setxor1d)
def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the elements that one of both has, sorted, on every rank. Collective."""
    common_mesh([ar1, ar2])
    return _alike(np.setxor1d(_whole_set(ar1), _whole_set(ar2)), _first_split(ar1, ar2))


@implements(np.setdiff1d)
def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> DTensor:
    """Return the elements of the first that the second lacks. Collective.

    They are sorted, on every rank; with `assume_unique` they stay in order, where they are.
    """
    mesh = common_mesh([ar1, ar2])
    if assume_unique:
        row = ravel(as_tensor(ar1, mesh))
        return masked(row, isin(row, ar2, invert=True))
    return _alike(np.setdiff1d(_whole_set(ar1), _whole_set(ar2)), _first_split(ar1, ar2))
