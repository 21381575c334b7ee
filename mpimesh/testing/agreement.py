"""Exchange small values among all ranks of the world, for test runners.

The exchange has a communicator of its own, so that it never meets a message of
the test, and it naps while it waits: a test suite runs more ranks than there
are cores, and a rank that spins takes the core from the rank it waits for.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Agreement"]

_FIRST_NAP_S = 0.0002
_LONGEST_NAP_S = 0.003
_SIZE_BYTES = 8
_RECORD_BYTES = 256


class Agreement:
    """A private communicator over the whole world.

    Collective: made and closed by every rank, at the same place in its program.

    Attributes:
        rank: This process's rank in the world.
        size: The world's size.
    """

    def __init__(self) -> None:
        # Importing MPI starts it: only a run that has several ranks may come here.
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order.

        Collective. `value` is anything that JSON can hold. Waits, with naps,
        until all ranks have called it.
        """
        from mpi4py import MPI

        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        # All that is short goes with its size at once: each wait more is some naps more.
        record = np.zeros(_RECORD_BYTES, np.uint8)
        record[:_SIZE_BYTES] = np.array([data.size], np.int64).view(np.uint8)
        record[_SIZE_BYTES : _SIZE_BYTES + data.size] = data[: _RECORD_BYTES - _SIZE_BYTES]
        records = np.empty((self.size, _RECORD_BYTES), np.uint8)
        _wait(self._comm.Iallgather(record, records))
        sizes = records[:, :_SIZE_BYTES].copy().view(np.int64)[:, 0]
        if sizes.max() <= _RECORD_BYTES - _SIZE_BYTES:
            rows = [row[_SIZE_BYTES:][:size] for row, size in zip(records, sizes, strict=True)]
        else:
            joined = np.empty(int(sizes.sum()), np.uint8)
            ends = np.cumsum(sizes)
            _wait(self._comm.Iallgatherv(data, [joined, sizes, ends - sizes, MPI.UINT8_T]))
            rows = np.split(joined, ends[:-1])
        return [json.loads(row.tobytes()) for row in rows]

    def abort(self, code: int) -> None:
        """End all ranks of the job at once with exit code `code`."""
        self._comm.Abort(code)

    def close(self) -> None:
        """Collective: give the communicator back."""
        self._comm.Free()


def _wait(request: MPI.Request) -> None:
    nap_s = _FIRST_NAP_S
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
