"""burn-collective, row by row, on virtual ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.comm import Communicator
from mpimesh.compat.burn import (
    AllReduceStrategy,
    BroadcastStrategy,
    CollectiveConfig,
    CollectiveTensor,
    NodeId,
    PeerId,
    ReduceStrategy,
    all_reduce,
    broadcast,
    finish_collective,
    nodes,
    reduce,
    register,
    reset_collective,
    start_global_orchestrator,
)
from mpimesh.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GroupError,
    LaunchError,
    MismatchError,
    RankError,
    UnknownNameError,
)
from tests.helpers.raises import raises
from tests.helpers.ranks import on


def test_b16_register_and_finish():
    def main(mesh):
        group = register(mesh)
        assert group.size == 3
        with raises(GroupError, "'collective'"):
            register(mesh)
        finish_collective(group)
        with pytest.raises(ClosedError):
            group.barrier()
        pair = register(mesh, CollectiveConfig().with_num_devices(2))
        assert [*pair.ranks] == [0, 1]
        if mesh.rank == 2:
            with pytest.raises(RankError):
                pair.barrier()

    on("dp=3", main)


def test_b16_reset_and_identities():
    def main(mesh):
        reset_collective(mesh)  # nothing is registered, and nothing happens
        group = register(mesh)
        reset_collective(mesh)
        with raises(GroupError, "not registered"):
            finish_collective(group)
        group = register(mesh)
        assert nodes(group) == {NodeId(0): [PeerId(0), PeerId(1)]}
        found = reduce(np.ones(1), "sum", PeerId(1), group)
        finish_collective(group)
        with raises(GroupError, "not registered"):
            nodes(group)
        return found

    assert on("dp=2", main) == [None, [2.0]]
    one: Any = NodeId(1)
    assert PeerId(1) != one
    assert PeerId(np.int64(1)) == PeerId(1)  # type: ignore[arg-type]
    assert sorted([PeerId(2), PeerId(0)])[0] == PeerId(0)
    with raises(GroupError, "PeerId", -1):
        PeerId(-1)


def test_b17_reduce_and_broadcast():
    def main(mesh):
        group, me = mesh.group(), mesh.rank
        total: Any = reduce(np.full(2, me + 1.0), "sum", 1, group)
        assert total is None if me != 1 else total.tolist() == [6.0, 6.0]
        assert broadcast(np.arange(3.0) if me == 2 else None, group).tolist() == [0.0, 1.0, 2.0]
        for senders in ([], [0, 2]):
            with pytest.raises(mm.MpimeshError):
                broadcast(np.ones(1) if me in senders else None, group)
        assert all_reduce(np.ones(1), "sum", group).resolve()[0] == 3

    on("dp=3", main)


def test_b18_an_error_is_typed_and_raised_on_all_ranks():
    def main(mesh):
        group = mesh.group()
        with pytest.raises(MismatchError):  # RegisterParamsMismatch
            mesh.add_group("other", [0, mesh.rank])
        with pytest.raises(GroupError):  # MultipleRegister
            mesh.add_group("dp", [0])
        with pytest.raises(RankError):  # ReduceRootMismatch
            group.reduce(np.ones(1), root=7)
        with pytest.raises(UnknownNameError):  # RegisterNotFirstOperation
            mesh.group("unregistered")
        return group.all_reduce(np.ones(1)).resolve()[0]

    assert on("dp=2", main) == [2.0] * 2


def test_b19_strategies_give_one_result():
    strategies = [
        AllReduceStrategy.Centralized,
        AllReduceStrategy.Tree(2),
        AllReduceStrategy.Tree(3),
        AllReduceStrategy.Ring,
    ]

    def main(mesh):
        found = []
        for size in (1, 2, 5, 7):  # also fewer elements than ranks, and uneven parts
            x = np.arange(float(size)) + 10 * mesh.rank
            found += [all_reduce(x, "sum", mesh.group(), one).resolve() for one in strategies]
        return found

    for found in on("dp=3", main):
        expected = [3 * np.arange(float(size)) + 30 for size in (1, 2, 5, 7) for _ in range(4)]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_b20_configurations_are_acted_on_or_refused():
    config = CollectiveConfig().with_num_devices(2)
    ring = config.with_local_all_reduce_strategy(AllReduceStrategy.Ring)
    assert ring == CollectiveConfig(2, AllReduceStrategy.Ring)
    assert ring.is_valid()
    for name, value, words in (
        ("num_devices", 0, ()),
        ("num_nodes", 0, ()),
        ("num_nodes", 2, ("on 1",)),
        ("local_all_reduce_strategy", "no such way", ()),
        ("local_reduce_strategy", "ring", ()),
        ("local_broadcast_strategy", "tree(1)", ()),
        ("global_all_reduce_strategy", "two_level", ()),
        ("global_reduce_strategy", "ring", ()),
        ("global_broadcast_strategy", "x", ()),
    ):
        wrong = getattr(config, f"with_{name}")(value)
        assert wrong.is_valid() == bool(words)  # how many nodes there are only the ranks know

        def refused(mesh, wrong=wrong, words=(name, value, *words)):
            with raises(GroupError, *words):
                register(mesh, wrong)

        on("dp=2", refused)
    for refuse, value in (
        (config.with_global_address, "node1:3000"),
        (config.with_node_address, "node2:3001"),
        (config.with_data_service_port, 3002),
    ):
        with raises(LaunchError, value, "mpiexec", "srun"):
            refuse(value)
    with pytest.raises(MismatchError):
        on("dp=2", lambda mesh: register(mesh, CollectiveConfig(1 + mesh.rank)))


def test_b20_strategies_of_the_configuration_are_those_that_run(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        config = (
            CollectiveConfig()
            .with_local_all_reduce_strategy(AllReduceStrategy.Ring)
            .with_local_reduce_strategy(ReduceStrategy.Tree(3))
            .with_local_broadcast_strategy(BroadcastStrategy.Centralized)
        )
        group = register(mesh, config)
        calls = {
            "ring": lambda: all_reduce(np.ones(4), "sum", group).resolve(),
            "tree(3)": lambda: reduce(np.ones(4), "sum", 0, group),
            "centralized": lambda: broadcast(np.ones(4) if mesh.rank == 1 else None, group),
        }
        for call in calls.values():
            call()
        finish_collective(group)

    used: list[str | None] = []
    prepare = Communicator.prepare

    def noted(self, name, arguments, algorithm=None):
        used.append(algorithm)
        return prepare(self, name, arguments, algorithm)

    monkeypatch.setattr(Communicator, "prepare", noted)
    on("dp=2", main)
    assert {"ring", "tree(3)", "centralized"} <= set(used)


@pytest.mark.parametrize(("hosts", "size"), [("aabbb", 4), ("aabbb", 5), ("abcab", 5), ("aaa", 3)])
def test_b20_two_levels_give_the_result_of_one(hosts, size, monkeypatch):
    monkeypatch.setattr(mm.DeviceMesh, "hosts", property(lambda mesh: tuple(hosts)))
    config = CollectiveConfig(
        num_devices=size,
        local_all_reduce_strategy=AllReduceStrategy.Ring,
        local_reduce_strategy=ReduceStrategy.Centralized,
        local_broadcast_strategy=BroadcastStrategy.Tree(2),
        num_nodes=len(set(hosts[:size])),
        global_all_reduce_strategy=AllReduceStrategy.Tree(2),
        global_reduce_strategy=ReduceStrategy.Tree(2),
        global_broadcast_strategy=BroadcastStrategy.Centralized,
    )
    rows = np.arange(float(3 * size)).reshape(size, 3).astype(np.float32) + 1

    def main(mesh):
        group = register(mesh, config)
        if mesh.rank >= size:
            with pytest.raises(RankError):
                all_reduce(rows[0], "sum", group)
        else:
            check(mesh, group)
        finish_collective(group)
        finish_collective(register(mesh, config))

    def check(mesh, group):
        order = list(dict.fromkeys(hosts[:size]))
        expected: dict[NodeId, list[PeerId]] = {NodeId(k): [] for k in range(len(order))}
        for rank in range(size):
            expected[NodeId(order.index(hosts[rank]))].append(PeerId(rank))
        assert nodes(group) == expected
        mine = rows[mesh.rank]
        results: dict[Any, Any] = {"sum": rows.sum(0), "max": rows.max(0), "mean": rows.mean(0)}
        for op, whole in results.items():
            total = all_reduce(mine, op, group).resolve()
            assert total.dtype == np.float32
            assert np.array_equal(total, whole)
            for root in range(size):
                found: Any = reduce(mine, op, root, group)
                if mesh.rank == root:
                    assert np.array_equal(found, whole)
                else:
                    assert found is None
        assert np.array_equal(mine, rows[mesh.rank])
        with pytest.raises(mm.MpimeshError):  # the mean of integers
            all_reduce(np.ones(2, int), "mean", group)
        for root in range(size):
            found = broadcast(mine if mesh.rank == root else None, group)
            assert np.array_equal(found, rows[root])
        for senders in ([], [0, size - 1]):
            with raises(GroupError, senders):
                broadcast(mine if mesh.rank in senders else None, group)

    on(f"dp={len(hosts)}", main)


def test_b20_the_mean_divides_once_by_the_number_of_all_ranks(nodes_apart):
    found = on("dp=4", lambda mesh: mesh.group().all_reduce(np.full(3, 4.0), "mean").resolve())
    assert [one.tolist() for one in found] == [[4.0] * 3] * 4


def test_b21_the_launcher_replaces_the_orchestrator():
    with raises(LaunchError, "mpiexec", "srun"):
        start_global_orchestrator(4000)


def test_b22_a_pending_operation_can_be_waited_for():
    def main(mesh):
        handle = None
        if mesh.rank == 0:
            handle = mesh.group().all_reduce(np.ones(1))
            assert not handle.done()
            with pytest.raises(CollectiveTimeoutError):
                handle.resolve(0.05)
            barrier.wait()
        else:
            barrier.wait()
            handle = mesh.group().all_reduce(np.ones(1))
        handle.wait(30)
        assert handle.done()
        return handle.resolve()[0]

    barrier = threading.Barrier(2)
    assert on("dp=2", main) == [2.0, 2.0]


def test_b22_the_same_by_burns_handle():
    def main(mesh):
        if mesh.rank == 0:
            handle = all_reduce(np.ones(1), "sum", mesh.group())
            assert not handle.test()
            with pytest.raises(CollectiveTimeoutError):
                handle.wait(0.05)
            barrier.wait()
        else:
            barrier.wait()
            handle = all_reduce(np.ones(1), "sum", mesh.group())
        found = handle.wait(30)
        assert handle.test()
        assert handle.done()
        assert CollectiveTensor(found).test()
        assert CollectiveTensor(found).wait(0) is found
        return found[0]

    barrier = threading.Barrier(2)
    assert on("dp=2", main) == [2.0, 2.0]
