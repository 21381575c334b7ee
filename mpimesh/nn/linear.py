"""Linear layers, and layers made of them, whole or split over the ranks of a group."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from mpimesh.arguments import as_flag, shown
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, namespace
from mpimesh.errors import LayoutError, ModuleError, ShapeError
from mpimesh.layout import Placement, PlacementLike, Shard
from mpimesh.nn import protocol
from mpimesh.nn.initializers import Uniform
from mpimesh.nn.module import Composite, Module
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import (
    Context,
    FeaturePart,
    check_extent,
    check_features,
    check_floats,
    joined,
    parted,
)
from mpimesh.nn.split import AxisRun, RankGroup, SequenceSplit, Split, SplitRanks

__all__ = ["ColumnParallelLinear", "Linear", "RowParallelLinear", "SplitLayer"]


class Linear(Module):
    """``y = x @ weight.T + bias``, over the last axis of `x`.

    Weight and bias start uniform in ``±1/sqrt(in_features)``: He's uniform
    initialisation with the gain of a leaky ReLU of slope sqrt(5), which is what
    PyTorch does, so that learning rates carry over.

    The weight may be split over the ranks of a group, each of which has its part of the values
    of the unsplit layer. With ``weight="S0"`` a rank has some of the outputs, with their biases;
    with ``weight="S1"`` some of the inputs, and the whole bias: the results are then summed.
    Forward and backward are collective over the group.

    Shapes:
        x: (..., in_features), with any leading axes, of any extents. Split by "S0" the same on
            every rank, or with `sequence` this rank's places; by "S1" this rank's features.
        result: (..., out_features). Split by "S0" this rank's features, unless `gather_output`;
            by "S1" the same on every rank, or with `sequence` its places.
        weight: (out_features, in_features). bias: (out_features,). Of these the rank's part.

    Cost:
        With m the product of the leading extents, ``2 * m * in * out`` flops in
        forward and in each half of backward. Saves `x`, then `x` and `dy`, by
        reference.
        Split by "S0", backward all-reduces the gradient of `x`, while the weight's is computed;
        with `sequence` forward gathers `x`, and backward gathers it again, so that only this
        rank's places are saved, and reduce-scatters its gradient. Split by "S1", forward
        all-reduces the result; with `sequence` forward reduce-scatters it, and backward gathers
        its gradient.

    Args:
        in_features: Length of the last axis of `x`, over all ranks.
        out_features: Length of the last axis of the result, over all ranks.
        bias: Whether to add a bias.
        weight: The split of the weight over the ranks of `group`: ``"S0"``, ``"S1"``, or with sizes
            as ``"S0(3,1)"``; it may name the group, as in ``"tp=S0"``.
        group: The ranks, such as ``mesh.group("tp")``.
        sequence: How activations outside of the pair of layers, one of each kind, are split
            along the sequence, if they are.
        gather_output: With ``weight="S0"``, give every rank the whole result.

    Attributes:
        weight: The :class:`Parameter` of the weight; ``weight.data`` is its array.
        bias: The :class:`Parameter` of the bias, or None.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, `weight` is no such split,
            or `group` and `weight` are not given together.
        LayoutError: If sizes do not fit.
        GroupError: If this rank is not in the group.

    Example:
        >>> into = nn.Linear(64, 256, weight="S0", group=mesh.group("tp"))
        >>> out = nn.Linear(256, 64, weight="S1", group=mesh.group("tp"))
    """

    mixes_features = True
    split: Split | None = None
    _axis: int | None = None  # of the weight, along which it is split
    _runs: Sequence[AxisRun] = ()  # what each rank has of it
    _entrance: Split | None = None  # where x comes in, if not by the layer around this one
    gather_output = False
    _placement: ClassVar[PlacementLike | None] = None  # of the weight, by default

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        weight: PlacementLike | None = None,
        group: RankGroup | None = None,
        sequence: SequenceSplit | None = None,
        gather_output: bool = False,
    ) -> None:
        self.in_features = check_extent("in_features", in_features)
        self.out_features = check_extent("out_features", out_features)
        start = Uniform(1.0 / math.sqrt(self.in_features))
        self._shape = (self.out_features, self.in_features)
        self.weight = Parameter("weight", self._shape, start)
        with_bias = as_flag(bias, "bias", ModuleError)
        self.bias = Parameter("bias", (self.out_features,), start) if with_bias else None
        gather = as_flag(gather_output, "gather_output", ModuleError)
        weight = self._placement if weight is None else weight
        split = Split.over(self, group, sequence, must=weight is not None or gather)
        if split is None:
            return
        axis, runs = _axis_of(weight, split)
        if gather and axis:
            raise ModuleError("gather_output is for weight='S0': every rank has all outputs of S1")
        self.gather_output = gather
        self.set_split(split, axis, runs)

    def set_split(
        self,
        split: Split,
        axis: int,
        runs: Sequence[AxisRun] | None = None,
        *,
        within: bool = False,
    ) -> None:
        """Have a part of the weight from now on, before there is memory. Local.

        Args:
            split: The ranks.
            axis: The axis of the weight that is split: 0, outputs, or 1, inputs.
            runs: What each rank has of it, several maybe the same; even parts if None.
            within: Whether the layer around this one lets the input in, and sums its gradient; it
                then gives the input to :meth:`add_gradients`, too.

        Raises:
            ModuleStateError: If the layer has memory.
            LayoutError: If runs overlap, or are not all of the axis together.
        """
        ranks = split.ranks
        runs = ranks.runs(self.weight.global_shape[axis]) if runs is None else runs
        ranks.lay(self.weight, axis, runs)
        if self.bias is not None and axis == 0:
            ranks.lay(self.bias, 0, runs)
        elif self.bias is not None and split.sequence is not None:
            ranks.lay(self.bias, None)
        self._shape = (self.weight.shape[0], self.weight.shape[1])
        self.split, self._axis, self._runs = split, axis, runs
        self._entrance = split if axis == 0 and not within else None

    @property
    def is_first(self) -> bool:
        """True if it is split by its outputs, within a layer that lets the input in."""
        return self._axis == 0 and self._entrance is None

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return which features it gives; see `Module.set_part`.

        Raises:
            ModuleError: If it needs others than those that it gets.
        """
        if self.split is None:
            return super().set_part(part)
        ranks, extent = self.split.ranks, self._runs[-1][1]
        mine = None if ranks.size == 1 else FeaturePart(*self._runs[ranks.rank], extent)
        if self._axis == 0:
            super().set_part(part)
            return None if self.gather_output else mine
        if part not in (None, mine):
            raise ModuleError(f"{self!r} takes {mine}, but gets {part}")
        return None

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return ``x @ weight.T + bias``. Collective over the group if the layer is split.

        Raises:
            ShapeError: If the last axis of `x` is not `in_features` long, or this rank's part of
                it, or the weight is that of another layer and does not fit.
            DTypeError: If `x` has another dtype than the weight.
            ModuleStateError: If the layer is not materialised.
        """
        weight, split = self.weight.value(), self.split
        if weight.shape != self._shape:
            raise ShapeError(
                f"{self!r}: weight must have shape {self._shape}, got {weight.shape}; a weight "
                "that is shared with another layer must fit both"
            )
        out_features, in_features = self._shape
        check_floats(self, x, weight.dtype)
        check_features(self, x, in_features)
        if self._entrance is not None:
            x = self._entrance.enter(x, ctx)
        # One large product instead of one for each leading index.
        x2 = _flat(x)
        y = self._product(x2, weight.T, (*x.shape[:-1], out_features), ctx)
        if split is not None and self._axis == 1:
            y = split.join(y)
        if self.bias is not None:
            y += self.bias.value()
        self._save(ctx, y, None if self._axis == 0 else x2, x.shape)
        if split is not None and self.gather_output:
            sizes = [stop - start for start, stop in self._runs]
            y = split.ranks.start("all_gather", y, axis=y.ndim - 1, sizes=sizes).resolve()
        return y

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return ``dy @ weight``, or None if `input_grad` is False. Collective if split."""
        dx = self._back(dy, ctx)
        return dx if self._entrance is None else self._entrance.leave(dx, ctx).resolve()

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run both halves; if split, weights' gradients are made while that of `x` is summed."""
        if self._entrance is None:
            return super().backward(dy, ctx)
        dx = self._entrance.leave(self._back(dy, ctx), ctx)
        self.backward_weight(ctx)
        return dx.resolve()

    def backward_weight(self, ctx: Context) -> None:
        """Add ``dy.T @ x`` to the weight's gradient and the sum of `dy` to the bias's.

        Collective with a sequence.
        """
        x = None
        if self._entrance is not None:
            x = self._entrance.again(ctx, wanted=self.weight.requires_grad).resolve()
        self.add_gradients(x, ctx)

    def add_gradients(self, x: Array | None, ctx: Context) -> None:
        """Add the gradients, `x` being all of the input where the layer keeps none. Local."""
        x2, dy2, mine = ctx.take_deferred(self)
        if self.bias is not None and self.bias.requires_grad:
            self.bias.accumulate(mine.sum(axis=0, dtype=sum_dtype(mine.dtype)), owned=True)
        if self.weight.requires_grad:
            self.weight.accumulate(dy2.T @ (x2 if x is None else _flat(x)), owned=True)

    def _back(self, dy: Array, ctx: Context) -> Array | None:
        """Return this rank's gradient of the input."""
        if self.gather_output:
            if dy.shape[-1:] != (self.out_features,):
                raise ShapeError(
                    f"{self!r}: the gradient of the output must have shape (..., "
                    f"{self.out_features}) like it, got {tuple(dy.shape)}"
                )
            start, stop = self.weight.box[0]
            dy = dy[..., start:stop]
        x2, x_shape = self._take(dy, ctx)
        dy2 = mine = _flat(dy)
        if self.split is not None and self._axis == 1:
            dy2 = _flat(self.split.whole(dy))
        # Frozen parameters keep nothing alive.
        if any(parameter.requires_grad for parameter in self._own_parameters()):
            ctx.defer(self, x2 if self.weight.requires_grad else None, dy2, mine)
        else:
            ctx.defer(self, None, None, None)
        return self._product(dy2, self.weight.value(), x_shape, ctx) if self.input_grad else None

    def _product(self, a: Array, b: Array, shape: tuple[int, ...], ctx: Context | None) -> Array:
        """Return ``a @ b`` as an array of `shape`, where the context wants it."""
        room = None if ctx is None or self.split else ctx.empty(self, shape, a.dtype)
        if room is None:
            return (a @ b).astype(a.dtype, copy=False).reshape(shape)  # of bfloat16 float32
        namespace(a).matmul(a, b, out=room.reshape(-1, shape[-1]), casting="same_kind")
        return room

    def __repr__(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        weight = f", weight='S{self._axis}'" if self.split and type(self) is Linear else ""
        options = f"{bias}{weight}{Split.text(self.split)}"
        return f"{type(self).__name__}({self.in_features}, {self.out_features}{options})"


class ColumnParallelLinear(Linear):
    """A :class:`~mpimesh.nn.Linear` whose outputs are split over the ranks of `group`: "S0".

    Raises:
        ModuleError: As that, and without `group`.

    Example:
        >>> tp = mesh.group("tp")
        >>> mlp = nn.Sequential(ColumnParallelLinear(64, 256, group=tp), nn.GELU(),
        ...                     RowParallelLinear(256, 64, group=tp))
    """

    _placement = "S0"


class RowParallelLinear(Linear):
    """A :class:`~mpimesh.nn.Linear` whose inputs are split over the ranks of `group`: "S1".

    Raises:
        ModuleError: As that, and without `group`.
    """

    _placement = "S1"


class SplitLayer(Composite):
    """A composite that may be split over ranks: the first layers by outputs, the last by inputs.

    Then its forward and backward are collective over the ranks. What a subclass runs sees all of
    the input, and gives a part of its gradient: the input is gathered once for all first layers,
    and one sum is made of their gradients.

    Attributes:
        split: The ranks; None if it is not split.
        eager: Whether `backward_input` runs the weights' half, too, while the gradient of the
            input is summed, so that `backward_weight` has nothing left to do. Set by what is
            around it, while its own `backward` runs both halves.
    """

    split: Split | None = None
    eager: bool = False
    must_split: ClassVar[bool] = False
    """True for layers that are refused without a group."""
    linears: ClassVar[tuple[str, ...]] = ()
    """Names of the layers within that are split: the last one by its inputs."""

    def _split_over(self, group: RankGroup | None, sequence: SequenceSplit | None) -> None:
        """Be split as the options of a layer say, if they say so.

        Raises:
            ModuleError: As :meth:`set_split`, or if `group` is missing.
            GroupError: If this rank is not in the group.
        """
        split = Split.over(self, group, sequence, must=self.must_split)
        if split is not None:
            self.set_split(split)

    def set_split(self, split: Split) -> None:
        """Have a part of the layers within from now on, before there is memory. Local.

        Raises:
            ModuleError: If they are no plain linear ones, or cannot be split so.
            ModuleStateError: If the layer has memory.
        """
        layers: list[Linear] = []
        for name in self.linears:
            layer = getattr(self, name)
            if type(layer) is not Linear or layer.split is not None:
                raise ModuleError(
                    f"{type(self).__name__}: only plain Linear layers within can be split, got "
                    f"{layer!r}"
                )
            layers.append(layer)
        runs = self._runs(split.ranks)
        for layer, of_layer in zip(layers[:-1], runs, strict=False):
            layer.set_split(split, 0, of_layer, within=True)
        layers[-1].set_split(split, 1, runs[0])
        self.split = split

    def _runs(self, ranks: SplitRanks) -> list[Sequence[AxisRun] | None]:
        """Return what each rank has of the outputs of the first layers; None for even parts."""
        return [None] * len(self.linears)

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return what the layers give. Collective over the group if they are split.

        Raises:
            ShapeError: If `x` has another shape, or a mask does not fit it.
            DTypeError: If `x` has another dtype than the weights, or a mask is not boolean.
            ModuleError: If `x` is a tuple of something else than an array and a mask.
            ModuleStateError: If the layer is not materialised.
        """
        if self.split is None:
            return self._run(x, ctx)
        x, mask = parted(self, x, ctx)
        whole = self.split.enter(x, ctx)
        if mask is not None:
            mask = self.split.whole_mask(mask, ctx)
        return self._run(joined(whole, mask), ctx)

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return the gradient of `x`; with a mask, a tuple of that and None. Collective if split.

        Raises:
            ShapeError: If `dy` has another shape than the result.
            DTypeError: If `dy` has another dtype.
            ModuleStateError: If forward did not run with `ctx`, or its backward ran already.
        """
        found = self._run_back(dy, ctx)
        return found if self.split is None else self._leave(self.split, found, ctx, self.eager)

    def backward(self, dy: Array, ctx: Context) -> Any:
        """Run both halves; if split, weights' gradients are made while that of `x` is summed."""
        if self.split is None:
            return super().backward(dy, ctx)
        return self._leave(self.split, self._run_back(dy, ctx), ctx, True)

    def backward_weight(self, ctx: Context) -> None:
        """Add the parameters' gradients. Collective if the input is split along the sequence."""
        if self.split is None:
            super().backward_weight(ctx)
        elif not self.eager:
            self._add_gradients(self.split, ctx)

    @abstractmethod
    def _run(self, x: Any, ctx: Context | None) -> Array: ...

    @abstractmethod
    def _run_back(self, dy: Array, ctx: Context) -> Any: ...

    def _leave(self, split: Split, found: Any, ctx: Context, with_weights: bool) -> Any:
        """Return the sum of the ranks' gradients of the input, which may come with a mask."""
        dx, _ = parted(self, found)
        pending = split.leave(dx, ctx)
        if with_weights:
            self._add_gradients(split, ctx)
        dx = pending.resolve()
        return (dx, None) if isinstance(found, tuple) else dx

    def _add_gradients(self, split: Split, ctx: Context) -> None:
        children = [child for _, child in reversed(self.named_children())]
        first = [child for child in children if isinstance(child, Linear) and child.is_first]
        wanted = any(layer.weight.requires_grad for layer in first)
        whole = split.again(ctx, wanted=wanted)
        for child in children:
            if child not in first:
                protocol.backward_weight(child, ctx)
        x = whole.resolve()
        for layer in first:
            layer.add_gradients(x, ctx)


def _flat(x: Array) -> Array:
    """Return `x` with one axis before the last; that may be of no features."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _axis_of(weight: PlacementLike | None, split: Split) -> tuple[int, Sequence[AxisRun] | None]:
    """Return along which axis a weight is split, and what each rank has if sizes say it."""
    ranks = split.ranks
    try:
        found = None if weight is None else Placement.of(weight, [ranks.group.name])[0]
    except LayoutError as error:
        raise LayoutError(f"weight: {error}") from None
    if not isinstance(found, Shard) or found.axis > 1:
        raise ModuleError(
            f"weight must be 'S0', to split the outputs over the ranks of the group, or 'S1', to "
            f"split the inputs, got {shown(weight)}"
        )
    if found.sizes is None:
        return found.axis, None
    if len(found.sizes) != ranks.size:
        raise LayoutError(
            f"weight: {found!r} has {len(found.sizes)} sizes, but the group has {ranks.size} "
            "ranks; give one size for each"
        )
    return found.axis, list(pairwise([0, *accumulate(found.sizes)]))
