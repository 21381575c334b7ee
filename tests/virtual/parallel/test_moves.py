"""State that moves when divided buckets are cut anew: all of it arrives, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.parallel.optimizer_shards import layouts_of
from tests.helpers.depth import examples
from tests.helpers.parallel_models import assert_equal, batch, make_pipeline, on_ranks, state_of
from tests.helpers.parallel_tied import tied_batch, tied_pipeline


def plain(state):
    return [{name: np.asarray(one[name]) for name in one} for one in state["params"]]


@pytest.mark.parametrize("dims", ["dp=1", "dp=2", "dp=3", "dp=2,pp=2"])
@settings(max_examples=examples(4))
@given(data=st.data())
def test_any_cut_to_any_other(dims, data):
    """With parameters frozen and thawed between, and a dtype with master values."""
    dtype = data.draw(st.sampled_from(["float16", "float64"]))
    seed = data.draw(st.integers(0, 99))

    def body(mesh):
        pipe = make_pipeline(mesh, dtype=dtype)
        adam = optim.AdamW(pipe.parameters(), lr=0.01, decay_mask=lambda one: len(one.shape) > 1)
        optimizer = mm.ParallelOptimizer(adam, pipe)
        x, target = batch(0, 12)
        for step in range(3):
            pipe.train_step(x.astype(dtype), target, loss=nn.cross_entropy, optimizer=optimizer)
            before = state_of(pipe), plain(optimizer.state_dict())
            # By the stage: all that hold a parameter do the same.
            rng = np.random.default_rng([seed, step, mesh.coord("pp") if "pp" in dims else 0])
            for one in pipe.parameters():
                one.requires_grad = bool(rng.integers(3))
            count = sum(one.requires_grad for one in pipe.parameters())
            cuts = np.sort(rng.integers(0, count + 1, 3))
            plan = [one.tolist() for one in np.split(rng.permutation(count), cuts) if one.size]
            pipe._engine.rebuild_buckets(plan)
            assert_equal(state_of(pipe), before[0])
            for one, other in zip(plain(optimizer.state_dict()), before[1], strict=True):
                assert_equal(one, other)
        pipe.check_replicas()

    on_ranks(dims, body)


def test_state_of_parameters_that_several_stages_hold():
    def body(mesh):
        pipe = tied_pipeline(mesh)
        optimizer = mm.ParallelOptimizer(optim.Adam(pipe.parameters(), lr=0.01), pipe)
        for step in range(2):
            pipe.train_step(*tied_batch(step, 12), loss=nn.cross_entropy, optimizer=optimizer)
            before = state_of(pipe), plain(optimizer.state_dict())
            pipe.tune_buckets()
            assert_equal(state_of(pipe), before[0])
            for one, other in zip(plain(optimizer.state_dict()), before[1], strict=True):
                assert_equal(one, other)

    on_ranks("dp=2,pp=2", body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_receives_no_more_than_its_own_part(ranks):
    """Putting the whole state together takes all of it on every rank."""

    def body(mesh):
        model = mm.DataParallel(
            nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]),
            mesh,
            loss=nn.mse_loss,
        )
        optimizer = mm.ParallelOptimizer(optim.Adam(model.parameters()), model)
        x = np.ones((ranks, 64), "float32")
        model.train_step(x, x, optimizer=optimizer)
        whole = 2 * 8 * 64 * 64 * 4
        order = [7, 0, 6, 1, 5, 2, 4, 3]
        with mesh.budget() as moved:
            model._engine.rebuild_buckets([order])
        assert moved.used_bytes < whole / ranks + 4096
        with mesh.budget() as moved:
            model._engine.rebuild_buckets([order])
        assert moved.used_bytes < 4096  # each has what it needs
        with mesh.budget() as moved:
            optimizer.state_dict()
        assert moved.used_bytes >= whole * (ranks - 1) / ranks
        assert len(layouts_of(model.buckets.buckets)) == 8

    on_ranks(f"dp={ranks}", body)
