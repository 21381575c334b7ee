"""Linear layers whose weight is split over the ranks of a group (Shoeybi et al., Megatron-LM).

A pair of them needs one all-reduce: the first splits its outputs (columns of the product), what
lies between works on each output by itself, the second splits its inputs (rows) and sums::

    h = activation(into(x))    # ColumnParallelLinear: x is whole, h is split
    y = out(h)                 # RowParallelLinear: y is whole again, after one all-reduce

A dropout between the two drops what it drops of the unsplit h, and what needs all of h, such as a
norm, is refused: a Sequential tells its layers which features they get, and so does a model.

With a :class:`SequenceSplit` the x and y are split along the sequence instead, by an all-gather
in front and a reduce-scatter behind.
"""

from __future__ import annotations

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.nn import Context, Linear
from mpimesh.nn.checks import check_features, check_floats
from mpimesh.nn.protocol import FeaturePart
from mpimesh.parallel.tensor.dropout import part_of
from mpimesh.parallel.tensor.entrance import Entrance
from mpimesh.parallel.tensor.group import Pending, TensorGroup
from mpimesh.parallel.tensor.part import ColumnPart, RowPart
from mpimesh.parallel.tensor.sequence import SequenceSplit
from mpimesh.runtime import ProcessGroup

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(ColumnPart):
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

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `sequence` is split over
            another group.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> mlp = nn.Sequential(ColumnParallelLinear(64, 256, group=tp), nn.GELU(),
        ...                     RowParallelLinear(256, 64, group=tp))
    """

    mixes_features = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | TensorGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
        gather_output: bool = False,
    ) -> None:
        entrance = Entrance(group, sequence)
        super().__init__(Linear(in_features, out_features, bias=bias), entrance.tensor)
        self.entrance = entrance
        self.gather_output = gather_output

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
        y = super().forward(self.entrance.enter(x, ctx), ctx)
        if self.gather_output:
            sizes = self.tensor.sizes(self.out_features)
            y = self.tensor.all_gather(y, axis=y.ndim - 1, sizes=sizes).resolve()
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of `x`, or None if `input_grad` is False. Collective."""
        return self._start(dy, ctx).resolve()

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run both halves; the weight's gradient is computed while that of `x` is summed."""
        dx = self._start(dy, ctx)
        self.backward_weight(ctx)
        return dx.resolve()

    def backward_weight(self, ctx: Context) -> None:
        """Add the gradients of weight and bias. Collective with `sequence`."""
        x = self.entrance.again(ctx, wanted=self.weight.requires_grad).resolve()
        self.add_gradients(x, ctx)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return which features it gives; see `Module.set_part`.

        Raises:
            ModuleError: If it gets a part of its input only.
        """
        super().set_part(part)
        return None if self.gather_output else part_of(self.out_features, self.tensor)

    def _start(self, dy: Array, ctx: Context) -> Pending:
        if self.gather_output:
            if dy.shape[-1:] != (self.out_features,):
                raise ShapeError(
                    f"{self!r}: the gradient of the output must have shape (..., "
                    f"{self.out_features}) like it, got {tuple(dy.shape)}"
                )
            start, stop = self.runs[self.tensor.rank]
            dy = dy[..., start:stop]
        return self.entrance.leave(super().backward_input(dy, ctx), ctx)


class RowParallelLinear(RowPart):
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

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or `sequence` is split over
            another group.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ProcessGroup | TensorGroup,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
    ) -> None:
        like = Linear(in_features, out_features, bias=bias)
        super().__init__(like, TensorGroup(group), sequence)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return that it gives all features; see `Module.set_part`.

        Raises:
            ModuleError: If it gets another part than its own.
        """
        mine = part_of(self.in_features, self.tensor)
        if part not in (None, mine):
            raise ModuleError(f"{self!r} takes {mine}, but gets {part}")
        return None
