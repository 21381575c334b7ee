"""Activations split along the sequence, outside of the layers that are split over a group.

As in Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022:
norms, dropout and residual sums treat each place of a sequence by itself, so each of the n ranks
of a tensor-parallel group keeps a part of the places only. A split layer gathers the places in
front (`all_gather`) and leaves its sum split (`reduce_scatter`), which together move as many
bytes as the all-reduce that they replace. A parameter that such a rank applies to its own places
only, a norm's or a bias, has on each rank a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.layout import layout_of_runs
from mpimesh.nn import Module, Parameter
from mpimesh.nn.checks import check_extent
from mpimesh.parallel.tensor.group import Pending, TensorGroup
from mpimesh.runtime import ProcessGroup

__all__ = ["SequenceSplit", "repeated", "split_sequence"]

M = TypeVar("M", bound=Module)


class SequenceSplit:
    """The split of the places of sequences over the ranks of a tensor-parallel group.

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

    def __init__(self, group: ProcessGroup | TensorGroup, *, length: int | None = None) -> None:
        self.tensor = TensorGroup(group)
        self.length = None if length is None else check_extent("length", length)

    def sizes(self, extent: int) -> list[int]:
        """Return how many of `extent` places each rank has.

        Raises:
            ShapeError: If that is not the length, or without one the ranks cannot share evenly.
        """
        if self.length is None and extent % self.tensor.size:
            raise ShapeError(
                f"{extent} places of a sequence cannot be shared evenly by {self.tensor.size} "
                f"ranks; SequenceSplit(group, length={extent}) allows uneven parts"
            )
        if self.length not in (None, extent):
            raise ShapeError(f"sequences must have {self.length} places, got {extent}")
        return self.tensor.sizes(extent)

    def places(self, extent: int) -> slice:
        """Return which of `extent` places this rank has."""
        sizes = self.sizes(extent)
        start = sum(sizes[: self.tensor.rank])
        return slice(start, start + sizes[self.tensor.rank])

    def here(self, x: Array) -> tuple[slice, ...]:
        """Return the index of this rank's places in the whole `x`."""
        _check_axis(x)
        return (slice(None), self.places(int(x.shape[1])))

    def first_place(self, x: Array) -> int:
        """Return which place of the sequence is the first of `x`, this rank's places."""
        return sum(self._sizes_by(x)[: self.tensor.rank])

    def gather(self, x: Array) -> Pending:
        """Start to join the places of all ranks. Collective."""
        return self.tensor.all_gather(x, axis=1, sizes=self._sizes_by(x))

    def reduce_scatter(self, x: Array) -> Pending:
        """Start to sum `x` over the ranks, each of which gets its places. Collective."""
        _check_axis(x)
        return self.tensor.reduce_scatter(x, axis=1, sizes=self.sizes(int(x.shape[1])))

    def _sizes_by(self, x: Array) -> Sequence[int]:
        """Return the sizes of all ranks' parts, `x` being this rank's."""
        _check_axis(x)
        mine = int(x.shape[1])
        if self.length is None:
            return [mine] * self.tensor.size
        sizes = self.tensor.sizes(self.length)
        if mine != sizes[self.tensor.rank]:
            raise ShapeError(
                f"rank {self.tensor.rank} of {self.tensor.size} has {sizes[self.tensor.rank]} of "
                f"{self.length} places of a sequence, got {mine}: shape {tuple(x.shape)}"
            )
        return sizes

    def __deepcopy__(self, memo: object) -> SequenceSplit:
        """Return this: the copy of a layer is split over the same ranks."""
        return self

    def __repr__(self) -> str:
        length = "" if self.length is None else f", length={self.length}"
        return f"SequenceSplit({self.tensor.group.name!r}{length})"


def _check_axis(x: Array) -> None:
    if x.ndim < 2:
        raise ShapeError(
            f"a sequence that is split lies along axis 1, behind the rows; got {tuple(x.shape)}"
        )


def repeated(parameter: Parameter, tensor: TensorGroup, *, partial: bool) -> Parameter:
    """Return `parameter`, without memory yet, as one that all ranks of a group have.

    Args:
        parameter: The parameter.
        tensor: The ranks.
        partial: Whether each rank makes a part of the gradient. Else all make the same.
    """
    if not partial:
        return parameter
    everything = [(0, parameter.shape[0])] * tensor.size
    parameter.set_layout(layout_of_runs(parameter.shape, 0, everything), tensor.rank)
    return parameter


def split_sequence(layer: M, sequence: SequenceSplit) -> M:
    """Let `layer`, such as a LayerNorm, work on a split sequence; returns it. Local.

    For layers that treat each place by itself. All parameters under it become such whose
    gradients are summed over the ranks.

    Args:
        layer: The layer, whose parameters have no memory yet.
        sequence: How sequences are split.

    Raises:
        ModuleError: If a parameter has memory, or is split already.
    """
    for name, value in list(vars(layer).items()):
        if not isinstance(value, Parameter):
            continue
        if value.data is not None or value.layout is not None:
            raise ModuleError(
                f"{layer!r}: parameter {value.name!r} has memory, or is split; split_sequence "
                "comes before materialize, once"
            )
        setattr(layer, name, repeated(value, sequence.tensor, partial=True))
    for _, child in layer.named_children():
        if isinstance(child, Module):
            split_sequence(child, sequence)
    # By it a model finds the ranks, also if it has no other layer that knows them.
    vars(layer)["sequence"] = sequence
    return layer
