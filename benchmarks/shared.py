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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpimesh as mm
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

__all__ = ["run"]

ALL_REDUCE_BYTES = (8, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
OTHERS_BYTES = (64 << 10, 1 << 20, 16 << 20)
_COPY = "copy"


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of one way; `x` is `y` where a collective works in place.

    Attributes:
        x: What goes in.
        y: What comes out.
    """

    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: how big its arrays are, and how it is called by both.

    Attributes:
        name: Its name in the table.
        call: Its name in mpi4py.
        blocks: Whether what goes in and what comes out is the whole array or a block of it.
        in_place: Whether both are one array.
        mpi: Calls mpi4py.
        mesh: Calls mpimesh.
        expected: Makes the result of this rank out of what all ranks put in.
    """

    name: str
    call: str
    blocks: tuple[bool, bool]
    in_place: bool
    mpi: Callable[[MPI.Intracomm, Arrays], object]
    mesh: Callable[[mm.ProcessGroup, Arrays], object]
    expected: Callable[[list[Any], int], Any]


COLLECTIVES = (
    Collective(
        "all-reduce",
        "Allreduce in place",
        (False, False),
        True,
        lambda comm, a: comm.Allreduce(MPI.IN_PLACE, a.y),
        lambda group, a: group.all_reduce(a.x, out=a.y).resolve(),
        lambda inputs, rank: sum(inputs),
    ),
    Collective(
        "reduce-scatter",
        "Reduce_scatter_block",
        (False, True),
        False,
        lambda comm, a: comm.Reduce_scatter_block(a.x, a.y),
        lambda group, a: group.reduce_scatter(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.split(sum(inputs), len(inputs))[rank],
    ),
    Collective(
        "all-gather",
        "Allgather",
        (True, False),
        False,
        lambda comm, a: comm.Allgather(a.x, a.y),
        lambda group, a: group.all_gather(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.concatenate(inputs),
    ),
    Collective(
        "broadcast",
        "Bcast",
        (False, False),
        True,
        lambda comm, a: comm.Bcast(a.y),
        lambda group, a: group.broadcast(a.x, out=a.y).resolve(),
        lambda inputs, rank: inputs[0],
    ),
    Collective(
        "all-to-all",
        "Alltoall",
        (False, False),
        False,
        lambda comm, a: comm.Alltoall(a.x, a.y),
        lambda group, a: group.all_to_all(a.x, out=a.y).resolve(),
        lambda inputs, rank: np.concatenate([np.split(x, len(inputs))[rank] for x in inputs]),
    ),
)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each collective, size and way."""
    return [
        row
        for collective in COLLECTIVES
        for nbytes in effort.sizes(
            ALL_REDUCE_BYTES if collective.name == "all-reduce" else OTHERS_BYTES
        )
        for row in _rows(mesh, collective, nbytes, effort)
    ]


def _rows(
    mesh: mm.DeviceMesh, collective: Collective, nbytes: int, effort: Effort
) -> list[dict[str, Any]]:
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    what = f"{collective.name}, {size_text(nbytes)}"
    # Arrays for each way: those that another way has just written would be warm.
    named: dict[str, tuple[Callable[..., Any], Callable[[Arrays], Callable[[], object]]]] = {
        collective.call: (np.empty, lambda a: partial(collective.mpi, comm, a)),
        "ordinary arrays": (np.empty, lambda a: partial(collective.mesh, group, a)),
        "shared arrays": (mesh.shared_empty, lambda a: partial(collective.mesh, group, a)),
        "shared arrays, from a plan": (mesh.shared_empty, partial(_planned, collective, group)),
    }
    ways: dict[str, Callable[[], object]] = {}
    for way, (empty, make) in named.items():
        arrays = _arrays(collective, empty, nbytes // 8, group.size)
        ways[way] = make(arrays)
        _check(comm, collective, arrays, ways[way], f"{what}, {way}")
    ways[_COPY] = _copying(nbytes)
    timings = in_turns(comm, ways, calls=effort.calls(nbytes), rounds=effort.rounds)
    share = (1 + 1 / group.size) / 2 if collective.name == "reduce-scatter" else 1.0
    return make_rows(what, timings, copy=_COPY, share=share)


def _planned(
    collective: Collective, group: mm.ProcessGroup, arrays: Arrays
) -> Callable[[], object]:
    """Return what starts the collective from a plan that was made once."""
    make = getattr(group, f"{collective.name.replace('-', '_')}_init")
    planned = make(arrays.x, out=arrays.y)
    return lambda: planned.start().resolve()


def _arrays(collective: Collective, empty: Callable[..., Any], size: int, ranks: int) -> Arrays:
    x, y = (empty(size // ranks if block else size, np.float64) for block in collective.blocks)
    return Arrays(y if collective.in_place else x, y)


def _copying(nbytes: int) -> Callable[[], object]:
    memory = np.zeros(nbytes, np.uint8)
    first, second = memory[: nbytes // 2], memory[nbytes // 2 :]
    first[...] = 0  # takes pages

    def copy() -> None:
        np.copyto(second, first)
        np.copyto(second, first)

    return copy


def _check(
    comm: MPI.Intracomm,
    collective: Collective,
    arrays: Arrays,
    call: Callable[[], object],
    what: str,
) -> None:
    """See that one call gives the right result, and leave zeros behind. Collective."""
    inputs = list(_inputs(arrays.x.size, comm.size))
    arrays.y[...] = -1
    arrays.x[...] = inputs[comm.rank]
    call()
    right = np.array_equal(arrays.y, collective.expected(inputs, comm.rank))
    arrays.x[...] = arrays.y[...] = 0
    if not comm.allreduce(right, MPI.LAND):
        raise RuntimeError(f"{what} gives a wrong result")


def _inputs(size: int, ranks: int) -> Iterator[Any]:
    """The input of each rank: small whole numbers, whose sums are exact in any order."""
    return (np.arange(size) % 251 + 1000.0 * rank for rank in range(ranks))
