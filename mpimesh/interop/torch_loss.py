"""A loss of PyTorch for a batch that is cut into parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.interop.torch_arrays import as_array, as_tensor
from mpimesh.interop.torch_library import torch
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["TorchLoss", "wrap_loss"]

_Count = Callable[[Any], float]


class TorchLoss:
    """The result of :func:`wrap_loss`; meets :class:`mpimesh.nn.Loss`."""

    def __init__(self, function: Callable[..., Any], count: _Count | None = None) -> None:
        reduction = getattr(function, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ModuleError(
                f"a loss gives one number: make it with reduction='mean' or 'sum', not "
                f"{reduction!r}"
            )
        if not callable(function):
            raise ModuleError(f"wrap_loss takes a function or a loss of torch.nn, got {function!r}")
        self._function = function
        self._is_mean = reduction == "mean"
        self._count = count

    def __call__(self, y: Tree, target: Tree) -> float:
        """Return the mean over the rows.

        Raises:
            ShapeError: If there is nothing to take the mean of.
        """
        count = self.count(target)
        if not count:
            raise ShapeError(f"{self!r}: the mean over nothing does not exist")
        return self._compute(y, target, count, grad=False)[0]

    def value_and_grad(self, y: Tree, target: Tree, *, denominator: float) -> tuple[float, Tree]:
        """Return this part's share of the loss, and its gradient by `y`.

        Shapes:
            grad: built as `y`, of its shapes and dtypes; None for arrays that have no gradient.

        Raises:
            ModuleError: If `denominator` is not positive, or the loss is not one number.
        """
        if not 0 < denominator < math.inf:
            raise ModuleError(f"{self!r}: denominator must be positive, got {denominator!r}")
        return self._compute(y, target, float(denominator), grad=True)

    def count(self, target: Tree) -> float:
        """Return what `target` adds to the denominator of a batch in parts."""
        if self._count is not None:
            return float(self._count(tree_map(lambda leaf, _: as_tensor(leaf), target)))
        leaves, _ = flatten(target, name="the target")
        module = _module_of(self._function)
        if self._is_mean and isinstance(module, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
            counted = _class_count(module, as_tensor(leaves[0]))
            if counted is not None:
                return counted
        return float(leaves[0].shape[0])

    def _compute(
        self, y: Tree, target: Tree, denominator: float, *, grad: bool
    ) -> tuple[float, Tree]:
        leaves, structure = flatten(y, name="the output")
        tensors = [as_tensor(leaf) for leaf in leaves]
        if grad:
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        share = self.count(target) / denominator if self._is_mean else 1.0 / denominator
        value = 0.0
        if share and leaves[0].shape[0]:
            targets = tree_map(lambda leaf, _: as_tensor(leaf), target)
            with torch.set_grad_enabled(grad):
                result = self._function(structure.unflatten(tensors), targets)
                if not isinstance(result, torch.Tensor) or result.numel() != 1:
                    raise ModuleError(f"{self!r} must give a tensor of one number, got {result!r}")
                scaled = result * share
            value = float(scaled.detach())
            if grad and scaled.requires_grad:
                scaled.backward()
        if not grad:
            return value, None
        return value, structure.unflatten([_gradient(tensor) for tensor in tensors])

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"TorchLoss({name})"


def wrap_loss(function: Callable[..., Any], *, count: _Count | None = None) -> TorchLoss:
    """Return a loss of PyTorch as ``loss=`` of a training step. Local.

    Over the whole batch, however it is cut, it gives what `function` gives for all rows at once:
    for a mean, the parts are weighted by what each counts. That is its rows, or for
    `torch.nn.CrossEntropyLoss` and `NLLLoss`, or their functions, with class numbers the targets
    that are not ignored, by their weights. A loss with ``reduction="sum"`` gives the sum divided by
    the rows; ``denominator=1`` in the step gives the sum itself.

    Args:
        function: A loss of `torch.nn`, or any function of the output and the target that gives a
            tensor of one number, the mean over what it counts.
        count: What a target counts in such a mean, if that is not its rows.

    Raises:
        ModuleError: If it gives more than one number, by its ``reduction``.
    """
    return TorchLoss(function, count)


def _module_of(function: Callable[..., Any]) -> Any:
    """Return the loss that a function is, with its defaults; the function itself if it is none."""
    if function is torch.nn.functional.cross_entropy:
        return torch.nn.CrossEntropyLoss()
    return torch.nn.NLLLoss() if function is torch.nn.functional.nll_loss else function


def _class_count(loss: Any, target: torch.Tensor) -> float | None:
    """Return what the mean of a loss over classes divides by; None if that is the rows."""
    if target.is_floating_point():  # probabilities of all classes
        return None
    kept = target != loss.ignore_index
    if loss.weight is not None:
        return float(loss.weight[target[kept]].sum())
    return float(kept.sum())


def _gradient(tensor: torch.Tensor) -> Array | None:
    if not tensor.requires_grad:
        return None
    return as_array(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
