"""Scatters of arrays that only the root knows: into places and without, and what goes wrong."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from mpimesh.errors import DTypeError, ShapeError
from tests.contract.cases import same, values
from tests.contract.meshes import mesh_of
from tests.contract.oracle import cut, uneven
from tests.helpers.raises import raises

ROWS = (1, 3, 40, 3000, 60_000)
"""Inline, in a slot, in pieces, and large enough to be read in place."""


def check_scatters_into_places_and_without(comm):
    """Each rank in its own way, of any size, from memory of any kind."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        for number, rows in enumerate(ROWS):
            root = number % n
            whole = values(root, (rows * n, 2), "f8", number)
            shared = mesh.shared_empty(whole.shape)
            shared[...] = whole
            for turn, x in enumerate((whole, shared, np.asfortranarray(whole))):
                out = np.zeros((rows, 2)) if (me + turn) % 2 else None
                handle = group.scatter(x if me == root else None, root=root, out=out)
                got = handle.resolve()
                same(got, cut(whole, 0, [rows] * n)[me], (rows, turn))
                assert out is None or got is out
            sizes = uneven(n, number)
            parts = cut(values(root, (2, sum(sizes)), "i4", number), 1, sizes)
            x = np.concatenate(parts, axis=1)
            out = np.zeros((2, sizes[me]), "i4")
            x = x if me == root else None
            for into in (out, None if me % 2 else out):
                handle = group.scatter(x, root=root, axis=1, sizes=sizes, out=into)
                same(handle.resolve(), parts[me], sizes)


def check_many_scatters_of_different_arrays_wait_for_each_other(comm):
    """The root may be far ahead of who must first be told what comes."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        wholes = [values(0, (n * (1 + size % 7), size), "f4", size) for size in range(150)]
        handles = [group.scatter(x if me == 0 else None) for x in wholes]
        total = group.all_reduce(np.ones(2))
        for x, handle in reversed([*zip(wholes, handles, strict=True)]):
            same(handle.resolve(), np.split(x, n)[me])
        same(total.resolve(), np.full(2, float(n)))


def check_an_output_that_does_not_fit_a_scatter_is_its_ranks_alone(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        for rows in ROWS:
            for odd in range(n):
                for wrong in (np.zeros((rows + 1, 2)), np.zeros((rows, 2), "f4"), np.zeros(rows)):
                    whole = values(odd, (rows * n, 2), "f8")
                    out = wrong if me == odd else np.zeros((rows, 2))
                    handle = group.scatter(whole if me == 0 else None, out=out)
                    if me == odd:
                        kind = DTypeError if wrong.dtype == np.float32 else ShapeError
                        with raises(kind, "out"):
                            handle.resolve()
                    else:
                        same(handle.resolve(), cut(whole, 0, [rows] * n)[me])
        same(group.all_reduce(np.ones(2)).resolve(), np.full(2, float(n)))


def check_an_array_that_cannot_be_scattered_is_refused_by_all(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        overlapping = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})
        cases = [
            (np.ones((n + 1, 2)), 0, None, ShapeError) if n > 1 else None,
            (np.ones((n, 2)), 2, None, ShapeError),
            (np.ones((n, 2)), 0, [2] * n, ShapeError),
            (np.float64(1), 0, None, ShapeError),
            (np.zeros(n, overlapping), 0, None, DTypeError),
        ]
        for x, axis, sizes, kind in filter(None, cases):
            for out in (None, np.zeros((1, 2))):
                mine = x if me == 0 else None
                handle = group.scatter(mine, axis=axis, sizes=sizes, out=out if me else None)
                with raises(kind):
                    handle.resolve()
        same(group.scatter(np.arange(n) if me == 0 else None).resolve(), np.array([me]))


def check_what_does_not_fit_is_found_behind_other_work_and_within_a_budget(comm):
    """There a scatter goes by steps, of which the operation is one."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        if n == 1:
            return
        whole = values(0, (2 * n, 3), "f8")
        for behind in (0, 1, 2, 3):
            for rows in (2 * n, 2 * n + 1):
                x = np.ones(3 * n) if me == 0 else None
                before = None
                if behind == 1:
                    before = group.broadcast(x, root=None)
                elif behind == 2:
                    before = group.scatter(x)
                out = np.zeros((2, 3 if me == 0 or rows > 2 * n else 4))
                x = np.resize(whole, (rows, 3)) if me == 0 else None
                with mesh.budget(bytes=1 << 20) if behind == 3 else nullcontext():
                    handle = group.scatter(x, out=out)
                    if me == 0 and rows == 2 * n:
                        same(handle.resolve(), whole[:2])
                    else:
                        with raises(ShapeError):
                            handle.resolve()
                if before is not None:
                    before.resolve()
