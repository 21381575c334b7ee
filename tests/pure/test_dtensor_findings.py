"""What first users and those who tried to break it have found, on arrays as a whole."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import (
    BudgetError,
    ClosedError,
    DTypeError,
    LayoutError,
    MismatchError,
    NoRuleError,
    ShapeError,
)


def on(dims, function):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh)

    return mm.run_virtual(mm.Mesh(dims).size, main)


def test_ranks_that_name_different_roots(monkeypatch):
    """They wrote into each other's results, and nobody noticed."""
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.distribute(np.arange(6.0), mesh, "S0")
        with pytest.raises(MismatchError, match="ids"):
            x.full(root=mesh.rank % 2)
        with pytest.raises(MismatchError, match="max_bytes"):
            x.redistribute("R", max_bytes=8 + mesh.rank)

    on("a=3", main)


def test_ranks_that_name_meshes_of_other_orders(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.distribute(np.arange(6.0), mesh, "S0")
        with (
            mm.DeviceMesh(mm.Mesh("b=2", ids=[0, 1])) as one,
            mm.DeviceMesh(mm.Mesh("b=2", ids=[1, 0])) as other,
            pytest.raises(MismatchError),
        ):
            x.redistribute("S0", mesh=other if mesh.rank else one)

    on("a=2", main)


def test_an_array_as_the_value_of_full():
    def main(mesh):
        for placement in ("R", "S0"):
            for shape, value in (((4,), [1, 2, 3, 4]), ((3, 2), [[1], [2], [3]]), ((2, 2), [5, 6])):
                found = mm.full(shape, value, mesh, placement).full()
                assert np.array_equal(found, np.full(shape, value))
        with pytest.raises(ShapeError, match=r"\(2,\) does not fit \(4,\)"):
            mm.full((4,), [1, 2], mesh, "S0")

    on("a=2", main)


def test_parts_without_elements_take_the_others_dtype():
    """``np.array([])`` is of float64: the integers of the others were read as floats."""

    def main(mesh):
        x = mm.from_callback((2,), mesh, "S0", lambda index: [10, 20][index[0]])
        y = mm.local_map(lambda b: np.array([int(v) for v in b]), "S0")(mm.ones(2, mesh, "S0"))
        for found, want in ((x, [10, 20]), (y, [1, 1])):
            assert found.dtype == np.int64
            assert found.local.dtype == np.int64
            assert found.full().tolist() == want
        none = mm.from_callback((0,), mesh, "S0", lambda index: np.zeros(0, "f4"))
        assert none.dtype == np.float32
        dtype = "f4" if mesh.rank else "f8"
        with pytest.raises(MismatchError, match="rank 1: float32"):
            mm.from_callback((6,), mesh, "S0", lambda index: np.zeros(2, dtype))

    on("a=3", main)


def test_the_same_array_on_all_ranks_is_compared(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        with pytest.raises(MismatchError, match="distribute"):
            mm.distribute(np.full(2, mesh.rank), mesh, "R")
        with pytest.raises(MismatchError, match="distribute"):
            mm.distribute(np.ones((6 + mesh.rank, 2)), mesh, "S0")

    on("a=2", main)


def test_what_an_array_is_cannot_be_assigned():
    def main(mesh):
        x = mm.zeros((6, 2), mesh, "S0")
        for name, value in (("shape", (2, 6)), ("dtype", np.int8), ("layout", None)):
            with pytest.raises(AttributeError):
                setattr(x, name, value)

    on("a=2", main)


def test_a_closed_mesh_takes_no_array():
    def main(mesh):
        x = mm.zeros(4, mesh, "S0")
        other = mesh.copy()
        other.close()
        with pytest.raises(ClosedError):
            x.redistribute("S0", mesh=other)

    on("a=2", main)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_a_budget_that_one_rank_breaks(monkeypatch, checks):
    """The others learn of it, with checks or without: theirs is larger, but there is one."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main(mesh):
        x = mm.zeros((4, 4), mesh, "S0")
        limit = 8 if mesh.rank else 1 << 20
        words = "would receive" if mesh.rank else "budget of rank 1"
        with mesh.budget(bytes=limit), pytest.raises(BudgetError, match=words):
            x.redistribute("S1")

    on("a=2", main)


def test_copied_shown_and_formatted():
    def main(mesh):
        x = mm.arange(4, mesh=mesh, placements="S0")
        y = copy.deepcopy(x)
        y.local[...] = -1
        assert x.full().tolist() == [0, 1, 2, 3]
        with pytest.raises(TypeError, match="full"):
            pickle.dumps(x)
        assert f"{x.sum():.2f}" == "6.00"
        assert str(x) == f"{x!r}, the block of rank {mesh.rank}:\n{x.local}"
        assert f"{x}" == str(x)
        assert "RedistributionPlan of shape (4,)" in repr(x.plan("R"))
        with pytest.raises(ShapeError, match="has 4 elements"):
            f"{x:.2f}"
        assert mm.Random(1).normal(5, mesh, "S0").shape == (5,)

    on("a=2", main)


def test_nothing_is_none():
    def main(mesh):
        x: Any = mm.distribute(np.arange(6), mesh, "R").redistribute("P")
        assert (x == None).full().tolist() == [False] * 6  # noqa: E711
        assert (x != None).full().tolist() == [True] * 6  # noqa: E711

    on("a=2", main)


@pytest.mark.parametrize("op", ["divide", "sum of", "prod of"])
def test_what_errstate_raises_on_one_rank_is_raised_on_all(op):
    """Else that rank would go on alone, and its next collective meet another of the others."""
    values = np.array([1.0, 1.0, 1.0, 1e308, 1e308, 1e308]) if " " in op else np.arange(6.0)[::-1]

    def main(mesh):
        x: Any = mm.distribute(values, mesh, "S0")
        calls = {"divide": lambda: 1.0 / x, "sum of": x.sum, "prod of": x.prod}
        with np.errstate(all="raise"):
            assert (x + 1.0).shape == (6,)
            with pytest.raises(FloatingPointError, match=r"divide by zero|overflow"):
                calls[op]()
        assert x.full().tolist() == values.tolist()

    on("a=2", main)


def test_a_default_layout_is_a_default_mesh():
    def main(mesh: Any) -> None:
        with mm.default_layout(mesh, "S0"):
            assert mm.dtensor.get_default_mesh() == mesh
        with mm.dtensor.default_mesh(mesh):
            made = mm.arange(3, mesh=mesh, placements="R").__array_namespace__().arange(4)
            assert made.layout.is_replicated
        assert mm.dtensor.get_default_mesh() is None
        grid = mm.dtensor.call_with_layout(np.identity, "a=S0", 4, mesh=mesh)
        assert grid.layout.text == "a=S0"

    on("a=2", main)


def test_functions_without_a_rule_work_on_copies():
    """Every rank has all of them, so nothing is gathered."""
    a, b = np.diag([2.0, 4.0]), np.array([1.0, 2.0])

    def main(mesh):
        x, y = mm.distribute(a, mesh, "R"), mm.distribute(b, mesh, "R")
        before = mesh.traffic().snapshot()
        found: Any = np.linalg.solve(x, y)
        assert found.layout.is_replicated
        assert found.local.tolist() == [0.5, 0.5]
        assert (mesh.traffic() - before).received_bytes == 0
        with pytest.raises(NoRuleError, match="solve"):
            np.linalg.solve(x.redistribute("S0"), y)

    on("a=2", main)


def test_what_is_sent_in_pieces_counts():
    """It was in no count of what is received, so no budget saw it."""

    def main(mesh):
        x = mm.distribute(np.arange(32.0).reshape(8, 4), mesh, "S0")
        before = mesh.traffic().snapshot()
        np.roll(x, 1, axis=0)
        assert (mesh.traffic() - before).received_bytes == x[0].nbytes
        with pytest.raises(BudgetError), mesh.budget(bytes=x[0].nbytes - 1):
            np.roll(x, 1, axis=0)

    on("a=4", main)


@pytest.mark.parametrize("checks", ["0", "1"])
def test_sums_on_one_of_two_equal_meshes_that_leave_ranks_out(monkeypatch, checks):
    """Only their members took part in the way back, by another collective than the rest."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def main():
        small = mm.Mesh("d=2")
        with mm.DeviceMesh(small) as here, mm.DeviceMesh(small) as there:
            x = mm.distribute(np.arange(4.0), here, ["R"])
            back = x.redistribute(["P"], mesh=there).redistribute(["R"], mesh=here)
            return back.local.tolist() if back.is_member else None

    assert mm.run_virtual(3, main) == [[0.0, 1.0, 2.0, 3.0]] * 2 + [None]


@pytest.mark.parametrize("checks", ["0", "1"])
def test_what_exceeds_the_budget_of_one_rank_is_refused_on_all(monkeypatch, checks):
    """Those that refused alone left the others in an exchange with their next one: wrong values."""
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    numbers = np.arange(24.0).reshape(6, 4)

    def main(mesh):
        x = mm.distribute(numbers, mesh, "a=S0, b=R")
        before = mesh.traffic().snapshot()
        with mesh.budget(bytes=47) as budget:
            for _ in range(2):
                with pytest.raises(BudgetError, match=r"of rank 1, 2|would receive 48 bytes"):
                    x.redistribute("a=S1, b=S0")  # ranks 0 and 3 have all that they need
            assert budget.used_bytes == 0
        assert (mesh.traffic() - before).received_bytes == 0
        y = (x + 1000).redistribute("a=S1, b=R")
        assert np.array_equal(y.full(), numbers + 1000)
        with mesh.budget(bytes=48) as budget:
            x.redistribute("a=S1, b=S0")
            assert budget.used_bytes == (48 if mesh.rank in (1, 2) else 0)

    on("a=2,b=2", main)


def test_a_sum_that_waits_says_so():
    def main(mesh):
        x = mm.distribute(np.arange(4.0), mesh, "a=S0")
        assert "x.full() is the result" in str(x.sum())
        assert "the block of rank" in str(x)
        whole = mm.distribute(np.arange(4.0), mesh, "a=R")
        for call in (np.asarray, list):
            with pytest.raises(LayoutError, match=r"take x.local, which is NumPy's own"):
                call(whole)
            with pytest.raises(LayoutError, match="its parts are on several ranks"):
                call(x)

    on("a=2", main)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("i1", 300), ("u1", -1), ("i8", float("nan")), ("i8", float("inf")), ("f8", 5 + 3j)],
)
def test_numbers_that_do_not_fit_are_not_written(dtype, value):
    """They were cast, and stored as something else."""

    def main(mesh):
        x: Any = mm.zeros((4, 3), mesh, "S0", dtype=dtype)
        writes = [
            lambda: operator.setitem(x, 0, value),
            lambda: operator.setitem(x, (slice(None), 1), [value] * 4),
            lambda: np.put(x, [1], value),
            lambda: np.fill_diagonal(x, value),
        ]
        for write in writes:
            with pytest.raises(DTypeError, match="nothing was written"):
                write()
        assert not x.full().any()

    on("a=2", main)


def test_values_along_an_axis_that_do_not_fit_are_refused_on_all_ranks():
    def main(mesh):
        x: Any = mm.zeros((4, 3), mesh, "S0")
        with pytest.raises(DTypeError, match="nothing was written"):
            np.put_along_axis(x, np.zeros((4, 3), int), "q", 0)

    on("a=2", main)


def test_no_initial_value():
    """None was taken for NaN."""

    def main(mesh):
        numbers = np.arange(6.0).reshape(3, 2)
        x: Any = mm.distribute(numbers, mesh, "S0")
        functions: Any = (np.sum, np.prod, np.max, np.nansum, np.add.reduce)
        for function in functions:
            found = function(x, axis=0, initial=None)
            np.testing.assert_array_equal(found.full(), function(numbers, axis=0, initial=None))

    on("a=2", main)
