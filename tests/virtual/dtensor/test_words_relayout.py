"""Split arrays are laid out anew in TensorFlow's words, on the mesh that is meant."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.dtensor import (
    DTensor,
    call_with_layout,
    check_layout,
    copy_to_mesh,
    default_mesh,
    device_name,
    fetch_layout,
    get_default_mesh,
    is_dtensor,
    relayout,
    relayout_like,
    run_on,
)
from mpimesh.errors import LayoutError
from mpimesh.layout import MATCH, UNSHARDED, AxisLayout

X = np.arange(24).reshape(6, 4)


def on(dims, function, *arguments):
    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh, *arguments)

    return mm.run_virtual(mm.Mesh(dims).size, main)


# -- copy_to_mesh and relayout -------------------------------------------------------------


def test_a_whole_array_is_cut():
    """Reducing over x, ranks 0, 2, 4 hold the rows of 3 x 2."""

    def main(mesh):
        t = copy_to_mesh(X, AxisLayout(["x", "y"], mesh), mesh=mesh)
        return t.local.tolist()

    blocks = on("x=3,y=2", main)
    assert blocks[0] == [[0, 1], [4, 5]]
    assert blocks[3] == [[10, 11], [14, 15]]


def test_a_copy_is_no_view():
    def main(mesh):
        x = np.zeros(4)
        copy_to_mesh(x, "R", mesh=mesh).local[...] = 1
        assert not x.any()

    on("a=2", main)


def specs_of(names, ndim):
    rows = itertools.product([UNSHARDED, *names], repeat=ndim)
    return [row for row in rows if all(row.count(name) < 2 for name in names)]


@pytest.mark.parametrize("dims", ["x=1", "x=2,y=2", "x=3,y=2"])
def test_any_layout_to_any_layout(dims):
    x = np.arange(72).reshape(6, 12)

    def main(mesh):
        rows = [AxisLayout(row, mesh) for row in specs_of(mesh.dim_names, 2)]
        for source, target in itertools.product(rows, repeat=2):
            made = relayout(copy_to_mesh(x, source, mesh=mesh), target)
            assert fetch_layout(made).sharding_specs == target.sharding_specs
            assert np.array_equal(made.full(), x)

    on(dims, main)


def test_a_dim_for_another():
    """'x', 'y' to 'z', 'y', which TensorFlow's own relayout cannot."""

    def main(mesh):
        t = copy_to_mesh(X, AxisLayout(["x", "y"], mesh), mesh=mesh)
        moved = relayout(t, AxisLayout(["z", "y"], mesh))
        assert moved.layout.text == "x=R, y=S1, z=S0"
        assert np.array_equal(moved.full(), X)

    on("x=1,y=2,z=2", main)


def test_an_axis_that_matches_stays():
    def main(mesh):
        t = copy_to_mesh(X, AxisLayout(["x", "y"], mesh), mesh=mesh)
        for wanted, found in (
            ([MATCH, UNSHARDED], ["x", UNSHARDED]),
            ([UNSHARDED, MATCH], [UNSHARDED, "y"]),
            ([MATCH, MATCH], ["x", "y"]),
        ):
            moved = relayout(t, AxisLayout(wanted, mesh))
            assert fetch_layout(moved).sharding_specs == found
            assert np.array_equal(moved.full(), X)
        assert relayout(t, AxisLayout([MATCH, MATCH], mesh)) is t
        with pytest.raises(LayoutError, match=r"axis 0\b.*\bx\b"):
            relayout(t, AxisLayout([MATCH, "x"], mesh))

    on("x=2,y=2", main)


def test_what_only_a_layout_can_say_matches_too():
    def main(mesh):
        t = mm.distribute(np.arange(40).reshape(5, 8), mesh, "x=S0, y=S0")
        moved = relayout(t, AxisLayout([MATCH, UNSHARDED], mesh))
        assert moved is t
        sized = t.redistribute("x=S0(4,1), y=S1")
        moved = relayout(sized, AxisLayout([MATCH, UNSHARDED], mesh))
        assert moved.layout.text == "x=S0(4,1), y=R"
        summands = mm.DTensor.from_local(np.ones((2, 2)), mesh, "P, S0")
        moved = relayout(summands, AxisLayout([MATCH, MATCH], mesh))
        assert moved.layout.text == "x=R, y=S0"
        assert moved.local.tolist() == [[2, 2], [2, 2]]

    on("x=2,y=2", main)


def test_onto_another_mesh():
    def main():
        with mm.DeviceMesh("x=4") as here, mm.DeviceMesh("y=2,x=2") as there:
            t = copy_to_mesh(X[:4], AxisLayout(["x", UNSHARDED], here), mesh=here)
            moved = relayout(t, AxisLayout([MATCH, "y"], there), mesh=there)
            assert moved.layout.text == "y=S1, x=S0"
            assert np.array_equal(moved.full(), X[:4])
            copied = copy_to_mesh(t, AxisLayout(["y", "x"], there), mesh=there)
            assert np.array_equal(copied.full(), X[:4])
            assert relayout_like(copied, t).layout == t.layout
            with pytest.raises(LayoutError):
                relayout(t, AxisLayout([MATCH, "y"], there))
            with pytest.raises(LayoutError, match=r"\by\b"):
                relayout(copied, AxisLayout([MATCH, MATCH], here), mesh=here)

    mm.run_virtual(4, main)


def test_like_another():
    def main(mesh):
        t = copy_to_mesh(X, "S0, S1", mesh=mesh)
        other = mm.zeros((9, 9), mesh, "S1, R")
        moved = relayout_like(t, other)
        assert moved.layout == other.layout
        assert np.array_equal(moved.full(), X)
        with pytest.raises(LayoutError):
            relayout_like(t, mm.zeros((4,), mesh, "R, R"))

    on("x=2,y=2", main)


@pytest.mark.parametrize(
    "put", [copy_to_mesh, lambda x, to, mesh: relayout(mm.ones(x.shape, mesh, "R, R"), to)]
)
def test_layouts_that_do_not_fit(put):
    def main(mesh):
        with pytest.raises(LayoutError, match="requires dimension 0 to be divisible"):
            put(np.zeros((7, 4)), AxisLayout(["x", UNSHARDED], mesh), mesh=mesh)
        with pytest.raises(LayoutError, match=r"\b1 axes"):
            put(np.zeros((7, 4)), AxisLayout(["x"], mesh), mesh=mesh)
        assert put(np.zeros((7, 4)), mm.Layout(mesh, "S0, R"), mesh=mesh).shape == (7, 4)

    on("x=2,y=2", main)


def test_match_is_for_relayout_only():
    def main(mesh):
        with pytest.raises(LayoutError, match="match"):
            copy_to_mesh(X, AxisLayout([MATCH, "x"], mesh), mesh=mesh)

    on("x=1", main)


# -- layouts of every spelling are placements ------------------------------------------------


def test_a_layout_stands_for_placements():
    def main(mesh):
        layout = AxisLayout(["y", "x"], mesh)
        for spelling in (layout, layout.layout, "S1, S0"):
            t = mm.distribute(X, mesh, spelling)
            assert t.layout == layout.layout
            assert np.array_equal(t.redistribute("R, R").redistribute(spelling).local, t.local)
            assert DTensor.from_local(t.local, mesh, spelling).layout == t.layout
        with pytest.raises(LayoutError, match="Mesh"):
            mm.distribute(X, mesh, AxisLayout(["x", "y"], mm.Mesh("x=2,y=1")))

    on("x=2,y=2", main)


# -- what lies where --------------------------------------------------------------------------


def test_fetch_and_check():
    def main(mesh):
        layout = AxisLayout(["x", UNSHARDED], mesh)
        t = copy_to_mesh(X, layout, mesh=mesh)
        assert is_dtensor(t)
        assert fetch_layout(t) == layout
        for same in (layout, layout.layout, "S0, R", "x=S0"):
            check_layout(t, same)
        other = AxisLayout([UNSHARDED, "x"], mesh)
        for wrong in (other, other.layout, "R, S0", AxisLayout(["x"], mesh)):
            with pytest.raises(ValueError, match="did not match expected layout"):
                check_layout(t, wrong)
        with pytest.raises(LayoutError, match=r"x=S0, y=R on .*expected layout: x=S1, y=R"):
            check_layout(t, other)
        with pytest.raises(ValueError, match="did not match"):
            check_layout(t, AxisLayout(["x", UNSHARDED], mm.Mesh("x=4,y=1")))

    on("x=2,y=2", main)


def test_a_layout_that_the_spelling_cannot_say():
    def main(mesh):
        with pytest.raises(LayoutError):
            fetch_layout(mm.zeros((4, 4), mesh, "S0, S0"))

    on("x=2,y=2", main)


def test_plain_arrays_have_no_layout():
    assert not is_dtensor(X)
    for word in (fetch_layout, lambda x: check_layout(x, "R"), lambda x: relayout(x, "R")):
        with pytest.raises(LayoutError, match="ndarray"):
            word(X)  # type: ignore[arg-type]


# -- the mesh that is meant ---------------------------------------------------------------------


def test_meshes_in_each_other():
    def main():
        assert get_default_mesh() is None
        with (
            mm.DeviceMesh("x=-1") as outer,
            mm.DeviceMesh("y=-1") as inner,
            default_mesh(outer) as found,
        ):
            assert found is outer
            with run_on(inner):
                assert get_default_mesh() is inner
                t = copy_to_mesh(X, AxisLayout(["y", UNSHARDED], inner))
                assert t.mesh is inner
            assert get_default_mesh() is outer
            with pytest.raises(LayoutError):
                copy_to_mesh(X, AxisLayout(["y", UNSHARDED], inner))
        assert get_default_mesh() is None

    mm.run_virtual(2, main)


def test_each_rank_has_its_own():
    """Virtual ranks are threads: what one of them sets, the others do not see."""

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            if mesh.rank == 0:
                with default_mesh(mesh):
                    mesh.barrier()
                    mesh.barrier()
            else:
                mesh.barrier()
                assert get_default_mesh() is None
                mesh.barrier()

    mm.run_virtual(2, main)


@pytest.mark.parametrize("mesh", [mm.Mesh("x=2"), None, "x=2"])
def test_what_is_no_live_mesh(mesh):
    with pytest.raises(ValueError, match="DeviceMesh"), default_mesh(mesh):
        pytest.fail("it is none")
    with pytest.raises(LayoutError, match="DeviceMesh"):
        copy_to_mesh(X, "R", mesh=mesh)


def test_the_block_ends_by_an_error_too():
    def main(mesh):
        with pytest.raises(ZeroDivisionError), default_mesh(mesh):
            raise ZeroDivisionError
        assert get_default_mesh() is None

    on("x=1", main)


def test_device_names():
    def main(mesh):
        with run_on(mesh):
            assert device_name() == device_name(mesh)
        with pytest.raises(LayoutError, match="mesh="):
            device_name()
        return device_name(mesh)

    assert on("x=1", main) == ["/job:localhost/replica:0/task:0/device:CPU:0"]
    names = on("x=2", main)
    assert names == [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]


def test_results_are_laid_out():
    def main(mesh):
        layout = AxisLayout(["x", UNSHARDED], mesh)
        with default_mesh(mesh):
            t = call_with_layout(np.full, layout, (6, 4), fill_value=7)
            assert (t.layout, t.shape) == (layout.layout, (6, 4))
            assert t.local.tolist() == [[7] * 4] * 3
            first, second = call_with_layout(np.divmod, layout, X, 5)
            assert np.array_equal(first.full(), X // 5)
            assert np.array_equal(second.full(), X % 5)
            moved = call_with_layout(lambda one: one, layout, mm.distribute(X, mesh, "S1"))
            assert moved.layout == layout.layout
            assert np.array_equal(moved.full(), X)
            assert call_with_layout(np.sum, None, X) == X.sum()
            with pytest.raises(LayoutError, match=r"\b2 axes"):
                call_with_layout(np.sum, layout, X)

    on("x=2", main)


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
