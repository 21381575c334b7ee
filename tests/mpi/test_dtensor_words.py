"""TensorFlow's and TVM's words for split arrays, between processes."""

from __future__ import annotations

import numpy as np

import mpimesh as mm
from mpimesh.compat.tensorflow import (
    UNSHARDED,
    DVariable,
    Layout,
    copy_to_mesh,
    fetch_layout,
    pack,
    relayout,
    unpack,
)
from mpimesh.compat.tvm import redistribute, redistribute_replica_to_shard
from mpimesh.errors import MismatchError, ShapeError
from tests.helpers.raises import raises


def test_packed_laid_out_and_back(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n = mesh.size
        x = np.arange(4.0 * n * n).reshape(2 * n, 2 * n)
        rows, columns = Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh)
        mine = x[2 * mesh.rank : 2 * mesh.rank + 2]
        t = pack([mine], rows)
        moved = relayout(t, columns)
        assert fetch_layout(moved) == columns
        assert np.array_equal(unpack(moved)[0], x[:, 2 * mesh.rank : 2 * mesh.rank + 2])
        assert np.array_equal(relayout(moved, rows).local, mine)
        assert np.array_equal(redistribute(moved, mesh, "R").local, x)


def test_components_that_do_not_fit(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        last = mesh.rank == mesh.size - 1
        layout = Layout(["x"], mesh)
        with raises((ShapeError, MismatchError), "pack" if mesh.size > 1 else "DTensorPack"):
            pack([np.ones(2)] * (2 if last else 1), layout)
        if mesh.size > 1:
            with raises(MismatchError, "float64", f"rank {mesh.size - 1}", "float32"):
                pack([np.ones(2, "f4" if last else "f8")], layout)


def test_a_variable_takes_a_gradient_of_summands(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n = mesh.size
        v = DVariable(np.zeros((2 * n, 3)), layout="S0", mesh=mesh)
        part = np.arange(6.0 * n).reshape(2 * n, 3)
        for _ in range(3):
            v.assign_sub(mm.DTensor.from_local(part, mesh, "P"))
        assert np.array_equal(v.value().full(), -3 * n * part)
        assert v.layout.text == "x=S0"


def test_slices_of_a_copy(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        x = np.arange(3 * mesh.size)
        t = copy_to_mesh(x, "R", mesh=mesh)
        mine = redistribute_replica_to_shard(t, mesh.size, 0).local
        assert mine.tolist() == [3 * mesh.rank + k for k in range(3)]
