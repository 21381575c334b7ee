"""CuPy arrays on a device that moves them: every operation, with a stand-in whose streams are late.

The arrays stay where they are, but their addresses are real, so real MPI can move them, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.errors import GroupError
from tests.contract.cases import same, values
from tests.contract.meshes import groups_of, mesh_of
from tests.contract.oracle import cut, joined, reduced
from tests.contract.shared_memory import PIECES
from tests.devices.on_device import check, given, late
from tests.helpers.raises import raises

__all__ = ["CHECKS", "DTYPES", "LAYOUTS", "operations"]

DTYPES = [np.dtype(kind) for kind in ("f8", "f4", "f2", "i4", "u1", "F")]


def _every_other(x: Any) -> Any:
    return given(np.repeat(x, 2, axis=1))[:, ::2]


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "plain": given,
    "turned": lambda x: given(np.ascontiguousarray(x.T)).T,
    "every other": _every_other,
}
"""Ways in which an array may lie on the device."""


def operations(group: Any, inputs: list[Any]) -> list[tuple[Callable[[Any, Any], Any], Any]]:
    """Every operation that takes `x` and `out`, with what it gives on this rank.

    Inputs have the shape (2, 2 n).
    """
    me, n, dtype = group.rank, group.size, inputs[0].dtype
    root = min(1, n - 1)
    halves = [r % 2 + 1 for r in range(n)]
    rows = [x[: halves[r]] for r, x in enumerate(inputs)]
    total = reduced(inputs, "sum")
    calls = [
        (lambda x, out: group.all_reduce(x, out=out), total),
        (
            lambda x, out: group.reduce(x, root=n - 1, out=out),
            total if me == n - 1 else None,
        ),
        (
            lambda x, out: group.reduce_scatter(x, axis=1, out=out),
            cut(total, 1, [2] * n)[me],
        ),
        (lambda x, out: group.all_gather(x, out=out), joined(inputs)),
        (lambda x, out: group.all_gather(x, axis=1, out=out), joined(inputs, 1)),
        (
            lambda x, out: group.all_gather(x[: halves[me]], sizes=halves, out=out),
            joined(rows),
        ),
        (
            lambda x, out: group.gather(x, root=root, axis=1, out=out),
            joined(inputs, 1) if me == root else None,
        ),
        (
            lambda x, out: group.scatter(x if me == 0 else None, axis=1, out=out),
            cut(inputs[0], 1, [2] * n)[me],
        ),
        (
            lambda x, out: group.all_to_all(x, split_axis=1, concat_axis=0, out=out),
            joined([cut(x, 1, [2] * n)[me] for x in inputs], 0),
        ),
        (lambda x, out: group.broadcast(x, root=root, out=out), inputs[root]),
        (
            lambda x, out: group.broadcast(x if me == root else None, root=None, out=out),
            inputs[root],
        ),
    ]
    if dtype.kind == "f":
        calls.append((lambda x, out: group.all_reduce(x, "mean", out=out), reduced(inputs, "mean")))
    if dtype.kind != "c":
        calls.append((lambda x, out: group.all_reduce(x, "max", out=out), reduced(inputs, "max")))
    return calls


def check_every_operation_gives_what_numpy_gives(comm):
    with groups_of(comm) as groups:
        for group in groups:
            for place, dtype in enumerate(DTYPES):
                layout = [*LAYOUTS][place % len(LAYOUTS)]
                inputs = [values(r, (2, 2 * group.size), dtype) for r in group.ranks]
                x = LAYOUTS[layout](inputs[group.rank])
                handles = [(call(x, None), right) for call, right in operations(group, inputs)]
                late()
                for handle, right in handles[::-1]:
                    got = handle.resolve()
                    if right is None:
                        assert got is None
                    else:
                        check(got, right)
                check(x, inputs[group.rank])


def check_min_and_max_give_nan(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        for dtype in DTYPES[:3]:
            for op in ("min", "max"):
                inputs = [values(r, (2, 2 * group.size), dtype) for r in group.ranks]
                for rank, x in enumerate(inputs):
                    x[0, rank:] = np.nan
                x, total = given(inputs[group.rank]), reduced(inputs, op)
                check(group.all_reduce(x, op).resolve(), total)
                got = group.reduce(x, op, root=0).resolve()
                if group.rank == 0:
                    check(got, total)
                mine = cut(total, 1, [2] * group.size)[group.rank]
                check(group.reduce_scatter(x, op, axis=1).resolve(), mine)


def check_algorithms_are_for_arrays_on_the_host(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = given(values(group.rank, (2, 2), "f8"))
        for call in (group.all_reduce, group.reduce, group.broadcast, group.all_reduce_init):
            for algorithm in ("ring", "tree(2)", "mpi"):
                with raises(GroupError, algorithm, "device"):
                    call(x, algorithm=algorithm)
        root = x if group.rank == 0 else None
        with raises(GroupError, "ring", "device"):
            group.broadcast(root, root=None, algorithm="ring").resolve()


def check_every_operation_into_every_output(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        for dtype in DTYPES[1:4]:
            inputs = [values(r, (2, 2 * group.size), dtype) for r in group.ranks]
            mine = inputs[group.rank]
            for call, right in operations(group, inputs):
                shape = (0,) if right is None else right.shape
                on_host = np.zeros(shape, dtype)
                outs = [given(on_host), given(on_host.T.copy()).T, on_host]
                for x, out in [(given(mine), out) for out in outs] + [(mine, given(on_host))]:
                    got = call(x, None if right is None else out).resolve()
                    if right is None:
                        assert got is None
                        continue
                    assert got is out
                    if out is on_host:
                        same(out, right)
                    else:
                        check(out, right)


def check_messages_and_shifts(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        after, before = (me + 1) % n, (me - 1) % n
        for shape in ((3,), (40, 40), (), (0, 2)):
            inputs = [values(r, shape, "f4") for r in group.ranks]
            for offset in (0, 1, -1):
                got = group.shift(given(inputs[me]), offset, wrap=True).resolve()
                check(got, inputs[(me - offset) % n])
            if n == 1:
                continue
            sends = [group.send(given(inputs[me]), after) for _ in range(3)]
            check(group.recv(before).resolve(), inputs[before])
            out, on_host = given(np.zeros(shape, "f4")), np.zeros(shape, "f4")
            assert group.recv(before, out=out).resolve() is out
            check(out, inputs[before])
            assert group.recv(before, out=on_host).resolve() is on_host
            same(on_host, inputs[before])
            sends.append(group.send(inputs[me], after))
            assert group.recv(before, out=out).resolve() is out
            check(out, inputs[before])
            for send in sends:
                send.resolve()


def check_large_arrays(comm):
    """Larger than the pieces in which they are staged."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        # In pieces of 7 elements this would take for ever.
        size = (1000 if PIECES[0] else 1 << 18) * n
        x = given(np.arange(float(size)) * (group.rank + 1))
        total = np.arange(float(size)) * (n * (n + 1) // 2)
        check(group.all_reduce(x).resolve(), total)
        check(group.reduce_scatter(x).resolve(), cut(total, 0, [size // n] * n)[group.rank])
        mine = given(np.full(size // n, float(group.rank)))
        check(group.all_gather(mine).resolve(), np.repeat(np.arange(float(n)), size // n))
        got = group.shift(x, wrap=True).resolve()
        check(got, np.arange(float(size)) * ((group.rank - 1) % n + 1))


def check_both_kinds_in_one_queue(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        handles = []
        for number in range(12):
            mine = np.full((3,), float(group.rank + number))
            x = given(mine) if number % 3 else mine
            handle = group.all_reduce(x) if number % 2 else group.all_gather(x)
            inputs = [np.full((3,), float(r + number)) for r in range(n)]
            handles.append((handle, reduced(inputs, "sum") if number % 2 else joined(inputs), x))
        for handle, right, x in handles[::-1]:
            if isinstance(x, sys.modules["cupy"].ndarray):
                check(handle.resolve(), right)
            else:
                same(handle.resolve(), right)


CHECKS = {
    name.removeprefix("check_").replace("_", " "): value
    for name, value in dict(vars()).items()
    if name.startswith("check_")
}
