"""Programs in the words of other systems, compared with NumPy, for a mesh of any communicator."""

from __future__ import annotations

import numpy as np

import mpimesh as mm
from mpimesh.arguments import rank_names
from mpimesh.compat.burn import DistributedParamId, DistributedSyncClient
from mpimesh.compat.kapsl import dist_ops
from mpimesh.compat.tensorflow import Heartbeat
from mpimesh.compat.tvm import scatter_from_worker0
from mpimesh.errors import DTypeError, GroupError, MismatchError, RankError, ShapeError
from tests.helpers import warned
from tests.helpers.raises import raises

__all__ = [
    "beats_go_on",
    "every_kapsl_operation",
    "gradients_by_their_ids",
    "missing_gradients_are_named",
    "parts_of_worker_0",
]


def every_kapsl_operation(comm):
    """K31, over the world and over a group that lists it backwards: ranks are the mesh's."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n, me = mesh.size, mesh.rank
        ops = dist_ops(mesh)
        mesh.add_group("back", range(n)[::-1])
        everyone = np.arange(n * 2 * n).reshape(n, 2 * n)  # row r is of rank r
        for dtype in ("float32", "int32", "float64", "complex128"):
            for group, order in (("world", range(n)), ("back", range(n)[::-1])):
                rows = everyone[list(order)].astype(dtype)
                mine, place = everyone[me].astype(dtype), list(order).index(me)
                root = n - 1

                data = mine.copy()
                assert ops.all_reduce(data, "sum", group) is data
                assert np.array_equal(data, rows.sum(0))

                data = mine.copy()
                ops.broadcast(data, root, group)
                assert np.array_equal(data, everyone[root])

                output = np.zeros(2 * n * n, dtype)
                ops.all_gather(mine, output, group)
                assert np.array_equal(output, rows.reshape(-1))

                chunk = np.zeros(2, dtype)
                ops.scatter(mine if me == root else None, chunk, root, group)
                assert np.array_equal(chunk, everyone[root][2 * place : 2 * place + 2])

                whole = np.zeros(2 * n * n, dtype) if me == root else None
                assert ops.gather(mine, whole, root, group) is whole
                if whole is not None:
                    assert np.array_equal(whole, rows.reshape(-1))

                part = np.zeros(2, dtype)
                ops.reduce_scatter(mine, part, "sum", group)
                assert np.array_equal(part, rows.sum(0)[2 * place : 2 * place + 2])
                ops.barrier(group)
            if n > 1:
                _around(ops, mine, everyone)
        _kapsl_dtypes(ops, n, me)
        with raises(RankError, "root_rank", n):
            ops.broadcast(np.ones(2), n)
        with raises(RankError, "dest_rank", -1):
            ops.send(np.ones(2), -1)


def _around(ops, mine, everyone):
    """Each rank sends to the next one: even ranks first."""
    n, me = len(everyone), ops.mesh.rank
    came = np.zeros_like(mine)
    steps = [lambda: ops.send(mine, (me + 1) % n), lambda: ops.recv(came, (me - 1) % n)]
    for step in steps if me % 2 == 0 and me != n - 1 else steps[::-1]:
        step()
    assert np.array_equal(came, everyone[me - 1])


def _kapsl_dtypes(ops, n, me):
    data = np.full(3, me, "i4")
    ops.all_reduce_i32(data, "max", "world")
    assert data.tolist() == [n - 1] * 3
    data = np.full(3, me, "f4")
    ops.all_reduce_f32(data, "average", "world")
    assert data.tolist() == [(n - 1) / 2] * 3
    chunk = np.zeros(1, "f4")
    ops.scatter_f32(np.arange(n, dtype="f4") if me == 0 else None, chunk, 0)
    assert chunk.tolist() == [me]
    for call in (ops.all_reduce_i32, ops.all_reduce_f32):
        with raises(DTypeError, "all_reduce", "float64"):
            call(np.ones(3), "sum", "world")
    with raises(ShapeError, (n + 1,)):
        ops.all_gather_f32(np.ones(1, "f4"), np.ones(n + 1, "f4"), "world")


def parts_of_worker_0(comm):
    """V19: NumPy's split, along every axis, for every memory order."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n, me, group = mesh.size, mesh.rank, mesh.group()
        for dtype in ("float32", "int8", "complex64"):
            x = np.arange(2 * n * 3 * n * n).reshape(2 * n, 3 * n, n).astype(dtype)
            for whole in (x, np.asfortranarray(x), x[:, ::-1]):
                for axis in (0, 1, 2, -1):
                    give = whole if me == 0 else None
                    part = scatter_from_worker0(give, n, axis, group=group)
                    assert part.flags.c_contiguous
                    assert part.dtype == x.dtype
                    assert np.array_equal(part, np.split(whole, n, axis)[me])
        out = np.zeros(2)
        give = np.arange(2.0 * n) if me == 0 else None
        assert scatter_from_worker0(give, n, group=group, out=out) is out
        assert out.tolist() == [2 * me, 2 * me + 1]

        with raises(GroupError, "num_workers", n + 1, n, "'world'"):
            scatter_from_worker0(give, n + 1, group=group)
        if n == 1:
            return
        # Worker 0 alone knows the shape, and all raise.
        with raises(ShapeError, "axis 0", (2 * n + 1,), n, "equal parts"):
            scatter_from_worker0(np.ones(2 * n + 1) if me == 0 else None, n, group=group)
        with raises(ShapeError, "None from worker 0"):
            scatter_from_worker0(None, n, group=group)
        with raises(ShapeError, "axis 3"):
            scatter_from_worker0(np.ones(n) if me == 0 else None, n, 3, group=group)
        with warned.recorded as seen:
            part = scatter_from_worker0(np.full(n, float(me)), n, group=group)
            group.barrier()
        of_mine = [one for one in seen if f"worker {me} of group 'world'" in str(one.message)]
        assert [(one.category, one.filename) for one in of_mine] == [(RuntimeWarning, __file__)] * (
            me != 0
        )
        assert all(f"of shape ({n},)" in str(one.message) for one in of_mine)
        assert part.tolist() == [0.0]
        assert group.all_reduce(np.ones(1)).resolve()[0] == n  # the next one is in order


def gradients_by_their_ids(comm):
    """B12: each rank submits in another order, and all hold the mean, bit for bit."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n, me = mesh.size, mesh.rank
        shapes = {7: (3,), 2: (2, 5), 11: (), 3: (40,)}
        for op in ("mean", "sum"):
            client = DistributedSyncClient(mesh.group(), op)
            for step in range(3):
                values = {
                    key: [
                        np.random.default_rng([step, key, r]).integers(0, 99, s) for r in range(n)
                    ]
                    for key, s in shapes.items()
                }
                mine = {
                    DistributedParamId(key): np.asarray(all_of[me], float)
                    for key, all_of in values.items()
                }
                client.register_sync_parameters(mine)
                for key in np.random.default_rng([step, me]).permutation(list(shapes)):
                    client.submit_gradient_sync(key)
                client.submit_sync_collective(timeout_s=None if step == 1 else 30)
                for key, all_of in values.items():
                    total = np.sum(all_of, 0) / (n if op == "mean" else 1)
                    assert np.array_equal(mine[DistributedParamId(key)], total), (op, step, key)


def missing_gradients_are_named(comm):
    """B12: alike on all ranks, whoever left one out; and the next step is in order."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        n, me, last = mesh.size, mesh.rank, mesh.size - 1
        client = DistributedSyncClient(mesh.group(), "sum")
        for limit_s in (None, 30):
            gradients = {key: np.full(2, key + 10.0 * me) for key in range(4)}
            client.register_sync_parameters(gradients)
            if me != last:
                client.submit_gradient_sync(2)  # ahead of 0 and 1
                client.submit_gradient_sync(0)
            client.submit_gradient_sync(1)
            with raises(
                MismatchError,
                f"parameter 0: not by rank {last}",
                f"parameter 2: not by rank {last}",
                f"parameter 3: not by {rank_names(range(n))}",
                "submit_gradient_sync",
            ) as caught:
                client.submit_sync_collective(limit_s)
            assert caught.value.agreed
            assert "parameter 1" not in str(caught.value)
            tens = 10.0 * sum(range(n))
            assert gradients[1].tolist() == [n + tens] * 2
            assert gradients[0].tolist() == [tens - 10.0 * last] * 2
            assert gradients[3].tolist() == [0.0] * 2

        with raises(GroupError, "register_sync_parameters"):
            client.submit_sync_collective()
        with raises(GroupError, "gradients", {}):
            client.register_sync_parameters({})
        with raises(GroupError, "param_id", -1):
            client.register_sync_parameters({-1: np.ones(2)})
        with raises(GroupError, "each id once"):
            client.register_sync_parameters({1: np.ones(2), DistributedParamId(1): np.ones(2)})  # type: ignore[arg-type]
        with raises(DTypeError, "mean", "int64"):
            DistributedSyncClient(mesh.group()).register_sync_parameters({1: np.arange(2)})
        with raises(GroupError, "parameter 5", "written"):
            client.register_sync_parameters({5: [1.0]})
        if n > 1:
            odd = {1: np.ones(3), 4: np.ones(5)} if me == last else {1: np.ones(3), 4: np.ones(6)}
            with raises(MismatchError, "rank 0", "parameter 4", (6,), f"rank {last}", (5,)):
                client.register_sync_parameters(odd)
            wrong = {} if me == last else {1: np.ones(3)}
            with raises(MismatchError, f"rank {last}", "GroupError", "parameter 1"):
                client.register_sync_parameters(wrong)
        client.register_sync_parameters({1: np.ones(2)})
        client.submit_gradient_sync(1)
        for key, what in ((1, "twice"), (6, "not registered")):
            with raises(GroupError, f"parameter {key}", what):
                client.submit_gradient_sync(key)
        with raises(GroupError, "the last step", "parameters 1"):
            client.register_sync_parameters({1: np.ones(2)})
        client.submit_sync_collective()


def beats_go_on(comm):
    """T35: beats among other operations; what the first rank's variable says holds for all."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        heartbeat = Heartbeat(mesh, timeout_s=30)
        assert heartbeat.enabled
        for step in range(4):
            heartbeat.beat()
            assert heartbeat.beats == step + 1
            assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == mesh.size
        with raises(GroupError, "timeout_s", 0):
            Heartbeat(mesh, timeout_s=0)
        with raises(GroupError, "strikes", 0):
            Heartbeat(mesh, strikes=0)
        if mesh.size > 1:
            heartbeat._token += mesh.rank == mesh.size - 1
            with raises(MismatchError, "heartbeat 4", "token", heartbeat._token):
                heartbeat.beat()
