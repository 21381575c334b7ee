"""`model.gathered(write=True)`: one write has one effect, whoever shares memory with whom."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.comm.base import Communicator
from mpimesh.comm.virtual import VirtualCommunicator
from mpimesh.errors import MismatchError, ShapeError
from tests.helpers import tensor_models
from tests.helpers.depth import examples
from tests.helpers.parallel_models import SEED, batch, cut, layers, on_ranks
from tests.helpers.parallel_tied import tied_layers
from tests.helpers.raises import raises


def run(dims: str, apart: bool, body: Any) -> list[Any]:
    """Run on virtual ranks; `apart`: each on a node of its own."""
    nodes = mock.patch.object(VirtualCommunicator, "offer_once", Communicator.offer_once)
    with nodes if apart else nullcontext():
        return on_ranks(dims, body)


def model_of(mesh: Any, stage: int, frozen: bool, hybrid: bool = False) -> Any:
    tp = mesh.group("tp") if mesh.contains_dim("tp") else None
    made = layers() if tp is None else tensor_models.layers("plain", tp=tp)
    if mesh.contains_dim("pp") and tp is None:
        made = tied_layers()
    if frozen:
        made[0].freeze()
    stages = cut(mesh.dim_size("pp") if mesh.contains_dim("pp") else 1, made)
    model = mm.PipelineParallel(stages, 2, mesh=mesh, seed=SEED, dtype="float64", bucket_bytes=300)
    return mm.fully_shard(model, mesh, stage=stage, hybrid=hybrid and stage == 3)


CASES = st.tuples(
    st.sampled_from(["dp=1", "dp=2", "dp=3", "dp=2,pp=2", "dp=2,tp=2"]),
    st.integers(0, 3),
    *[st.booleans()] * 3,
)


@settings(max_examples=examples(60), deadline=None)
@given(CASES)
def test_what_all_ranks_write_is_done_once(case):
    dims, stage, frozen, apart, hybrid = case

    def body(mesh):
        model = model_of(mesh, stage, frozen, hybrid)
        before = model.full_state_dict()
        with model.gathered(write=True):
            for one in model.parameters():
                one.data *= 0.5
                one.data = one.data + 1
            with model.gathered(write=True):
                for one in model.parameters():
                    one.data -= 1
        after = model.full_state_dict()
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values * 0.5 + 1 - 1, err_msg=name)
        model.check_replicas()
        replica = mesh.group("dp")
        if replica.size > 1:
            with raises(MismatchError, "0."), model.gathered(write=True):
                model.parameters()[0].data += replica.rank
        with raises(ZeroDivisionError), model.gathered(write=True):
            model.parameters()[-1].data += 1
            raise ZeroDivisionError
        again = model.full_state_dict()
        for name, values in after.items():
            np.testing.assert_array_equal(again[name], values, err_msg=name)
        return True

    size = math.prod(int(dim[3:]) for dim in dims.split(","))
    assert run(dims, apart, body) == [True] * size


@pytest.mark.parametrize("stage", range(4))
def test_steps_go_on_from_what_was_written(stage):
    def course(mesh, stage, write):
        model = mm.fully_shard(
            nn.Sequential(layers()), mesh, stage=stage, loss=nn.cross_entropy, dtype="float64"
        )
        optimizer = mm.ParallelOptimizer(optim.Adam(model.parameters(), lr=0.01), model)
        losses = []
        for step in range(3):
            losses.append(model.train_step(*batch(step, 8), optimizer=optimizer))
            write(model)
        return losses

    def gathered(model):
        with model.gathered(write=True):
            for one in model.parameters():
                one.data *= 1.5

    def loaded(model):
        model.load_state_dict({k: v * 1.5 for k, v in model.full_state_dict().items()})

    (wanted,) = on_ranks("dp=1", lambda mesh: course(mesh, 0, loaded))
    for losses in on_ranks("dp=2", lambda mesh: course(mesh, stage, gathered)):
        np.testing.assert_allclose(losses, wanted, rtol=1e-10)


def test_one_rank_that_fails_or_writes_another_shape_is_told_everywhere():
    def body(mesh):
        model = model_of(mesh, 3, False)
        before = model.full_state_dict()
        error: Any = ZeroDivisionError if mesh.rank else mm.errors.ModuleStateError
        with pytest.raises(error), model.gathered(write=True):
            1 / (1 - mesh.rank)
        with raises(ShapeError, "weight"), model.gathered(write=True):
            if mesh.rank:
                model.parameters()[0].data = np.ones(2)
        after = model.full_state_dict()
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, err_msg=name)
        return True

    assert on_ranks("dp=2", body) == [True] * 2
