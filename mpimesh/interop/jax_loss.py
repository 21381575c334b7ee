"""A loss of JAX for a batch that is cut into parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.errors import ModuleError, ShapeError
from mpimesh.interop.host_memory import host_array
from mpimesh.interop.jax_layer import has_gradient
from mpimesh.interop.jax_library import jax
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["JaxLoss", "wrap_loss"]


class JaxLoss:
    """The result of :func:`wrap_loss`; meets :class:`mpimesh.nn.Loss`."""

    def __init__(
        self, function: Callable[..., Any], count: Callable[[Any], float] | None = None
    ) -> None:
        if not callable(function):
            raise ModuleError(f"wrap_loss takes a function of JAX, got {function!r}")
        self._function = function
        self._count = count
        self._value = jax.jit(function)
        self._value_and_grad = jax.jit(self._both)

    def __call__(self, y: Tree, target: Tree) -> float:
        """Return the mean over the rows.

        Raises:
            ShapeError: If there is nothing to take the mean of.
        """
        if not self.count(target):
            raise ShapeError(f"{self!r}: the mean over nothing does not exist")
        return float(self._value(_host(y), _host(target)))

    def value_and_grad(self, y: Tree, target: Tree, *, denominator: float) -> tuple[float, Tree]:
        """Return this part's share of the loss, and its gradient by `y`.

        Shapes:
            grad: built as `y`, of its shapes and dtypes; None for arrays that have no gradient.

        Raises:
            ModuleError: If `denominator` is not positive.
        """
        if not 0 < denominator < math.inf:
            raise ModuleError(f"{self!r}: denominator must be positive, got {denominator!r}")
        leaves, structure = flatten(_host(y), name="the output")
        share = self.count(target) / float(denominator)
        if not share or not leaves[0].shape[0]:
            none = [np.zeros_like(leaf) if has_gradient(leaf) else None for leaf in leaves]
            return 0.0, structure.unflatten(none)
        real = {place: leaf for place, leaf in enumerate(leaves) if has_gradient(leaf)}
        rest = {place: leaf for place, leaf in enumerate(leaves) if place not in real}
        # A tree of zeros tells how `y` is put together.
        form = structure.unflatten([0] * len(leaves))
        value, gradients = self._value_and_grad(real, rest, form, _host(target), np.float64(share))
        found = [
            np.asarray(gradients[place]).astype(leaf.dtype, copy=False) if place in real else None
            for place, leaf in enumerate(leaves)
        ]
        return float(value), structure.unflatten(found)

    def count(self, target: Tree) -> float:
        """Return what `target` adds to the denominator of a batch in parts."""
        if self._count is not None:
            return float(self._count(target))
        return float(flatten(target, name="the target")[0][0].shape[0])

    def _both(self, real: Any, rest: Any, form: Any, target: Any, share: Any) -> Any:
        treedef = jax.tree_util.tree_structure(form)

        def scaled(real: Any) -> Any:
            every = real | rest
            y = jax.tree_util.tree_unflatten(treedef, [every[i] for i in range(len(every))])
            return self._function(y, target) * share

        return jax.value_and_grad(scaled)(real)

    def __repr__(self) -> str:
        return f"JaxLoss({getattr(self._function, '__name__', type(self._function).__name__)})"


def wrap_loss(
    function: Callable[..., Any], *, count: Callable[[Any], float] | None = None
) -> JaxLoss:
    """Return a loss of JAX as ``loss=`` of a training step. Local.

    Args:
        function: A function of the output and the target that gives one number, the mean over the
            rows.
        count: What a target counts in such a mean, if that is not its rows.

    Raises:
        ModuleError: If it cannot be called.
    """
    return JaxLoss(function, count)


def _host(tree: Tree) -> Tree:
    return tree_map(lambda leaf, _: host_array(leaf), tree)
