"""Split arrays with known values, and what NumPy says they are as a whole."""

from __future__ import annotations

import itertools

import numpy as np

import mpimesh as mm

OPS = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def placements(ndim, specs=("R", "S0", "S1", "P")):
    """All rows of `specs`, one for each dim."""
    return list(itertools.product(specs, repeat=ndim))


def split(x, mesh, placement):
    """Split `x` so that summands, where there are any, differ over the ranks and are whole numbers.

    Whoever reduces them gets `x` again, to the bit.
    """
    layout = mm.Layout(mesh, placement)
    if not layout.partial_op:
        return mm.distribute(x, mesh, placement)
    dims = [dim for dim, spec in enumerate(layout.placement) if isinstance(spec, mm.Partial)]
    coords = [mesh.coords_of(mesh.rank)[dim] for dim in dims]
    sizes = [mesh.dims[dim].size for dim in dims]
    place, count = np.ravel_multi_index(coords, sizes), int(np.prod(sizes))
    box = tuple(slice(*edges) for edges in layout.box(x.shape, mesh.rank))
    block = summand(x, layout.partial_op, int(place), count)[box]
    return mm.DTensor.from_local(np.array(block, order="C"), mesh, placement, shape=x.shape)


def summand(x, op, place, count):
    """Return part `place` of `count` parts that `op` makes `x` of."""
    numbers = np.arange(x.size).reshape(x.shape)
    if op in ("sum", "mean"):
        parts = [((numbers + k) % 5 - 2).astype(x.dtype) for k in range(count - 1)]
        parts.append((x * (count if op == "mean" else 1) - sum(parts)).astype(x.dtype))
        return parts[place]
    owner = numbers % count
    if op == "prod":
        return np.where(owner == place, x, 1).astype(x.dtype)
    worse = x + 1 if op == "min" else x - 1
    return np.where(owner == place, x, worse).astype(x.dtype)


def lacked_bytes(source, target, shape, itemsize, rank):
    """The bytes of `rank`'s new block that its old one does not have, element by element."""
    wanted = np.zeros(shape, bool)
    if target.mesh.contains_rank(rank):
        wanted[tuple(slice(*edges) for edges in target.box(shape, rank))] = True
    if source.mesh.contains_rank(rank):
        wanted[tuple(slice(*edges) for edges in source.box(shape, rank))] = False
    return int(wanted.sum()) * itemsize
