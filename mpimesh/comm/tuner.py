"""Sizes from which on shared memory, or two levels over nodes, are faster than MPI's messages.

Where two ways cross depends on the machine and its MPI, so it is measured, once for each machine,
MPI, and number of ranks on a node; the answer is kept in the user's cache folder. The measurement
takes turns, so that a slow moment meets both ways, and counts the fastest of some rounds, the
slowest rank's of each: a tenth of a second or two. With many ranks on few cores it takes fewer
rounds; a group that two seconds do not allow has the sizes of other machines. Two ways cross
where the gains over all larger sizes together are greatest, so that one size that was measured
wrong does not decide by itself.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.algorithms import NEVER, OPERATIONS, Sizes, Ways
from mpimesh.comm.arena import Arena
from mpimesh.comm.base import Communicator
from mpimesh.comm.engine import ProgressEngine, poll, test_often
from mpimesh.comm.mpi_environment import (
    cache_folder,
    digest,
    loaded_ucx,
    tuning,
    write_json,
)
from mpimesh.comm.requests import Request

__all__ = ["KeptSizes", "crossing", "measure", "stretch"]

_NUMBERS = len(OPERATIONS) + 3
_SLOT_BYTES = (8, 512, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10)
_CHUNKED_BYTES = (1 << 20, 4 << 20)
_PLACED_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
_CROSSING_BYTES = (16 << 10, 128 << 10, 1 << 20)
_BUDGET_S = 2.0
"""Longest measurement of one process, for all its groups together."""
_SHARE_S = 0.06
"""Time after which the measurement of one size has no further round."""
_CLEARLY = 0.95
"""Another way has to win by this much: a draw is MPI's."""

_Way: TypeAlias = Callable[[], Request]


class _Collectives(Protocol):
    """Those in shared memory, or on two levels, by given ways."""

    def prepare(self, name: str, ways: Ways, *arguments: Any) -> _Way: ...


def measure(
    messages: Communicator,
    shared: _Collectives,
    engine: ProgressEngine,
    arena: Arena | None,
    most_slot_bytes: int,
) -> Sizes:
    """Collective: return from which size on each operation is faster than by messages.

    Args:
        messages: The ranks, and their collectives by messages.
        shared: Their collectives in other ways.
        engine: Moves operations along.
        arena: Gives arrays in shared memory; None for ranks on several nodes.
        most_slot_bytes: The largest array that fits into a slot.
    """
    clock = _Clock(messages, engine)
    if arena is None:
        return _measure_levels(clock, messages, shared)

    def gains_by(ways: Ways, sizes: Sequence[int]) -> dict[int, float]:
        """Return what an all-reduce of ordinary arrays gains."""
        gains = {}
        for nbytes in sizes:
            x = np.zeros(nbytes // 8)
            gains[nbytes] = clock.gain(
                nbytes, *_both(messages, shared, ways, "all_reduce", None, x, "sum")
            )
        return gains

    in_slots = gains_by(Ways("slots", "slots"), [n for n in _SLOT_BYTES if n <= most_slot_bytes])
    in_chunks = gains_by(Ways("chunks", "chunks"), _CHUNKED_BYTES)
    gains: dict[str, dict[int, float]] = {name: {} for name in OPERATIONS}
    for nbytes in _PLACED_BYTES:
        moves = _moves(messages, shared, Ways("mpi", "in_place"), arena, nbytes)
        for name, both in moves.items():
            gains[name][nbytes] = clock.gain(nbytes, *both)
    if clock.is_over:
        return Sizes.unmeasured()
    slots_from, slots_to = stretch(in_slots) or (NEVER, NEVER)
    return Sizes(
        [crossing(gains[name], 2 * max(_PLACED_BYTES)) for name in OPERATIONS],
        "",
        slots_from=slots_from,
        slots_to=slots_to,
        chunks_from=crossing(in_chunks, NEVER),
    )


def _measure_levels(clock: _Clock, messages: Communicator, shared: _Collectives) -> Sizes:
    """Measure ranks on several nodes: all but an all-to-all, whose ranks know only their sizes."""
    levels = Ways("two_levels", "two_levels")
    names = [name for name in OPERATIONS if name != "all_to_all"]
    gains: dict[str, dict[int, float]] = {name: {} for name in names}
    for nbytes in _CROSSING_BYTES:
        moves = _moves(messages, shared, levels, None, nbytes)
        for name in names:
            gains[name][nbytes] = clock.gain(256 << 10, *moves[name], rounds=3)
    if clock.is_over:
        return Sizes.unmeasured(several_nodes=True)
    sizes = {name: crossing(gains[name], 2 * max(_CROSSING_BYTES)) for name in names}
    return Sizes([sizes.get(name, NEVER) for name in OPERATIONS], "")


def _moves(
    messages: Communicator, shared: _Collectives, ways: Ways, arena: Arena | None, nbytes: int
) -> dict[str, tuple[_Way, _Way]]:
    """Return both ways of each operation, of arrays of so many bytes over all ranks."""
    ranks = messages.size
    each = nbytes // ranks // 8
    counts = [each] * ranks
    whole, block = _zeros(arena, each * ranks), _zeros(arena, each)
    out, part = _zeros(arena, each * ranks), _zeros(arena, each)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (None, _zeros(arena, nbytes // 8), "sum"),
        "reduce_scatter": (whole, part, counts, "sum"),
        "all_gather": (block, out, counts),
        "broadcast": (whole, 0),
        "all_to_all": (whole, out, counts, counts),
    }
    return {name: _both(messages, shared, ways, name, *of) for name, of in arguments.items()}


def _both(
    messages: Communicator, shared: _Collectives, ways: Ways, name: str, *arguments: Any
) -> tuple[_Way, _Way]:
    """Return what starts a collective by messages, and what does in these ways."""
    plain: _Way = partial(getattr(messages, name), *arguments)
    return plain, shared.prepare(name, ways, *arguments)


def _zeros(arena: Arena | None, size: int) -> HostArray:
    part = None if arena is None else arena.empty(8 * size)
    array = np.empty(size) if part is None else part.view(np.float64)
    array[...] = 0
    return array


class _Clock:
    """Takes turns of two ways; the answers are the same on all ranks.

    Attributes:
        is_over: Whether there was no time left for a size.
    """

    spent_s = 0.0  # by all measurements of this process

    def __init__(self, messages: Communicator, engine: ProgressEngine) -> None:
        self._messages = messages
        self._engine = engine
        self.is_over = False
        self._now_s, self._waits = time.perf_counter(), 0
        self._begun_s, self._waits = self._spend(), 0
        for _ in range(2):
            self._spend()

    def _spend(self) -> float:
        """Count the time since the last call, and return what the slowest rank has spent in all."""
        last_s, self._now_s = self._now_s, time.perf_counter()
        _Clock.spent_s += self._now_s - last_s
        spent = np.array([_Clock.spent_s])
        self._finish(self._messages.all_reduce(None, spent, "max"))
        return float(spent[0])

    def gain(self, nbytes: int, first: _Way, second: _Way, *, rounds: int = 7) -> float:
        """Return how many times the second way is clearly faster; alike on all ranks."""
        if self.is_over:
            return 1.0
        best_s = np.full(2, np.inf)
        begin_s = spent_s = self._spend()
        wait_s = (begin_s - self._begun_s) / self._waits
        # One call of a small operation is shorter than what the scheduler may do in between.
        calls = max(1, min(16, (256 << 10) // nbytes, int(_SHARE_S / max(2 * wait_s, 1e-6))))
        for _ in range(rounds):
            if spent_s >= _BUDGET_S or spent_s - begin_s >= _SHARE_S:
                break
            self._engine.steps += 1  # whoever looks after waits sees that this one gets on
            for number, way in enumerate((first, second)):
                self._finish(self._messages.barrier())
                start_s = time.perf_counter()
                for _ in range(calls):
                    self._finish(way())
                best_s[number] = min(best_s[number], time.perf_counter() - start_s)
            spent_s = self._spend()
        if best_s[0] == np.inf:
            self.is_over = True
            return 1.0
        self._finish(self._messages.all_reduce(None, best_s, "max"))
        return float(_CLEARLY * best_s[0] / best_s[1])

    def _finish(self, request: Request) -> None:
        """Wait as a handle does: some tests in a row, and then with naps."""
        self._waits += 1
        engine = self._engine
        if test_often(request.test, engine):
            return

        def ready() -> bool:
            engine.advance()
            return request.test()

        poll(ready, engine=engine)


def stretch(gains: Mapping[int, float]) -> tuple[int, int] | None:
    """Return the first and the last size between which another way gains most in all.

    None if it gains nothing anywhere.

    Args:
        gains: By size, how many times it is faster.
    """
    best, most = None, 1.0
    first, total = 0, 1.0
    for nbytes in sorted(gains):
        if total <= 1:
            first, total = nbytes, 1.0  # what was lost before is not worth having
        total *= gains[nbytes]
        if total > most:
            best, most = (first, nbytes), total
    return best


def crossing(gains: Mapping[int, float], otherwise: int) -> int:
    """Return the size from which on another way gains most in all; `otherwise` if it gains nothing.

    Args:
        gains: By size, how many times it is faster.
        otherwise: The size from which on nothing was measured.
    """
    size, most, total = otherwise, 1.0, 1.0
    for nbytes in sorted(gains, reverse=True):
        total *= gains[nbytes]
        if total > most:
            size, most = nbytes, total
    return size


# -- kept ------------------------------------------------------------------------------

_FORMAT = "9"
_KEPT = "faster, as measured on this machine before"
_MEASURED = "faster, as measured in this job"


class KeptSizes:
    """The sizes of one process: set, measured in this job, or kept from an earlier one.

    Args:
        mode: ``"auto"``, ``"always"`` or ``"never"``: the setting ``MPIMESH_NODE_SHARED``.
        path: The file that keeps what was measured; None keeps nothing.
    """

    def __init__(self, mode: str, path: Path | None) -> None:
        self.mode = mode
        self._path = path
        self._known = {
            group: Sizes.of_numbers(numbers, _KEPT) for group, numbers in _read(path).items()
        }

    @classmethod
    def of_machine(cls, mode: str) -> KeptSizes:
        """Return those that hold for this machine and its MPI. Local."""
        folder = cache_folder()
        name = f"shared-memory-{digest(_FORMAT, *_machine())}.json"
        return cls(mode, None if folder is None else folder / name)

    @property
    def number(self) -> int:
        """The mode as a number that the ranks compare; 0 for never."""
        return ("never", "always", "auto").index(self.mode)

    def of_ranks(self, ranks: int, nodes: int = 1) -> Sizes | None:
        """Return the sizes for so many ranks on so many nodes; None if they are to be measured."""
        if self.mode == "always":
            return Sizes.everything("MPIMESH_NODE_SHARED=always")
        return self._known.get((ranks, nodes))

    def agreed(self, messages: Communicator, nodes: int, measured: Callable[[], Sizes]) -> Sizes:
        """Collective: return what rank 0 knows, or what all measure if it knows nothing."""
        known = self.of_ranks(messages.size, nodes)
        if self.mode == "always" and known is not None:
            return known
        numbers = np.zeros(_NUMBERS, np.int64)
        if messages.rank == 0 and known is not None:
            numbers[...] = known.numbers
        poll(messages.broadcast(numbers, 0).test)
        reason = _KEPT if numbers.all() else _MEASURED
        if reason is _MEASURED:
            sizes = measured()
            numbers[...], reason = sizes.numbers, sizes.reason or reason
        if known is None or known.numbers != numbers.tolist():  # else it says when it was measured
            # A group for which there was no time is measured in the next job.
            keep = messages.rank == 0 and known is None and reason is _MEASURED
            known = Sizes.of_numbers(numbers.tolist(), reason)
            self.learn(messages.size, nodes, known, keep=keep)
        return known

    def learn(self, ranks: int, nodes: int, sizes: Sizes, *, keep: bool) -> None:
        """Take over what was measured or what another rank knows; `keep` writes it down."""
        self._known[ranks, nodes] = sizes
        if keep and self._path is not None:
            table = {**_read(self._path), (ranks, nodes): sizes.numbers}
            # Not to be able to keep it costs the next job a tenth of a second, no more.
            with suppress(OSError):
                write_json(self._path, {f"{r} on {n}": row for (r, n), row in table.items()})


def _machine() -> list[str]:
    # Imported late: importing it starts MPI.
    from mpi4py import MPI

    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    return [
        MPI.Get_library_version(),
        platform.machine(),
        model,
        str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        # The same library sends otherwise by another UCX, or as a person has told it to.
        str(loaded_ucx()),
        *tuning(os.environ),
    ]


def _read(path: Path | None) -> dict[tuple[int, int], list[int]]:
    """Return the numbers for ranks on nodes; nothing if the file is not what it should be."""
    if path is None:
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        found = {_group(text): [int(one) for one in numbers] for text, numbers in table.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return {
        group: numbers
        for group, numbers in found.items()
        if len(numbers) == _NUMBERS and all(0 < number <= NEVER for number in numbers)
    }


def _group(text: str) -> tuple[int, int]:
    ranks, nodes = text.split(" on ")
    return int(ranks), int(nodes)
