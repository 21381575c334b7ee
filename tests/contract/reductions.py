"""all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mpimesh.arrays import ReduceOp
from mpimesh.errors import DTypeError, RankError, ReduceOpError, ShapeError
from tests.contract.cases import (
    ALL,
    COMPLEX,
    FLOATS,
    HALVES,
    INTEGERS,
    LAYOUTS,
    NUMBERS,
    WRITABLE,
    output,
    same,
    values,
)
from tests.contract.flight import Flight
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.oracle import cut, equal_sizes, reduced, uneven
from tests.contract.shared_memory import PIECES
from tests.helpers.raises import raises


def allowed(dtype, op):
    """The table of `mpimesh.arrays.dtypes`, said once more."""
    if dtype in FLOATS or dtype in HALVES:
        return True
    if dtype in COMPLEX:
        return op in ("sum", "prod", "mean")
    if dtype in INTEGERS:
        return op != "mean"
    return dtype.kind == "b" and op in ("min", "max")


OPS = [str(op) for op in ReduceOp]


def check_all_reduce_of_every_dtype_and_op(comm):
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        for dtype in ALL:
            for op in OPS:
                if not allowed(dtype, op):
                    continue
                inputs = [values(r, (2, 3), dtype) for r in group.ranks]
                handle = group.all_reduce(inputs[group.rank], op)
                flight.add(handle, reduced(inputs, op), (dtype, op))
        flight.land()


def check_many_small_ones_under_way(comm):
    """More than there are slots: a rank must not write to one that itself has yet to read."""
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        for _ in range(4):
            for seed in range(150):
                inputs = [values(r, (2,), "f4", seed) for r in group.ranks]
                flight.add(group.all_reduce(inputs[group.rank]), reduced(inputs, "sum"), seed)
            flight.land()


def check_an_output_may_be_of_an_equal_dtype(comm):
    """NumPy's long and long long are equal on most systems, and two types to MPI."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        for dtype, other in (("l", "q"), ("q", "l"), ("L", "Q")):
            if np.dtype(dtype) != np.dtype(other):
                continue
            x, out = np.full(3, group.rank, dtype), np.empty(3, other)
            expected = np.full(3, sum(range(group.size)), other)
            assert group.all_reduce(x, out=out).resolve() is out
            same(out, expected)
            same(group.reduce_scatter(np.tile(x, group.size)).resolve(), expected.astype(dtype))


def check_reductions_refuse_dtypes_that_have_none(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        for dtype in ALL:
            x = values(0, (2 * group.size,), dtype)
            for op in OPS:
                if not allowed(dtype, op):
                    for call in (group.all_reduce, group.reduce, group.reduce_scatter):
                        with raises(DTypeError, op, np.dtype(dtype)):
                            call(x, op)
        same(group.all_reduce(np.array([1.0])).resolve(), np.array([float(group.size)]))


def check_reduce_of_every_dtype_to_every_root(comm):
    with groups_of(comm, many=True) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            for place, dtype in enumerate(NUMBERS):
                root = place % group.size
                inputs = [values(r, (4,), dtype, place) for r in group.ranks]
                handle = group.reduce(inputs[group.rank], root=root)
                expected = reduced(inputs, "sum") if group.rank == root else None
                flight.add(handle, expected, (group, dtype, root))
            flight.land()


def check_reduce_scatter_of_every_dtype(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            for place, dtype in enumerate(NUMBERS):
                sizes = uneven(group.size, place)
                inputs = [values(r, (sum(sizes), 2), dtype, place) for r in group.ranks]
                handle = group.reduce_scatter(inputs[group.rank], sizes=sizes)
                whole = reduced(inputs, "sum")
                flight.add(handle, cut(whole, 0, sizes)[group.rank], (group, dtype))
            flight.land()


def check_reductions_of_every_memory_order(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            shape = (2, 2 * group.size, 3)
            for name, layout in LAYOUTS.items():
                inputs = [layout(values(r, shape, "f8")) for r in group.ranks]
                x, total = inputs[group.rank], reduced(inputs, "max")
                before = np.array(x)
                flight.add(group.all_reduce(x, "max"), total, (name, "all_reduce"))
                at_root = total if group.rank == group.size - 1 else None
                flight.add(group.reduce(x, "max", root=group.size - 1), at_root, (name, "reduce"))
                for axis, size in ((1, 2 * group.size), (-2, 2 * group.size)):
                    mine = cut(total, axis, equal_sizes(size, group.size))[group.rank]
                    handle = group.reduce_scatter(x, "max", axis=axis)
                    flight.add(handle, mine, (name, "reduce_scatter", axis))
                flight.land()
                same(np.array(x), before, f"the input {name}")


def check_reductions_of_scalars_and_empty_arrays(comm):
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        for shape in ((), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1)):
            inputs = [values(r, shape, "f4") for r in group.ranks]
            x, total = inputs[group.rank], reduced(inputs, "sum")
            flight.add(group.all_reduce(x), total, shape)
            flight.add(group.reduce(x), total if group.rank == 0 else None, shape)
        rank, size = group.rank, group.size
        flight.add(group.all_reduce(rank + 1), np.asarray(size * (size + 1) // 2), "int")
        flight.add(group.all_reduce(0.5), np.asarray(0.5 * size), "float")
        flight.add(group.all_reduce(rank == 0, "max"), np.asarray(True), "bool")
        flight.add(group.all_reduce(1 + 2j), np.asarray((1 + 2j) * size), "complex")
        flight.add(
            group.all_reduce(np.float16(rank)),
            reduced([np.float16(r) for r in range(size)], "sum"),
            "NumPy scalar",
        )
        empty = np.empty((0, 2), "i2")
        flight.add(group.reduce_scatter(empty), empty, "no rows")
        flight.add(group.reduce_scatter(np.empty((2, 0)), axis=1), np.empty((2, 0)), "no columns")
        flight.land()
        with raises(ShapeError, "axis 0", "0 axes"):
            group.reduce_scatter(np.array(1.0))


def check_reductions_into_every_output(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            for dtype, layouts in (
                (np.dtype("f8"), WRITABLE),
                (np.dtype(">f8"), WRITABLE[:2]),
                (np.dtype("f2"), WRITABLE[2:4]),
                (np.dtype("i4"), WRITABLE[4:]),
            ):
                for layout in layouts:
                    shape = (3, 2 * group.size)
                    inputs = [values(r, shape, dtype) for r in group.ranks]
                    x, total = inputs[group.rank], reduced(inputs, "sum")
                    out = output(layout, shape, dtype)
                    what = (dtype, layout)
                    flight.add(group.all_reduce(x, out=out), total, what, into=out)
                    if dtype.kind == "f":
                        out, mean = output(layout, shape, dtype), reduced(inputs, "mean")
                        flight.add(group.all_reduce(x, "mean", out=out), mean, what, into=out)
                    root = group.size - 1
                    out = output(layout, shape, dtype)
                    handle = group.reduce(x, out=out, root=root)
                    if group.rank == root:
                        flight.add(handle, total, what, into=out)
                    else:
                        flight.add(handle, None, what)
                    mine = cut(total, 1, equal_sizes(2 * group.size, group.size))[group.rank]
                    out = output(layout, mine.shape, dtype)
                    handle = group.reduce_scatter(x, axis=1, out=out)
                    flight.add(handle, mine, what, into=out)
            flight.land()


def check_reductions_in_place(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            for dtype, layouts in (
                (np.dtype("f8"), WRITABLE),
                (np.dtype(">f4"), WRITABLE[:1]),
                (np.dtype("f2"), WRITABLE[:2]),
            ):
                for layout in layouts:
                    for op in ("sum", "mean"):
                        inputs = [values(r, (3, 4), dtype) for r in group.ranks]
                        total = reduced(inputs, op)
                        x = LAYOUTS[layout](inputs[group.rank])
                        what = (dtype, layout, op)
                        flight.add(group.all_reduce(x, op, out=x), total, what, into=x)
                        x = LAYOUTS[layout](inputs[group.rank])
                        handle = group.reduce(x, op, out=x)
                        if group.rank == 0:
                            flight.add(handle, total, what, into=x)
                        else:
                            flight.add(handle, None, what)
            flight.land()


def check_reductions_into_memory_of_the_input(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            size = 4 * group.size
            inputs = [values(r, (size,), "f8") for r in group.ranks]
            total = reduced(inputs, "sum")
            sizes = equal_sizes(size, group.size)
            memory = [np.concatenate([inputs[group.rank], np.zeros(2)]) for _ in range(6)]
            out = memory[0][2:]
            flight.add(group.all_reduce(memory[0][:-2], out=out), total, "shifted", into=out)
            out = memory[1][:-2][...]
            flight.add(group.all_reduce(memory[1][:-2], out=out), total, "a second view", into=out)
            out = memory[2][1:5]
            mine = cut(total, 0, sizes)[group.rank]
            flight.add(group.reduce_scatter(memory[2][:-2], out=out), mine, "block", into=out)
            out = memory[3][:4]
            flight.add(group.reduce_scatter(memory[3][:-2], out=out), mine, "front", into=out)
            whole = [size] + [0] * (group.size - 1)
            out = memory[5][: whole[group.rank]]  # of no elements, but at the same address
            mine = cut(total, 0, whole)[group.rank]
            handle = group.reduce_scatter(memory[5][:-2], sizes=whole, out=out)
            flight.add(handle, mine, "uneven", into=out)
            out = memory[4][1:-1]
            handle = group.reduce(memory[4][:-2], out=out)
            if group.rank == 0:
                flight.add(handle, total, "reduce", into=out)
            else:
                flight.add(handle, None, "reduce")
            flight.land()


def check_reductions_refuse_outputs_that_do_not_fit(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones((2 * group.size, 3))
        blocked = np.zeros_like(x)
        blocked.flags.writeable = False
        for call in (group.all_reduce, lambda x, out: group.reduce(x, out=out, root=group.rank)):
            with raises(ShapeError, "out", (3, 2 * group.size + 1), x.shape):
                call(x, out=np.zeros((3, 2 * group.size + 1)))
            with raises(DTypeError, "out", "float32", "float64"):
                call(x, out=np.zeros(x.shape, "f4"))
            with raises(DTypeError, "out", ">f8", "float64"):
                call(x, out=np.zeros(x.shape, ">f8"))
            with raises(ShapeError, "out", "read-only"):
                call(x, out=blocked)
            with raises(DTypeError, "out", "list"):
                call(x, out=[[0.0] * 3] * 2 * group.size)
        with raises(ShapeError, "out", (3, 3), (2, 3)):
            group.reduce_scatter(x, out=np.zeros((3, 3)))
        same(group.all_reduce(x).resolve(), x * group.size)


def check_reduce_scatter_refuses_wrong_blocks(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        x = np.ones((n + 1, 3))
        with raises(ShapeError, [1] * n, "axis 0", x.shape):
            group.reduce_scatter(x, sizes=[1] * n)
        with raises(ShapeError, "sizes", f"{n} ranks", [1] * (n + 1)):
            group.reduce_scatter(x, sizes=[1] * (n + 1))
        with raises(ShapeError, "sizes", f"{n} ranks", [*[1] * (n - 1), -1]):
            group.reduce_scatter(x, sizes=[*[1] * (n - 1), -1])
        with raises(ShapeError, "axis 2", "2 axes"):
            group.reduce_scatter(x, axis=2)
        with raises(ShapeError, "axis -3", "2 axes"):
            group.reduce_scatter(x, axis=-3)
        with raises(ShapeError, "sizes", f"{n} ranks", [1.5] * n):
            group.reduce_scatter(x, sizes=[1.5] * n)
        with raises(ShapeError, "sizes", f"{n} ranks", 3):
            group.reduce_scatter(x, sizes=3)
        if n > 1:
            with raises(ShapeError, "axis 0", x.shape, n, "sizes"):
                group.reduce_scatter(x)
        same(group.all_reduce(x).resolve(), x * n)


def check_reductions_refuse_unknown_ops_and_roots(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones(2 * group.size)
        for call in (group.all_reduce, group.reduce, group.reduce_scatter):
            with raises(ReduceOpError, "'xor'", "sum, mean, prod, min, max"):
                call(x, "xor")
            with pytest.raises(ReduceOpError):
                call(x, ["sum"])
        for root in (-1, group.size, 0.0, "0", None):
            with raises(RankError, "root", "group 'world'", repr(root)):
                group.reduce(x, root=root)
        same(group.all_reduce(x, "avg").resolve(), x)
        same(group.all_reduce(x, ReduceOp.PROD).resolve(), x)
        if (mpi := sys.modules.get("mpi4py.MPI")) is not None:
            same(group.all_reduce(x, mpi.SUM).resolve(), x * group.size)
            same(group.reduce_scatter(x * group.rank, mpi.MAX).resolve(), x[:2] * (group.size - 1))
        same(group.reduce(x, root=np.int64(0)).resolve(), None if group.rank else x * group.size)


def check_overflow_and_nan_are_silent(comm):
    """Warnings are errors here, so that a warning of NumPy would fail."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        big = np.array([60000.0, -60000.0, 1.0], "f2")
        total = group.all_reduce(big).resolve()
        expected = [np.inf, -np.inf, n] if n > 1 else big
        assert np.array_equal(total, np.array(expected, "f2"))
        huge = np.array([1e308, 3e38, np.inf, np.nan, 0.0])
        for dtype in ("f8", "f4", "F", "g"):
            with np.errstate(all="ignore"):
                x = huge.astype(dtype)
            for op in ("sum", "mean", "prod"):
                got = group.all_reduce(x, op).resolve()
                assert np.isnan(got[3])
                assert not np.isfinite(got[2])
                assert got[4] == 0
        top = np.array([127, -128], "b")
        wrapped = (top.astype(int) * n).astype("b")
        same(group.all_reduce(top).resolve(), wrapped)


def _specials(rng, size, dtype):
    """Draw NaN of both signs and several payloads, infinities, zeros of both signs, numbers."""
    numbers = rng.choice([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, -np.inf, np.inf], size)
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7FC12340, 0xFFFFFFC0], np.uint32).view("f4")
    # Of most elements no rank has NaN, of some several ranks have.
    numbers = np.where(rng.random(size) < 0.15, rng.choice(nan, size), numbers.astype("f4"))
    with np.errstate(all="ignore"):  # some types have no infinity
        return numbers.astype(dtype)


def check_sums_and_products_of_whole_numbers_wrap_around(comm):
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        for dtype in INTEGERS:
            for size in (1, 70):  # 70: whole vectors of a processor, and a rest
                for op in ("sum", "prod"):
                    bounds = np.iinfo(dtype)
                    inputs = [
                        np.full(size * group.size, bounds.max - r % 2, dtype) for r in group.ranks
                    ]
                    mine, want = inputs[group.rank], reduced(inputs, op)
                    block = slice(group.rank * size, (group.rank + 1) * size)
                    what = (dtype, size, op)
                    flight.add(group.all_reduce(mine, op), want, what)
                    flight.add(group.reduce_scatter(mine, op), want[block], what)
                    flight.add(
                        group.reduce(mine, op, root=0), want if group.rank == 0 else None, what
                    )
        flight.land()


def check_min_and_max_of_nan_are_those_of_numpy_with_the_same_bits_on_all_ranks(comm):
    rng = np.random.default_rng(8)
    with mesh_of(comm) as mesh:
        mesh.add_group("turned", range(mesh.world_size)[::-1])
        for turn, dtype in enumerate([*FLOATS, *HALVES]):
            for size in (1, 8, 300, 9000, 140_000)[: 3 if turn > 1 or PIECES[0] else 5]:
                group = mesh.group(str(rng.choice(mesh.group_names)))
                op = str(rng.choice(["min", "max"]))
                inputs = [_specials(rng, size, dtype) for _ in group.ranks]
                _reduce_by_all_ways(mesh, group, inputs, op, (dtype, size, op))


def _reduce_by_all_ways(mesh, group, inputs, op, what):
    me, x, total = group.rank, inputs[group.rank], reduced(inputs, op)
    flight, results = Flight(group.world_rank), []
    for source, out in (
        (x, x.copy()),
        (x.copy(), None),
        (mesh.shared_empty(x.shape, x.dtype), None),
        (mesh.shared_empty(x.shape, x.dtype), mesh.shared_empty(x.shape, x.dtype)),
    ):
        source[...] = x
        results.append(source if out is None else out)
        handle = group.all_reduce(source, op, out=results[-1])
        flight.add(handle, total, what, into=results[-1])
    at_root = total if me == 0 else None
    flight.add(group.reduce(x, op, root=0), at_root, what)
    each = x.size // (group.size + 1)
    sizes = [x.size - each * (group.size - 1), *[each] * (group.size - 1)]
    flight.add(group.reduce_scatter(x, op, sizes=sizes), cut(total, 0, sizes)[me], what)
    flight.land()
    for got in results:
        # Longdouble has bytes that are no part of the number.
        bits = np.ascontiguousarray(got.reshape(-1, 1).view(np.uint8)[:, :10])
        everywhere = group.all_gather(bits[None]).resolve()
        assert (everywhere == everywhere[0]).all(), f"{what}: the ranks have different bits"
