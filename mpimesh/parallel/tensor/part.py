"""Linear layers of which each rank of a group has a part, as other layers are made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ModuleStateError, ShapeError
from mpimesh.nn import Context, Linear, Module, Parameter
from mpimesh.nn.checks import check_features, check_floats, sum_dtype
from mpimesh.parallel.tensor.group import TensorGroup
from mpimesh.parallel.tensor.parameter import Runs, TensorParameter, even_parts
from mpimesh.parallel.tensor.sequence import SequenceSplit, repeated

__all__ = ["ColumnPart", "RowPart"]


class _Part(Module):
    """The base of both kinds: ``y = x @ weight.T + bias`` with the weight split along an axis.

    Args:
        like: The unsplit layer, without memory.
        axis: The axis of the weight.
        tensor: The ranks.
        parts: What each has of it; even ones if None.
    """

    def __init__(
        self, like: Linear, axis: int, tensor: TensorGroup, parts: Sequence[Runs] | None
    ) -> None:
        self.in_features, self.out_features = like.in_features, like.out_features
        self.tensor = tensor
        shape = like.weight.shape
        self.parts = tuple(even_parts(shape[axis], tensor.size) if parts is None else parts)
        self.weight: Parameter = self._split(like.weight, axis)
        self.bias: Parameter | None = None

    def _split(self, whole: Parameter, axis: int) -> TensorParameter:
        if whole.data is not None:
            raise ModuleStateError(
                f"a layer is split before it has memory, but {whole!r} has: split the model first, "
                "then materialise it, or load a state into it"
            )
        made = TensorParameter(
            whole.name,
            whole.shape,
            whole.initializer,
            axis=axis,
            parts=self.parts,
            rank=self.tensor.rank,
            requires_grad=whole.requires_grad,
        )
        return made

    def _product(self, x: Array) -> Array:
        weight = self.weight.value()
        if weight.shape != self.weight.shape:
            raise ShapeError(f"{self!r}: weight must have shape {self.weight.shape}")
        check_floats(self, x, weight.dtype)
        check_features(self, x, weight.shape[1])
        # One large product instead of one for each leading index.
        y = (_flat(x) @ weight.T).astype(x.dtype, copy=False)  # of bfloat16 float32
        return y.reshape(*x.shape[:-1], weight.shape[0])

    def _input_gradient(self, dy: Array) -> Array | None:
        if not self.input_grad:
            return None
        weight = self.weight.value()
        dx = (_flat(dy) @ weight).astype(dy.dtype, copy=False)
        return dx.reshape(*dy.shape[:-1], weight.shape[1])

    def _add_bias_gradient(self, dy: Array) -> None:
        if self.bias is not None and self.bias.requires_grad:
            summed = _flat(dy).sum(axis=0, dtype=sum_dtype(dy.dtype))
            self.bias.accumulate(summed, owned=True)

    def _add_weight_gradient(self, x: Array, dy: Array) -> None:
        if self.weight.requires_grad:
            self.weight.accumulate(_flat(dy).T @ _flat(x), owned=True)

    def __repr__(self) -> str:
        has_bias = getattr(self, "bias", None) is not None
        return (
            f"{type(self).__name__}({self.in_features}, {self.out_features}, "
            f"group={self.tensor.group.name!r}{'' if has_bias else ', bias=False'})"
        )


class ColumnPart(_Part):
    """A layer split by its outputs, within another that gathers its input and sums its gradients.

    Shapes:
        x: (..., in_features), all of it.
        result: (..., this rank's features).

    Args:
        like: The unsplit layer, without memory.
        tensor: The ranks.
        parts: Which outputs each rank has; even ones if None.
    """

    def __init__(
        self, like: Linear, tensor: TensorGroup, parts: Sequence[Runs] | None = None
    ) -> None:
        super().__init__(like, 0, tensor, parts)
        if like.bias is not None:
            self.bias = self._split(like.bias, 0)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return this rank's features of ``x @ weight.T + bias``. Local."""
        y = self._product(x)
        if self.bias is not None:
            y += self.bias.value()
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return this rank's part of the gradient of the input. Local."""
        self._take(dy, ctx)
        trained = any(one.requires_grad for one in self._own_parameters())
        ctx.defer(self, dy if trained else None)
        return self._input_gradient(dy)

    def add_gradients(self, x: Array, ctx: Context) -> None:
        """Add the gradients of weight and bias, `x` being all of the input. Local."""
        (dy,) = ctx.take_deferred(self)
        if dy is not None:
            self._add_bias_gradient(dy)
            self._add_weight_gradient(x, dy)


class RowPart(_Part):
    """A layer split by its inputs, whose result is summed over the ranks.

    Shapes:
        x: (..., this rank's features).
        result: (..., out_features), the same on every rank; with `sequence` this rank's places.

    Args:
        like: The unsplit layer, without memory.
        tensor: The ranks.
        sequence: How the result is to be split along the sequence, if it is.
        parts: Which inputs each rank has; even ones if None.

    Raises:
        ModuleError: If `sequence` is split over another group.
    """

    def __init__(
        self,
        like: Linear,
        tensor: TensorGroup,
        sequence: SequenceSplit | None,
        parts: Sequence[Runs] | None = None,
    ) -> None:
        if sequence is not None and sequence.tensor.group is not tensor.group:
            raise ModuleError("the sequence of a split layer is split over the group of the layer")
        super().__init__(like, 1, tensor, parts)
        self.sequence = sequence
        if like.bias is not None:
            self.bias = repeated(like.bias, tensor, partial=sequence is not None)

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``x @ weight.T + bias``, summed over the ranks. Collective over the group.

        Raises:
            ShapeError: If `x` does not fit.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        y = self._product(x)
        if self.sequence is None:
            y = self.tensor.all_reduce(y, owned=True).resolve()
        else:
            y = self.sequence.reduce_scatter(y).resolve()
        if self.bias is not None:
            y += self.bias.value()
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, x)
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of `x`, None if `input_grad` is False. Collective with `sequence`."""
        (x,) = self._take(dy, ctx)
        whole = dy if self.sequence is None else self.sequence.gather(dy).resolve()
        trained = any(one.requires_grad for one in self._own_parameters())
        kept = (x if self.weight.requires_grad else None, dy, whole)
        ctx.defer(self, *(kept if trained else (None, None, None)))
        return self._input_gradient(whole)

    def backward_weight(self, ctx: Context) -> None:
        """Add ``dy.T @ x`` to the weight's gradient and the sum of `dy` to the bias's. Local."""
        x, dy, whole = ctx.take_deferred(self)
        if dy is not None:
            self._add_bias_gradient(dy)
        if x is not None:
            self._add_weight_gradient(x, whole)


def _flat(x: Array) -> Array:
    """Return `x` with one axis before the last; that may be of no features."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
