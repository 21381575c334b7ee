"""Random meshes, each with the NumPy array of its ranks as the oracle."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from mpimesh.mesh import Mesh

NAMES = ("dp", "pp", "tp", "ep")

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def meshes(draw):
    """Draw (mesh, array): plain, from a range, permuted, sliced or flattened."""
    shape = draw(shapes)
    names = NAMES[: len(shape)]
    size = prod(shape)
    kind = draw(st.sampled_from(["plain", "range", "listed", "slice", "flatten"]))
    ids = np.arange(size)
    if kind == "range":
        ids = draw(st.integers(0, 50)) + ids * draw(st.integers(1, 3))
        made = Mesh(
            list(zip(names, shape, strict=True)),
            range(ids[0], ids[-1] + 1, ids[1] - ids[0] if size > 1 else 1),
        )
        return made, ids.reshape(shape)
    if kind == "listed":
        ids = np.array(draw(st.permutations(range(size + 3)))[:size])
        return Mesh(list(zip(names, shape, strict=True)), ids.tolist()), ids.reshape(shape)
    made, grid = Mesh(list(zip(names, shape, strict=True))), ids.reshape(shape)
    if kind == "slice" and len(shape) > 1:
        kept = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
        rank = draw(st.integers(0, size - 1))
        at = np.unravel_index(rank, shape)
        cut = grid[tuple(slice(None) if k in kept else at[k] for k in range(len(shape)))]
        return made.submesh_of(rank, [names[k] for k in kept]), cut.transpose(
            [sorted(kept).index(k) for k in kept]
        )
    if kind == "flatten" and len(shape) > 1:
        joined = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
        rest = [k for k in range(len(shape)) if k not in joined]
        before = [k for k in rest if k < min(joined)]
        after = [k for k in rest if k > min(joined)]
        flat = grid.transpose([*before, *joined, *after]).reshape(
            [shape[k] for k in before]
            + [prod(shape[k] for k in joined)]
            + [shape[k] for k in after]
        )
        return made.flatten([names[k] for k in joined], "flat"), flat
    return made, grid


@st.composite
def meshes_and_dims(draw):
    """Draw (mesh, array, names of some of its dims in any order)."""
    made, grid = draw(meshes())
    names = draw(st.permutations(made.dim_names))
    return made, grid, names[: draw(st.integers(0, len(names)))]
