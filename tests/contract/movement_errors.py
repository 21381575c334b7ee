"""What all_gather, gather, scatter, all_to_all and broadcast refuse."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.errors import DTypeError, GroupError, RankError, ShapeError
from tests.contract.cases import same
from tests.contract.meshes import mesh_of


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
                lambda x: group.scatter(x, root=group.rank),
                lambda x: group.broadcast(x, root=None),
                group.shift,
            ):
                with pytest.raises(DTypeError, match="Python objects"):
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
            for out, error in (
                (np.zeros((*shape, 1)), ShapeError),
                (np.zeros(shape, "f4"), DTypeError),
                (blocked, ShapeError),
                ([1.0], DTypeError),
            ):
                with pytest.raises(error, match="out "):
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
                with pytest.raises(ShapeError, match="out has shape"):
                    handle.resolve()
            else:
                same(handle.resolve(), x[:right] + (right == 2) * 2 * me)
            same(later.resolve(), np.full(3, float(n)))


def check_movements_refuse_wrong_blocks(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        me, n = group.rank, group.size
        x = np.ones((n + 1, 3))
        for call in (group.all_gather, group.gather):
            with pytest.raises(ShapeError, match="sizes"):
                call(x, sizes=[n] * n)
            with pytest.raises(ShapeError, match="sizes"):
                call(x, sizes=[n + 1] * (n + 1))
            with pytest.raises(ShapeError, match="sizes"):
                call(x, sizes=[*[n + 1] * (n - 1), -1])
            with pytest.raises(ShapeError, match="axis 2 does not exist"):
                call(x, axis=2)
            with pytest.raises(ShapeError, match="axis"):
                call(x, axis="rows")
        for sizes in ([1] * n, [n + 1] * (n + 1), [-1] * n, "ab", 4):
            with pytest.raises(ShapeError, match="sizes"):
                group.all_to_all(x, sizes=sizes)
            with pytest.raises(ShapeError, match="sizes"):
                group.scatter(x if me == 0 else None, sizes=sizes).resolve()
        with pytest.raises(ShapeError, match="sizes"):
            group.all_to_all(np.ones(n), recv_sizes=[1] * (n + 1))
        with pytest.raises(ShapeError, match="split_axis 2"):
            group.all_to_all(x, split_axis=2)
        with pytest.raises(ShapeError, match="concat_axis -3"):
            group.all_to_all(np.ones((n, n)), concat_axis=-3)
        with pytest.raises(ShapeError, match="axis 5 does not exist"):
            group.scatter(x if me == 0 else None, axis=5).resolve()
        if n > 1:
            with pytest.raises(ShapeError, match="does not divide"):
                group.all_to_all(x)
            with pytest.raises(ShapeError, match="does not divide"):
                group.scatter(x if me == 0 else None).resolve()
        same(group.all_reduce(x).resolve(), x * n)


def check_movements_refuse_wrong_roots(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones(group.size)
        for root in (-1, group.size, 1.0, "0"):
            for call in (group.broadcast, group.gather, group.scatter):
                with pytest.raises(RankError, match="root must be a rank"):
                    call(x, root=root)
        with pytest.raises(ShapeError, match="passed None"):
            group.broadcast(None, root=0)
        with pytest.raises(ShapeError, match="passed None"):
            group.scatter(None, root=group.rank)
        same(group.all_reduce(x).resolve(), x * group.size)


def check_broadcast_from_whom_needs_one_sender(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        with pytest.raises(GroupError, match=r"exactly one rank .* but ranks \[\] did"):
            group.broadcast(None, root=None).resolve()
        if group.size > 1:
            x = np.ones(3) if group.rank in (0, group.size - 1) else None
            senders = rf"but ranks \[0, {group.size - 1}\] did"
            with pytest.raises(GroupError, match=senders):
                group.broadcast(x, root=None).resolve()
        for sender in range(group.size):
            given = np.full((2, 2), sender) if group.rank == sender else None
            got = group.broadcast(given, root=None).resolve()
            same(got, np.full((2, 2), sender))
