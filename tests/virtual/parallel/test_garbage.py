"""A step leaves nothing behind that only Python's collector could free."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.errors import ShapeError, StageError
from tests.helpers.parallel_models import batch, make_pipeline, on_ranks
from tests.helpers.parallel_traps import trapped_stages


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("dims", ["pp=1", "pp=2", "dp=2", "dp=2,pp=2"])
def test_the_batch_and_the_outputs_are_free_after_a_step(no_collector, dims):
    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        told = [weakref.ref(x), weakref.ref(target)]
        pipe.train_step(x, target, loss=nn.cross_entropy)
        y = pipe.forward(x, everywhere=True)
        told.append(weakref.ref(y))
        assert y.flags.writeable
        del x, target, y
        return [one() is None for one in told]

    assert on_ranks(dims, body) == [[True] * 3] * int(
        np.prod([int(d[-1]) for d in dims.split(",")])
    )


@pytest.mark.parametrize("kind", ["F", "B"])
def test_they_are_free_after_a_failed_step(no_collector, kind):
    def body(mesh):
        stages, traps = trapped_stages(2)
        pipe = make_pipeline(mesh, stages=stages)
        x, target = batch(0, 16)
        told = weakref.ref(x)
        traps[1].arm(kind, 1)
        with contextlib.suppress(StageError):
            pipe.train_step(x, target, loss=nn.cross_entropy)
        traps[1].error = ValueError()  # the one raised has its frames
        del x, target
        return told() is None

    assert on_ranks("pp=2", body) == [True, True]


def test_they_are_free_after_a_refused_step(no_collector):
    def body(mesh):
        pipe = make_pipeline(mesh)
        x, target = batch(0, 16)
        told = weakref.ref(x)
        with contextlib.suppress(ShapeError):
            pipe.train_step(x, target[1:], loss=nn.cross_entropy)
        del x, target
        return told() is None

    assert on_ranks("pp=2", body) == [True, True]
