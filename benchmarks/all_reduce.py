"""All-reduce whose result is another array: `all_reduce(x).resolve()`, also started from a plan.

In place, which is faster, stands in `shared.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from benchmarks.measure import FULL, Effort, in_turns
from benchmarks.rows import make_rows, size_text

SIZES_BYTES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)


def run(mesh: mm.DeviceMesh, effort: Effort = FULL) -> list[dict[str, Any]]:
    """Return a row for each way and size."""
    group = mesh.group()
    comm = group.communicator.native  # type: ignore[attr-defined]
    rows = []
    for nbytes in effort.sizes(SIZES_BYTES):
        x = np.ones(nbytes // 8)
        # An output for each way: one that another way has just written would be warm.
        y, z = np.empty_like(x), np.empty_like(x)
        planned = group.all_reduce_init(x)
        timings = in_turns(
            comm,
            {
                "Allreduce(x, y)": lambda x=x, y=y: comm.Allreduce(x, y),
                "all_reduce(x).resolve()": lambda x=x: group.all_reduce(x).resolve(),
                "all_reduce(x, out=z).resolve()": lambda x=x, z=z: group.all_reduce(
                    x, out=z
                ).resolve(),
                "all_reduce_init(x).start().resolve()": lambda p=planned: p.start().resolve(),
            },
            calls=effort.calls(nbytes),
            rounds=effort.rounds,
        )
        rows += make_rows(f"all-reduce, {size_text(nbytes)}", timings)
    return rows
