"""all_reduce, reduce and broadcast by the algorithm that a call names."""

from __future__ import annotations

import os

import numpy as np

from mpimesh.arrays import ReduceOp
from mpimesh.errors import GroupError, MismatchError
from tests.contract.cases import WRITABLE, output, same, values
from tests.contract.flight import Flight
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.oracle import reduced
from tests.helpers.raises import raises

BY_MESSAGES = ("centralized", "tree(2)", "tree(3)", "ring")
OTHERS = ("mpi", "node", "two_levels")
DTYPES = [np.dtype(kind) for kind in ("f4", "f8", "i4", "i8", "u1", "f2", ">f8", "D", "?")]
SHAPES = [(), (0,), (1,), (2,), (3, 5), (257,)]


def allowed(dtype, op):
    if dtype.kind in "cb":
        return (op in ("min", "max")) == (dtype.kind == "b")
    return dtype.kind == "f" or op != "mean"


def had(group, name="all_reduce"):
    """Return the algorithms of a group."""
    side = group.communicator
    return [*BY_MESSAGES, *(word for word in OTHERS if side.has_algorithm(name, word))]


def bits_are_alike(group, got, what):
    """Fail unless all ranks have the same bits."""
    mine = np.frombuffer(got.tobytes(), np.uint8)
    rows = group.all_gather(mine[None]).resolve()
    assert (rows == rows[0]).all(), f"{what}: the ranks have other bits"


def check_results_are_those_of_numpy(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.rank)
            for algorithm in had(group):
                for dtype in DTYPES:
                    for place, op in enumerate(ReduceOp):
                        if not allowed(dtype, op):
                            continue
                        # In larger groups each pair takes one shape.
                        turn = DTYPES.index(dtype) + place
                        shapes = SHAPES if group.size <= 2 else [SHAPES[turn % len(SHAPES)]]
                        for shape in shapes:
                            what = algorithm, dtype, op, shape
                            inputs = [values(r, shape, dtype, place) for r in group.ranks]
                            x, expected = inputs[group.rank], reduced(inputs, op)
                            out = x.copy() if place % 2 else None
                            handle = group.all_reduce(
                                x if out is None else out, op, out=out, algorithm=algorithm
                            )
                            flight.add(handle, expected, what, into=out)
                flight.land()


def check_every_root_reduces_and_broadcasts(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.rank)
            for root in range(group.size):
                for shape in ((), (0,), (2,), (7, 3)):
                    inputs = [values(r, shape, "f8", root) for r in group.ranks]
                    x = inputs[group.rank]
                    for algorithm in had(group, "reduce"):
                        for op in ("sum", "mean", "max"):
                            expected = reduced(inputs, op) if group.rank == root else None
                            handle = group.reduce(x, op, root=root, algorithm=algorithm)
                            flight.add(handle, expected, ("reduce", root, algorithm, shape))
                    for algorithm in had(group, "broadcast"):
                        handle = group.broadcast(x, root=root, algorithm=algorithm)
                        flight.add(handle, inputs[root], ("broadcast", root, algorithm, shape))
                        given = x if group.rank == root else None
                        handle = group.broadcast(given, root=None, algorithm=algorithm)
                        flight.add(handle, inputs[root], ("from any", root, algorithm, shape))
                flight.land()


def check_all_ranks_have_the_same_bits(comm):
    """Also of sums that depend on their order, and of NaN and zeros of either sign.

    MPI's own sums promise less.
    """
    with groups_of(comm) as groups:
        for group in groups:
            for algorithm in BY_MESSAGES:
                for size in (1, group.size, group.size + 1, 40):
                    rng = np.random.default_rng([group.rank, size])
                    x = rng.standard_normal(size) * 10.0 ** rng.integers(-12, 12, size)
                    for kind in ("f4", "f8"):
                        for op in ("sum", "prod", "mean"):
                            got = group.all_reduce(x.astype(kind), op, algorithm=algorithm)
                            bits_are_alike(group, got.resolve(), (algorithm, size, kind, op))
                    x = rng.choice([0.0, -0.0, np.nan, -np.nan, np.inf, 1.0], size)
                    inputs = group.all_gather(x[None]).resolve()
                    for op in ("min", "max", "sum"):
                        got = group.all_reduce(x, op, algorithm=algorithm).resolve()
                        same(got, reduced(list(inputs), op), (algorithm, size, op))
                        bits_are_alike(group, got, (algorithm, size, op))


def check_integers_wrap_around_and_overflow_is_silent(comm):
    with mesh_of(comm) as mesh, np.errstate(all="raise"):
        group = mesh.group()
        for algorithm in had(group):
            for dtype, value in (("u1", 200), ("i4", 2**31 - 1), ("f4", 3e38)):
                x = np.full(5, value, dtype)
                for op in ("sum", "prod"):
                    got = group.all_reduce(x, op, algorithm=algorithm).resolve()
                    same(got, reduced([x] * group.size, op), (algorithm, dtype, op))


def check_persistent_ones_go_by_an_algorithm_too(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        root = group.size - 1
        for algorithm in had(group, "reduce"):
            for layout in WRITABLE:
                x = output(layout, (4, 3), np.dtype("f8"))
                plans = [
                    group.all_reduce_init(x, "mean", algorithm=algorithm),
                    group.reduce_init(x, "max", root=root, algorithm=algorithm),
                    group.broadcast_init(x, root=root, algorithm=algorithm),
                    group.all_reduce_init(x, out=x, algorithm=algorithm),
                ]
                assert all(f"algorithm {algorithm}" in str(plan) for plan in plans)
                for start in range(3):
                    inputs = [values(r, x.shape, x.dtype, start) for r in group.ranks]
                    x[...] = inputs[group.rank]
                    largest = reduced(inputs, "max") if group.rank == root else None
                    results = [reduced(inputs, "mean"), largest, inputs[root]]
                    for plan, expected in zip(
                        plans, [*results, reduced(inputs, "sum")], strict=True
                    ):
                        same(plan.start().resolve(), expected, (algorithm, layout, start, plan))


def check_other_algorithms_on_the_ranks_are_a_mismatch(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        side = group.communicator
        if group.size == 1:
            return
        if os.environ.get("MPIMESH_CHECKS", "0") == "0" and side.nodes:
            return  # only ranks of one node are compared
        odd = group.rank == group.size - 1
        with raises(MismatchError, "ring", "tree(2)"):
            group.all_reduce(np.ones(9), algorithm="ring" if odd else "tree(2)").resolve()


def check_what_a_group_has_not_is_refused_alike(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones(4)
        for algorithm in ("tree(1)", "tree", "tree(0)", "Ring", "", "nccl", 3, ["ring"]):
            for call in (
                lambda given: group.all_reduce(x, algorithm=given),
                lambda given: group.reduce(x, algorithm=given),
                lambda given: group.broadcast(x, algorithm=given),
                lambda given: group.broadcast(None, root=None, algorithm=given),
                lambda given: group.all_reduce_init(x, algorithm=given),
                lambda given: group.reduce_init(x, algorithm=given),
                lambda given: group.broadcast_init(x, algorithm=given),
            ):
                with raises(GroupError, repr(algorithm), "algorithm", "ring", mesh.rank):
                    call(algorithm)
        for name in ("all_reduce", "reduce", "broadcast"):
            for algorithm in OTHERS:
                if not group.communicator.has_algorithm(name, algorithm):
                    with raises(GroupError, algorithm, name):
                        getattr(group, name)(x, algorithm=algorithm)
        same(group.all_reduce(x).resolve(), np.full(4, float(group.size)))
