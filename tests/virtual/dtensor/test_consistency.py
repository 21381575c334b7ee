"""Arguments of split arrays that differ by rank are told apart, however they are printed."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, RankError
from tests.helpers.raises import raises


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,)])
def test_the_last_bit_counts(shape, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.distribute(np.ones((2, *shape)), mesh, "S0")
            other = np.full(shape, np.nextafter(1 / 3, mesh.rank))
            with raises(MismatchError, "rank 0", "rank 1"):
                np.add(x, other)

    mm.run_virtual(2, main)


def test_a_long_range_costs_nothing(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.distribute(np.ones(4), mesh, "S0")
            with pytest.raises((MemoryError, TypeError, ValueError)):
                np.add(x, range(10**15))

    mm.run_virtual(2, main)


@pytest.mark.parametrize("root", [2, -1])
def test_a_root_that_is_wrong_on_one_rank_ends_all(root, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.distribute(np.ones(4), mesh, "S0")
            if mesh.rank:
                with raises(MismatchError, "rank 0", "full", "raised RankError"):
                    x.full(root=0)
            else:
                with raises(RankError):
                    x.full(root=root)
            assert np.array_equal(x.full(), np.ones(4))

    mm.run_virtual(2, main)
