"""Collectives planned once and started many times."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.arrays import ReduceOp
from mpimesh.errors import (
    ClosedError,
    DTypeError,
    LayoutError,
    RankError,
    ShapeError,
    UnresolvedError,
)
from tests.contract.cases import ALL, LAYOUTS, WRITABLE, output, same, values
from tests.contract.meshes import groups_of, mesh_of, world_size
from tests.contract.oracle import cut, equal_sizes, joined, reduced, uneven
from tests.contract.programs import BORDERS, every_planned, opened, run
from tests.contract.shared_memory import PIECES
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


def check_a_scatter_can_be_planned(comm):
    with groups_of(comm) as groups:
        for group in groups:
            size, rank = group.size, group.rank
            for root, axis, sizes, dtype in [
                (0, 0, None, "f8"),
                (size - 1, 1, uneven(size), "f4"),
                (0, 1, [0] * (size - 1) + [3], "i2"),
                (size - 1, 0, None, "D"),
            ]:
                blocks = equal_sizes(2 * size, size) if sizes is None else sizes
                shape = [4, 4]
                shape[axis] = sum(blocks)
                x: Any = np.zeros(shape, dtype)
                for layout in WRITABLE:
                    shape[axis] = blocks[rank]
                    out = output(layout, tuple(shape), np.dtype(dtype))
                    x = x if rank == root else None
                    planned = group.scatter_init(x, root=root, axis=axis, sizes=sizes, out=out)
                    for start in range(STARTS):
                        shape[axis] = sum(blocks)
                        whole = values(root, tuple(shape), np.dtype(dtype), start)
                        if x is not None:
                            x[...] = whole
                        got = planned.start().resolve()
                        assert got is out
                        same(got, cut(whole, axis, blocks)[rank], (root, axis, sizes, layout))
            x = np.arange(2.0 * size)
            like = x if rank == 0 else np.zeros(2 * size)
            got = group.scatter_init(like).start().resolve()
            same(got, x[2 * rank : 2 * rank + 2], "x everywhere")
            if size > 1:
                with raises(ShapeError, "out=", "root", rank):
                    group.scatter_init(None, root=0)
                with raises(RankError, "root", size):
                    group.scatter_init(np.ones(size), root=size, out=np.ones(1))


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


def check_every_planned_one_of_every_dtype(comm):
    """With all of them under way at once, by turns in memory that is shared or not."""

    def shapes(dtype):
        return [(3,), (0, 2), (2, 0)] if dtype == np.float64 else [(3,)]

    with opened(comm) as (mesh, groups):
        dtypes = ALL if mesh.world_size <= 4 else ALL[::4]
        problems, _ = run(mesh, groups, every_planned(shapes, dtypes))
        assert not problems, problems[0]


def check_every_planned_one_of_sizes_where_other_ways_begin(comm):
    small, slot, piece, *_ = BORDERS
    few = PIECES[0] > 0 or world_size(comm) > 4
    borders = (small,) if few else (small, slot, piece)

    def shapes(dtype):
        return [
            (border // dtype.itemsize + more,)
            for border in borders
            for more in ((-1, 0, 1) if border == small else (0, 1))
        ]

    with opened(comm) as (mesh, groups):
        problems, _ = run(mesh, groups, every_planned(shapes, [np.dtype("f8")] * 2))
        assert not problems, problems[0]


def check_a_planned_one_starts_again_while_a_later_one_is_under_way(comm):
    """On the last rank alone: what came between must not wait for what has begun again since."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n, is_last = group.size, group.rank == group.size - 1
        y = np.ones(3)
        for size in (1, 1000, 20_000)[: 1 if PIECES[0] else 3]:
            x, out = np.ones(size), np.empty(size)
            plans = [
                group.all_reduce_init(x, out=out),
                group.reduce_init(x, out=out),
                group.reduce_scatter_init(np.ones(size * n), out=out),
                group.all_gather_init(x),
                group.gather_init(x),
                group.all_to_all_init(np.ones(size * n)),
                group.broadcast_init(x, root=n - 1),
            ]
            for plan in plans:
                for later in (lambda: group.all_reduce(y), lambda: group.broadcast(y, root=n - 1)):
                    first, between = plan.start(), later()
                    first.resolve()
                    if is_last:
                        again = plan.start()
                        again.resolve()
                        between.resolve()
                    else:
                        between.resolve()
                        again = plan.start()
                        again.resolve()


def check_planning_is_local(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.rank == 0:
            with raises(DTypeError, "mean"):
                group.all_reduce_init(np.ones(2, int), "mean")
        same(group.all_reduce(np.ones(2)).resolve(), np.full(2, float(group.size)))


def check_neither_planning_nor_printing_writes(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n, whole = group.size, np.arange(3.0 * group.size)
        for name in (
            *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "all_to_all"),
            *("broadcast", "scatter"),
        ):
            plan = getattr(group, f"{name}_init")
            size = {"reduce_scatter": 3, "scatter": 3, "all_gather": 3 * n * n, "gather": 3 * n * n}
            memory = np.full(whole.size + size.get(name, whole.size) - 1, 7.0)
            memory[: whole.size] = whole
            x, out = memory[: whole.size], memory[whole.size - 1 :]
            planned = plan(x, out=out)
            print(planned)
            same(x, whole, name)
            assert (out[1:] == 7).all(), name
            got = planned.start().resolve()
            expected = plan(whole.copy()).start().resolve()
            if got is not None:
                same(got, expected, name)
            before = memory.copy()
            print(planned)
            same(memory, before, name)


# -- redistributions ------------------------------------------------------------------------------


def line_of(comm):
    """Collective: open a mesh of one dim."""
    return mm.DeviceMesh("a=-1", comm)


def split(values, mesh, placement):
    """Return an array with this rank's part of `values`; as summands, all are on the first rank."""
    x = mm.distribute(np.zeros(values.shape), mesh, "R" if placement == "P" else placement)
    if placement == "P":
        x = x.redistribute("P")
    rewrite(x, values)
    return x


def rewrite(x, values):
    if x.layout.partial_op:
        x.local[...] = values if x.mesh.rank == 0 else 0.0
    else:
        box = x.layout.box(x.shape, x.mesh.rank)
        x.local[...] = values[tuple(slice(*pair) for pair in box)]


def check_a_planned_redistribution_reads_the_array_at_each_start(comm):
    """Uneven and empty blocks, fewer rows than ranks, summands; NaN travels, too."""
    random = np.random.default_rng(3)
    with line_of(comm) as mesh:
        size = mesh.group().size
        for shape in ((size + 1, 3), (1, size), (0, 2)):
            for source in ("S0", "S1", "R", "P"):
                for target in ("S0", "S1", "R"):
                    x = split(np.zeros(shape), mesh, source)
                    out = split(np.ones(shape), mesh, target)
                    plans = [x.redistribute_init(target), x.redistribute_init(target, out=out)]
                    results = []
                    for _ in range(STARTS):
                        whole = random.standard_normal(shape)
                        whole.reshape(-1)[:1] = np.nan
                        rewrite(x, whole)
                        results += [[plan.start().resolve() for plan in plans]]
                        for result in results[-1]:
                            assert result.layout.text == out.layout.text
                            same(result.full(), whole, (shape, source, target))
                    assert all(made is results[0][0] for made, _ in results)
                    assert all(written is out for _, written in results)


def check_planned_redistributions_and_plain_ones_meet(comm):
    with line_of(comm) as mesh:
        whole = np.arange(12.0).reshape(3, 4)
        x = split(whole, mesh, "S0")
        planned = x.redistribute_init("S1")
        for _ in range(STARTS):
            first, second = planned.start(), x.start_redistribute("S1")
            same(second.resolve().full(), whole, "plain")
            same(first.resolve().full(), whole, "planned")


def check_a_planned_redistribution_refuses_what_it_cannot_do(comm):
    mesh = line_of(comm)
    x = split(np.arange(12.0).reshape(3, 4), mesh, "S0")
    with raises(LayoutError, "DTensor"):
        x.redistribute_init("S1", out=np.zeros((3, 4)))
    with raises(ShapeError, (4, 4)):
        x.redistribute_init("S1", out=split(np.zeros((4, 4)), mesh, "S1"))
    with raises(LayoutError, "new layout"):
        x.redistribute_init("S1", out=split(np.zeros((3, 4)), mesh, "S0"))
    with raises(DTypeError, "float32"):
        x.redistribute_init("S1", out=mm.distribute(np.zeros((3, 4), "f4"), mesh, "S1"))
    plans = [x.redistribute_init("S1"), x.redistribute_init("R")]
    for planned in plans:
        handle = planned.start()
        with raises(UnresolvedError, "under way"):
            planned.start()
        handle.resolve()
        same(planned.start().resolve().full(), np.arange(12.0).reshape(3, 4), "again")
    mesh.close()
    for planned in plans:
        with raises(ClosedError, "closed"):
            planned.start()


# -- messages -------------------------------------------------------------------------------------


def check_persistent_messages_meet_plain_ones(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        size, rank = group.size, group.rank
        if size == 1:
            return
        after, before = (rank + 1) % size, (rank - 1) % size
        for shape in ((3,), (), (0, 2), (40, 50)):
            for layout in WRITABLE if len(shape) == 2 else WRITABLE[:1]:
                x = output(layout, shape, np.dtype("f8"))
                out = output(layout, shape, np.dtype("f8"))
                sending = group.send_init(x, after, tag=2)
                coming = group.recv_init(out, before, tag=2)
                for start in range(4):
                    inputs = refilled(group, x, shape, start)
                    if x.size:
                        x[(0,) * x.ndim] = inputs[before][(0,) * x.ndim] = np.nan
                    sent = group.send(x, after, tag=2) if start == 2 else sending.start()
                    if start == 3:
                        came = group.recv(before, tag=2).resolve()
                    else:
                        came = coming.start().resolve()
                        assert came is out
                    sent.resolve()
                    same(came, inputs[before], (shape, layout, start))


def check_persistent_messages_keep_the_order_of_their_tag(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1 or group.rank > 1:
            return
        x, out = np.zeros(3), np.zeros(3)
        if group.rank == 0:
            sending = group.send_init(x, 1)
            for number in range(3):
                x[...] = number
                first, second = sending.start(), group.send(np.full(3, 10.0 + number), 1)
                first.resolve()
                second.resolve()
        else:
            coming = group.recv_init(out, 0)
            for number in range(3):
                first, second = coming.start(), group.recv(0)
                same(second.resolve(), np.full(3, 10.0 + number), number)
                same(first.resolve(), np.full(3, float(number)), number)


def check_persistent_messages_refuse_what_messages_refuse(comm):
    mesh = mesh_of(comm)
    group = mesh.group()
    size, rank = group.size, group.rank
    x, out = np.zeros(3), np.zeros(3)
    with raises(RankError, size):
        group.send_init(x, size)
    with raises(RankError, "source"):
        group.recv_init(out, rank)
    if size > 1:
        peer, before = (rank + 1) % size, (rank - 1) % size
        with raises(RankError, "tag"):
            group.send_init(x, peer, tag=-1)
        with raises(DTypeError, "out"):
            group.recv_init([0.0], peer)
        with raises(DTypeError, "object"):
            group.send_init(np.array([None]), peer)
        sending, coming = group.send_init(x, peer), group.recv_init(out, before)
        handles = [sending.start(), coming.start()]
        for planned, name in ((sending, "send"), (coming, "recv")):
            with raises(UnresolvedError, name):
                planned.start()
        for handle in handles:
            handle.resolve()
        group.barrier()
        mesh.close()
        for planned in (sending, coming):
            with raises(ClosedError, "closed"):
                planned.start()
    else:
        mesh.close()


def check_a_persistent_receive_refuses_another_shape(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1 or group.rank > 1:
            return
        if group.rank == 0:
            for shape in ((3,), (4,), (3,)):
                group.send(np.ones(shape), 1).resolve()
        else:
            out = np.zeros(3)
            coming = group.recv_init(out, 0)
            same(coming.start().resolve(), np.ones(3), "first")
            with raises(ShapeError, (4,)):
                coming.start().resolve()
            out[...] = 0
            same(coming.start().resolve(), np.ones(3), "after the error")


# -- halos ----------------------------------------------------------------------------------------


def check_a_halo_is_exchanged_again_and_again(comm):
    """With blocks that are copied for others, and with large ones that they read in place."""
    random = np.random.default_rng(4)
    with line_of(comm) as mesh:
        size = mesh.group().size
        for shape, width in (((size + 1, 3), 1), ((1, 5), {0: 2}), ((300, 300), {0: (70, 1)})):
            for boundary in ("periodic", "edge", 0.5):
                x = split(np.zeros(shape), mesh, "S0")
                halo = mm.Halo(x, width, boundary)
                fields = [halo.field(), halo.field()]
                pairs = halo.plan.width
                options: Any = {
                    "periodic": {"mode": "wrap"},
                    "edge": {"mode": "edge"},
                    0.5: {"constant_values": 0.5},
                }[boundary]
                for start in range(6):
                    whole = random.standard_normal(shape)
                    whole[0, 0] = np.nan
                    rewrite(fields[start % 2].tensor, whole)
                    padded = np.pad(whole, pairs, **options)
                    handles = [halo.start(fields[start % 2]) for _ in range(1 + start % 2)]
                    box = halo.plan.padded_box(mesh.rank)
                    mine = padded[
                        tuple(
                            slice(first + before, last + before)
                            for (first, last), (before, _) in zip(box, pairs, strict=True)
                        )
                    ]
                    for handle in handles:
                        same(handle.resolve(), mine, (shape, boundary, start))


def check_halos_and_other_operations_keep_their_order(comm):
    with line_of(comm) as mesh:
        group = mesh.group()
        x = split(np.arange(4.0 * group.size).reshape(-1, 2), mesh, "S0")
        halo = mm.Halo(x, {0: (1, 0)})
        fields = [halo.field(x) for _ in range(3)]
        total = np.ones(5)
        reducing = group.all_reduce_init(total, out=total)
        whole = np.pad(np.arange(4.0 * group.size).reshape(-1, 2), ((1, 0), (0, 0)), mode="wrap")
        first = x.layout.box(x.shape, mesh.rank)[0][0]
        for number in range(1, 5):
            handles = [halo.start(field) for field in fields]
            sums = reducing.start()
            for handle in reversed(handles):
                same(handle.resolve(), whole[first : first + 3], number)
            same(sums.resolve(), np.full(5, float(group.size**number)), number)


def check_a_halo_of_a_closed_mesh_is_refused(comm):
    mesh = line_of(comm)
    x = split(np.zeros((4, 4)), mesh, "S0")
    halo = mm.Halo(x)
    field = halo.field(x)
    for _ in range(2):
        halo.exchange(field)
    mesh.close()
    with raises(ClosedError, "closed"):
        halo.start(field)
