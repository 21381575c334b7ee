"""Arguments of split arrays that differ by rank are told apart, however they are printed."""

from __future__ import annotations

from typing import Any

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


def test_calls_that_mean_the_same_are_the_same(monkeypatch):
    """However their arguments are given; and what does not mean the same is told."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    alike: list[Any] = [
        (lambda x: np.sum(x, 0), lambda x: np.sum(x, axis=0)),
        (lambda x: np.sum(x), lambda x: x.sum()),
        (lambda x: np.sum(x, axis=-1), lambda x: x.sum(axis=1)),
        (lambda x: np.mean(x, axis=(0, -1)), lambda x: np.mean(x, (0, 1), keepdims=False)),
        (lambda x: np.sort(x), lambda x: np.sort(x, axis=1)),
        (lambda x: np.moveaxis(x, 0, -1), lambda x: np.moveaxis(x, source=-2, destination=1)),
        (lambda x: np.concatenate([x, x], -2), lambda x: np.concatenate([x, x], axis=0)),
        (lambda x: x.T, lambda x: np.transpose(x)),
        (lambda x: np.roll(x, 1, 0), lambda x: np.roll(x, axis=0, shift=1)),
    ]
    unlike: list[Any] = [
        (lambda x: np.sum(x, 0), lambda x: np.sum(x, axis=1)),
        (lambda x: np.sum(x), lambda x: x.sum(0)),
        (lambda x: np.expand_dims(x, -1), lambda x: np.expand_dims(x, 1)),
        (lambda x: np.roll(x, 1, 0), lambda x: np.roll(x, 0, 1)),
        (lambda x: np.std(x), lambda x: np.std(x, ddof=1)),
    ]

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.ones((4, 4), mesh, "S0")
            for pair in alike:
                pair[mesh.rank](x)
            for pair in unlike:
                with pytest.raises(MismatchError):
                    pair[mesh.rank](x)

    mm.run_virtual(2, main)


@pytest.mark.skipif(np.finfo("g").nmant != 63, reason="long doubles have no such bytes here")
@pytest.mark.parametrize("dtype", ["g", "G", [("a", "i1"), ("b", "g")]])
def test_bytes_that_hold_no_value_do_not_count(dtype, monkeypatch):
    """A long double has ten bytes of sixteen; what lies in the others differs over ranks."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            kind = np.dtype(dtype, align=isinstance(dtype, list))
            x = np.zeros(4, kind)
            for part in [x[name] for name in kind.names or ()] or [x]:
                part[...] = 3
            x.view(np.uint8).reshape(-1, 16)[:, 10:] = mesh.rank * 255
            y = mm.distribute(x, mesh, "R")
            assert y.shape == (4,)
            x[0] = x[1] = mesh.rank
            with pytest.raises(MismatchError):
                mm.distribute(x, mesh, "S0")

    mm.run_virtual(2, main)
