"""burn's distributed backend, row by row, on virtual ranks."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.compat.burn import (
    AllReduce,
    CollectiveTensor,
    DistributedConfig,
    DistributedContext,
    DistributedParamId,
    DistributedParams,
    DistributedSyncClient,
    ModuleSharder,
    ReduceOperation,
    TensorRef,
    all_reduce,
    close_communication_server,
    distributed_params,
    get_distributed_sync_client,
    is_distributed,
    set_distributed,
    start_communication_server,
)
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    MismatchError,
    UnresolvedError,
)
from tests.helpers.compat_programs import gradients_by_their_ids, missing_gradients_are_named
from tests.helpers.raises import raises
from tests.helpers.ranks import on


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_b12_gradients_in_any_order(size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    mm.run_virtual(size, gradients_by_their_ids, None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_b12_missing_gradients(size):
    mm.run_virtual(size, missing_gradients_are_named, None)


def test_b12_a_rank_that_does_not_come_is_named_and_may_come_later():
    def main():
        with mm.DeviceMesh("dp=3") as mesh:
            client = DistributedSyncClient(mesh.group(), "sum")
            gradients = {4: np.ones(2), 9: np.ones(2)}
            for _ in range(2):
                client.register_sync_parameters(gradients)
                client.submit_gradient_sync(9)
                client.submit_gradient_sync(4)
                if mesh.rank == 1:
                    time.sleep(0.6)
                    client.submit_sync_collective(0.2)
                else:
                    with raises(CollectiveTimeoutError, "ranks [1]", "submit_sync_collective"):
                        client.submit_sync_collective(0.2)
                    with raises(GroupError, "the last step"):
                        client._checked(gradients)
                    client.submit_sync_collective(20)
            return [x.tolist() for x in gradients.values()]

    assert mm.run_virtual(3, main) == [[[9.0, 9.0]] * 2] * 3


def test_b12_ids_not_reduced_are_named():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            client = DistributedSyncClient(mesh.group())
            client.register_sync_parameters({key: np.ones(2) for key in (1, 2, 3)})
            client.submit_gradient_sync(1)
            if mesh.rank == 0:
                client.submit_gradient_sync(2)
                client.submit_gradient_sync(3)
                with raises(CollectiveTimeoutError, "parameters 2, 3", "ranks [1]"):
                    client.submit_sync_collective(0.2)
            else:
                time.sleep(0.5)
                client.submit_gradient_sync(3)
                client.submit_gradient_sync(2)
            client.submit_sync_collective(20)

    mm.run_virtual(2, main)


def test_b12_reductions_start_before_the_end():
    """In the order of the ids, as far as it goes."""

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            client = DistributedSyncClient(mesh.group())
            calls = mesh.traffic()
            client.register_sync_parameters({key: np.ones(2) for key in (1, 2, 3)})
            before = calls.snapshot()
            started = []
            for key in (3, 1, 2):
                client.submit_gradient_sync(key)
                started.append((calls.snapshot() - before).calls.get("all_reduce", 0))
            client.submit_sync_collective()
            return started

    assert mm.run_virtual(2, main) == [[0, 1, 3]] * 2


def test_b12_ids():
    assert DistributedParamId(np.int64(3)) == DistributedParamId(3)  # type: ignore[arg-type]
    assert {DistributedParamId(3): 1}[DistributedParamId(3)] == 1
    assert DistributedParamId(3) < DistributedParamId(10)
    for wrong in (-1, 1.5, "3", True, None):
        with pytest.raises(GroupError):
            DistributedParamId(wrong)  # type: ignore[arg-type]
    with pytest.raises(GroupError):
        DistributedSyncClient("dp")  # type: ignore[arg-type]

    def main():
        with mm.DeviceMesh("dp=-1") as mesh, raises(GroupError, "all_reduce_op", "'max'"):
            DistributedSyncClient(mesh.group(), "max")

    mm.run_virtual(1, main)


# -- B1, B2: marked parameters --------------------------------------------------------------------


def small_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model.materialize(seed=1, dtype="float64")
    return model


def add_gradients(model, rank):
    x = np.random.default_rng(rank).integers(-4, 5, (8, 3)).astype(float)
    ctx = nn.Context()
    model.backward(np.ones_like(model(x, ctx)), ctx)
    return [parameter.grad.copy() for parameter in model.parameters()]


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_b2_marks_decide_which_gradients_are_reduced(size, op):
    """A NumPy sum over the ranks for the marked ones; each rank's own for the others."""
    everyone = [add_gradients(small_model(), rank) for rank in range(size)]

    def main():
        with mm.DeviceMesh("dp=-1") as mesh:
            group = mesh.group("dp")
            model = small_model()
            assert ModuleSharder(group).shard(model) is model
            parameters = model.parameters()
            marks = [distributed_params(one) for one in parameters]
            assert marks == [DistributedParams(DistributedParamId(at)) for at in range(4)]
            set_distributed(parameters[1], None)
            assert [*map(is_distributed, parameters)] == [True, False, True, True]
            client = DistributedSyncClient(group, op)
            for _ in range(2):
                model.zero_grad()
                own = add_gradients(model, mesh.rank)
                client.sync_parameters(parameters)
                for at, one in enumerate(parameters):
                    total = sum(there[at] for there in everyone)
                    total = total / size if op == "mean" else total
                    np.testing.assert_array_equal(one.grad, own[at] if at == 1 else total)

    mm.run_virtual(size, main)


def test_b1_ids_go_on_and_those_that_are_set_stay():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            sharder = ModuleSharder(mesh.group())
            first, second = small_model(), small_model()
            first[0].bias.requires_grad = False
            set_distributed(first[2].weight, np.int64(1))  # type: ignore[arg-type]
            sharder.shard(first)
            sharder.shard(second)
            ids = [distributed_params(one) for one in (*first.parameters(), *second.parameters())]
            numbers = [None if one is None else one.param_id.value for one in ids]
            assert numbers == [0, None, 1, 2, 3, 4, 5, 6]
            assert not is_distributed(copy.deepcopy(first[0].weight))
            tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            tied[1].weight = tied[0].weight
            sharder.shard(tied)
            assert distributed_params(tied[1].weight) == DistributedParams(DistributedParamId(7))

    mm.run_virtual(2, main)


def test_b1_ranks_with_other_parameters_are_told_and_nothing_is_marked():
    def main():
        with mm.DeviceMesh("dp=3") as mesh:
            group, model = mesh.group(), small_model()
            other = nn.Sequential(nn.Linear(3, 5)) if mesh.rank == 1 else model
            with raises(MismatchError, "'0.weight'", "(5, 3)", "rank 1"):
                ModuleSharder(group).shard(other)
            assert not any(map(is_distributed, [*model.parameters(), *other.parameters()]))
            with raises(MismatchError, "rank 2", "module"):
                ModuleSharder(group).shard(3 if mesh.rank == 2 else model)  # type: ignore[type-var]
            with raises(GroupError, "module", 3):
                ModuleSharder(group).shard(3)  # type: ignore[type-var]
            ModuleSharder(group).shard(model)
            if mesh.rank == 0:
                set_distributed(model.parameters()[2], 9)
            client = DistributedSyncClient(group)
            with raises(MismatchError, "parameter 9", "parameter 2", "rank 0"):
                client.sync_parameters(model.parameters())
            client.sync_parameters(model.parameters()[:2])  # a parameter without a gradient: zeros
            assert not model.parameters()[0].grad.any()

    mm.run_virtual(3, main)


def test_b2_wrong_marks():
    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            client, model = DistributedSyncClient(mesh.group()), small_model()
            with raises(GroupError, "gradients"):
                client.sync_parameters(model.parameters())  # none is marked
            for parameter in model.parameters()[:2]:
                set_distributed(parameter, 5)
            with raises(GroupError, "parameter 5", "'bias'"):
                client.sync_parameters(model.parameters())
            set_distributed(model[0].bias, None)
            model.freeze()
            with raises(GroupError, "parameter 5", "frozen"):
                client.sync_parameters(model.parameters())
            model.unfreeze()
            client.sync_parameters(model.parameters(), timeout_s=20)

    mm.run_virtual(2, main)
    with raises(GroupError, "parameter", 3):
        set_distributed(3, 1)  # type: ignore[arg-type]
    with raises(GroupError, "parameter", None):
        is_distributed(None)  # type: ignore[arg-type]
    with raises(GroupError, "param_id", -1):
        set_distributed(small_model()[0].weight, -1)
    with raises(GroupError, "group", "dp"):
        ModuleSharder("dp")  # type: ignore[arg-type]


def test_b3_reduce_operation():
    def main(mesh):
        x = np.array([mesh.rank + 1.0])
        return [
            all_reduce(x, op, mesh.group()).resolve()[0]
            for op in (ReduceOperation.Sum, ReduceOperation.Mean)
        ]

    assert on("dp=3", main) == [[6.0, 2.0]] * 3


def test_b4_the_configuration_of_a_session_holds_for_its_gradients():
    def main(mesh):
        found = []
        for op in ReduceOperation:
            with DistributedContext(mesh.group(), DistributedConfig(op)) as context:
                gradients = {3: np.array([mesh.rank + 1.0])}
                context.client.register_sync_parameters(gradients)
                context.client.submit_gradient_sync(3)
                context.client.submit_sync_collective()
                found.append(gradients[3][0])
        with pytest.raises(AttributeError):
            context.config.all_reduce_op = ReduceOperation.Sum  # type: ignore[misc]
        return found

    assert on("dp=2", main) == [[3.0, 1.5]] * 2


def test_b4_one_configuration_of_a_group_at_a_time():
    def main(mesh):
        group, other = mesh.group("dp"), mesh.add_group("other", [1, 0])
        total, mean = (DistributedConfig(op) for op in ReduceOperation)
        with DistributedContext(group, total) as first:
            with raises(GroupError, "Sum", "Mean", "'dp'"):
                DistributedContext(group, mean)
            with DistributedContext(group, total), DistributedContext(other, mean):
                pass
            assert first.all_reduce(np.ones(1)).resolve()[0] == 2
        with pytest.raises(KeyError), DistributedContext(group, total):
            raise KeyError
        with DistributedContext(group, mean):  # the sessions before have ended, one by an error
            pass

    on("dp=2", main)


def test_b5_a_collective_tensor_resolves_alone_and_again():
    def main(mesh):
        handles = [all_reduce(np.full(2, k + 1.0), "sum", mesh.group()) for k in range(3)]
        twin = handles[1].clone()
        second = handles[1].resolve()
        assert second.tolist() == [4.0, 4.0]
        assert twin.resolve() is handles[1].resolve() is second
        assert [one.resolve()[0] for one in handles] == [2.0, 4.0, 6.0]
        there = np.ones(2)
        by_hand = CollectiveTensor(there)
        assert by_hand.clone().resolve() is by_hand.assume_resolved() is there

    on("dp=2", main)


def test_b6_assume_resolved_never_waits():
    def main(mesh):
        if mesh.rank == 0:
            handle = all_reduce(np.ones(1), "sum", mesh.group())
            with pytest.raises(UnresolvedError, match="under way"):
                handle.assume_resolved()
            barrier.wait()
        else:
            barrier.wait()
            handle = all_reduce(np.ones(1), "sum", mesh.group())
        handle.resolve()
        assert handle.assume_resolved()[0] == 2

    barrier = threading.Barrier(2)
    on("dp=2", main)


def test_b7_all_reduce_is_deferred_and_holds_its_array():
    def main(mesh):
        x = np.full(100, mesh.rank + 1.0)
        handle = all_reduce(x, ReduceOperation.Sum, mesh.group("dp"))
        del x
        return handle.resolve().tolist()

    assert on("dp=3", main) == [[6.0] * 100] * 3


def test_b8_sync_collective_waits_for_all_in_the_order_of_their_start():
    def main(mesh):
        with DistributedContext(mesh.group()) as context:
            handles = [context.all_reduce(np.full(1, float(k))) for k in range(5)]
            context.sync_collective()
            assert [one.assume_resolved()[0] for one in handles] == [0.0, 2.0, 4.0, 6.0, 8.0]
        started = mesh.group().all_reduce(np.ones(1))
        mesh.sync_collective()
        assert started.done()
        assert started.resolve()[0] == 2

    on("dp=2", main)


def test_b9_a_session_ends_with_its_work_and_takes_no_more():
    def main(mesh):
        with DistributedContext(mesh.group()) as context:
            handle = context.all_reduce(np.ones(1))
        assert handle.assume_resolved()[0] == 2
        with raises(GroupError, "closed", "'world'"):
            context.all_reduce(np.ones(1))
        context = DistributedContext(mesh.group())
        context.client.register_sync_parameters({4: np.ones(1)})
        with raises(UnresolvedError, "parameters 4"):
            context.close()
        context.client.submit_gradient_sync(4)
        context.client.submit_sync_collective()
        client = context.client
        with raises(GroupError, "register_sync_parameters"):
            client.submit_sync_collective()
        context.close()
        x = np.ones(1)
        for call in (
            lambda: context.client,
            lambda: client.register_sync_parameters({4: x}),
            lambda: client.submit_gradient_sync(4),
            client.submit_sync_collective,
            lambda: client.sync_parameters([]),
        ):
            with raises(GroupError, "closed", "'world'"):
                call()
        assert x[0] == 1

    on("dp=2", main)


def test_b9_a_server_has_one_client_until_it_is_closed():
    def main(mesh):
        group = mesh.group("dp")
        for call in (get_distributed_sync_client, close_communication_server):
            with raises(GroupError, "start_communication_server", "'dp'"):
                call(group)
        server = start_communication_server(group, DistributedConfig(ReduceOperation.Sum))
        with raises(GroupError, "close_communication_server", "'dp'"):
            start_communication_server(group)
        client = get_distributed_sync_client(group)
        assert client is server.client
        gradients = {0: np.ones(2)}
        client.register_sync_parameters(gradients)
        client.submit_gradient_sync(0)
        with raises(UnresolvedError, "parameters 0"):
            close_communication_server(group)
        client.submit_sync_collective()
        close_communication_server(group)
        with pytest.raises(GroupError, match="closed"):
            client.register_sync_parameters(gradients)
        start_communication_server(group)
        close_communication_server(group)
        return gradients[0].tolist()

    assert on("dp=2", main) == [[2.0, 2.0]] * 2


def test_b10_registered_parameters_are_those_of_all_ranks():
    def main(mesh):
        client = DistributedSyncClient(mesh.group())
        ids = [1, 2] if mesh.rank == 0 else [1, 3]
        with raises(MismatchError, "parameter 2", "parameter 3"):
            client.register_sync_parameters({key: np.ones(1) for key in ids})

    on("dp=2", main)


def test_b11_gradients_come_in_any_order_and_are_reduced_in_place():
    def main(mesh):
        client = DistributedSyncClient(mesh.group(), ReduceOperation.Sum)
        gradients = {key: np.full(3, 10.0 * key + mesh.rank) for key in range(4)}
        arrays = dict(gradients)
        client.register_sync_parameters(gradients)
        for key in np.random.default_rng(mesh.rank).permutation(4):
            client.submit_gradient_sync(int(key))
        client.submit_sync_collective()
        return [arrays[key].tolist() for key in range(4)]

    assert on("dp=2", main) == [[[20.0 * key + 1] * 3 for key in range(4)]] * 2


def test_b13_references_to_arrays():
    array = np.arange(3.0)
    reference = TensorRef(array)
    copied = reference.float_from_ref()
    reference.tensor[0] = 7
    assert array[0] == 7
    assert copied.tolist() == [0.0, 1.0, 2.0]
    assert reference.comm_device() == "cpu"


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_b14_backward_of_an_all_reduce_is_one_by_the_same_operation(op):
    def main(mesh):
        layer, ctx = AllReduce(mesh.group(), op), nn.Context()
        y = layer.forward(np.array([mesh.rank + 1.0]), ctx)
        dx = layer.backward(np.array([10.0 * (mesh.rank + 1)]), ctx)
        assert dx is not None
        return y[0], dx[0]

    divisor = 1 if op == "sum" else 2
    assert on("dp=2", main) == [(3.0 / divisor, 30.0 / divisor)] * 2


def test_b15_other_orders_on_other_ranks_are_errors(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    with pytest.raises(mm.MpimeshError):
        on("dp=2", lambda mesh: mesh.group().all_reduce(np.ones(2 + mesh.rank)).resolve())
    ops: list[Any] = ["sum", "max"]
    with pytest.raises(mm.MpimeshError):
        on(
            "dp=2",
            lambda mesh: mesh.group().all_reduce(np.ones(2), ops[mesh.rank]).resolve(),
        )


def test_b23_data_parallel_training_leaves_equal_parameters():
    x = np.random.default_rng(0).normal(size=(6, 3))
    y = np.random.default_rng(1).normal(size=(6, 2))

    def main(mesh):
        model = mm.DataParallel(small_model(), mesh, loss=nn.mse_loss, dtype="float64")
        sgd = mm.optim.SGD(model.parameters(), lr=0.1)
        loss = model.train_step(x, y)
        sgd.step()
        return loss, [one.data for one in model.parameters()]

    reference, ctx = small_model(), nn.Context()
    out = reference(x, ctx)
    reference.backward(2 * (out - y) / out.size, ctx)
    for loss, found in on("dp=2", main):
        assert np.isclose(loss, ((out - y) ** 2).mean())
        for one, two in zip(found, reference.parameters(), strict=True):
            assert np.allclose(one, two.data - 0.1 * two.grad)
