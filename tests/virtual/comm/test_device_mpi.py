"""Reductions made of messages, as for CUDA-aware MPI, with NumPy on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.mpi_cuda import Peers, reduce_scatter_steps, reduce_steps
from tests.devices.operations import finish, numbers, reduced
from tests.devices.virtual import on_ranks


class Done:
    def test(self):
        return True


def peers(comm, dtype, *, small_bytes=0, function=np.add):
    return Peers(
        rank=comm.rank,
        size=comm.size,
        isend=lambda array, dest: comm.isend(array, dest, 1),
        irecv=lambda array, source: comm.irecv(array, source, 1),
        combine=lambda first, second, out: function(first, second, out=out),
        empty=lambda size: np.empty(size, dtype),
        settled=Done,
        small_bytes=small_bytes,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_reductions(ranks, small_bytes):
    def main(comm):
        for size in (0, 1, 2, 29):
            inputs = [numbers(r, size, "i8") for r in range(comm.size)]
            for function, op in ((np.add, "sum"), (np.maximum, "max")):
                net = peers(comm, "i8", small_bytes=small_bytes, function=function)
                mine = inputs[comm.rank].copy()
                finish(comm, comm.engine.stage("a", reduce_steps(net, mine)))
                assert mine.tolist() == reduced(inputs, op).tolist()
            for root in {0, comm.size - 1}:
                mine = inputs[comm.rank].copy()
                net = peers(comm, "i8", small_bytes=small_bytes)
                finish(comm, comm.engine.stage("b", reduce_steps(net, mine, root)))
                assert comm.rank != root or mine.tolist() == reduced(inputs, "sum").tolist()
        counts = [3 * r for r in range(comm.size)]
        inputs = [numbers(r, sum(counts), "f8") for r in range(comm.size)]
        steps = reduce_scatter_steps(peers(comm, "f8"), inputs[comm.rank].copy(), counts)
        request = comm.engine.stage("c", steps)
        finish(comm, request)
        start = sum(counts[: comm.rank])
        expected = reduced(inputs, "sum")[start : start + counts[comm.rank]]
        assert request.value.tolist() == expected.tolist()

    on_ranks(ranks, main)


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_all_ranks_get_the_same_bits(small_bytes):
    def main(comm):
        x = np.random.default_rng(comm.rank).standard_normal(1001).astype("f4")
        net = peers(comm, "f4", small_bytes=small_bytes)
        finish(comm, comm.engine.stage("a", reduce_steps(net, x)))
        return x.tobytes()

    for ranks in (3, 4, 6):
        assert len(set(on_ranks(ranks, main))) == 1
