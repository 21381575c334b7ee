"""The collectives inside a node and the barrier, beside mpi4py's own in the same run.

Each is a plain call, whose handle is resolved at once, and a planned one, which is started again
and again: of ordinary arrays, and planned of arrays of ``mesh.shared_empty``. All have ``out=``;
the all-reduce and the broadcast are in place, as MPI's are.

Sizes are those of the whole array: of the result of a gather or an all-gather, of the input of a
reduce-scatter, scatter or all-to-all. Where an array is cut, each rank has at least 8 bytes.

The copy takes its turn among the ways: an array of that size onto another, all ranks at once. It
reads and writes as many bytes as a rank must for an all-reduce, an all-gather, a broadcast or an
all-to-all of arrays that are read where they lie. Less is seen where ranks read the same bytes out
of a cache that they share.

The values are zeros, whose sums stay zeros however often they are added up; that the results
are right is seen before, with other values.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, Effort, Timing, in_turns
from benchmarks.rows import size_text
from mpimesh.cli.bench import COLLECTIVES, Arrays, Collective, round_s

__all__ = ["BARRIER", "OPERATIONS", "SIZES_BYTES", "add_choices", "run"]

SIZES_BYTES = (8, 64, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
BARRIER = "barrier"
_MPI, _COPY = "mpi4py", "copy"
_PLAIN, _PLANNED, _SHARED = "plain", "planned", "shared, planned"

_TURN_S = 0.01
"""About the time of one way's turn; that of the largest arrays, one call, is longer."""
_LARGE_BYTES = 16 << 20
"""From here on there are fewer rounds, and the ways take turns on the same ordinary arrays."""
_LARGE_ROUNDS = 7


def _at_root(array: Any, comm: Any) -> Any:
    return array if comm.rank == 0 else None


def _else(value: Any, rank: int) -> Any:
    """Return what rank 0 gets; the others' outputs keep what `Collective.check` wrote there."""
    return value if rank == 0 else np.full_like(value, -1.0)


_TO_AND_FROM_ONE = (
    Collective(
        "reduce",
        "Reduce",
        (False, False),
        False,
        lambda comm, a: comm.Reduce(a.x, _at_root(a.y, comm)),
        lambda group, a: group.reduce(a.x, out=_at_root(a.y, group)).resolve(),
        lambda inputs, rank: _else(sum(inputs), rank),
    ),
    Collective(
        "gather",
        "Gather",
        (True, False),
        False,
        lambda comm, a: comm.Gather(a.x, _at_root(a.y, comm)),
        lambda group, a: group.gather(a.x, out=_at_root(a.y, group)).resolve(),
        lambda inputs, rank: _else(np.concatenate(inputs), rank),
    ),
    Collective(
        "scatter",
        "Scatter",
        (False, True),
        False,
        lambda comm, a: comm.Scatter(_at_root(a.x, comm), a.y),
        lambda group, a: group.scatter(_at_root(a.x, group), out=a.y).resolve(),
        lambda inputs, rank: np.split(inputs[0], len(inputs))[rank],
    ),
)
_ALL = (*COLLECTIVES, *_TO_AND_FROM_ONE)
OPERATIONS = (*(one.operation for one in _ALL), BARRIER)


def run(
    mesh: mm.DeviceMesh,
    effort: Effort = FULL,
    *,
    operations: Collection[str] = OPERATIONS,
    sizes_bytes: Collection[int] = SIZES_BYTES,
) -> list[dict[str, Any]]:
    """Return a row for each collective and size, with the time of each way, and one of all ratios.

    A ratio is MPI's time over that of the way: above 1 is ahead of MPI.
    """
    rows = [
        _row(name, call, timings)
        for collective in _ALL
        if collective.operation in operations
        for name, call, timings in _cells(mesh, collective, effort, sizes_bytes)
    ]
    if BARRIER in operations:
        rows.append(_row(BARRIER, "Barrier", _barrier(mesh, effort)))
    return [*rows, _summary(rows)]


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Let a command choose what is measured."""

    def operations(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in OPERATIONS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(OPERATIONS)}")
        return names

    def sizes(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser.add_argument("--operations", type=operations, default=OPERATIONS, help="of shared")
    parser.add_argument("--sizes", type=sizes, default=SIZES_BYTES, help="of shared, in bytes")


def _row(what: str, call: str, timings: dict[str, Timing]) -> dict[str, Any]:
    first = timings[_MPI]
    return {
        "what": what,
        "call": call,
        "us": {way: timing.median_s * 1e6 for way, timing in timings.items()},
        "times": {
            way: first.over(timing) for way, timing in timings.items() if way not in (_MPI, _COPY)
        },
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each way, and for all, how many cells are ahead of MPI, and the median ratio."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for way, times in row["times"].items():
            found.setdefault(way, []).append(times)
    if found:
        found["all"] = [times for of_way in found.values() for times in of_way]
    return {
        "what": "ahead of MPI",
        "ahead": {way: sum(times > 1 for times in found[way]) for way in found},
        "cells": {way: len(found[way]) for way in found},
        "median": {way: statistics.median(found[way]) for way in found},
    }


def _cells(
    mesh: mm.DeviceMesh, collective: Collective, effort: Effort, sizes_bytes: Collection[int]
) -> Iterator[tuple[str, str, dict[str, Timing]]]:
    size = mesh.group().size
    least = 8 * size if collective.cuts else 8
    for nbytes in dict.fromkeys(max(least, nbytes) for nbytes in effort.sizes(sizes_bytes)):
        what = f"{collective.operation.replace('_', '-')}, {size_text(nbytes)}"
        yield what, collective.call, _cell(mesh, collective, nbytes, what, effort)
        gc.collect()  # arrays of this cell, whose plans may be in circles


def _cell(
    mesh: mm.DeviceMesh, collective: Collective, nbytes: int, what: str, effort: Effort
) -> dict[str, Timing]:
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    plain: Callable[[Arrays], Callable[[], object]] = partial(partial, collective.mesh, group)
    planned = partial(collective.planned, group)
    named: dict[str, tuple[Callable[..., Any], Callable[[Arrays], Callable[[], object]]]] = {
        _MPI: (np.empty, lambda a: partial(collective.mpi, comm, a)),
        _PLAIN: (np.empty, plain),
        _PLANNED: (np.empty, planned),
        _SHARED: (mesh.shared_empty, planned),
    }
    ways: dict[str, Callable[[], object]] = {}
    of_all: dict[Any, Arrays] = {}
    for way, (empty, make) in named.items():
        # Arrays for each way: those that another way has just written would be warm.
        place = empty if nbytes >= _LARGE_BYTES else way
        if place not in of_all:
            of_all[place] = collective.arrays(empty, nbytes, group.size)
        ways[way] = make(of_all[place])
        collective.check(comm, of_all[place], ways[way], f"{what}, {way}")
    ways[_COPY] = _copying(nbytes)
    return _timed(comm, ways, nbytes, effort)


def _barrier(mesh: mm.DeviceMesh, effort: Effort) -> dict[str, Timing]:
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    return _timed(comm, {_MPI: comm.Barrier, _PLAIN: group.barrier}, 8, effort)


def _timed(
    comm: Any, ways: dict[str, Callable[[], object]], nbytes: int, effort: Effort
) -> dict[str, Timing]:
    few = min(3, effort.calls(nbytes))
    slowest_s = max(round_s(comm, way, few) for way in ways.values())
    calls = max(1, min(effort.calls(8), int(_TURN_S / slowest_s)))
    large = nbytes >= _LARGE_BYTES
    rounds = min(effort.rounds, _LARGE_ROUNDS) if large else effort.rounds
    return in_turns(comm, ways, calls=calls, rounds=rounds)


def _copying(nbytes: int) -> Callable[[], object]:
    source, target = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    source[...] = 0  # takes pages
    return partial(np.copyto, target, source)
