"""Time shared memory against MPI's messages, for the sizes where they may cross.

Over several nodes, time collectives on two levels against MPI's own.

Takes turns, so that a slow moment meets both, and counts the fastest of some
rounds, the slowest rank's of each. A tenth of a second or two, more with more
ranks than cores, once for each machine, MPI and number of ranks on a node; the
answer is kept in the user's cache folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.transport.arena import Arena
from mpimesh.transport.base import Communicator, Request
from mpimesh.transport.choice import ALWAYS, NEVER, OPERATIONS, Choice
from mpimesh.transport.engine import Engine
from mpimesh.transport.node_shared import NodeShared
from mpimesh.transport.over_nodes import OverNodes
from mpimesh.transport.waiting import poll, test_often

__all__ = ["measure", "measure_nodes", "two_levels"]

_STAGED_BYTES = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10)
_CHUNKED_BYTES = (1 << 20, 4 << 20)
_REDUCED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
_MOVED_BYTES = (64 << 10, 256 << 10, 1 << 20)
_CROSSING_BYTES = (16 << 10, 128 << 10, 1 << 20)
_CLEARLY = 0.95
"""Shared memory has to win by this much: a draw is MPI's."""

_Way = Callable[[], Request]
_Shared: TypeAlias = NodeShared | OverNodes


def measure(
    comm: MPI.Intracomm, messages: Communicator, shared: NodeShared, arena: Arena, engine: Engine
) -> Choice:
    """Collective: return from which size on each operation goes through shared memory.

    Args:
        comm: The ranks, which share a node.
        messages: Their collectives by messages.
        shared: Their collectives in shared memory.
        arena: Gives arrays in it.
        engine: Moves operations along.
    """

    def faster_for(nbytes: int, first: _Way, second: _Way) -> bool:
        # One call of a small operation is shorter than what the scheduler may do in between.
        calls = max(2, min(16, (256 << 10) // nbytes))
        return _is_faster(comm, engine, first, second, calls=calls)

    # Each of the ways is forced in turn.
    shared.use(Choice([NEVER] * len(OPERATIONS), "", staged_from=ALWAYS))
    staged = {
        nbytes: faster_for(nbytes, *_all_reduces(messages, shared, np.zeros(nbytes // 8)))
        for nbytes in _STAGED_BYTES
        if nbytes <= shared.most_staged_bytes
    }
    shared.use(Choice([NEVER] * len(OPERATIONS), "", chunks_from=ALWAYS))
    in_chunks = {
        nbytes: faster_for(nbytes, *_all_reduces(messages, shared, np.zeros(nbytes // 8)))
        for nbytes in _CHUNKED_BYTES
    }
    shared.use(Choice([ALWAYS] * len(OPERATIONS), ""))
    faster: dict[str, dict[int, bool]] = {name: {} for name in OPERATIONS}
    for nbytes in _REDUCED_BYTES:
        ways = _all_reduces(messages, shared, _shared(arena, nbytes // 8))
        faster["all_reduce"][nbytes] = faster_for(nbytes, *ways)
    for nbytes in _MOVED_BYTES:
        for name, ways in _moves(comm, messages, shared, arena, nbytes).items():
            faster[name][nbytes] = faster_for(nbytes, *ways)
    sizes = [_crossing(faster[name], 2 * max(faster[name])) for name in OPERATIONS]
    return Choice(
        sizes,
        "",
        staged_from=_crossing(staged, NEVER),
        chunks_from=_crossing(in_chunks, NEVER),
    )


def measure_nodes(
    comm: MPI.Intracomm, messages: Communicator, shared: OverNodes, engine: Engine
) -> Choice:
    """Collective: return from which size on each operation takes two levels, over several nodes.

    Not an all-to-all: a rank knows its own sizes only, and could agree with nobody.

    Args:
        comm: The ranks.
        messages: Their collectives by messages alone.
        shared: Their collectives on two levels.
        engine: Moves operations along.
    """
    names = [name for name in OPERATIONS if name != "all_to_all"]
    faster: dict[str, dict[int, bool]] = {name: {} for name in names}
    for nbytes in _CROSSING_BYTES:
        ways = _moves(comm, messages, shared, None, nbytes)
        ways["all_reduce"] = _all_reduces(messages, shared, np.zeros(nbytes // 8))
        for name in names:
            faster[name][nbytes] = _is_faster(comm, engine, *ways[name], rounds=3, calls=1)
    sizes = {name: _crossing(faster[name], 2 * max(_CROSSING_BYTES)) for name in names}
    return two_levels([sizes.get(name, NEVER) for name in OPERATIONS], "")


def two_levels(sizes: Sequence[int], why: str) -> Choice:
    """Return the choice of two levels from these sizes on, wherever the arrays lie."""
    return Choice(sizes, why, staged_from=sizes[0], staged=True)


def _all_reduces(messages: Communicator, shared: _Shared, x: HostArray) -> tuple[_Way, _Way]:
    """Return both ways of reducing an array of zeros, which stay what they are."""
    return lambda: messages.all_reduce(None, x, "sum"), lambda: shared.all_reduce(None, x, "sum")


def _moves(
    comm: MPI.Intracomm,
    messages: Communicator,
    shared: _Shared,
    arena: Arena | None,
    nbytes: int,
) -> dict[str, tuple[_Way, _Way]]:
    """Return both ways of each operation that moves arrays of so many bytes over all ranks."""
    ranks = comm.size
    each = nbytes // ranks // 8
    counts = [each] * ranks
    whole, block = _shared(arena, each * ranks), _shared(arena, each)
    out, part = np.zeros(each * ranks), np.zeros(each)
    return {
        "reduce_scatter": (
            lambda: messages.reduce_scatter(whole, part, counts, "sum"),
            lambda: shared.reduce_scatter(whole, part, counts, "sum"),
        ),
        "all_gather": (
            lambda: messages.all_gather(block, out, counts),
            lambda: shared.all_gather(block, out, counts),
        ),
        "broadcast": (
            lambda: messages.broadcast(whole, 0),
            lambda: shared.broadcast(whole, 0),
        ),
        "all_to_all": (
            lambda: messages.all_to_all(whole, out, counts, counts),
            lambda: shared.all_to_all(whole, out, counts, counts),
        ),
    }


def _shared(arena: Arena | None, size: int) -> HostArray:
    part = None if arena is None else arena.empty(8 * size)
    array = np.empty(size) if part is None else part.view(np.float64)
    array[...] = 0
    return array


def _is_faster(
    comm: MPI.Intracomm,
    engine: Engine,
    first: _Way,
    second: _Way,
    *,
    rounds: int = 5,
    calls: int,
) -> bool:
    """Tell whether the second way is clearly faster; the same answer on all ranks."""
    best_s = np.full(2, np.inf)
    for _ in range(rounds):
        engine.steps += 1  # whoever looks after waits sees that this one gets on
        for number, way in enumerate((first, second)):
            _finish(comm.Ibarrier().Test, engine)
            start_s = time.perf_counter()
            for _ in range(calls):
                _finish(way().test, engine)
            best_s[number] = min(best_s[number], time.perf_counter() - start_s)
    slowest_s = np.empty(2)
    _finish(comm.Iallreduce(best_s, slowest_s, MPI.MAX).Test, engine)
    return bool(slowest_s[1] < _CLEARLY * slowest_s[0])


def _finish(test: Callable[[], bool], engine: Engine) -> None:
    """Wait as a handle does: some tests in a row, and then with naps."""
    if test_often(test, engine):
        return

    def ready() -> bool:
        engine.advance()
        return test()

    poll(ready, engine=engine)


def _crossing(faster: dict[int, bool], otherwise: int) -> int:
    """Return the smallest size from which on shared memory is faster at all larger ones."""
    crossing = otherwise
    for nbytes in sorted(faster, reverse=True):
        if not faster[nbytes]:
            break
        crossing = nbytes
    return crossing
