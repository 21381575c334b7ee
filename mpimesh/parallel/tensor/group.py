"""The ranks that share the layers of one model, and what they tell each other within a step.

A tensor-parallel layer waits for the other ranks in the middle of its forward or backward. If one
of them fails there, it never comes to the collective that the others are in, and a started
collective cannot be taken back. So a step watches: while a layer waits, it looks for the
signal of a failed rank, and what was started is noted. After a failure the ranks compare their
notes, and those that are behind do what they have missed, with zeros; then nothing of the
step is left on the group, and the next one works. All ranks run the same layers in the same
order, so a rank is never further ahead than the few collectives that it has not resolved.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from typing import Any, Self, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from mpimesh.arrays import Array
from mpimesh.arrays.namespace import is_cupy
from mpimesh.errors import GroupError, MpimeshError
from mpimesh.parallel.microbatch import replica_sizes
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = ["Pending", "Run", "TensorGroup", "TensorWatch", "watch_over"]

Run: TypeAlias = tuple[int, int]
"""(start, stop) of a rank's part of an axis."""

_REMEMBERED = 16
# More than a layer ever has under way at once.

_watches: WeakKeyDictionary[ProcessGroup, TensorWatch] = WeakKeyDictionary()
# By the group, so that whatever is split over it is watched, wherever a user's loss or layer keeps
# it.


def watch_over(group: ProcessGroup, watch: TensorWatch | None) -> None:
    """Let `watch` look after the waits in what is split over `group`; None for nobody. Local."""
    if watch is None:
        _watches.pop(group, None)
    else:
        _watches[group] = watch


class TensorGroup:
    """A group of ranks as the layers use it that are split over them.

    Each operation starts at once and gives a :class:`Pending`. In a group of one rank nothing
    is moved or copied.

    Args:
        group: The ranks, such as ``mesh.group("tp")``; or another TensorGroup of them.

    Attributes:
        group: The ranks.
        size: Their number.
        rank: This rank's place among them.

    Raises:
        GroupError: If this rank is not among them, or `group` is no group.
    """

    def __init__(self, group: ProcessGroup | TensorGroup) -> None:
        ranks = group.group if isinstance(group, TensorGroup) else group
        if not isinstance(ranks, ProcessGroup):
            raise GroupError(
                f"a layer is split over a group of ranks, such as mesh.group('tp'); got {group!r}"
            )
        if ranks.rank is None:
            raise GroupError(
                f"rank {ranks.world_rank} is not in the group {ranks.name!r} of ranks "
                f"{list(ranks.ranks)}, so it has no part of a layer that is split over it"
            )
        self.group: ProcessGroup = ranks
        self.size: int = ranks.size
        self.rank: int = ranks.rank

    @property
    def watch(self) -> TensorWatch | None:
        """The watch over the waits of a step over these ranks; None outside of one."""
        return _watches.get(self.group)

    def sizes(self, extent: int) -> list[int]:
        """Return how `extent` things are dealt to the ranks: the first ones have one more."""
        return replica_sizes(extent, self.size)

    def runs(self, extent: int) -> list[Run]:
        """Return (start, stop) of what each rank has of `extent` things; see :meth:`sizes`."""
        ends = [0, *accumulate(self.sizes(extent))]
        return list(pairwise(ends))

    def all_reduce(self, x: Array, op: str = "sum", *, owned: bool = False) -> Pending:
        """Start to reduce `x` over the ranks. Collective.

        Args:
            x: This rank's part.
            op: As in :meth:`ProcessGroup.all_reduce`.
            owned: Nobody else holds `x`, so that the result may be written into it.
        """
        return self._start(_Call.of("all_reduce", x, op=op), x, owned)

    def all_gather(self, x: Array, *, axis: int, sizes: Sequence[int]) -> Pending:
        """Start to join the blocks of all ranks. Collective; see :meth:`ProcessGroup`'s."""
        return self._start(_Call.of("all_gather", x, axis=axis, sizes=sizes), x)

    def reduce_scatter(self, x: Array, *, axis: int, sizes: Sequence[int]) -> Pending:
        """Start to sum `x` and give each rank its block. Collective; see :meth:`ProcessGroup`'s."""
        return self._start(_Call.of("reduce_scatter", x, axis=axis, sizes=sizes), x)

    def _start(self, call: _Call, x: Array, owned: bool = False) -> Pending:
        if self.size == 1:
            return Pending(None, x, None)
        watch = self.watch
        handle = call.start(watch.group if watch else self.group, x, x if owned else None)
        if watch is not None:
            watch.note(call, handle)
        return Pending(handle, None, self.watch)

    def __deepcopy__(self, memo: object) -> TensorGroup:
        """Return this: the copy of a layer is split over the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"TensorGroup({self.group.name!r}, size={self.size}, rank={self.rank})"


class Pending:
    """The result of an operation that may be under way."""

    __slots__ = ("_handle", "_value", "_watch")

    def __init__(
        self, handle: CollectiveTensor | None, value: Array, watch: TensorWatch | None
    ) -> None:
        self._handle = handle
        self._value = value
        self._watch = watch

    def resolve(self) -> Array:
        """Wait for the result and return it.

        Raises:
            Exception: What ends the step, if another rank has failed in it.
        """
        handle = self._handle
        if handle is not None:
            if self._watch is not None:
                self._watch.wait(handle)
            self._value = handle.resolve()
            self._handle = None
            if self._watch is not None:
                self._watch.forget(handle)
        return self._value


@dataclass(frozen=True, slots=True)
class _Call:
    """A started collective, so that a rank that missed it can take part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    on_device: bool
    op: str
    axis: int
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, name: str, x: Array, *, op: str = "", axis: int = 0, sizes: Sequence[int] = ()
    ) -> Self:
        return cls(name, tuple(x.shape), str(x.dtype), is_cupy(x), op, axis, tuple(sizes))

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        name, shape, dtype, on_device, op, axis, sizes = values
        return cls(name, tuple(shape), dtype, on_device, op, axis, tuple(sizes))

    def start(self, group: ProcessGroup, x: Array, out: Array | None = None) -> CollectiveTensor:
        if self.name == "all_reduce":
            return group.all_reduce(x, self.op, out=out, label="tensor parallel")
        if self.name == "all_gather":
            return group.all_gather(x, axis=self.axis, sizes=self.sizes, label="tensor parallel")
        return group.reduce_scatter(x, axis=self.axis, sizes=self.sizes, label="tensor parallel")

    def start_missed(self, group: ProcessGroup) -> CollectiveTensor:
        """Take part in what another rank of the group has started, with zeros."""
        shape = list(self.shape)
        if self.name == "all_gather":
            shape[self.axis] = self.sizes[group.rank or 0]
        xp = sys.modules["cupy"] if self.on_device else np
        return self.start(group, xp.zeros(shape, self.dtype))


class TensorWatch:
    """A step's record of the collectives of its layers on this rank.

    Args:
        group: The ranks that share the layers, for their collectives in this step.
        look: Raises if the step is to be left.
    """

    def __init__(self, group: ProcessGroup, look: Callable[[], None]) -> None:
        self.group = group
        self._look = look
        self._count = 0
        self._recent: deque[_Call] = deque(maxlen=_REMEMBERED)
        self._open: dict[int, CollectiveTensor] = {}

    def note(self, call: _Call, handle: CollectiveTensor) -> None:
        """Keep in mind that `call` was started."""
        self._count += 1
        self._recent.append(call)
        self._open[id(handle)] = handle

    def forget(self, handle: CollectiveTensor) -> None:
        """Let go of a handle that is resolved."""
        self._open.pop(id(handle), None)

    def wait(self, handle: CollectiveTensor) -> None:
        """Wait for `handle`, or leave the step. Its resolving raises what went wrong with it."""
        if not handle.done():
            self.group._core.wait_for(_Watched(handle, self._look), what=handle)

    def notes(self) -> list[Any]:
        """Return what other ranks are to know after a failure: how many, and the last of them."""
        return [self._count, [call.to_json() for call in self._recent]]

    def finish(self, everyone: Sequence[list[Any]]) -> None:
        """Do what this rank has missed, and wait for all that is under way. Collective.

        Args:
            everyone: The `notes` of all ranks of the group.
        """
        most, calls = max(everyone, key=lambda notes: notes[0])
        missed = [] if most == self._count else calls[self._count - most :]
        handles = list(self._open.values())
        handles += [_Call.from_json(call).start_missed(self.group) for call in missed]
        for handle in handles:
            try:
                handle.resolve()
            except MpimeshError:
                continue  # the ranks were at odds, which the step tells
        self._open.clear()


class _Watched:
    """An operation as a request whose wait also looks for news."""

    __slots__ = ("_handle", "_look")

    def __init__(self, handle: CollectiveTensor, look: Callable[[], None]) -> None:
        self._handle = handle
        self._look = look

    def test(self) -> bool:
        if self._handle.done():
            return True
        self._look()
        return False
