"""all_gather, gather, scatter, all_to_all, broadcast."""

from __future__ import annotations

import numpy as np

from mpimesh.errors import ShapeError
from tests.contract.cases import ALL, LAYOUTS, WRITABLE, output, same, values
from tests.contract.flight import Flight
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.oracle import cut, equal_sizes, joined, uneven
from tests.contract.shared_memory import PIECES
from tests.helpers.raises import raises


def check_movements_of_every_dtype(comm):
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        me, n = group.rank, group.size
        for place, dtype in enumerate(ALL):
            root = place % n
            inputs = [values(r, (2, n), dtype) for r in group.ranks]
            x, whole = inputs[me], joined(inputs)
            flight.add(group.all_gather(x), whole, (dtype, "all_gather"))
            handle = group.gather(x, root=root, axis=1)
            at_root = joined(inputs, 1) if me == root else None
            flight.add(handle, at_root, (dtype, "gather"))
            handle = group.scatter(x if me == root else None, root=root, axis=1)
            flight.add(handle, inputs[root][:, me : me + 1], (dtype, "scatter"))
            handle = group.all_to_all(x, split_axis=1)
            exchanged = joined([given[:, me : me + 1] for given in inputs], 1)
            flight.add(handle, exchanged, (dtype, "all_to_all"))
            flight.add(group.broadcast(x, root=root), inputs[root], (dtype, "broadcast"))
            handle = group.broadcast(x if me == root else None, root=None)
            flight.add(handle, inputs[root], (dtype, "broadcast from whom"))
        flight.land()


def check_movements_of_every_memory_order(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            root = n - 1
            shape = (2, 2 * n, 3)
            for name, layout in LAYOUTS.items():
                inputs = [layout(values(r, shape, "f8")) for r in group.ranks]
                arrays = [np.array(x) for x in inputs]
                x = inputs[me]
                for axis in (0, -2):
                    what = (name, axis)
                    flight.add(group.all_gather(x, axis=axis), joined(arrays, axis), what)
                    handle = group.gather(x, axis=axis, root=root)
                    flight.add(handle, joined(arrays, axis) if me == root else None, what)
                sizes = equal_sizes(2 * n, n)
                handle = group.scatter(x if me == root else None, axis=1, root=root)
                flight.add(handle, cut(arrays[root], 1, sizes)[me], (name, "scatter"))
                for concat_axis in (0, 1, -1):
                    handle = group.all_to_all(x, split_axis=1, concat_axis=concat_axis)
                    expected = joined([cut(a, 1, sizes)[me] for a in arrays], concat_axis)
                    flight.add(handle, expected, (name, "all_to_all", concat_axis))
                flight.add(group.broadcast(x, root=root), arrays[root], (name, "broadcast"))
                given = x if me == root else None
                flight.add(group.broadcast(given, root=None), arrays[root], (name, "from whom"))
                flight.land()
                same(np.array(x), arrays[me], f"the input {name}")


def check_uneven_blocks(comm):
    with groups_of(comm, many=True) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            for seed in range(3):
                sizes = uneven(n, seed)
                root = seed % n
                for axis in (0, 1, -1):
                    place = axis % 2
                    shapes = [(3, size) if place else (size, 3) for size in sizes]
                    inputs = [values(r, s, "i4") for r, s in zip(group.ranks, shapes, strict=True)]
                    whole = joined(inputs, axis)
                    what = (sizes, axis)
                    handle = group.all_gather(inputs[me], axis=axis, sizes=sizes)
                    flight.add(handle, whole, what)
                    handle = group.gather(inputs[me], axis=axis, sizes=np.array(sizes), root=root)
                    flight.add(handle, whole if me == root else None, what)
                    handle = group.scatter(
                        whole if me == root else None, axis=axis, sizes=tuple(sizes), root=root
                    )
                    flight.add(handle, inputs[me], what)
            flight.land()


def check_uneven_all_to_all(comm):
    """Rank s sends `table[s][d]` columns to rank d; then along two axes."""
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            table = [[(3 * s + d) % 4 for d in range(n)] for s in range(n)]
            inputs = [values(r, (2, sum(table[s])), "f4") for s, r in enumerate(group.ranks)]
            handle = group.all_to_all(
                inputs[me], split_axis=-1, sizes=table[me], recv_sizes=[row[me] for row in table]
            )
            blocks = [cut(inputs[s], 1, table[s])[me] for s in range(n)]
            flight.add(handle, joined(blocks, 1), "one axis")
            # Along two axes: all cut axis 0 alike, and each brings its own number of columns.
            rows, columns = uneven(n, 1), uneven(n, 2)
            inputs = [
                values(r, (sum(rows), columns[s], 2), "i2") for s, r in enumerate(group.ranks)
            ]
            handle = group.all_to_all(
                inputs[me], split_axis=0, concat_axis=1, sizes=rows, recv_sizes=columns
            )
            expected = joined([cut(x, 0, rows)[me] for x in inputs], 1)
            flight.add(handle, expected, "two axes")
            flight.land()


def check_movements_of_scalars_and_empty_arrays(comm):
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        me, n = group.rank, group.size
        flight.add(group.all_gather(me), np.arange(n), "int")
        flight.add(group.all_gather(np.float32(me)), np.arange(n, dtype="f4"), "scalar")
        flight.add(group.all_gather("ab"), np.array(["ab"] * n), "text")
        flight.add(group.gather(2.5, root=0), None if me else np.full(n, 2.5), "float")
        flight.add(group.broadcast(me, root=n - 1), np.asarray(n - 1), "broadcast")
        from_whom = group.broadcast(True if me == 0 else None, root=None)
        flight.add(from_whom, np.asarray(True), "from whom")
        for shape in ((0,), (0, 3), (2, 0), (0, 0)):
            x = np.empty(shape, "c16")
            for axis in range(len(shape)):
                whole = joined([x] * n, axis)
                flight.add(group.all_gather(x, axis=axis), whole, (shape, axis))
                flight.add(group.gather(x, axis=axis), None if me else whole, (shape, axis))
                cuts = x if me == 0 else None
                if shape[axis] == 0:
                    flight.add(group.scatter(cuts, axis=axis), x, (shape, axis))
                    flight.add(group.all_to_all(x, split_axis=axis), x, (shape, axis))
            flight.add(group.broadcast(x), x, shape)
        flight.land()
        for call in (group.all_to_all, lambda x: group.scatter(x, root=0).resolve()):
            with raises(ShapeError, 0, "0 axes"):
                call(np.array(1.0))


def _with_output(group, inputs):
    """Calls of every movement that take `out`, each with what it must give on this rank."""
    me, n = group.rank, group.size
    x, last = inputs[me], inputs[-1]
    from_last = x if me == n - 1 else None
    gathered = joined(inputs, 1) if me == 0 else None
    return [
        (lambda out: group.all_gather(x, axis=1, out=out), joined(inputs, 1)),
        (
            lambda out: group.all_to_all(x, split_axis=1, out=out),
            joined([given[:, me : me + 1] for given in inputs], 1),
        ),
        (
            lambda out: group.scatter(from_last, root=n - 1, axis=1, out=out),
            last[:, me : me + 1],
        ),
        (lambda out: group.broadcast(x, root=n - 1, out=out), last),
        (lambda out: group.broadcast(from_last, root=None, out=out), last),
        (lambda out: group.gather(x, axis=1, out=out), gathered),
    ]


def check_movements_into_every_output(comm):
    structure = np.dtype([("a", "i4"), ("b", "S3")])
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            for dtype, layouts in (("f8", WRITABLE), (structure, WRITABLE[1:3])):
                for layout in layouts:
                    inputs = [values(r, (2, group.size), dtype) for r in group.ranks]
                    for call, expected in _with_output(group, inputs):
                        if expected is None:
                            flight.add(call(None), None, layout)
                            continue
                        out = output(layout, expected.shape, dtype)
                        flight.add(call(out), expected, (dtype, layout), into=out)
            flight.land()


def check_movements_into_memory_of_the_input(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            inputs = [values(r, (2 * n,), "f8") for r in group.ranks]
            x = inputs[me]

            whole = np.zeros(2 * n * n)  # in place, as MPI programs do it
            whole[2 * n * me : 2 * n * (me + 1)] = x
            mine = whole[2 * n * me : 2 * n * (me + 1)]
            flight.add(group.all_gather(mine, out=whole), joined(inputs), "all_gather", into=whole)
            gathered = whole.copy()
            mine = gathered[2 * n * me : 2 * n * (me + 1)]
            handle = group.gather(mine, out=gathered if me == 0 else None)
            if me == 0:
                flight.add(handle, joined(inputs), "gather", into=gathered)
            else:
                flight.add(handle, None, "gather")

            turned = x.copy()
            blocks = joined([given[2 * me : 2 * me + 2] for given in inputs])
            flight.add(group.all_to_all(turned, out=turned), blocks, "all_to_all", into=turned)
            turned = x.copy()
            back = turned[::-1]
            flight.add(group.all_to_all(turned, out=back), blocks, "backwards", into=back)

            source = np.concatenate([x, [0.0]])
            out = source[1:3]
            handle = group.scatter(source[:-1] if me == 0 else None, out=out)
            flight.add(handle, inputs[0][2 * me : 2 * me + 2], "scatter", into=out)

            for layout in WRITABLE:
                same_array = LAYOUTS[layout](x)
                handle = group.broadcast(same_array, root=n - 1, out=same_array)
                flight.add(handle, inputs[-1], ("broadcast", layout), into=same_array)
                given = LAYOUTS[layout](x)
                handle = group.broadcast(given if me == 0 else None, root=None, out=given)
                flight.add(handle, inputs[0], ("from whom", layout), into=given)
            shifted = np.concatenate([x, [0.0]])
            out = shifted[1:]
            handle = group.broadcast(shifted[:-1], out=out)
            flight.add(handle, inputs[0], "broadcast, overlapping", into=out)
            flight.land()


def check_results_are_the_callers_own(comm):
    """No result shares memory with an input or with another result."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        # Large enough for the pool of result memory, but not in pieces of 7.
        x = np.arange((50.0 if PIECES[0] else 16384.0) * n)
        calls = [
            lambda: group.all_reduce(x),
            lambda: group.reduce(x, root=group.rank) if n == 1 else group.all_reduce(x, "max"),
            lambda: group.reduce_scatter(x),
            lambda: group.all_gather(x),
            lambda: group.all_to_all(x),
            lambda: group.broadcast(x),
            lambda: group.scatter(x if group.rank == 0 else None),
            lambda: group.shift(x, wrap=True),
        ]
        results = [call().resolve() for call in [*calls, *calls]]
        copies = [result.copy() for result in results]
        for place, result in enumerate(results):
            assert result.flags.writeable
            for other in (x, *results[:place]):
                assert not np.shares_memory(result, other)
        results[0][...] = -1
        del results[1:3]
        del result, other
        fresh = [call().resolve() for call in calls]
        for kept, copy in zip(results[1:], copies[3:], strict=True):
            same(kept, copy)
        assert not any(np.shares_memory(a, b) for a in fresh for b in results)
