"""Modules of PyTorch on the meta device: all that they lack gets values, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ModuleError
from tests.helpers.parallel_models import on_ranks
from tests.helpers.raises import raises
from tests.helpers.torch_models import FEATURES, batch, mt, torch

LOSS = mt.wrap_loss(torch.nn.functional.cross_entropy)


class Reset(torch.nn.Module):
    """On the meta device, with values for the parameters and buffers of some names."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inner = torch.nn.Linear(3, 3, device="meta")
        self.w = torch.nn.Parameter(torch.empty(3, device="meta"))
        self.register_buffer("scale", torch.empty(3, device="meta"))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64, device="meta"))
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool, device="meta"))

    def reset_parameters(self):
        torch.nn.init.zeros_(self.inner.bias)
        for name in self.how:
            if name == "w":
                self.w.data.fill_(3.0)  # which PyTorch does not see
            elif name == "scale":
                self.scale = torch.ones(3)
            else:
                getattr(self, name).fill_(1)


@pytest.mark.parametrize("left", ["w", "scale", "count", "mask", ""])
def test_what_reset_parameters_forgets_is_refused(left):
    """A buffer was zeros, and a parameter whatever lay there, without a word."""
    module = Reset([name for name in ("w", "scale", "count", "mask") if name != left])
    layer = mt.wrap(module)
    if left:
        with raises(ModuleError, "reset_parameters()", "Reset", [left]):
            layer.materialize(seed=0)
        return
    layer.materialize(seed=0)
    assert (module.w == 3).all()
    assert (module.scale == 1).all()
    assert not module.inner.bias.any()  # as in __init__, the outer module has the last word
    assert module.inner.weight.any()


def test_buffers_alone_get_values_too_and_what_has_memory_keeps_its():
    attention = torch.nn.MultiheadAttention(4, 2, device="meta")
    attention.out_proj = torch.nn.Linear(4, 4)
    before = attention.out_proj.bias.clone()
    mt.wrap(attention).materialize(seed=0)
    assert torch.equal(attention.out_proj.bias, before)
    assert attention.in_proj_weight.std() > 0.1

    def body(mesh):
        with torch.device("meta"):
            norms = [torch.nn.BatchNorm1d(FEATURES, affine=False), torch.nn.BatchNorm1d(FEATURES)]
        norms[1].weight = torch.nn.Parameter(torch.full((FEATURES,), 2.0))
        norms[1].bias = torch.nn.Parameter(torch.zeros(FEATURES))
        model = torch.nn.Sequential(*norms)
        replicas = mm.DataParallel(mt.wrap(model), mesh, loss=LOSS)
        x, _ = batch(0, 8)
        y = replicas.forward(x.astype(np.float32))
        np.testing.assert_allclose(y, 2 * x, rtol=1e-4)  # of mean 0 and variance 1

    on_ranks("dp=1", body)
