"""Layers of transformers against PyTorch's, where it is installed: a second oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpimesh import nn
from mpimesh.nn.attention import BlockAttention

torch: Any = pytest.importorskip("torch")


def tensor(x):
    return torch.tensor(x, requires_grad=x.dtype.kind == "f")


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(causal):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.normal(size=(4, 2, 70, 3, 8))
    core = BlockAttention(q, k, v, causal=causal, block=32)
    out, sums = core.forward()
    given = [tensor(x.swapaxes(1, 2).copy()) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    expected.backward(torch.tensor(dout.swapaxes(1, 2).copy()))
    np.testing.assert_allclose(out.swapaxes(1, 2), expected.detach().numpy(), atol=1e-12)
    found = core.backward(dout, out, sums)
    for one, other in zip(found, given, strict=True):
        np.testing.assert_allclose(one.swapaxes(1, 2), other.grad.numpy(), atol=1e-11)


def test_silu_tanh_and_rmsnorm_are_torchs():
    x = np.random.default_rng(0).normal(size=(4, 6)) * 10
    norm = nn.RMSNorm(6, eps=1e-5)
    norm.materialize(seed=0, dtype="float64")
    for layer, function in (
        (nn.SiLU(), torch.nn.functional.silu),
        (nn.Tanh(), torch.tanh),
        (norm, lambda t: torch.nn.functional.rms_norm(t, (6,), eps=1e-5)),
    ):
        ctx, given = nn.Context(), tensor(x)
        y = layer(x, ctx)
        expected = function(given)
        expected.backward(torch.ones_like(expected))
        np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-12)
        dx = layer.backward_input(np.ones_like(y), ctx)
        assert dx is not None
        np.testing.assert_allclose(dx, given.grad.numpy(), atol=1e-12)


def test_a_bert_block_is_torchs_encoder_layer():
    block = nn.BertBlock(12, 3, hidden=20, eps=1e-6)
    block.materialize(seed=0, dtype="float64")
    layer = torch.nn.TransformerEncoderLayer(
        12, 3, 20, 0.0, "gelu", 1e-6, batch_first=True, dtype=torch.float64
    )
    mine = block.state_dict()
    theirs = {
        f"self_attn.in_proj_{kind}": np.concatenate(
            [mine[f"attention.{part}.{kind}"] for part in ("query", "key", "value")]
        )
        for kind in ("weight", "bias")
    }
    for name, other in {
        "attention.output": "self_attn.out_proj",
        "mlp.up": "linear1",
        "mlp.down": "linear2",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
    }.items():
        theirs |= {f"{other}.{kind}": mine[f"{name}.{kind}"] for kind in ("weight", "bias")}
    layer.load_state_dict({name: torch.tensor(value) for name, value in theirs.items()})
    x = np.random.default_rng(0).normal(size=(2, 5, 12))
    mask = np.arange(5) < np.array([[5], [3]])
    y, _ = block((x, mask))
    expected = layer(torch.tensor(x), src_key_padding_mask=torch.tensor(~mask)).detach().numpy()
    np.testing.assert_allclose(y[mask], expected[mask], rtol=1e-10, atol=1e-12)
