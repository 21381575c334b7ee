"""Reductions made of messages, as for CUDA-aware MPI, with NumPy on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.reductions import (
    RING,
    Peers,
    all_reduce_by_messages,
    doubling,
    reduce_by_messages,
    reduce_scatter_by_messages,
)
from tests.devices.operations import finish, numbers, reduced
from tests.devices.virtual import on_ranks


def all_reduce(comm, data, op, *, small):
    """Reduce in place by one of the two algorithms for devices."""
    if small:
        return doubling(Peers(comm), data, op)
    return all_reduce_by_messages(Peers(comm), RING, None, data, op)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("small", [False, True])
def test_reductions(ranks, small):
    def main(comm):
        for size in (0, 1, 2, 29):
            inputs = [numbers(r, size, "i8") for r in range(comm.size)]
            for op in ("sum", "max"):
                mine = inputs[comm.rank].copy()
                finish(comm, comm.engine.stage("a", all_reduce(comm, mine, op, small=small)))
                assert mine.tolist() == reduced(inputs, op).tolist()
            for root in {0, comm.size - 1}:
                mine = inputs[comm.rank].copy()
                out = mine if small or size >= comm.size else mine.copy()
                if small:
                    steps = doubling(Peers(comm), mine, "sum")
                else:
                    steps = reduce_by_messages(Peers(comm), RING, mine, out, "sum", root)
                finish(comm, comm.engine.stage("b", steps))
                assert comm.rank != root or out.tolist() == reduced(inputs, "sum").tolist()
        counts = [3 * r for r in range(comm.size)]
        inputs = [numbers(r, sum(counts), "f8") for r in range(comm.size)]
        mine, block = inputs[comm.rank].copy(), np.full(counts[comm.rank], np.nan)
        steps = reduce_scatter_by_messages(Peers(comm), mine, block, counts, "sum")
        finish(comm, comm.engine.stage("c", steps))
        start = sum(counts[: comm.rank])
        expected = reduced(inputs, "sum")[start : start + counts[comm.rank]]
        assert block.tolist() == expected.tolist()
        assert mine.tolist() == inputs[comm.rank].tolist()

    on_ranks(ranks, main)


@pytest.mark.parametrize("small", [False, True])
def test_all_ranks_get_the_same_bits(small):
    def main(comm):
        x = np.random.default_rng(comm.rank).standard_normal(1001).astype("f4")
        finish(comm, comm.engine.stage("a", all_reduce(comm, x, "sum", small=small)))
        return x.tobytes()

    for ranks in (3, 4, 6):
        assert len(set(on_ranks(ranks, main))) == 1
