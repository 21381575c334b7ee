"""The step after the BERT: one vector for a sentence, by the modes of published models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh import nn
from mpimesh.arrays import Array
from mpimesh.models.forward_only import ForwardOnly
from mpimesh.nn import Context, SupportsLayer

__all__ = ["pooling_layer"]


class _Pool(ForwardOnly):
    """The vectors of several modes side by side.

    Shapes:
        x: (batch, tokens, features) and a mask of shape (batch, tokens), with a token in each row.
        result: (batch, modes * features).
    """

    def __init__(self, modes: Sequence[str]) -> None:
        self._modes = tuple(modes)
        self._mean = nn.MeanPool()

    def forward(self, x: Any, ctx: Context | None = None) -> Array:
        return np.concatenate([self._pooled(mode, x) for mode in self._modes], axis=1)

    def _pooled(self, mode: str, x: Any) -> Array:
        values, mask = x
        if mode == "cls":
            return values[:, 0]
        if mode == "max":
            return np.where(mask[..., None], values, -np.inf).max(axis=1).astype(values.dtype)
        mean = self._mean.forward(x)
        if mode == "mean_sqrt_len_tokens":  # the sum over the root of the count
            count = mask.sum(axis=1, keepdims=True)
            mean = (mean * np.sqrt(count)).astype(values.dtype)
        return mean

    def __repr__(self) -> str:
        return f"Pool({', '.join(self._modes)})"


def pooling_layer(modes: Sequence[str], *, normalize: bool) -> SupportsLayer:
    """Return the layer that makes the vectors of sentences. Local.

    Args:
        modes: Those of :class:`~mpimesh.models.modules.Modules`.
        normalize: Whether the vectors get the length 1.
    """
    pool: SupportsLayer = nn.MeanPool() if tuple(modes) == ("mean",) else _Pool(modes)
    return nn.Sequential(pool, nn.Normalize()) if normalize else pool
