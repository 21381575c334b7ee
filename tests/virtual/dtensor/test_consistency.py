"""Arguments of split arrays that differ by rank are told apart, however they are printed."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError, RankError
from mpimesh.mesh import Mesh
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


def test_what_is_no_axis_is_refused_as_numpy_does(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x: Any = mm.zeros((2, 2), mesh, "S0")
            for axes in (np.array([0, 1]), np.array([0])):
                with pytest.raises(TypeError):
                    np.diff(x, axis=axes)

    mm.run_virtual(2, main)


def test_arrays_are_told_apart_in_no_program_that_is_right(monkeypatch):
    """Whatever is local: copies, garbage, errors, other meshes, and the order of results."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    ranks = threading.local()

    def fails(block):
        if ranks.rank:
            raise ArithmeticError
        return block

    def main():
        with mm.DeviceMesh("a=2") as mesh, mm.DeviceMesh(Mesh("b=1", world_size=1)) as few:
            ranks.rank = mesh.rank
            x = mm.distribute(np.arange(8.0), mesh, "S0")
            copied = x.copy() if mesh.rank else x
            assert float((copied + 1).sum()) == 36
            rows = [mm.zeros(8, mesh, "S0") for _ in range(4)]
            kept = rows[3]
            if mesh.rank:
                rows.clear()
            for number in range(3 if mesh.rank == 0 else 0):
                assert float((mm.ones(2, few, "R") + number).sum()) == 2 * (1 + number)
            with pytest.raises(ValueError, match="broadcast"):
                x + np.ones(5)
            with contextlib.suppress(ArithmeticError):
                mm.local_map(fails)(x)
            started = [one.start_redistribute("R") for one in (x, kept)]
            for handle in reversed(started) if mesh.rank else started:
                handle.resolve()
            whole, zeros = (handle.resolve() for handle in started)
            assert np.array_equal((whole + zeros).full(), np.arange(8.0))
            if mesh.rank:
                assert whole.copy().astype("f4").local[1] == 1.0
            own = mm.DTensor(mesh, x.layout, x.shape, x.dtype, x.local)
            x += own
            low, high = np.split(x, 2)
            joined: Any = np.concatenate([high, low])
            assert np.array_equal(joined.full(), 2 * np.roll(np.arange(8), 4))
            x.sort()
            assert float(x.T.real.max()) == 14

    mm.run_virtual(2, main)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_only_with_checks_on_arrays_have_numbers(checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.zeros(4, mesh, "S0") + 1
            made = [x, x.copy(), x.redistribute("R"), mm.shift(x, 1, 0), *np.split(x, 2)]
            numbers = [getattr(one, "_origin", None) for one in made]
            if checks == "0":
                assert numbers == [None] * 6
            else:
                texts = [str(number) for number in numbers]
                assert texts == ["#2", "#2", "#3", "#4", "#5[0]", "#5[1]"]

    mm.run_virtual(2, main)
