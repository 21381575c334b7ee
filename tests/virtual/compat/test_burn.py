"""burn's words."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.compat.burn import (
    DistributedParamId,
    DistributedParams,
    DistributedSyncClient,
    ModuleSharder,
    distributed_params,
    is_distributed,
    set_distributed,
)
from mpimesh.errors import CollectiveTimeoutError, GroupError, MismatchError
from tests.helpers.compat_programs import gradients_by_their_ids, missing_gradients_are_named
from tests.helpers.raises import raises


@pytest.mark.thin(1)
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
