"""Linear layers whose weight is split over the ranks of a group (Shoeybi et al., Megatron-LM).

A pair of them needs one all-reduce: the first splits its outputs (columns of the product), what
lies between works on each output by itself, the second splits its inputs (rows) and sums::

    h = activation(into(x))    # ColumnParallelLinear: x is whole, h is split
    y = out(h)                 # RowParallelLinear: y is whole again, after one all-reduce

With a :class:`SequenceSplit` the x and y are split along the sequence instead, by an all-gather
in front and a reduce-scatter behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Context, Module, Parameter, Uniform
from mpimesh.nn.checks import check_extent, check_features, check_floats, sum_dtype
from mpimesh.nn.initializers import Initializer
from mpimesh.parallel.sequence import SequenceSplit, repeated
from mpimesh.parallel.tensor_group import Pending, TensorGroup
from mpimesh.parallel.tensor_parameter import Runs, TensorParameter, even_parts
from mpimesh.runtime import ProcessGroup

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _SplitLinear(Module):
    """What the two have in common: ``y = x @ weight.T + bias`` with the weight split."""

    _axis: int  # of the weight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | TensorGroup,
        sequence: SequenceSplit | None,
        parts: Sequence[Runs] | None,
        initializer: Initializer | None,
    ) -> None:
        self.in_features = check_extent("in_features", in_features)
        self.out_features = check_extent("out_features", out_features)
        self.tensor = TensorGroup(group)
        if sequence is not None and sequence.tensor.group is not self.tensor.group:
            raise ModuleError(f"{self!r}: its sequence must be split over its own group")
        self.sequence = sequence
        shape = (self.out_features, self.in_features)
        self.parts = tuple(
            even_parts(shape[self._axis], self.tensor.size) if parts is None else parts
        )
        start = initializer or Uniform(1.0 / math.sqrt(self.in_features))
        self.weight: Parameter = TensorParameter(
            "weight", shape, start, axis=self._axis, parts=self.parts, rank=self.tensor.rank
        )
        self.bias: Parameter | None = None

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of the input, or None if `input_grad` is False."""
        return self._start_input(dy, ctx).resolve()

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run both halves; the weight's gradient is computed while the input's is summed."""
        dx = self._start_input(dy, ctx)
        self.backward_weight(ctx)
        return dx.resolve()

    def _start_input(self, dy: Array, ctx: Context) -> Pending:
        raise NotImplementedError

    def _product(self, x: Array) -> Array:
        weight = self.weight.value()
        if weight.shape != self.weight.shape:
            raise ShapeError(f"{self!r}: weight must have shape {self.weight.shape}")
        check_floats(self, x, weight.dtype)
        check_features(self, x, weight.shape[1])
        # One large product instead of one for each leading index.
        y = _flat(x) @ weight.T
        return y.reshape(*x.shape[:-1], weight.shape[0])

    def _input_gradient(self, dy: Array) -> Array:
        weight = self.weight.value()
        dx = _flat(dy) @ weight
        return dx.reshape(*dy.shape[:-1], weight.shape[1])

    def _defer(self, ctx: Context, x: Array, dy: Array) -> None:
        """Keep what the weights' half needs; frozen parameters keep nothing alive."""
        trained = any(one.requires_grad for one in self._own_parameters())
        ctx.defer(self, x if self.weight.requires_grad else None, dy if trained else None)

    def _add_bias_gradient(self, dy: Array) -> None:
        if self.bias is not None and self.bias.requires_grad:
            summed = _flat(dy).sum(axis=0, dtype=sum_dtype(dy.dtype))
            self.bias.accumulate(summed, owned=True)

    def _add_weight_gradient(self, x: Array, dy: Array) -> None:
        self.weight.accumulate(_flat(dy).T @ _flat(x), owned=True)

    def __repr__(self) -> str:
        has_bias = getattr(self, "bias", None) is not None
        return (
            f"{type(self).__name__}({self.in_features}, {self.out_features}, "
            f"group={self.tensor.group.name!r}{'' if has_bias else ', bias=False'})"
        )


class ColumnParallelLinear(_SplitLinear):
    """A :class:`~mpimesh.nn.Linear` whose outputs are split over the ranks of a group.

    Each rank has some rows of the weight, and some of the bias, with the values that they have
    in the unsplit layer. Forward and backward are collective over the group.

    Shapes:
        x: (..., in_features), the same on every rank; with `sequence` this rank's places.
        result: (..., this rank's features), or (..., out_features) with `gather_output`.
        weight: (this rank's features, in_features). bias: (this rank's features,).

    Cost:
        Forward moves nothing without `sequence`; backward all-reduces the gradient of `x`, while
        the weight's is computed. With `sequence` forward gathers `x`; backward gathers it again,
        so that only this rank's places are kept, and reduce-scatters its gradient.

    Args:
        in_features: Length of the last axis of `x`.
        out_features: Length of the last axis of the result, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether to add a bias.
        sequence: How `x` is split along the sequence, if it is.
        gather_output: Give every rank the whole result.
        parts: Which outputs each rank has; even ones if None.
        initializer: First values of weight and bias; those of :class:`~mpimesh.nn.Linear` if None.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `parts` do not fit.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> mlp = nn.Sequential(ColumnParallelLinear(64, 256, group=tp), nn.GELU(),
        ...                     RowParallelLinear(256, 64, group=tp))
    """

    _axis = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | TensorGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
        gather_output: bool = False,
        parts: Sequence[Runs] | None = None,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence, parts, initializer)
        self._widths = [sum(stop - start for start, stop in part) for part in self.parts]
        if gather_output and self.parts != even_parts(self.out_features, self.tensor.size):
            raise ModuleError(f"{self!r}: gather_output joins even parts in their order only")
        self.gather_output = gather_output
        if bias:
            self.bias = TensorParameter(
                "bias",
                (self.out_features,),
                self.weight.initializer,
                axis=0,
                parts=self.parts,
                rank=self.tensor.rank,
            )

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return this rank's features of ``x @ weight.T + bias``; all with `gather_output`.

        Collective over the group with `sequence` or `gather_output`.

        Raises:
            ShapeError: If `x` does not fit.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        check_floats(self, x, self.weight.value().dtype)
        check_features(self, x, self.in_features)
        y = self._product(x if self.sequence is None else self.sequence.gather(x).resolve())
        if self.bias is not None:
            y += self.bias.value()
        if self.gather_output:
            y = self.tensor.all_gather(y, axis=y.ndim - 1, sizes=self._widths).resolve()
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, x)
        return y

    def _start_input(self, dy: Array, ctx: Context) -> Pending:
        (x,) = self._take(dy, ctx)
        if self.gather_output:
            start = sum(self._widths[: self.tensor.rank])
            dy = dy[..., start : start + self._widths[self.tensor.rank]]
        self._defer(ctx, x, dy)
        if not self.input_grad:
            return Pending(None, None, None)
        dx = self._input_gradient(dy)
        if self.sequence is None:
            return self.tensor.all_reduce(dx, owned=True)
        return self.sequence.reduce_scatter(dx)

    def backward_weight(self, ctx: Context) -> None:
        """Add ``dy.T @ x`` to the weight's gradient and the sum of `dy` to the bias's.

        Collective over the group with `sequence`, unless the weight is frozen.
        """
        x, dy = ctx.take_deferred(self)
        whole = None
        if x is not None and self.sequence is not None:
            whole = self.sequence.gather(x)
        self._add_bias_gradient(dy)
        if x is not None:
            self._add_weight_gradient(x if whole is None else whole.resolve(), dy)


class RowParallelLinear(_SplitLinear):
    """A :class:`~mpimesh.nn.Linear` whose inputs are split over the ranks of a group.

    Each rank has some columns of the weight, with the values that they have in the unsplit
    layer, and the whole bias. Forward and backward are collective over the group.

    Shapes:
        x: (..., this rank's features), as a :class:`ColumnParallelLinear` gives them.
        result: (..., out_features), the same on every rank; with `sequence` this rank's places.
        weight: (out_features, this rank's features). bias: (out_features,).

    Cost:
        Forward all-reduces the result, backward moves nothing. With `sequence` forward
        reduce-scatters the result, and backward gathers its gradient.

    Args:
        in_features: Length of the last axis of `x`, over all ranks.
        out_features: Length of the last axis of the result.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether to add a bias.
        sequence: How the result is to be split along the sequence, if it is.
        parts: Which inputs each rank has; even ones if None.
        initializer: First values of weight and bias; those of :class:`~mpimesh.nn.Linear` if None.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `parts` do not fit.
        GroupError: If this rank is not in the group.
    """

    _axis = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | TensorGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
        parts: Sequence[Runs] | None = None,
        initializer: Initializer | None = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence, parts, initializer)
        if bias:
            whole = Parameter("bias", (self.out_features,), self.weight.initializer)
            self.bias = repeated(whole, self.tensor, partial=sequence is not None)

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

    def _start_input(self, dy: Array, ctx: Context) -> Pending:
        (x,) = self._take(dy, ctx)
        whole = dy if self.sequence is None else self.sequence.gather(dy).resolve()
        self._defer(ctx, x, (dy, whole))
        return Pending(None, self._input_gradient(whole) if self.input_grad else None, None)

    def backward_weight(self, ctx: Context) -> None:
        """Add ``dy.T @ x`` to the weight's gradient and the sum of `dy` to the bias's. Local."""
        x, gradients = ctx.take_deferred(self)
        if gradients is not None:
            self._add_bias_gradient(gradients[0])
        if x is not None:
            self._add_weight_gradient(x, gradients[1])


def _flat(x: Array) -> Array:
    """Return `x` with one axis before the last; that may be of no features."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
