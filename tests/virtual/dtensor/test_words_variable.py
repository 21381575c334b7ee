"""Split arrays that can be assigned anew keep their layout."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor import DTensor, DVariable, default_layout
from mpimesh.dtensor.dispatch import FUNCTIONS
from mpimesh.errors import DTypeError, LayoutError, MissingPackageError, ShapeError
from tests.helpers.dtensor_oracle import placements
from tests.helpers.raises import raises

X = np.arange(24.0).reshape(6, 4)


def on(dims, function, *arguments):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh, *arguments)

    return mm.run_virtual(mm.Mesh(dims).size, main)


def variable(mesh, placement="S0, R", x=X):
    return DVariable(x, layout=placement, mesh=mesh, name="v")


# -- made --------------------------------------------------------------------------------


def test_what_it_begins_with():
    def main(mesh):
        layout = mm.Layout(mesh, "x=S0")
        t = mm.distribute(X, mesh, layout)
        with default_layout(mesh):
            made = [
                DVariable(t),
                DVariable(t, layout=layout, dtype=float),
                DVariable(X, layout=layout),
                DVariable(X.tolist(), layout="x=S0"),
                DVariable(lambda: t, layout="x=S0"),
                DVariable(lambda: X, layout=layout),
                DVariable(DVariable(t)),
            ]
        for v in made:
            assert (v.layout, v.shape, v.dtype, v.mesh) == (t.layout, t.shape, t.dtype, mesh)
            assert np.array_equal(v.value().full(), X)
            v.local[...] = -1  # of no other
        assert np.array_equal(t.full(), X)
        assert DVariable(X, layout=layout, mesh=mesh, dtype="f4").dtype == np.float32
        assert repr(variable(mesh)) == (
            "DVariable('v', shape=(6, 4), dtype=float64, x=S0, y=R on x=3,y=2)"
        )

    on("x=3,y=2", main)


def test_what_it_cannot_begin_with():
    def main(mesh):
        t = mm.distribute(X, mesh, "S0, R")
        with pytest.raises(ValueError, match=r"x=S0, y=R.*x=S1"):
            DVariable(t, layout=mm.Layout(mesh, "x=S1"))
        with pytest.raises(LayoutError, match="layout="):
            DVariable(X, mesh=mesh)
        with pytest.raises(LayoutError):
            DVariable(X, layout="P, R", mesh=mesh)
        with pytest.raises(DTypeError, match="float32"):
            DVariable(t, dtype="f4")
        with pytest.raises(DTypeError, match="float32"):
            DVariable(t, save_as_bf16=True)

    on("x=3,y=2", main)


# -- assigned ------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["x=1", "x=2", "x=2,y=2"])
def test_any_layout_is_assigned(dims):
    def main(mesh):
        rows = placements(mesh.ndim, ("R", "S0", "S1"))
        for row in rows:
            v = variable(mesh, row, np.zeros_like(X))
            expected = np.zeros_like(X)
            for number, source in enumerate(placements(mesh.ndim), 1):
                t = mm.distribute(number * X, mesh, source)
                assert v.assign(t) is v
                assert v.layout.placement == mm.Layout(mesh, row).placement
                assert np.array_equal(v.value().full(), number * X)
                assert v.assign_add(t).assign_add(t) is v
                assert v.assign_sub(variable(mesh, row, np.ones_like(X))) is v
                expected = 3 * number * X - 1
                assert np.array_equal(v.value().full(), expected)

    on(dims, main)


def test_summands_are_summed():
    """A gradient that every rank has a part of goes in as it is."""

    def main(mesh):
        v = variable(mesh, "S0, R", np.zeros((6, 1)))
        part = np.full((6, 1), 1.0 + mesh.rank)
        v.assign_sub(DTensor.from_local(part, mesh, "P, P", shape=(6, 1)))
        assert v.value().full().ravel().tolist() == [-21] * 6

    on("x=3,y=2", main)


def test_what_was_read_stays():
    def main(mesh):
        v = variable(mesh)
        before, t = v.value(), mm.distribute(X + 1, mesh, "S0, R")
        v.assign(t)
        after = v.value()
        v.assign_add(t)
        t.local[...] = 0
        assert np.array_equal(before.full(), X)
        assert np.array_equal(after.full(), X + 1)
        assert np.array_equal(v.value().full(), 2 * X + 2)

    on("x=2,y=1", main)


def test_a_number():
    def main(mesh):
        v = DVariable(np.float32(2), layout=mm.Layout(mesh, "x=R"), mesh=mesh)
        assert v.assign_add(0.5).value().full() == 2.5
        assert v.assign(7).value().full() == 7
        assert v.dtype == np.float32

    on("x=2", main)


def test_what_cannot_be_assigned():
    def main():
        with mm.DeviceMesh("x=2,y=1") as mesh, mm.DeviceMesh("x=2,y=1") as other:
            v = variable(mesh)
            for word in (v.assign, v.assign_add, v.assign_sub):
                with pytest.raises(LayoutError, match="ndarray"):
                    word(X)
                with pytest.raises(ShapeError, match=r"\(6, 4\).*\(3, 4\)"):
                    word(X[:3])
                with pytest.raises(ShapeError, match=r"\(\)"):
                    word(1.0)
                with pytest.raises(ShapeError, match=r"DTensor\(shape=\(6,\)"):
                    word(mm.zeros((6,), mesh, "S0, R"))
                with pytest.raises(DTypeError, match="float32"):
                    word(mm.zeros((6, 4), mesh, "S0, R", dtype="f4"))
                with pytest.raises(LayoutError):
                    word(mm.zeros((6, 4), other, "S0, R"))
            assert np.array_equal(v.value().full(), X)

    mm.run_virtual(2, main)


def test_a_rank_outside_takes_part():
    def main():
        with mm.DeviceMesh(mm.Mesh("x=1", [0])) as mesh:
            v = DVariable(X, layout="S0", mesh=mesh, dtype="f4", save_as_bf16=True)
            v.assign_add(mm.ones((6, 4), mesh, "R", dtype="f4"))
            assert v.value_to_save().is_member == (mesh.rank == 0)
            if mesh.rank == 0:
                assert np.array_equal(v.local, X + 1)

    mm.run_virtual(2, main)


# -- saved -------------------------------------------------------------------------------------


def test_half_of_the_bytes_are_saved():
    def main(mesh):
        v = DVariable(X / 7, layout="S0", mesh=mesh, dtype="f4")
        assert v.value_to_save() is v.value()
        v.save_as_bf16 = True
        saved = v.value_to_save()
        assert (saved.dtype, saved.layout) == (ml_dtypes.bfloat16, v.layout)
        assert np.array_equal(saved.full(), (X / 7).astype("f4").astype(ml_dtypes.bfloat16))
        assert v.dtype == np.float32

    on("x=2", main)


# -- NumPy ---------------------------------------------------------------------------------------


@pytest.fixture
def rules(monkeypatch):
    """Rules that do without messages, for arrays that all lie alike."""

    def ufunc(function, method, args, kwargs):
        assert not kwargs
        assert not any(isinstance(one, DVariable) for one in args)
        first = next(one for one in args if isinstance(one, DTensor))
        rows = [one.local if isinstance(one, DTensor) else one for one in args]
        block = getattr(function, method)(*rows)
        return DTensor(first.mesh, first.layout, first.shape, block.dtype, block)

    monkeypatch.setitem(FUNCTIONS, np.ufunc, ufunc)
    monkeypatch.setitem(FUNCTIONS, np.concatenate, lambda arrays, axis: (type(arrays[1]), axis))


def test_it_computes_as_its_values_do(rules):
    def main(mesh):
        v, t = variable(mesh), mm.distribute(X, mesh, "S0, R")
        for found, expected in (
            (v + t, X + X),
            (t - v, X - X),
            (2 * v, 2 * X),
            (v * v, X * X),
            (-v, -X),
            (np.sqrt(v), np.sqrt(X)),
            (v > 3, X > 3),
        ):
            assert isinstance(found, DTensor)
            assert np.array_equal(found.full(), expected)
        assert np.concatenate([t, v], axis=1) == (DTensor, 1)
        assert len(v) == 6
        assert (v.ndim, v.size, v.is_member) == (2, 24, True)

    on("x=3,y=2", main)


def test_in_place_is_assigned(rules):
    def main(mesh):
        v = same = variable(mesh)
        before = v.value()
        v += mm.distribute(X, mesh, "S0, R")
        v *= 2
        assert v is same
        assert np.add(v, 1, out=v) is v
        assert np.array_equal(v.value().full(), 4 * X + 1)
        assert np.array_equal(before.full(), X)

        w = DVariable(X, layout="S0, R", mesh=mesh, dtype="f4")
        w += mm.distribute(X, mesh, "S0, R")  # float64, which NumPy's own += rounds, too
        assert w.dtype == np.float32
        assert np.array_equal(w.value().full(), 2 * X)
        whole = DVariable(X.astype(int), layout="S0, R", mesh=mesh)
        with pytest.raises(DTypeError, match="int64"):
            whole += 0.5

    on("x=3,y=2", main)


def test_it_is_no_numpy_array():
    def main(mesh):
        v = variable(mesh)
        for use in (np.asarray, list):
            with pytest.raises(LayoutError, match="full"):
                use(v)
        with pytest.raises(AttributeError):
            v.there_is_none  # noqa: B018

    on("x=1,y=1", main)


def test_bfloat16_without_its_package_is_told_when_it_is_asked_for(monkeypatch):
    """It was told when the variable was saved, as a ModuleNotFoundError."""
    monkeypatch.setattr("mpimesh.dtensor.variable.find_spec", lambda name: None)

    def main():
        with mm.DeviceMesh("x=1") as mesh:
            values = np.zeros(4, np.float32)
            with raises(MissingPackageError, "save_as_bf16", "ml_dtypes"):
                mm.dtensor.DVariable(values, layout="x=S0", mesh=mesh, save_as_bf16=True)
            variable = mm.dtensor.DVariable(values, layout="x=S0", mesh=mesh)
            with raises(MissingPackageError, "save_as_bf16", "ml_dtypes"):
                variable.save_as_bf16 = True
            assert not variable.save_as_bf16

    mm.run_virtual(1, main)
