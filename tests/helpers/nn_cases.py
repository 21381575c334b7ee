"""The layers under test, and how to make inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpimesh import nn


@dataclass
class Case:
    """A layer and how to make inputs for it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    integers_below: int = 0
    context: dict[str, int] = field(default_factory=dict)

    def layer(self, dtype="float64") -> nn.Module:
        layer = self.make()
        layer.materialize(seed=3, dtype=dtype)
        # Away from the special points 0 and 1 at which some parameters start.
        rng = np.random.default_rng(5)
        for parameter in layer.parameters():
            parameter.data[...] += rng.normal(scale=0.1, size=parameter.shape)
        return layer

    def x(self, rows: int, dtype="float64", seed=7) -> np.ndarray:
        rng = np.random.default_rng(seed)
        shape = (rows, *self.shape)
        if self.integers_below:
            return rng.integers(0, self.integers_below, shape)
        # At least 0.1 from the corner of ReLU.
        x = rng.uniform(0.1, 1.5, shape) * rng.choice([-1.0, 1.0], shape)
        y: np.ndarray = x.astype(dtype)
        return y


CASES = {
    "linear": Case(lambda: nn.Linear(3, 4), (3,)),
    "linear without bias": Case(lambda: nn.Linear(3, 2, bias=False), (3,)),
    "linear on more axes": Case(lambda: nn.Linear(3, 4), (2, 2, 3)),
    "relu": Case(nn.ReLU, (5,)),
    "gelu": Case(nn.GELU, (5,)),
    "gelu by tanh": Case(lambda: nn.GELU(approximate="tanh"), (5,)),
    "layernorm": Case(lambda: nn.LayerNorm(5), (5,)),
    "layernorm on more axes": Case(lambda: nn.LayerNorm(4), (2, 4)),
    "silu": Case(nn.SiLU, (5,)),
    "tanh": Case(nn.Tanh, (5,)),
    "rmsnorm": Case(lambda: nn.RMSNorm(5), (5,)),
    "rmsnorm on more axes": Case(lambda: nn.RMSNorm(4), (2, 4)),
    "rotary": Case(lambda: nn.RotaryEmbedding(4), (3, 2, 4)),
    "rotary interleaved": Case(
        lambda: nn.RotaryEmbedding(6, base=100.0, interleaved=True), (3, 1, 6)
    ),
    "learned positions": Case(lambda: nn.PositionalEmbedding(4, 3), (3, 3)),
    "feed forward": Case(lambda: nn.FeedForward(3, 5), (2, 3)),
    "swiglu": Case(lambda: nn.SwiGLU(3, 5, bias=True), (2, 3)),
    "attention": Case(lambda: nn.Attention(4, 2), (3, 4)),
    "attention by groups": Case(
        lambda: nn.Attention(
            8, 4, num_kv_heads=2, causal=True, rotary=nn.RotaryEmbedding(2), head_dim=2, bias=False
        ),
        (3, 8),
    ),
    "bert block": Case(
        lambda: nn.BertBlock(4, 2, hidden=5, dropout=0.3), (3, 4), context={"step": 2}
    ),
    "gpt block": Case(lambda: nn.GptBlock(4, 2, hidden=6), (3, 4)),
    "llama block": Case(
        lambda: nn.GptBlock(
            4, 2, num_kv_heads=1, hidden=5, norm="rms", mlp="swiglu", rotary=True, bias=False
        ),
        (3, 4),
    ),
    "mean pool": Case(nn.MeanPool, (3, 2)),
    "normalize": Case(nn.Normalize, (2, 3)),
    "bert embedding": Case(
        lambda: nn.BertEmbedding(6, 4, 3, dropout=0.3), (3,), integers_below=6, context={"step": 1}
    ),
    "embedding": Case(lambda: nn.Embedding(6, 3), (), integers_below=6),
    "embedding on more axes": Case(lambda: nn.Embedding(3, 2), (2, 3), integers_below=3),
    "dropout": Case(lambda: nn.Dropout(0.4), (3, 3), context={"step": 2, "first_row": 5}),
    "sequential": Case(
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.3), nn.Linear(4, 2)
        ),
        (3,),
    ),
    "sequential of embedding": Case(
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))),
        (2,),
        integers_below=5,
    ),
    "checkpoint": Case(
        lambda: nn.Checkpoint(
            nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Dropout(0.3), nn.Linear(4, 2))
        ),
        (3,),
        context={"step": 1},
    ),
    "checkpoint of embedding": Case(
        lambda: nn.Sequential(nn.Checkpoint(nn.Embedding(5, 4)), nn.Checkpoint(nn.LayerNorm(4))),
        (2,),
        integers_below=5,
    ),
    "empty sequential": Case(nn.Sequential, (2,)),
}


def gradients(layer: nn.Module) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.copy()
        for name, parameter in layer.named_parameters()
    }
