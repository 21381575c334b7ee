"""Refusals of all_gather, gather, scatter, all_to_all and broadcast."""

from __future__ import annotations

import numpy as np

from mpimesh.errors import DTypeError, GroupError, MismatchError, RankError, ShapeError
from tests.contract.cases import same
from tests.contract.meshes import mesh_of
from tests.helpers.raises import raises


def raises_alone(mesh):
    """Whether a rank that gives a scatter a wrong array raises at once, and alone."""
    return mesh.group().communicator.window is None or mesh._core.context.settings.checks


def check_movements_refuse_objects(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        holders = [
            np.array([{}, []], object),
            np.zeros(2, [("a", "i4"), ("b", object)]),
            [object(), "text"],
            np.array(["a", "bc"], np.dtypes.StringDType()),
        ]
        for x in holders:
            for call in (
                group.all_gather,
                group.all_to_all,
                group.broadcast,
                group.gather,
                # Of several ranks the root tells the others before it raises: see wrong_uses.py.
                lambda x: group.alone().scatter(x).resolve(),
                lambda x: group.broadcast(x, root=None),
                group.shift,
            ):
                with raises(DTypeError, np.asarray(x).dtype, "Python objects"):
                    call(x)
        same(group.all_gather(np.arange(2)).resolve(), np.tile(np.arange(2), group.size))


def check_movements_refuse_outputs_that_do_not_fit(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        x = np.ones((2 * n, 3))
        calls = [
            (group.all_gather, (2 * n * n, 3)),
            (lambda x, out: group.gather(x, root=me, out=out), (2 * n * n, 3)),
            (group.all_to_all, (2 * n, 3)),
            (group.broadcast, (2 * n, 3)),
        ]
        for call, shape in calls:
            blocked = np.zeros(shape)
            blocked.flags.writeable = False
            for out, error, told in (
                (np.zeros((*shape, 1)), ShapeError, ((*shape, 1), shape)),
                (np.zeros(shape, "f4"), DTypeError, ("float32", "float64")),
                (blocked, ShapeError, ("read-only",)),
                ([1.0], DTypeError, ("list",)),
            ):
                with raises(error, "out", *told):
                    call(x, out=out)
        same(group.all_reduce(x).resolve(), x * n)


def check_an_output_that_does_not_fit_on_one_rank_spoils_no_later_call(comm):
    """Its shape is known only after the exchange began, so the rank has to take part to its end."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        last = n - 1
        x = np.arange(2.0 * n)
        for call, right in (
            (lambda out: group.scatter(x if me == 0 else None, out=out), 2),
            (lambda out: group.broadcast(x if me == 0 else None, root=None, out=out), 2 * n),
        ):
            handle = call(np.zeros(right + 1) if me == last else np.zeros(right))
            later = group.all_reduce(np.ones(3))
            if me == last:
                with raises(ShapeError, "out", (right + 1,), (right,)):
                    handle.resolve()
            else:
                same(handle.resolve(), x[:right] + (right == 2) * 2 * me)
            same(later.resolve(), np.full(3, float(n)))


def check_a_scatter_that_is_wrong_on_one_rank_leaves_the_ranks_in_step(comm):
    """On one node, and without checks: else who is wrong raises alone, or with all."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        x = np.arange(2.0 * n)
        blocked = np.zeros(2)
        blocked.flags.writeable = False
        for root in range(0 if raises_alone(mesh) else n):
            for odd in {root, n - 1}:
                for wrong, told in ((blocked, "read-only"), ([1.0, 2.0], "list")):
                    out = wrong if me == odd else np.zeros(2)
                    handle = group.scatter(x if me == root else None, root=root, out=out)
                    if me == odd:
                        with raises((ShapeError, DTypeError), "out", told):
                            handle.resolve()
                    else:
                        same(handle.resolve(), x[2 * me : 2 * me + 2])
            with raises(ShapeError, "needs an array", f"rank {root}"):
                group.scatter(None, root=root).resolve()
        same(group.all_reduce(x).resolve(), x * n)


def check_movements_refuse_wrong_blocks(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        x = np.ones((n + 1, 3))
        for call in (group.all_gather, group.gather):
            with raises(ShapeError, [n] * n, f"rank {me}", "axis 0", x.shape):
                call(x, sizes=[n] * n)
            with raises(ShapeError, "sizes", f"{n} ranks", [n + 1] * (n + 1)):
                call(x, sizes=[n + 1] * (n + 1))
            with raises(ShapeError, "sizes", f"{n} ranks", [*[n + 1] * (n - 1), -1]):
                call(x, sizes=[*[n + 1] * (n - 1), -1])
            with raises(ShapeError, "axis 2", "2 axes"):
                call(x, axis=2)
            with raises(ShapeError, "axis", "'rows'"):
                call(x, axis="rows")
        for sizes in ([1] * n, [n + 1] * (n + 1), [-1] * n, "ab", 4):
            with raises(ShapeError, "sizes", repr(sizes)):
                group.all_to_all(x, sizes=sizes)
            with raises(ShapeError, "sizes", repr(sizes)):
                group.scatter(x if me == 0 else None, sizes=sizes).resolve()
        with raises(ShapeError, "sizes", f"{n} ranks", [1] * (n + 1)):
            group.all_to_all(np.ones(n), recv_sizes=[1] * (n + 1))
        with raises(ShapeError, "split_axis 2", "2 axes"):
            group.all_to_all(x, split_axis=2)
        with raises(ShapeError, "concat_axis -3", "2 axes"):
            group.all_to_all(np.ones((n, n)), concat_axis=-3)
        with raises(ShapeError, "axis 5", "2 axes"):
            group.scatter(x if me == 0 else None, axis=5).resolve()
        if n > 1:
            with raises(ShapeError, "axis 0", x.shape, n, "sizes"):
                group.all_to_all(x)
            with raises(ShapeError, "axis 0", x.shape, n, "sizes"):
                group.scatter(x if me == 0 else None).resolve()
        same(group.all_reduce(x).resolve(), x * n)


def check_blocks_that_another_rank_does_not_expect(comm):
    """Each rank knows its own sizes only; with checks off, too, all learn that two do not fit."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        with raises(ShapeError, f"rank {me}", "recv_sizes", (2, 3), "is 4 along axis 0"):
            recv_sizes = [2] * n
            recv_sizes[me] = 4
            group.all_to_all(np.ones((2 * n, 3)), recv_sizes=recv_sizes)
        if n == 1:
            return
        last = n - 1
        for dtype in ("u1", "f8"):
            for sent, expected in ((2, 4), (4, 2), (3, 1), (0, 1)):
                # All put in and expect as many, but the first sends the last some others.
                sizes = [expected] * n
                if me == 0:
                    sizes[last] = sent
                x = np.ones(sum(sizes), dtype)
                shared = mesh.shared_empty(x.shape, dtype)
                for source in (x, shared):
                    handle = group.all_to_all(source, sizes=sizes, recv_sizes=[expected] * n)
                    with raises(MismatchError, f"rank {last}", (expected,), (sent,)) as caught:
                        handle.resolve()
                    assert caught.value.agreed
        # As many bytes, of another shape beside the axis.
        x = np.ones((n, 6) if me == 0 else (2 * n, 3))
        handle = group.all_to_all(x, sizes=[len(x) // n] * n)
        with raises(MismatchError, "rank 0", (1, 6), (2, 3)):
            handle.resolve()
        same(group.all_to_all(np.full(2 * n, me), sizes=[2] * n).resolve(), np.arange(n).repeat(2))


def check_movements_refuse_wrong_roots(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones(group.size)
        for root in (-1, group.size, 1.0, "0"):
            for call in (group.broadcast, group.gather, group.scatter):
                with raises(RankError, "root", "group 'world'", repr(root)):
                    call(x, root=root)
        with raises(ShapeError, "broadcast", "root=0", f"rank {group.rank}", "root=None"):
            group.broadcast(None, root=0)
        root = group.rank if raises_alone(mesh) else 0
        with raises(ShapeError, "scatter", f"rank {root}", None):
            group.scatter(None, root=root).resolve()
        same(group.all_reduce(x).resolve(), x * group.size)


def check_broadcast_from_whom_needs_one_sender(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        with raises(GroupError, "broadcast", "group 'world'", "ranks []"):
            group.broadcast(None, root=None).resolve()
        if group.size > 1:
            x = np.ones(3) if group.rank in (0, group.size - 1) else None
            with raises(GroupError, "broadcast", "group 'world'", f"ranks [0, {group.size - 1}]"):
                group.broadcast(x, root=None).resolve()
        for sender in range(group.size):
            given = np.full((2, 2), sender) if group.rank == sender else None
            got = group.broadcast(given, root=None).resolve()
            same(got, np.full((2, 2), sender))
