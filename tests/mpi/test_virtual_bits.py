"""Virtual ranks compute the bits that the processes of one node compute."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm

KINDS = [np.float16, np.float32, np.float64, np.complex64]


def inputs(kind, rank, n):
    rng = np.random.default_rng(1000 * rank + n)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    return values.astype(kind)


def results(group, kind, n):
    x = inputs(kind, group.rank, n * group.size)
    with np.errstate(all="ignore"):
        handles = [group.all_reduce(x, op=op) for op in ("sum", "mean", "prod")]
        handles += [group.all_reduce(np.abs(x), op="max")]
        handles += [group.reduce_scatter(x, op=op) for op in ("sum", "mean")]
        handles += [group.reduce(x, op=op, root=group.size - 1) for op in ("sum", "mean")]
        found = [handle.resolve() for handle in handles]
    return [b"" if one is None else one.tobytes() for one in found]


@pytest.mark.parametrize("n", [1, 9, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_virtual_ranks_have_the_bits_of_processes(comm, kind, n):
    with mm.DeviceMesh("a=-1", comm) as mesh:
        group = mesh.group()
        if group.algorithms().pick("all_reduce", "host", 8) != "node":
            pytest.skip("MPI sums in an order of its own")
        mine = results(group, kind, n)

    def main():
        with mm.DeviceMesh("a=-1") as virtual:
            return results(virtual.group(), kind, n)

    assert mm.run_virtual(comm.size, main)[comm.rank] == mine
