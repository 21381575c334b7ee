"""Gradients of a wider dtype than the parameters: what float16 would lose is added up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import DTypeError, MismatchError, ModuleError
from tests.helpers.parallel_models import (
    Total,
    assert_equal,
    batch,
    make_pipeline,
    on_ranks,
    state_of,
)
from tests.helpers.raises import raises

ROWS = np.array([[2048.0], *7 * [[1.0]]], "float16")
"""The addends of a replica's rows; the first is so large that 1 more is lost."""


def one_weight(mesh, grad_dtype, zero=None):
    """A model whose gradient is the sum of its rows, and its optimizer, of the rate 1."""
    model = mm.DataParallel(
        nn.Sequential(nn.Linear(1, 1, bias=False)),
        mesh,
        loss=Total(),
        num_microbatches=8,
        dtype="float16",
        grad_dtype=grad_dtype,
    )
    model.parameters()[0].data[...] = 0
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer if zero is None else mm.ParallelOptimizer(optimizer, model, zero=zero)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_over_microbatches_keep_their_digits(ranks):
    def body(mesh):
        x = np.tile(ROWS, (ranks, 1))
        found = []
        for grad_dtype in ("float16", "float32", None):
            model, _ = one_weight(mesh, grad_dtype)
            (weight,) = model.parameters()
            model.train_step(x, x)
            assert weight.grad.dtype == (grad_dtype or "float16")
            assert weight.data.dtype == "float16"
            found.append(float(weight.grad[0, 0]))
            model.into_inner()
            assert weight.grad_dtype is None
        return found

    for found in on_ranks(f"dp={ranks}", body):
        assert found == [2048 * ranks, 2055 * ranks, 2048 * ranks]


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_sums_over_replicas_do_not_overflow_and_steps_are_made_by_them(zero):
    def body(mesh):
        x = np.full((2, 1), 60000.0, "float16")
        changes = []
        for grad_dtype in (None, "float32"):
            model, optimizer = one_weight(mesh, grad_dtype, zero)
            optimizer.lr = 2.0**-4
            with np.errstate(over="ignore"):
                model.train_step(x, x)
            assert (model.clip_grad_norm(1e9) == 120000) == (grad_dtype is not None)
            optimizer.step()
            changes.append(float(model.parameters()[0].data[0, 0]))
        return changes

    for changes in on_ranks("dp=2", body):
        assert changes == [-np.inf, -7500.0]


@pytest.mark.parametrize("dims", ["dp=3", "dp=2,pp=2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_replicas_that_divide_the_state_do_the_same(dims, dtype):
    """And no dtype is made narrower: gradients of float64 parameters stay what they are."""

    def body(mesh):
        found = []
        for zero in (None, 0, 1):
            pipe = make_pipeline(mesh, dtype=dtype, grad_dtype="float64")
            optimizer: Any = optim.AdamW(pipe.parameters(), lr=0.01)
            if zero is not None:
                optimizer = mm.ParallelOptimizer(optimizer, pipe, zero=zero)
            for step in range(3):
                x, target = batch(step, 13)
                pipe.train_step(x.astype(dtype), target, loss=nn.cross_entropy, optimizer=optimizer)
                if step == 1:
                    pipe.tune_buckets()
            pipe.check_replicas()
            found.append(state_of(pipe))
        assert_equal(found[0], found[1])
        assert_equal(found[0], found[2])

    on_ranks(dims, body)


def test_only_wider_dtypes_count_and_all_ranks_have_one():
    def body(mesh):
        pipe = make_pipeline(mesh, grad_dtype="float32")
        pipe.train_step(*batch(0, 8), loss=nn.cross_entropy)
        assert {one.grad.dtype for one in pipe.parameters()} == {np.dtype("float64")}
        with raises(DTypeError, "grad_dtype", "float16", "float32", "float64", "'int32'"):
            make_pipeline(mesh, grad_dtype="int32")
        with raises(MismatchError, "rank 0", None, "rank 1", "gradients float32"):
            make_pipeline(mesh, grad_dtype="float32" if mesh.rank else None)

    on_ranks("dp=2", body)


def test_gradients_without_buckets_are_of_their_dtype_too():
    weight = nn.Parameter("weight", (3, 2), nn.Constant(0.0))
    weight.materialize(seed=0, dtype="float16")
    weight.grad_dtype = np.dtype("float32")
    owned = np.ones((3, 2), "float16")
    weight.accumulate(owned, owned=True)
    assert weight.grad is not owned
    assert weight.grad.dtype == "float32"
    weight.zero_grad()
    weight.accumulate_rows(np.array([1]), np.full((1, 2), 2048, "float16"))
    weight.accumulate_rows(np.array([1]), np.ones((1, 2), "float16"))
    assert weight.grad.tolist() == [[0, 0], [2049, 2049], [0, 0]]
    assert weight.grad.dtype == "float32"


class OwnDtype(nn.Parameter):
    takes_wider_grad = False


def test_libraries_that_keep_gradients_in_the_dtype_of_parameters_are_refused_another():
    def body(mesh):
        parameter = OwnDtype("weight", (2,), nn.Constant(0.0))
        parameter.materialize(seed=0, dtype="float16")
        group = mesh.group("dp")
        with raises(ModuleError, "'weight'", "float16", "grad_dtype='float32'"):
            mm.parallel.GradientBuckets([parameter], group, mesh=mesh, grad_dtype="float32")
        mm.parallel.GradientBuckets([parameter], group, mesh=mesh, grad_dtype="float16").close()

    on_ranks("dp=2", body)
