"""The layers of a transformer that treat each token alone, split over the ranks of a group."""

from __future__ import annotations

from typing import Self

from mpimesh.nn import FeedForward, SwiGLU
from mpimesh.nn.protocol import SupportsLayer, set_part
from mpimesh.parallel.tensor.attention import plain
from mpimesh.parallel.tensor.dropout import part_of
from mpimesh.parallel.tensor.entrance import Entered, Entrance
from mpimesh.parallel.tensor.group import TensorGroup
from mpimesh.parallel.tensor.part import ColumnPart, RowPart
from mpimesh.parallel.tensor.retyped import retyped
from mpimesh.parallel.tensor.sequence import SequenceSplit
from mpimesh.runtime import ProcessGroup

__all__ = ["ParallelFeedForward", "ParallelSwiGLU"]


class ParallelFeedForward(Entered, FeedForward):
    """A :class:`~mpimesh.nn.FeedForward` of which each rank of a group has some hidden values.

    The weights have the values that they have in the unsplit layer, and the same names. Forward and
    backward are collective over the group.

    Shapes:
        x, result: (..., features), the same on every rank; with `sequence` (rows, this rank's
            places, features).

    Cost:
        That of :class:`ParallelAttention`.

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        activation: The layer between, which treats each value alone; None for GELU. A dropout in
            it drops what it drops in the unsplit layer.
        bias: Whether the linear layers have biases.
        sequence: How `x` and the result are split along the sequence, if they are.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1, or the activation needs all
            hidden values.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        group: ProcessGroup | TensorGroup,
        activation: SupportsLayer | None = None,
        bias: bool = True,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(features, hidden, activation=activation, bias=bias)
        self._split(Entrance(group, sequence))

    @classmethod
    def of(cls, like: FeedForward, entrance: Entrance) -> Self:
        """Return `like`, an unsplit layer without memory, split.

        Raises:
            ModuleError: If its layers are no plain linear ones.
            ModuleStateError: If it has memory.
        """
        made = retyped(like, cls)
        made._split(entrance)
        return made

    def _split(self, entrance: Entrance) -> None:
        self.entrance = entrance
        self.up = ColumnPart(plain(self, self.up), entrance.tensor)
        self.down = RowPart(plain(self, self.down), entrance.tensor, entrance.sequence)
        set_part(self.activation, part_of(self.hidden, entrance.tensor))


class ParallelSwiGLU(Entered, SwiGLU):
    """A :class:`~mpimesh.nn.SwiGLU` of which each rank of a group has some hidden values.

    All else is as in :class:`ParallelFeedForward`.

    Shapes:
        x, result: (..., features), the same on every rank; with `sequence` (rows, this rank's
            places, features).

    Args:
        features: Length of the last axis of `x`.
        hidden: Length of what is between, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.
        bias: Whether the linear layers have biases.
        sequence: How `x` and the result are split along the sequence, if they are.

    Raises:
        ModuleError: If an extent is not a whole number of at least 1.
        GroupError: If this rank is not in the group.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        group: ProcessGroup | TensorGroup,
        bias: bool = False,
        sequence: SequenceSplit | None = None,
    ) -> None:
        super().__init__(features, hidden, bias=bias)
        self._split(Entrance(group, sequence))

    @classmethod
    def of(cls, like: SwiGLU, entrance: Entrance) -> Self:
        """Return `like`, an unsplit layer without memory, split.

        Raises:
            ModuleError: If its layers are no plain linear ones.
            ModuleStateError: If it has memory.
        """
        made = retyped(like, cls)
        made._split(entrance)
        return made

    def _split(self, entrance: Entrance) -> None:
        self.entrance = entrance
        self.gate = ColumnPart(plain(self, self.gate), entrance.tensor)
        self.up = ColumnPart(plain(self, self.up), entrance.tensor)
        self.down = RowPart(plain(self, self.down), entrance.tensor, entrance.sequence)
