"""Layers with a backward in two halves, and losses: local maths for NumPy and CuPy."""

import sys
from typing import TYPE_CHECKING, NoReturn

from mpimesh.nn.activations import GELU, ReLU, SiLU, Tanh
from mpimesh.nn.attention import Attention
from mpimesh.nn.containers import Add, Checkpoint, Concat, MeanPool, Sequential
from mpimesh.nn.dropout import Dropout
from mpimesh.nn.embedding import BertEmbedding, Embedding, PositionalEmbedding, RotaryEmbedding
from mpimesh.nn.initializers import Constant, Initializer, Normal, Uniform
from mpimesh.nn.linear import Linear
from mpimesh.nn.losses import CrossEntropy, Loss, MeanSquaredError, cross_entropy, mse_loss
from mpimesh.nn.module import Module
from mpimesh.nn.norms import LayerNorm, Normalize, RMSNorm
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import Context, SupportsLayer
from mpimesh.nn.transformer import BertBlock, FeedForward, GptBlock, SwiGLU

__all__ = [
    "GELU",
    "Add",
    "Attention",
    "BertBlock",
    "BertEmbedding",
    "Checkpoint",
    "Concat",
    "Constant",
    "Context",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "FeedForward",
    "GptBlock",
    "Initializer",
    "LayerNorm",
    "Linear",
    "Loss",
    "MeanPool",
    "MeanSquaredError",
    "Module",
    "Normal",
    "Normalize",
    "Parameter",
    "PositionalEmbedding",
    "RMSNorm",
    "ReLU",
    "RotaryEmbedding",
    "Sequential",
    "SiLU",
    "SupportsLayer",
    "SwiGLU",
    "Tanh",
    "Uniform",
    "cross_entropy",
    "mse_loss",
]

if not TYPE_CHECKING:  # type checkers find a misspelt name by themselves

    def __getattr__(name: str) -> NoReturn:
        ours = {"CrossEntropyLoss": "CrossEntropy", "MSELoss": "MeanSquaredError"}.get(name)
        cure = (
            "layers of PyTorch and JAX are wrapped by mpimesh.interop.torch and .jax, and "
            "docs/how-to/own-layers.md says how to write one"
        )
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; "
            + (f"it is nn.{ours} here" if ours else cure),
            name=name,
            obj=sys.modules[__name__],
        )
