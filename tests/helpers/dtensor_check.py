"""Functions of NumPy on split arrays, held against the same functions on whole ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import mpimesh as mm

SIZES = (1, 2, 3, 4)


def numbers(shape, dtype=int, seed=0):
    """An array of small numbers, none of them like its neighbours."""
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 10, shape).astype(dtype)


def summands(x, op, count, seed=5):
    """Return so many arrays, none like `x`, of which `op` makes it, to the bit if it is small."""
    rng = np.random.default_rng(seed)
    table = rng.integers(-5, 6, (count, *x.shape)).astype(x.dtype)
    owner = int(rng.integers(count))
    with np.errstate(all="ignore"):
        if op in ("sum", "mean"):
            whole = x * x.dtype.type(count) if op == "mean" else x
            # What is not finite stands in one of them, beside others that are.
            table[owner] += whole - table.sum(axis=0).astype(x.dtype)
        elif op == "prod":
            signs = rng.choice([-1, 1] if x.dtype.kind != "u" else [1], x.shape).astype(x.dtype)
            table[:] = 1
            table[owner] = x * signs
            table[(owner + 1) % count] *= signs
        elif x.dtype.kind == "b":
            others = table.astype(bool)
            table = (x | others) if op == "min" else (x & others)
            table[owner] = x
        else:
            away = np.abs(rng.integers(0, 6, table.shape)).astype(x.dtype)
            table = x + away if op == "min" else x - away
            if x.dtype.kind in "iu":  # without wrapping around
                table = np.maximum(table, x) if op == "min" else np.minimum(table, x)
            table[owner] = x
    return table


def split(x, mesh, placements, seed=5):
    """Distribute an array; of `Partial` dims every rank has a summand of its own."""
    layout = mm.Layout(mesh, placements)
    partial = [dim for dim, spec in enumerate(layout.placement) if isinstance(spec, mm.Partial)]
    whole = mm.distribute(
        x, mesh, ["R" if d in partial else spec for d, spec in enumerate(layout.placement)]
    )
    kinds = "biuf" if layout.partial_op in ("min", "max") else "iufc"
    if not partial or x.dtype.kind not in kinds:
        return whole.redistribute(layout.placement) if partial else whole
    parts = [layout.mesh.dims[dim].size for dim in partial]
    table = summands(x, layout.partial_op, int(np.prod(parts)), seed)
    coords = layout.mesh.coords_of(mesh.rank)
    mine = table[np.ravel_multi_index([coords[dim] for dim in partial], parts)]
    box = tuple(slice(*edges) for edges in layout.box(x.shape, mesh.rank))
    return mm.DTensor.from_local(mine[(*box, ...)].copy(), mesh, layout.placement, shape=x.shape)


def placements_of(ndim, mesh_dims=1):
    """All placements of arrays of so many axes on a mesh of so many dims."""
    one = ["R", "P", *(f"S{axis}" for axis in range(ndim))]
    if mesh_dims == 1:
        return one
    return [f"{first}, {second}" for first in one for second in one]


@st.composite
def layouts(draw, shape, size, partial=True):
    """Text of the placement of an array on a mesh of one dim; blocks may be of any sizes."""
    kinds = ["R", *(["P"] if partial else []), *(f"S{axis}" for axis in range(len(shape)))] * 2
    kinds += [f"u{axis}" for axis in range(len(shape))]
    kind = draw(st.sampled_from(kinds))
    if kind[0] != "u":
        return kind
    axis = int(kind[1:])
    edges = sorted(
        draw(st.lists(st.integers(0, shape[axis]), min_size=size - 1, max_size=size - 1))
    )
    sizes = np.diff([0, *edges, shape[axis]])
    return f"S{axis}({','.join(map(str, sizes))})"


def same(found, expected, note="", atol=0.0):
    """See that results are equal, tuples item by item, dtypes too; numbers up to `atol`."""
    if isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple), (note, found)
        assert len(found) == len(expected), note
        for one, other in zip(found, expected, strict=True):
            same(one, other, note, atol)
        return
    assert isinstance(found, mm.DTensor), (note, found)
    whole, expected = found.full(), np.asarray(expected)
    assert found.dtype == whole.dtype == expected.dtype, (note, whole.dtype, expected.dtype)
    assert whole.shape == expected.shape, (note, whole.shape, expected.shape)
    if atol:
        np.testing.assert_allclose(whole, expected, atol, atol, err_msg=note)
    else:
        np.testing.assert_array_equal(whole, expected, err_msg=note)


def agree(dims, cases, atol=0.0):
    """Run cases on virtual ranks.

    Each case is ``(function, arrays, placements)``. Numbers may differ by `atol`.
    """

    def main():
        with mm.DeviceMesh(dims) as mesh:
            for number, (function, arrays, placements) in enumerate(cases):
                note = f"case {number} of {dims}: {[a.shape for a in arrays]} as {placements}"
                tensors = [split(a, mesh, p) for a, p in zip(arrays, placements, strict=True)]
                try:
                    found = function(*tensors)
                except Exception as error:
                    error.add_note(note)
                    raise
                same(found, function(*arrays), note, atol)

    size = int(np.prod([int(part.split("=")[1]) for part in dims.split(",")]))
    mm.run_virtual(size, main)


def raises_alike(dims, error, cases):
    """See that each case raises on every rank, and that the ranks are still in step."""

    def main():
        with mm.DeviceMesh(dims) as mesh:
            for number, (function, array, placement) in enumerate(cases):
                x = split(array, mesh, placement)
                try:
                    function(x)
                except error:
                    pass
                else:
                    raise AssertionError(f"case {number} raised nothing")
                same(x, array)

    size = int(np.prod([int(part.split("=")[1]) for part in dims.split(",")]))
    mm.run_virtual(size, main)


def on(dims, function, *arguments):
    """Call a function with a mesh on as many virtual ranks; return what each rank returned."""

    def main():
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh, *arguments)

    return mm.run_virtual(mm.Mesh(dims).size, main)
