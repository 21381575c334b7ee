"""Parameters, gradients and optimizer state divided among replicas: what each rank has."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import (
    MismatchError,
    ModuleError,
    ModuleStateError,
    MpimeshError,
    ShapeError,
)
from tests.helpers.depth import examples
from tests.helpers.parallel_models import SEED, batch, layers, make_pipeline, on_ranks, state_of
from tests.helpers.raises import raises

STAGES = [0, 1, 2, 3]


def make(mesh, stage, **options):
    return mm.fully_shard(
        nn.Sequential(layers()),
        mesh,
        stage=stage,
        loss=nn.cross_entropy,
        dtype="float64",
        seed=SEED,
        **{"bucket_bytes": 300, **options},
    )


def train(mesh, stage, *, rows=13, steps=3, **options):
    model = make(mesh, stage, **options)
    optimizer = mm.ParallelOptimizer(optim.AdamW(model.parameters(), lr=0.01), model)
    losses = [model.train_step(*batch(step, rows), optimizer=optimizer) for step in range(steps)]
    model.check_replicas()
    return losses, state_of(model), optimizer.state_dict()["params"]


@settings(max_examples=examples(20))
@given(
    ranks=st.integers(1, 4),
    bucket_bytes=st.sampled_from([1, 300, 10**6]),
    rows=st.integers(1, 13),
    num_microbatches=st.integers(1, 4),
    overlap=st.booleans(),
)
def test_every_stage_gives_the_same_bits(ranks, bucket_bytes, rows, num_microbatches, overlap):
    options = {
        "bucket_bytes": bucket_bytes,
        "rows": rows,
        "num_microbatches": num_microbatches,
        "overlap": overlap,
    }
    expected, *others = (
        on_ranks(f"dp={ranks}", partial(train, stage=stage, **options))[0] for stage in STAGES
    )
    for losses, state, params in others:
        assert losses == expected[0]
        for name, values in state.items():
            np.testing.assert_array_equal(values, expected[1][name], err_msg=name)
        for mine, theirs in zip(params, expected[2], strict=True):
            for name, values in mine.items():
                np.testing.assert_array_equal(values, theirs[name], err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_have_one_array_of_values_at_stage_3(stage):
    def body(mesh):
        model = make(mesh, stage)
        return [parameter.data for parameter in model.parameters()]

    one, *others = on_ranks("dp=3", body)
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert np.shares_memory(mine, theirs) == (stage == 3)


class Twice(nn.Linear):
    """Of another library: nobody knows how often it uses its weight."""

    input_grad = property(
        lambda self: True, lambda self, wanted: None
    )  # its own second use reads it

    def forward(self, x, ctx=None):
        return super().forward(super().forward(x, ctx), ctx)

    def backward(self, dy, ctx):
        return super().backward(super().backward(dy, ctx), ctx)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [nn.Linear, Twice])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_gradients_are_whole_only_while_they_are_reduced(stage, kind, num_microbatches):
    """Those of a layer that is not of this library after the first step, which learns of it."""

    def body(mesh):
        width, depth = 16, 12
        model = mm.fully_shard(
            nn.Sequential([kind(width, width, bias=False) for _ in range(depth)]),
            mesh,
            stage=stage,
            loss=nn.mse_loss,
            dtype="float64",
            bucket_bytes=1,
            num_microbatches=num_microbatches,
        )
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=1e-3), model)
        x = np.ones((6, width))
        whole = []
        for parameter in model.parameters():
            before = parameter.on_ready

            def on_ready(one, before=before):
                before(one)
                whole.append(sum(other.grad is not None for other in model.parameters()))

            parameter.on_ready = on_ready
        for step in range(3):
            whole.clear()
            model.train_step(x, x, optimizer=optimizer)
            assert whole[-1] == (depth if kind is Twice and not step else 0)
            assert max(whole) == (
                depth if num_microbatches > 1 or (kind is Twice and not step) else whole[0]
            )
            assert all(parameter.grad is None for parameter in model.parameters())
        assert model.buckets.buckets[0].flat is None
        return True

    assert all(on_ranks("dp=2", body))


def test_each_rank_has_its_part_of_sums_and_state():
    def body(mesh):
        model = make(mesh, 3, bucket_bytes=10**6)
        adam = optim.AdamW(model.parameters())
        optimizer = mm.ParallelOptimizer(adam, model)
        model.train_step(*batch(0, 8), optimizer=optimizer)
        sums = sum(bucket.shard.memory.size for bucket in model.buckets.buckets)
        return sums, sum(parameter.size for parameter in adam.params)

    size = sum(parameter.size for parameter in nn.Sequential(layers()).parameters())
    parts = on_ranks("dp=4", body)
    assert [sum(part) for part in zip(*parts, strict=True)] == [size, size]
    assert max(max(part) for part in parts) <= size / 4 + 8


@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_frozen_parameters_are_there_once_and_thaw(dims):
    def body(mesh):
        course = []
        for stage in (0, 3):
            pipe = make_pipeline(mesh)
            for name, parameter in pipe.named_parameters():
                parameter.requires_grad = not name.endswith("bias")
            pipe.rebuild_buckets()
            mm.fully_shard(pipe, mesh, stage=stage)
            optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe)
            frozen = [one for one in pipe.parameters() if not one.requires_grad]
            arrays = [one.data for one in frozen]
            losses = []
            for step in range(4):
                if step == 2:
                    for one in frozen:
                        one.requires_grad = True
                    pipe.rebuild_buckets()
                losses.append(
                    pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
                )
            pipe.check_replicas()
            course.append((losses, state_of(pipe)))
        assert course[0][0] == course[1][0]
        for name, values in course[0][1].items():
            np.testing.assert_array_equal(values, course[1][1][name], err_msg=name)
        return mesh.coord("dp"), mesh.rank - mesh.coord("dp"), arrays

    arrays: dict[Any, list[Any]] = {}
    for _, _, found in on_ranks(dims, body):
        arrays.setdefault(tuple(one.shape for one in found), []).append(found)
    for one, other in arrays.values():
        assert all(np.shares_memory(*pair) for pair in zip(one, other, strict=True))


def test_a_stage_can_rise_and_not_fall():
    def body(mesh):
        model = make(mesh, 1)
        optimizer = mm.ParallelOptimizer(optim.Adam(model.parameters()), model, zero=3)
        model.train_step(*batch(0, 8), optimizer=optimizer)
        assert "zero=3" in repr(optimizer)
        assert repr(model).endswith(", stage 3>")
        other = make(mesh, 2)
        with raises(ModuleError, "zero=1", 2):
            mm.ParallelOptimizer(optim.Adam(other.parameters()), other, zero=1)
        with raises(ModuleError, "stage 1", 2):
            mm.fully_shard(other, mesh, stage=1)
        mm.fully_shard(other, mesh)
        assert "zero=3" in repr(mm.ParallelOptimizer(optim.Adam(other.parameters()), other))
        return True

    assert all(on_ranks("dp=2", body))


def test_what_cannot_be_divided_is_refused():
    def body(mesh):
        pipe = make_pipeline(mesh)
        wrong: list[Any] = [-1, 4, 1.5, "3", None]
        for stage in wrong:
            with raises(ModuleError, "stage", stage):
                mm.fully_shard(pipe, mesh, stage=stage)
        with raises(ModuleError, "fully_shard", "dtype", "PipelineParallel"):
            mm.fully_shard(pipe, mesh, dtype="float32")  # type: ignore[call-overload]
        for below in (0, 1, 2):
            with raises(ModuleError, "hybrid=True", "stage 3", below):
                mm.fully_shard(pipe, mesh, stage=below, hybrid=True)
        with raises(ModuleError, "hybrid"):
            mm.fully_shard(pipe, mesh, hybrid="yes")  # type: ignore[call-overload]
        with raises(ModuleError, "reshard_after_forward", "hybrid=True"):
            mm.fully_shard(nn.Linear(2, 2), mesh, reshard_after_forward=False)
        with mm.DeviceMesh("dp=2") as other, raises(ModuleError, "mesh", "dp=2"):
            mm.fully_shard(pipe, other)
        with raises(MismatchError, "fully_shard", 1, 2):
            mm.fully_shard(pipe, mesh, stage=1 + mesh.rank)
        with pipe.no_sync():
            pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        with raises(ModuleStateError, "no_sync"):
            mm.fully_shard(pipe, mesh)
        pipe.zero_grad()
        mm.fully_shard(pipe, mesh)
        plain = optim.Adam(pipe.parameters())
        with raises(ModuleError, "ParallelOptimizer", "parameters"):
            pipe.train_step(*batch(0, 8), loss=nn.cross_entropy, optimizer=plain)
        optimizer = mm.ParallelOptimizer(plain, pipe)
        with raises(ModuleError, "ParallelOptimizer", "zero="):
            mm.fully_shard(pipe, mesh)
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy, optimizer=optimizer)
        return True

    assert all(on_ranks("dp=2", body))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_only_a_parallel_optimizer_can_train_is_refused(stage):
    def body(mesh):
        model = make(mesh, stage)
        plain = optim.SGD(model.parameters(), lr=0.1)
        with raises(ModuleError, "ParallelOptimizer"):
            model.train_step(*batch(0, 8))
        with raises(ModuleStateError, "ParallelOptimizer"):
            model.clip_grad_norm(1.0)
        optimizer = mm.ParallelOptimizer(plain, model)
        with raises(ModuleError, "optimizer=", "SGD"):
            other = optim.SGD(model.parameters(), lr=0.1)
            mm.parallel.Accumulation(model, 2, optimizer=other, max_norm=1.0)
        model.train_step(*batch(0, 8), optimizer=optimizer)
        return True

    assert all(on_ranks("dp=2", body))


def test_stage_0_stays_0():
    def body(mesh):
        model = make(mesh, 0)
        optimizer = mm.ParallelOptimizer(optim.SGD(model.parameters(), lr=0.1), model)
        model.train_step(*batch(0, 8), optimizer=optimizer)
        assert all(parameter.grad is not None for parameter in model.parameters())
        return repr(optimizer)

    assert "zero=0" in on_ranks("dp=2", body)[0]


@pytest.mark.parametrize("late", [0, 1])
def test_values_are_loaded_when_nobody_reads_the_old_ones(late):
    """Swapped for others and back, as an average of weights is, with one rank behind."""

    def body(mesh):
        model = make(mesh, 3)
        before = model.evaluate(*batch(0, 8))
        if mesh.rank == late:
            time.sleep(0.2)
        kept = model.full_state_dict()
        model.load_state_dict({name: values * 0.5 for name, values in kept.items()})
        half = model.evaluate(*batch(0, 8))
        model.load_state_dict(kept)
        assert half != before
        assert model.evaluate(*batch(0, 8)) == before
        wrong = {**kept, "0.weight": kept["0.weight"][1:]}
        with raises(ShapeError, "0.weight"):
            model.load_state_dict(wrong)
        with raises(MpimeshError):
            model.load_state_dict(wrong if mesh.rank else kept)
        assert model.evaluate(*batch(0, 8)) == before
        return True

    assert all(on_ranks("dp=2", body))


def test_one_rank_alone_divides_nothing():
    def body(mesh):
        model = make(mesh, 3)
        adam = optim.Adam(model.parameters(), lr=0.01)
        losses = [model.train_step(*batch(step, 8), optimizer=adam) for step in range(2)]
        return losses[0] != losses[1]

    assert on_ranks("dp=1", body) == [True]
