"""Messages around a ring of ranks: each sends to the next and receives from the one before.

Beside mpi4py's `Sendrecv`: `send` and `recv` into an array, `send` and `recv` of whatever comes,
both planned, and `shift`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

__all__ = ["SIZES_BYTES", "run"]

SIZES_BYTES = (8, 1 << 10, 64 << 10, 1 << 20)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way and size."""
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    after, before = (mesh.rank + 1) % group.size, (mesh.rank - 1) % group.size
    rows = []
    for nbytes in effort.sizes(SIZES_BYTES):
        x = np.full(nbytes // 8, float(mesh.rank))
        y, z = np.empty_like(x), np.empty_like(x)
        sending, receiving = group.send_init(x, after), group.recv_init(z, before)

        def into_array(x: Any = x, y: Any = y) -> None:
            sent = group.send(x, after)
            group.recv(before, out=y).resolve()
            sent.resolve()

        def whatever_comes(x: Any = x) -> None:
            sent = group.send(x, after)
            group.recv(before).resolve()
            sent.resolve()

        def planned(sending: Any = sending, receiving: Any = receiving) -> None:
            sent = sending.start()
            receiving.start().resolve()
            sent.resolve()

        into_array()
        planned()
        assert y[0] == z[0] == before
        timings = in_turns(
            comm,
            {
                "Sendrecv": lambda x=x, y=y: comm.Sendrecv(x, after, 0, y, before, 0),
                "send, recv(out=y)": into_array,
                "send, recv": whatever_comes,
                "send_init, recv_init": planned,
                "shift": lambda x=x: group.shift(x, wrap=True).resolve(),
            },
            calls=effort.calls(nbytes),
            rounds=effort.rounds,
        )
        rows += make_rows(f"message of {size_text(nbytes)}", timings)
    return rows
