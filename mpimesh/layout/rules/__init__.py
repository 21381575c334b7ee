"""The rules of operations on split arrays, each family's stated once: values and arithmetic."""

from __future__ import annotations

from mpimesh.layout.rules.patterns import (
    KEEP,
    Contraction,
    Linear,
    Pattern,
    broadcast_axes,
    broadcast_shape,
    contraction,
    einsum_pattern,
    elementwise_pattern,
    matmul_pattern,
    reduced_shape,
    reduction_pattern,
)
from mpimesh.layout.rules.search import rule_for

__all__ = [
    "KEEP",
    "Contraction",
    "Linear",
    "Pattern",
    "broadcast_axes",
    "broadcast_shape",
    "contraction",
    "einsum_pattern",
    "elementwise_pattern",
    "matmul_pattern",
    "reduced_shape",
    "reduction_pattern",
    "rule_for",
]
