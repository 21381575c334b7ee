"""Collectives planned once and started many times."""

from __future__ import annotations

import numpy as np

from mpimesh.arrays import ReduceOp
from mpimesh.errors import ClosedError, DTypeError, RankError, ShapeError, UnresolvedError
from tests.contract.cases import LAYOUTS, WRITABLE, output, same, values
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.oracle import cut, equal_sizes, joined, reduced, uneven
from tests.helpers.raises import raises

STARTS = 3
DTYPES = [np.dtype(kind) for kind in ("f8", "f2", ">f4", "i4", "D")]


def refilled(group, x, shape, start):
    """Write this rank's values of a start into `x`; return those of all ranks."""
    inputs = [values(rank, shape, x.dtype, start) for rank in group.ranks]
    x[...] = inputs[group.rank]
    return inputs


def check_an_all_reduce_reads_its_input_at_each_start(comm):
    with groups_of(comm) as groups:
        for group in groups:
            for dtype in DTYPES:
                for layout in WRITABLE:
                    x = output(layout, (3, 4), dtype)
                    for out in (None, x, output(layout, (3, 4), dtype)):
                        refilled(group, x, (3, 4), 0)
                        planned = group.all_reduce_init(x, out=out)
                        for start in range(STARTS):
                            inputs = refilled(group, x, (3, 4), start)
                            got = planned.start().resolve()
                            same(got, reduced(inputs, "sum"), (dtype, layout, start))
                            assert out is None or got is out


def check_every_reduction_can_be_planned(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        size, rank = group.size, group.rank
        x = np.empty((size, 3))
        sizes = uneven(size)
        uneven_x = np.empty((2, sum(sizes)))
        for op in ReduceOp:
            plans = [
                group.all_reduce_init(x, op),
                group.reduce_init(x, op, root=size - 1),
                group.reduce_scatter_init(x, op),
            ]
            uneven_plan = group.reduce_scatter_init(uneven_x, op, axis=1, sizes=sizes)
            for start in range(STARTS):
                whole = reduced(refilled(group, x, x.shape, start), op)
                mine = cut(whole, 0, equal_sizes(size, size))[rank]
                expected = [whole, whole if rank == size - 1 else None, mine]
                handles = [plan.start() for plan in plans]
                for handle, value in zip(handles, expected, strict=True):
                    same(handle.resolve(), value, (op, start))
                parts = cut(reduced(refilled(group, uneven_x, uneven_x.shape, start), op), 1, sizes)
                same(uneven_plan.start().resolve(), parts[rank], (op, start))


def check_every_movement_can_be_planned(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        size, rank = group.size, group.rank
        for layout in LAYOUTS:
            if layout not in WRITABLE:
                continue
            x = output(layout, (2, size), np.dtype("i4"))
            refilled(group, x, x.shape, 0)
            out = output(layout, (2, size * size), x.dtype)
            plans = [
                group.all_gather_init(x, axis=1),
                group.all_gather_init(x, axis=1, out=out),
                group.gather_init(x, root=size - 1),
                group.all_to_all_init(x, split_axis=1),
                group.broadcast_init(x, root=size - 1),
                group.broadcast_init(x, root=0, out=x),
            ]
            for start in range(STARTS):
                inputs = refilled(group, x, x.shape, start)
                blocks = [cut(one, 1, equal_sizes(size, size))[rank] for one in inputs]
                expected = [
                    joined(inputs, 1),
                    joined(inputs, 1),
                    joined(inputs) if rank == size - 1 else None,
                    joined(blocks, 1),
                    inputs[size - 1],
                    inputs[0],
                ]
                for plan, value in zip(plans, expected, strict=True):
                    same(plan.start().resolve(), value, (layout, start, plan))


def check_persistent_collectives_refuse_what_calls_refuse(comm):
    mesh = mesh_of(comm)
    group = mesh.group()
    x = np.ones(group.size)
    with raises(DTypeError, "mean", x.astype(int).dtype):
        group.all_reduce_init(x.astype(int), "mean")
    with raises(RankError, group.size):
        group.reduce_init(x, root=group.size)
    with raises(ShapeError, "axis"):
        group.all_gather_init(x, axis=1)
    with raises(ShapeError, (group.size + 1,)):
        group.all_reduce_init(x, out=np.ones(group.size + 1))
    planned = group.all_reduce_init(x, out=x)
    handle = planned.start()
    with raises(UnresolvedError, "all_reduce"):
        planned.start()
    handle.resolve()
    same(planned.start().resolve(), np.full(group.size, float(group.size**2)))
    mesh.close()
    with raises(ClosedError, "closed"):
        planned.start()


def check_a_persistent_collective_notices_changed_arrays(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x: list[float] = [1, 2, 3]
        planned = group.all_reduce_init(x)
        same(planned.start().resolve(), np.array([1, 2, 3]) * group.size)
        x.append(4)
        with raises(ShapeError, (4,), (3,)):
            planned.start()
        x[:] = [1.5, 2.5, 3.5]
        with raises(DTypeError, "float64", "int64"):
            planned.start()


def check_results_have_the_dtype_of_the_input_and_not_an_equal_one(comm):
    plain = np.dtype([("a", "i4")])
    record = np.dtype((np.record, plain))
    named = np.dtype("i4", metadata={"unit": "m"})
    with mesh_of(comm) as mesh:
        group = mesh.group()
        assert group.all_gather(np.zeros(2, plain)).resolve().dtype.type is np.void
        assert group.all_gather(np.zeros(2, record)).resolve().dtype.type is np.record
        group.all_reduce(np.zeros(2, named)).resolve()
        assert group.all_reduce(np.zeros(2, "i4")).resolve().dtype.metadata is None


def check_planning_is_local(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.rank == 0:
            with raises(DTypeError, "mean"):
                group.all_reduce_init(np.ones(2, int), "mean")
        same(group.all_reduce(np.ones(2)).resolve(), np.full(2, float(group.size)))
