"""The program that tries CUDA-aware MPI, in a process that may crash.

``python -m mpimesh.comm.cuda_probe_child FOLDER OPERATION...`` moves device
memory between two ranks by each operation, in three sizes, from and to addresses
that are not the start of an allocation, and compares. Each rank writes lines of JSON into
a file of its own; what is missing there did not come to its end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mpimesh.arrays.namespace import HostArray

__all__ = ["OPERATIONS", "TRIAL_BYTES", "main"]

TRIAL_BYTES = (8, 1 << 15, 1 << 22)
"""Sizes that are tried: MPI has another way for each."""

_FAILED = 3


def _pattern(rank: int, size: int) -> HostArray:
    """Return numbers that no other rank has at the same place, all exact in float32."""
    return np.arange(size, dtype=np.float32) + 1000 * (rank + 1)


class _Trial:
    """Operations on arrays of one size."""

    def __init__(self, comm: Any, cupy: Any, size: int) -> None:
        self.comm, self.cupy, self.size = comm, cupy, size
        self.mine = _pattern(comm.rank, size)
        self.all = np.concatenate([_pattern(rank, size) for rank in range(comm.size)])

    def filled(self, values: HostArray) -> Any:
        """Return `values` on the device, one element past the start of an allocation."""
        return self.cupy.asarray(np.concatenate([np.zeros(1, np.float32), values]))[1:]

    def empty(self, size: int) -> Any:
        return self.filled(np.full(size, -1, np.float32))

    def counts(self) -> list[int]:
        return [self.size] * int(self.comm.size)

    def run(self, operation: str) -> str:
        """Return what went wrong; nothing if nothing did."""
        start, received, expected = _PREPARATIONS[operation](self)
        self.cupy.cuda.get_current_stream().synchronize()
        for request in start():
            request.Wait()
        if received is None or np.array_equal(self.cupy.asnumpy(received), expected):
            return ""
        return f"wrong data in {operation} of {self.size * 4} bytes"


# What starts the operation and keeps its arrays alive, the array that is received (None on a rank
# that receives nothing), and the data that it must hold in the end.
_Prepared = tuple[Callable[[], list[Any]], Any, Any]


def _messages(trial: _Trial) -> _Prepared:
    peer = trial.comm.size - 1 - trial.comm.rank
    send, recv = trial.filled(trial.mine), trial.empty(trial.size)

    def start() -> list[Any]:
        return [trial.comm.Irecv(recv, peer, 1), trial.comm.Isend(send, peer, 1)]

    return start, recv, _pattern(peer, trial.size)


def _broadcast(trial: _Trial) -> _Prepared:
    root = trial.comm.size - 1
    buffer = trial.filled(trial.mine)
    return lambda: [trial.comm.Ibcast(buffer, root)], buffer, _pattern(root, trial.size)


def _all_gather(trial: _Trial) -> _Prepared:
    send, recv = trial.filled(trial.mine), trial.empty(trial.all.size)
    return lambda: [trial.comm.Iallgatherv(send, [recv, trial.counts()])], recv, trial.all


def _gather(trial: _Trial) -> _Prepared:
    send = trial.filled(trial.mine)
    recv = trial.empty(trial.all.size) if trial.comm.rank == 0 else None
    target = None if recv is None else [recv, trial.counts()]
    return lambda: [trial.comm.Igatherv(send, target, 0)], recv, trial.all


def _scatter(trial: _Trial) -> _Prepared:
    source = [trial.filled(trial.all), trial.counts()] if trial.comm.rank == 0 else None
    recv = trial.empty(trial.size)
    return lambda: [trial.comm.Iscatterv(source, recv, 0)], recv, trial.mine


def _all_to_all(trial: _Trial) -> _Prepared:
    ranks, me = trial.comm.size, trial.comm.rank
    send = trial.filled(np.concatenate([trial.mine + rank for rank in range(ranks)]))
    recv = trial.empty(trial.all.size)

    def start() -> list[Any]:
        return [trial.comm.Ialltoallv([send, trial.counts()], [recv, trial.counts()])]

    return start, recv, trial.all + me


_PREPARATIONS: dict[str, Callable[[_Trial], _Prepared]] = {
    "messages": _messages,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
OPERATIONS = tuple(_PREPARATIONS)
"""Operations that are tried, in this order: all that moves and nothing that reduces."""


def main(arguments: Sequence[str]) -> None:
    """Run the trials; ends the process with exit code 3 at the first that fails."""
    from mpi4py import MPI

    folder, *operations = arguments
    comm = MPI.COMM_WORLD
    sharing = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks that are of one node to MPI
    with (Path(folder) / f"rank{comm.rank}").open("a", buffering=1) as log:
        _log(log, event="world", size=comm.size, sharing=sharing.size)
        try:
            cupy = _device(comm.rank)
        except Exception as error:
            _fail(log, "device", f"{type(error).__name__}: {error}")
        for operation in operations:
            try:
                problems = [
                    _Trial(comm, cupy, nbytes // 4).run(operation) for nbytes in TRIAL_BYTES
                ]
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
            if any(problems):
                _fail(log, operation, "; ".join(filter(None, problems)))
            _log(log, event="passed", operation=operation)


def _device(rank: int) -> Any:
    """Return CuPy, with this rank's device chosen."""
    import cupy

    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    cupy.asarray(np.zeros(1))
    return cupy


def _log(log: TextIO, **fields: object) -> None:
    log.write(json.dumps(fields) + "\n")


def _fail(log: TextIO, operation: str, problem: str) -> None:
    _log(log, event="failed", operation=operation, problem=problem)
    log.flush()
    # Not by an exception: the exit of an MPI process waits for the other rank.
    os._exit(_FAILED)


if __name__ == "__main__":
    main(sys.argv[1:])
