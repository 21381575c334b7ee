"""Rows of elements that ranks of a mesh send each other, each rank its own to each other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.comm import Steps
from mpimesh.layout import Give, Part, Regions, Take
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.traffic import sparse, uniform

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers

__all__ = ["exchange_counts", "exchange_pieces", "place_in", "true_anywhere"]


def place_in(mesh: DeviceMesh) -> int:
    """Return the place of this rank in the mesh, in row-major order."""
    return mesh.mesh.offset_of(mesh.rank)


def exchange_pieces(
    mesh: DeviceMesh,
    name: str,
    pieces: Mapping[int, HostArray],
    counts: Integers,
    dtype: DType,
) -> dict[int, HostArray]:
    """Send pieces to other ranks, and return what they sent here. Collective over the mesh.

    Args:
        mesh: The mesh; ranks are counted as their places in it.
        name: What is called, for messages.
        pieces: What to send to which rank: arrays without axes to speak of, flattened. None for
            this rank itself.
        counts: How many elements each rank (row) sends each (column); alike on all ranks.
        dtype: The dtype of all pieces.

    Shapes:
        counts: (ranks, ranks); the diagonal counts nothing.
    """
    counts = counts.copy()
    np.fill_diagonal(counts, 0)
    if not counts.any():
        return {}
    me = place_in(mesh)
    packed = mesh.shared_empty((int(counts[me].sum()),), dtype)
    gives, at = [], 0
    for rank in np.flatnonzero(counts[me]).tolist():
        piece = np.asarray(pieces[rank]).reshape(-1)
        packed[at : at + piece.size] = piece
        gives.append(Give(rank, ((at, at + piece.size),)))
        at += piece.size
    target = mesh.shared_empty((int(counts[:, me].sum()),), dtype)
    takes, found, into = [], {}, 0
    received: list[int] = []
    for rank in np.flatnonzero(counts[:, me]).tolist():
        size, start = int(counts[rank, me]), int(counts[rank, :me].sum())
        part = Part(rank, (int(counts[rank].sum()),), ((start, start + size),))
        takes.append(Take(((into, into + size),), (part,)))
        found[rank] = target[into : into + size]
        received += rank, size * dtype.itemsize, 1
        into += size
    regions = Regions(tuple(takes), tuple(gives))
    group = mesh.group()
    group._core.compose(
        name,
        partial(group.communicator.exchange_regions, packed, target, regions),
        rule=f"{name} of {dtype}",
        nbytes=packed.nbytes,
        receives=(sparse, tuple(received)) if received else None,
    ).resolve()
    return found


def exchange_counts(mesh: DeviceMesh, name: str, row: Integers) -> Integers:
    """Return the rows of small numbers of all ranks, in the order of their places. Collective.

    Shapes:
        row: (n,), as many on every rank.
        result: (ranks, n).
    """
    group = mesh.group()
    table = np.empty((group.size, len(row)), np.int64)

    def steps() -> Steps:
        side = group.communicator
        yield side.all_gather(row.astype(np.int64), table.reshape(-1), [len(row)] * side.size)

    nbytes = 8 * len(row)
    group._core.compose(
        name, steps, rule=f"{name}: {len(row)} counts", nbytes=nbytes, receives=(uniform, nbytes)
    ).resolve()
    return table


def true_anywhere(mesh: DeviceMesh, name: str, flag: bool) -> bool:
    """Tell every rank whether any of them has a true flag. Collective over the mesh."""
    return bool(exchange_counts(mesh, name, np.array([flag])).any())
