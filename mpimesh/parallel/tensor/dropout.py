"""Dropout of features that are split over the ranks of a group."""

from __future__ import annotations

from mpimesh.errors import ModuleError
from mpimesh.nn import Dropout
from mpimesh.nn.checks import check_extent
from mpimesh.nn.protocol import FeaturePart
from mpimesh.parallel.tensor.group import TensorGroup
from mpimesh.runtime import ProcessGroup

__all__ = ["ParallelDropout", "part_of"]


def part_of(extent: int, tensor: TensorGroup) -> FeaturePart | None:
    """Return which of `extent` features this rank has behind a split layer; None if all."""
    if tensor.size == 1:
        return None
    start, stop = tensor.runs(extent)[tensor.rank]
    return FeaturePart(start, stop, extent)


class ParallelDropout(Dropout):
    """A :class:`~mpimesh.nn.Dropout` that drops of split features what it drops of all. Local.

    For what stands between a :class:`ColumnParallelLinear` and a :class:`RowParallelLinear` in a
    layer of one's own. In a :class:`~mpimesh.nn.Sequential`, a model's stages or a
    :class:`ParallelFeedForward` a plain dropout is told its features, and does the same.

    Shapes:
        x, result: (rows, ..., this rank's features), the same.

    Args:
        p: The share to drop, in [0, 1), exact to 2^-32.
        features: Number of features, over all ranks.
        group: The ranks, such as ``mesh.group("tp")``.

    Raises:
        ModuleError: If `p` is out of range, or `features` not a whole number of at least 1.
        GroupError: If this rank is not in the group.

    Example:
        >>> tp = mesh.group("tp")
        >>> dropout = ParallelDropout(0.1, features=256, group=tp)
    """

    def __init__(self, p: float = 0.5, *, features: int, group: ProcessGroup | TensorGroup) -> None:
        super().__init__(p)
        self.tensor = TensorGroup(group)
        self._part = part_of(check_extent("features", features), self.tensor)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Return the features that it has.

        Raises:
            ModuleError: If they are others than those that it gets.
        """
        if part not in (None, self._part):
            raise ModuleError(f"{self!r} is made for {self._part}, but gets {part}")
        return self._part
