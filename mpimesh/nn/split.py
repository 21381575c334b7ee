"""Layers split over ranks: what they do for each other, and how activations lie between them.

A layer that is split by its outputs computes some of them on each rank from all of the input, so
that a rank's gradient of the input is a part of the true one. A layer that is split by its inputs
computes a part of all outputs, which are summed over the ranks (Shoeybi et al., "Megatron-LM",
2019). A pair of them needs one all-reduce forward and one backward.

With a :class:`SequenceSplit` activations outside of such a pair are split along the sequence, as in
Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022): norms,
dropout and residual sums treat each place of a sequence by itself, so each rank keeps a part of
the places only. A split layer gathers the places in front (`all_gather`) and leaves its sum split
(`reduce_scatter`), which together move as many bytes as the all-reduce that they replace. A
parameter that a rank applies to its own places only, a norm's or a bias, has on each rank a part
of its gradient.

Layers talk to no ranks themselves: they take a group, such as ``mesh.group("tp")``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from mpimesh.arguments import shown
from mpimesh.arrays.namespace import Array
from mpimesh.errors import GroupError, ModuleError, ShapeError
from mpimesh.layout import layout_of_runs
from mpimesh.layout.boxes import even_sizes
from mpimesh.nn.parameter import Parameter
from mpimesh.nn.protocol import Context, FeaturePart, check_extent

__all__ = ["AxisRun", "Pending", "RankGroup", "SequenceSplit", "Split", "SplitRanks", "watch"]

_LABEL = "tensor parallel"

AxisRun = tuple[int, int]
"""The first of some places of an axis, and the one behind the last."""


class Pending(Protocol):
    """The result of a collective that may be under way."""

    def resolve(self) -> Array:
        """Wait for the result and return it."""
        ...


@runtime_checkable
class RankGroup(Protocol):
    """A group of ranks as layers use it: a :class:`~mpimesh.ProcessGroup` is one."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def size(self) -> int:
        """Number of its ranks."""
        ...

    @property
    def rank(self) -> int | None:
        """This rank's place among them; None if it is not among them."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, by their numbers in the world."""
        ...

    @property
    def world_rank(self) -> int:
        """This rank's number in the world."""
        ...

    def all_reduce(
        self, x: Array, op: Literal["sum", "min", "max"], *, out: Array | None, label: str
    ) -> Pending:
        """Start to reduce `x` over the ranks. Collective."""
        ...

    def all_gather(self, x: Array, *, axis: int, sizes: Sequence[int], label: str) -> Pending:
        """Start to join the blocks of all ranks along an axis. Collective."""
        ...

    def reduce_scatter(self, x: Array, *, axis: int, sizes: Sequence[int], label: str) -> Pending:
        """Start to sum `x` and give each rank its block along an axis. Collective."""
        ...


Start = Callable[..., Pending]
"""Starts a collective, given its name, the array, and the options of the group's method."""

_watches: WeakKeyDictionary[RankGroup, Start] = WeakKeyDictionary()


def watch(group: RankGroup, start: Start | None) -> None:
    """Let `start` begin the collectives of layers and losses that are split over `group`. Local.

    For a training step that watches over them, wherever a user's loss or layer keeps the group.

    Args:
        group: The group.
        start: What begins them from now on; None for the group itself.
    """
    if start is None:
        _watches.pop(group, None)
    else:
        _watches[group] = start


class _Resolved:
    """A result that nothing had to be moved for."""

    __slots__ = ("_value",)

    def __init__(self, value: Array) -> None:
        self._value = value

    def resolve(self) -> Array:
        return self._value


class SplitRanks:
    """A group of ranks as the layers that are split over it use it.

    In a group of one rank nothing is moved or copied.

    Args:
        group: The ranks, such as ``mesh.group("tp")``.

    Attributes:
        group: As given.
        size: Their number.
        rank: This rank's place among them.

    Raises:
        GroupError: If this rank is not among them, or `group` is no group.
    """

    def __init__(self, group: RankGroup) -> None:
        if not isinstance(group, RankGroup):
            raise GroupError(
                "a layer is split over a group of ranks, such as mesh.group('tp'); got "
                f"{shown(group)} as group"
            )
        if group.rank is None:
            raise GroupError(
                f"rank {group.world_rank} is not in the group {group.name!r} of ranks "
                f"{list(group.ranks)}, so it has no part of a layer that is split over it"
            )
        self.group = group
        self.size: int = group.size
        self.rank: int = group.rank

    def sizes(self, extent: int) -> list[int]:
        """Return how `extent` things are dealt to the ranks: the first ones have one more."""
        return even_sizes(extent, self.size)

    def runs(self, extent: int) -> list[AxisRun]:
        """Return (start, stop) of what each rank has of `extent` things; see :meth:`sizes`."""
        return list(pairwise([0, *accumulate(self.sizes(extent))]))

    def part_of(self, extent: int) -> FeaturePart | None:
        """Return which of `extent` features this rank has behind a split layer; None if all."""
        return None if self.size == 1 else FeaturePart(*self.runs(extent)[self.rank], extent)

    def lay(
        self, parameter: Parameter, axis: int | None, runs: Sequence[AxisRun] | None = None
    ) -> None:
        """Let a parameter without memory lie on the ranks. Local.

        Args:
            parameter: The parameter.
            axis: The axis that is split; None if each rank has all of it, and makes a part of its
                gradient.
            runs: What each rank has of the axis; even parts if None.
        """
        shape = parameter.global_shape
        if axis is None:
            axis, runs = 0, [(0, shape[0])] * self.size
        runs = self.runs(shape[axis]) if runs is None else runs
        parameter.set_layout(layout_of_runs(shape, axis, runs), self.rank)

    def start(
        self, name: Literal["all_reduce", "all_gather", "reduce_scatter"], x: Array, **options: Any
    ) -> Pending:
        """Start a collective of the group. Collective.

        Args:
            name: That of the group's method.
            x: This rank's part.
            options: Of that method, but the label.
        """
        if self.size == 1:
            return _Resolved(x)
        begin = _watches.get(self.group)
        if begin is not None:
            return begin(name, x, label=_LABEL, **options)
        pending: Pending = getattr(self.group, name)(x, label=_LABEL, **options)
        return pending

    def __deepcopy__(self, memo: object) -> SplitRanks:
        """Return this: the copy of a layer is split over the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"SplitRanks({self.group.name!r}, size={self.size}, rank={self.rank})"


class SequenceSplit:
    """The split of activations along the sequence over the ranks of a tensor-parallel group.

    Shapes:
        x: (rows, places, ...); a rank has consecutive places of each row.

    Args:
        group: The ranks.
        length: Places of each sequence. Then any number will do, and the first ranks have one
            more. Without it, sequences may have any length that the ranks can share evenly.

    Raises:
        ModuleError: If `length` is not a whole number of at least 1.
        GroupError: If this rank is not in the group.

    Example:
        >>> sequence = SequenceSplit(mesh.group("tp"))
        >>> into = ColumnParallelLinear(64, 256, group=mesh.group("tp"), sequence=sequence)
        >>> out = RowParallelLinear(256, 64, group=mesh.group("tp"), sequence=sequence)
    """

    def __init__(self, group: RankGroup, *, length: int | None = None) -> None:
        self.ranks = SplitRanks(group)
        self.length = None if length is None else check_extent("length", length)

    def sizes(self, extent: int) -> list[int]:
        """Return how many of `extent` places each rank has.

        Raises:
            ShapeError: If that is not the length, or without one the ranks cannot share evenly.
        """
        if self.length is None and extent % self.ranks.size:
            raise ShapeError(
                f"{extent} places of a sequence cannot be shared evenly by {self.ranks.size} "
                f"ranks; SequenceSplit(group, length={extent}) allows uneven parts"
            )
        if self.length not in (None, extent):
            raise ShapeError(f"sequences must have {self.length} places, got {extent}")
        return self.ranks.sizes(extent)

    def places(self, extent: int) -> slice:
        """Return which of `extent` places this rank has."""
        sizes = self.sizes(extent)
        start = sum(sizes[: self.ranks.rank])
        return slice(start, start + sizes[self.ranks.rank])

    def here(self, x: Array) -> tuple[slice, ...]:
        """Return the index of this rank's places in the whole `x`."""
        _check_axis(x)
        return (slice(None), self.places(int(x.shape[1])))

    def first_place(self, x: Array) -> int:
        """Return which place of the sequence is the first of `x`, this rank's places."""
        return sum(self._sizes_by(x)[: self.ranks.rank])

    def gather(self, x: Array) -> Pending:
        """Start to join the places of all ranks. Collective."""
        return self.ranks.start("all_gather", x, axis=1, sizes=self._sizes_by(x))

    def reduce_scatter(self, x: Array) -> Pending:
        """Start to sum `x` over the ranks, each of which gets its places. Collective."""
        _check_axis(x)
        return self.ranks.start("reduce_scatter", x, axis=1, sizes=self.sizes(int(x.shape[1])))

    def _sizes_by(self, x: Array) -> Sequence[int]:
        """Return the sizes of all ranks' parts, `x` being this rank's."""
        _check_axis(x)
        mine = int(x.shape[1])
        if self.length is None:
            return [mine] * self.ranks.size
        sizes = self.ranks.sizes(self.length)
        if mine != sizes[self.ranks.rank]:
            raise ShapeError(
                f"rank {self.ranks.rank} of {self.ranks.size} has {sizes[self.ranks.rank]} of "
                f"{self.length} places of a sequence, got {mine}: shape {tuple(x.shape)}"
            )
        return sizes

    def __deepcopy__(self, memo: object) -> SequenceSplit:
        """Return this: the copy of a layer is split over the same ranks."""
        return self

    def __repr__(self) -> str:
        length = "" if self.length is None else f", length={self.length}"
        return f"SequenceSplit({self.ranks.group.name!r}{length})"


def _check_axis(x: Array) -> None:
    if x.ndim < 2:
        raise ShapeError(
            f"a sequence that is split lies along axis 1, behind the rows; got {tuple(x.shape)}"
        )


class Split:
    """The ranks that a layer is split over, and the ways into the layer and out of it.

    Layers with one input that are split by their outputs, such as those of queries, keys and
    values, have one of these together: the input is gathered once, and one sum is made of all
    their gradients.

    Args:
        group: The ranks.
        sequence: How activations outside of the layer are split along the sequence, if they are.

    Attributes:
        ranks: The ranks.
        sequence: As given.

    Raises:
        GroupError: If this rank is not in the group, or `group` is no group.
        ModuleError: If `sequence` is split over another group.
    """

    def __init__(self, group: RankGroup, sequence: SequenceSplit | None = None) -> None:
        if sequence is not None and not isinstance(sequence, SequenceSplit):
            raise ModuleError(f"sequence must be a SequenceSplit or None, got {shown(sequence)}")
        self.ranks = SplitRanks(group) if sequence is None else sequence.ranks
        self.sequence = sequence
        if self.ranks.group is not group:
            raise ModuleError(
                f"a layer that is split over {group!r} cannot have a sequence that is split over "
                f"{self.ranks.group!r}"
            )

    @classmethod
    def over(
        cls,
        layer: object,
        group: RankGroup | None,
        sequence: SequenceSplit | None,
        *,
        must: bool,
    ) -> Split | None:
        """Return the split that the options of a layer ask for; None for a whole one.

        Args:
            layer: The layer.
            group: The ranks.
            sequence: How activations outside of the layer are split.
            must: Whether the layer is refused without a group.

        Raises:
            ModuleError: If a group is missing.
            GroupError: As for making one.
        """
        if group is not None:
            return cls(group, sequence)
        if sequence is not None or must:
            raise ModuleError(
                f"{type(layer).__name__} is split, by its class, its weight, gather_output or a "
                "sequence, over the ranks of a group: give group=, such as mesh.group('tp')"
            )
        return None

    # -- layers that are split by their outputs --------------------------------------------

    def enter(self, x: Array, ctx: Context | None) -> Array:
        """Return all of `x`. Collective with a sequence. This rank's places of it are saved."""
        if ctx is not None:
            ctx.save(self, x)
        return x if self.sequence is None else self.sequence.gather(x).resolve()

    def whole_mask(self, mask: Array, ctx: Context | None) -> Array:
        """Return all of a mask. Collective with a sequence, for the first of a pass that asks."""
        sequence = self.sequence
        if sequence is None:
            return mask
        if ctx is None:
            return sequence.gather(mask).resolve()
        return ctx.once(mask, lambda: sequence.gather(mask).resolve())

    def leave(self, dx: Array | None, ctx: Context) -> Pending:
        """Start to sum the ranks' gradients of the input, None if it is not needed. Collective."""
        ctx.defer(self, *ctx.take(self))
        if dx is None:
            return _Resolved(None)
        if self.sequence is None:
            return self.ranks.start("all_reduce", dx, op="sum", out=dx)
        return self.sequence.reduce_scatter(dx)

    def again(self, ctx: Context, *, wanted: bool) -> Pending:
        """Start to get all of the input once more, for the weights' gradients. Collective.

        Args:
            ctx: The microbatch.
            wanted: False if it is not needed, on all ranks alike.
        """
        (x,) = ctx.take_deferred(self)
        if not wanted or self.sequence is None:
            return _Resolved(x)
        return self.sequence.gather(x)

    # -- layers that are split by their inputs ---------------------------------------------

    def join(self, y: Array) -> Array:
        """Return the sum of the ranks' `y`; with a sequence this rank's places. Collective."""
        if self.sequence is None:
            return self.ranks.start("all_reduce", y, op="sum", out=y).resolve()
        return self.sequence.reduce_scatter(y).resolve()

    def whole(self, dy: Array) -> Array:
        """Return the gradient of all places. Collective with a sequence."""
        return dy if self.sequence is None else self.sequence.gather(dy).resolve()

    @staticmethod
    def text(split: Split | None) -> str:
        """Return how the repr of a layer tells that it is split, if it is."""
        return "" if split is None else f", group={split.ranks.group.name!r}"

    def __deepcopy__(self, memo: object) -> Split:
        """Return one of its own: what a context keeps for the copy is the copy's."""
        return Split(self.ranks.group, self.sequence)

    def __repr__(self) -> str:
        sequence = "" if self.sequence is None else f", {self.sequence!r}"
        return f"Split({self.ranks.group.name!r}{sequence})"
