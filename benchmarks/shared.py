"""Collectives inside a node against mpi4py's own, on ordinary arrays and on shared ones.

Sizes are those of the whole array: of the result of an all-gather, of the input of a
reduce-scatter or all-to-all.

The limit is what memory allows where ranks read and write each other's arrays in place:

    limit_s = (bytes a rank must read + bytes it must write) / bandwidth
    bandwidth = 2 * nbytes / seconds of a copy of nbytes, with all ranks copying at once

The copy takes its turn among the ways, in memory of the same size: one half of an array onto the
other, twice. With n ranks and arrays of nbytes, a rank must read and write

    all-reduce      its n-th part of n arrays, and again into n arrays: nbytes and nbytes
    reduce-scatter  its n-th part of n arrays, into its block:          nbytes and nbytes / n
    all-gather      all blocks into its array:                          nbytes and nbytes
    broadcast       the root's array into its own:                      nbytes and nbytes
    all-to-all      a block of each rank into its array:                nbytes and nbytes

Less than the limit is seen where ranks read the same bytes, out of a cache that they share.

The values are zeros, whose sums stay zeros however often they are added up; that the results
are right is seen before, with other values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text
from mpimesh.cli.bench import COLLECTIVES, Arrays, Collective

__all__ = ["run"]

ALL_REDUCE_BYTES = (8, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
OTHERS_BYTES = (64 << 10, 1 << 20, 16 << 20)
_COPY = "copy"


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each collective, size and way."""
    return [
        row
        for collective in COLLECTIVES
        for nbytes in effort.sizes(
            ALL_REDUCE_BYTES if collective.operation == "all_reduce" else OTHERS_BYTES
        )
        for row in _rows(mesh, collective, nbytes, effort)
    ]


def _rows(
    mesh: mm.DeviceMesh, collective: Collective, nbytes: int, effort: Effort
) -> list[dict[str, Any]]:
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    what = f"{collective.operation.replace('_', '-')}, {size_text(nbytes)}"
    # Arrays for each way: those that another way has just written would be warm.
    named: dict[str, tuple[Callable[..., Any], Callable[[Arrays], Callable[[], object]]]] = {
        collective.call: (np.empty, lambda a: partial(collective.mpi, comm, a)),
        "ordinary arrays": (np.empty, lambda a: partial(collective.mesh, group, a)),
        "shared arrays": (mesh.shared_empty, lambda a: partial(collective.mesh, group, a)),
        "shared arrays, from a plan": (mesh.shared_empty, partial(collective.planned, group)),
    }
    ways: dict[str, Callable[[], object]] = {}
    for way, (empty, make) in named.items():
        arrays = collective.arrays(empty, nbytes, group.size)
        ways[way] = make(arrays)
        collective.check(comm, arrays, ways[way], f"{what}, {way}")
    ways[_COPY] = _copying(nbytes)
    timings = in_turns(comm, ways, calls=effort.calls(nbytes), rounds=effort.rounds)
    share = (1 + 1 / group.size) / 2 if collective.operation == "reduce_scatter" else 1.0
    return make_rows(what, timings, copy=_COPY, share=share)


def _copying(nbytes: int) -> Callable[[], object]:
    memory = np.zeros(nbytes, np.uint8)
    first, second = memory[: nbytes // 2], memory[nbytes // 2 :]
    first[...] = 0  # takes pages

    def copy() -> None:
        np.copyto(second, first)
        np.copyto(second, first)

    return copy
