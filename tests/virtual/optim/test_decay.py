"""Weight decay for some parameters only, as by two optimizers with and without it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh import nn, optim
from mpimesh.errors import MismatchError, ModuleError
from tests.helpers.parallel_models import (
    assert_equal,
    batch,
    layers,
    make_pipeline,
    on_ranks,
    state_of,
)
from tests.helpers.raises import raises

KINDS = {
    "adamw": lambda params, decay, **mask: optim.AdamW(params, weight_decay=decay, **mask),
    "adam": lambda params, decay, **mask: optim.Adam(params, weight_decay=decay, **mask),
    "sgd": lambda params, decay, **mask: optim.SGD(
        params, lr=0.1, momentum=0.5, weight_decay=decay, **mask
    ),
}


def is_matrix(parameter):
    return len(parameter.shape) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_does_what_two_optimizers_do(kind):
    make = KINDS[kind]

    def train(steppers):
        model = nn.Sequential(layers())
        model.materialize(seed=1, dtype="float64")
        optimizers = steppers(model.parameters())
        for step in range(3):
            model.zero_grad()
            x, target = batch(step, 9)
            ctx = nn.Context(step=step)
            _, dy = nn.cross_entropy.value_and_grad(model.forward(x, ctx), target, denominator=9)
            model.backward(dy, ctx)
            for optimizer in optimizers:
                optimizer.step()
        return [parameter.data for parameter in model.parameters()]

    def two(params):
        rest = [one for one in params if not is_matrix(one)]
        return [make([*filter(is_matrix, params)], 0.2), make(rest, 0.0)]

    masked = train(lambda params: [make(params, 0.2, decay_mask=is_matrix)])
    for one, other in zip(masked, train(two), strict=True):
        np.testing.assert_array_equal(one, other)
    everything = train(lambda params: [make(params, 0.2)])
    assert any((one != other).any() for one, other in zip(masked, everything, strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_replicas_that_divide_the_state_spare_the_same_parameters(bucket_bytes):
    def body(mesh):
        found = []
        for zero in (None, 0, 1):
            pipe = make_pipeline(mesh, bucket_bytes=bucket_bytes)
            asked: list[nn.Parameter] = []

            def spared(one, asked=asked):
                asked.append(one)
                return is_matrix(one)

            optimizer: Any = optim.AdamW(
                pipe.parameters(),
                lr=0.1,
                weight_decay=0.3,
                decay_mask=spared,
            )
            if zero is not None:
                optimizer = mm.ParallelOptimizer(optimizer, pipe, zero=zero)
            for step in range(3):
                if step == 2 and zero is not None:
                    pipe.rebuild_buckets()
                pipe.train_step(*batch(step, 13), loss=nn.cross_entropy, optimizer=optimizer)
            assert asked == pipe.parameters()
            found.append(state_of(pipe))
        assert_equal(found[0], found[1])
        assert_equal(found[0], found[2])

    on_ranks("dp=3", body)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("options", "values", "odd"),
    [
        (lambda rank: {"decay_mask": lambda one: rank == 1}, ["0.weight"], "with decay"),
        (
            lambda rank: {"weight_decay": 0.1 * rank},
            ["AdamW", "weight_decay=0.0"],
            "weight_decay=0.1",
        ),
        (lambda rank: {"lr": 0.1 + rank}, ["AdamW", "lr=0.1"], "lr=1.1"),
        (lambda rank: {"betas": (0.9, 0.99 if rank else 0.9)}, ["AdamW"], "betas=(0.9, 0.99)"),
    ],
)
@pytest.mark.parametrize("dims", ["dp=2", "dp=2,pp=2"])
def test_replicas_of_different_rules_are_refused(options, values, odd, zero, dims):
    """On every rank, also where only those of one stage differ."""

    def body(mesh):
        pipe = make_pipeline(mesh)
        first = "pp" not in mesh.dim_names or mesh.coord("pp") == 0
        rank = mesh.coord("dp") if first else 0
        optimizer = optim.AdamW(pipe.parameters(), **options(rank))
        with raises(MismatchError, "decay_mask", "rank 0", "optimizer 0", *values) as caught:
            mm.ParallelOptimizer(optimizer, pipe, zero=zero)
        assert re.search(rf"rank [12]: .*\b{re.escape(odd)}", str(caught.value))
        # Nothing is changed: others may have the model.
        mm.ParallelOptimizer(optim.AdamW(pipe.parameters()), pipe, zero=zero)

    on_ranks(dims, body)


@pytest.mark.parametrize(
    ("mask", "values"),
    [
        ("weight", ("lambda", "'weight'")),
        (True, ("lambda", True)),
        (lambda one: None, (True, False, None, "'weight'", (2, 3))),
        (lambda one: "yes", (True, False, "'yes'", "'weight'", (2, 3))),
        (lambda one: 1, (True, False, 1, "'weight'", (2, 3))),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_is_none_is_refused(kind, mask, values):
    params = [nn.Parameter("weight", (2, 3), nn.Uniform(1.0))]
    with raises(ModuleError, "decay_mask", *values):
        KINDS[kind](params, 0.1, decay_mask=mask)
    assert KINDS[kind](params, 0.1, decay_mask=lambda one: np.bool_(False)).decays == (False,)
