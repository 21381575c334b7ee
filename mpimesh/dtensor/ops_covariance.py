"""Covariances and correlations: products of what is left when means are taken away."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.dtensor.arguments import as_tensor
from mpimesh.dtensor.ops_contract import matmul
from mpimesh.dtensor.ops_statistics import average
from mpimesh.dtensor.registry import implements
from mpimesh.dtensor.shape_axes import atleast_2d, permuted, squeeze
from mpimesh.dtensor.shape_join import concatenate
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import ShapeError, on_all_ranks

__all__: list[str] = []


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
        raise on_all_ranks(
            ShapeError(f"np.cov takes at most two axes, got {[one.shape for one in rows]}")
        )
    kind = np.result_type(np.float64 if dtype is None else dtype, *[one.dtype for one in rows])
    if dtype is not None:
        kind = np.dtype(dtype)
    # As NumPy has it, a second array of one row stays as it is.
    flags = [rowvar or one.ndim < 2 or (n == 1 and one.shape[0] == 1) for n, one in enumerate(rows)]
    table = [_by_rows(one, flag) for one, flag in zip(rows, flags, strict=True)]
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


def _by_rows(x: DTensor, rows: bool) -> DTensor:
    x = x if x.ndim == 2 else atleast_2d(x)
    return x if rows else permuted(x, (1, 0))


def _weights(mesh: Any, count: int, fweights: Any, aweights: Any) -> Any:
    rows = [as_tensor(one, mesh) for one in (fweights, aweights) if one is not None]
    for one in rows:
        if one.shape != (count,):
            raise on_all_ranks(ShapeError(f"weights of shape {one.shape} for {count} observations"))
        if bool(np.any(np.less(one, 0))):
            raise on_all_ranks(ShapeError("weights of observations are not negative"))
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
