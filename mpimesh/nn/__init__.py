"""Layers with a backward in two halves, and losses: local maths for NumPy and CuPy."""

from mpimesh.errors import tell_missing
from mpimesh.nn.activations import GELU, ReLU, SiLU, Tanh
from mpimesh.nn.attention import Attention
from mpimesh.nn.containers import Add, Checkpoint, Concat, MeanPool, Sequential
from mpimesh.nn.dropout import Dropout
from mpimesh.nn.embedding import BertEmbedding, Embedding, PositionalEmbedding, RotaryEmbedding
from mpimesh.nn.initializers import Constant, Initializer, Normal, Uniform
from mpimesh.nn.linear import Linear
from mpimesh.nn.losses import CrossEntropy, Loss, MeanSquaredError, cross_entropy, mse_loss
from mpimesh.nn.module import Module, stands_for
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

tell_missing(__name__, stands_for)
