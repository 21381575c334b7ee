"""What one rank alone gets wrong about a divided optimizer is told on all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError, ModuleStateError
from tests.pure.parallel_models import assert_equal, batch, make_pipeline, on_ranks, state_of
from tests.pure.parallel_traps import assert_nothing_left


def make(mesh, **options):
    pipe = make_pipeline(mesh)
    return pipe, mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe, **options)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
def test_values_that_one_rank_has_replaced(dims, scaled):
    def body(mesh):
        pipe, optimizer = make(mesh, scaler=optim.LossScaler(2.0) if scaled else None)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        before = state_of(pipe)
        parameter = pipe.parameters()[0]
        own = parameter.data
        if mesh.rank == 1:
            parameter.data = own.copy()
        with pytest.raises(ModuleStateError, match=r"^rank 1: .* another array for its values"):
            optimizer.step()
        assert_equal(state_of(pipe), before)
        parameter.data = own
        optimizer.step()
        pipe.check_replicas()
        assert any((state_of(pipe)[name] != before[name]).any() for name in before)
        assert_nothing_left(mesh)

    on_ranks(dims, body, rendezvous=True)


def test_gradients_that_one_rank_has_forgotten():
    def body(mesh):
        pipe, optimizer = make(mesh)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        if mesh.rank == 1:
            optimizer.zero_grad()
        with pytest.raises(ModuleStateError, match="rank 1: there are no sums of gradients"):
            optimizer.step()
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy, optimizer=optimizer)
        pipe.check_replicas()

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_a_parameter_that_one_rank_has_frozen(zero):
    """The buckets stay as they were, and nobody trains on by others than its replicas."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        optimizer: Any = optim.Adam(pipe.parameters(), lr=0.01)
        if zero is not None:
            optimizer = mm.ParallelOptimizer(optimizer, pipe, zero=zero)
        train = partial(pipe.train_step, loss=nn.cross_entropy, optimizer=optimizer)
        train(*batch(0, 16))
        parameter = pipe.parameters()[0]
        parameter.requires_grad = mesh.rank != 1
        with pytest.raises(MismatchError, match=r"frozen on ranks \[1\]"):
            pipe.rebuild_buckets()
        parameter.requires_grad = True
        train(*batch(1, 16))
        pipe.check_replicas()
        parameter.requires_grad = False
        if mesh.coord("pp") == 0:
            other = parameter.data.copy()
        pipe.rebuild_buckets()
        train(*batch(2, 16))
        pipe.check_replicas()
        if mesh.coord("pp") == 0:
            np.testing.assert_array_equal(parameter.data, other)

    on_ranks("dp=2,pp=2", body)


def test_no_step_after_buckets_that_could_not_be_made():
    def body(mesh):
        pipe = make_pipeline(mesh)
        pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        engine: Any = pipe._engine

        def broken(plan):
            raise MemoryError("no room")

        engine._new_buckets = broken
        with pytest.raises(MemoryError):
            pipe.rebuild_buckets()
        with pytest.raises(ModuleStateError, match="could not be made anew"):
            pipe.train_step(*batch(0, 16), loss=nn.cross_entropy)
        with pytest.raises(ModuleStateError, match="could not be made anew"):
            pipe.rebuild_buckets()

    on_ranks("dp=2", body)


def test_groups_that_leave_out_steps_together():
    def body(mesh):
        with pytest.raises(MismatchError):
            make(mesh, group=mesh.group() if mesh.rank else mesh.group("dp"))
        with pytest.raises(ModuleError, match="has only 2 of them"):
            make(mesh, group=mesh.group("pp"))
        make(mesh, group=mesh.group())

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("dims", ["dp=1", "dp=3", "dp=2,pp=2"])
@pytest.mark.parametrize("zero", [None, 0, 1])
def test_gradients_are_zeroed_before_each_step_as_in_pytorch(dims, zero):
    """Nothing changes: not the numbers, nor that reductions begin during the backward."""

    def train(mesh, zeroed):
        pipe = make_pipeline(mesh)
        if zeroed:
            pipe.zero_grad()
        inner = optim.Adam(pipe.parameters(), lr=0.01)
        optimizer: Any = inner
        if zero is not None:
            optimizer = mm.ParallelOptimizer(inner, pipe, zero=zero)
        uses = []
        for step in range(3):
            if zeroed:
                pipe.zero_grad()
                inner.zero_grad()
                optimizer.zero_grad()
            pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            uses.append([entry.uses for entry in pipe.buckets.entries])
        return state_of(pipe), uses

    def body(mesh):
        one, other = train(mesh, False), train(mesh, True)
        assert_equal(one[0], other[0])
        assert one[1] == other[1]
        assert all(uses == 1 for uses in other[1][0])

    on_ranks(dims, body)
