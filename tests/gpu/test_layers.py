"""Layers and optimizers on a GPU, with the kernels that are fused there, against the host's."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh import nn, optim


@pytest.mark.parametrize(
    "make",
    [
        nn.GELU,
        lambda: nn.GELU(approximate="tanh"),
        lambda: nn.LayerNorm(24),
        lambda: nn.RMSNorm(24),
        lambda: nn.BertBlock(24, 3),
        lambda: nn.GptBlock(24, 4, num_kv_heads=2, norm="rms", mlp="swiglu", rotary=True),
    ],
    ids=["gelu", "gelu by tanh", "layernorm", "rmsnorm", "bert block", "llama block"],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layers_and_adamw_give_the_hosts_numbers(make, dtype):
    import cupy

    x = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(dtype)
    told = []
    for xp in (np, cupy):
        layer, ctx = make(), nn.Context()
        layer.materialize(seed=0, dtype=dtype, xp=xp)
        y = layer(xp.asarray(x), ctx)
        dx = layer.backward(y, ctx)
        gradients = [parameter.grad.copy() for parameter in layer.parameters()]
        rng = np.random.default_rng(1)
        for parameter in layer.parameters():
            # Others than its own: of one that is 0 but for rounding, the first step takes the sign.
            parameter.grad = xp.asarray(rng.normal(size=parameter.shape).astype(dtype))
        if gradients:
            optim.AdamW(layer.parameters(), lr=0.01).step()
        values = [parameter.data for parameter in layer.parameters()]
        told.append([y, dx, *gradients, *values])
    tolerance = {"float16": 2e-2, "float32": 1e-4, "float64": 1e-11}[dtype]
    for on_host, on_device in zip(*told, strict=True):
        assert on_device.dtype == dtype
        np.testing.assert_allclose(
            cupy.asnumpy(on_device), on_host, rtol=tolerance, atol=tolerance * 10
        )
