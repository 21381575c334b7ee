"""Layers for inference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpimesh.arrays import Array
from mpimesh.errors import ModuleStateError
from mpimesh.nn import Context, Parameter

__all__ = ["ForwardOnly"]


class ForwardOnly(ABC):
    """A layer whose weights are nobody's business, so that nobody trains them."""

    @abstractmethod
    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return what the layer gives; nothing is saved."""

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Refuse.

        Raises:
            ModuleStateError: Always.
        """
        raise ModuleStateError(f"{self!r} is for inference, it has no backward")

    def parameters(self) -> list[Parameter]:
        """Return none."""
        return []
