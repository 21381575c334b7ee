"""Layers with a backward in two halves, and losses: local maths for NumPy and CuPy."""

from mpimesh.nn.activations import GELU, ReLU
from mpimesh.nn.context import Context
from mpimesh.nn.dropout import Dropout
from mpimesh.nn.embedding import Embedding
from mpimesh.nn.initializers import Constant, Initializer, Normal, Uniform
from mpimesh.nn.layernorm import LayerNorm
from mpimesh.nn.linear import Linear
from mpimesh.nn.losses import CrossEntropy, Loss, MeanSquaredError, cross_entropy, mse
from mpimesh.nn.merge import Add, Concat
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.nn.sequential import Sequential

__all__ = [
    "GELU",
    "Add",
    "Concat",
    "Constant",
    "Context",
    "CrossEntropy",
    "Dropout",
    "Embedding",
    "Initializer",
    "LayerNorm",
    "Linear",
    "Loss",
    "MeanSquaredError",
    "Module",
    "Normal",
    "Parameter",
    "ReLU",
    "Sequential",
    "SupportsLayer",
    "Uniform",
    "cross_entropy",
    "mse",
]
