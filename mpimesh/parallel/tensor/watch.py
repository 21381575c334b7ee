"""A watch over the ranks that share the layers of one model, within a step.

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
from typing import Any, Self

import numpy as np

from mpimesh.arrays import Array
from mpimesh.arrays.namespace import is_cupy
from mpimesh.errors import MpimeshError
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = ["TensorWatch"]

_REMEMBERED = 16
# More than a layer ever has under way at once.


@dataclass(frozen=True, slots=True)
class _Call:
    """A started collective, so that a rank that missed it can take part."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    on_device: bool
    label: str
    op: str
    axis: int
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        name: str,
        x: Array,
        label: str,
        *,
        op: str = "",
        axis: int = 0,
        sizes: Sequence[int] = (),
    ) -> Self:
        shape, on_device = tuple(x.shape), is_cupy(x)
        return cls(name, shape, str(x.dtype), on_device, label, op, axis, tuple(sizes))

    def to_json(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        name, shape, dtype, on_device, label, op, axis, sizes = values
        return cls(name, tuple(shape), dtype, on_device, label, op, axis, tuple(sizes))

    def start(self, group: ProcessGroup, x: Array, out: Array | None = None) -> CollectiveTensor:
        if self.name == "all_reduce":
            return group.all_reduce(x, self.op, out=out, label=self.label)
        collective = group.all_gather if self.name == "all_gather" else group.reduce_scatter
        return collective(x, axis=self.axis, sizes=self.sizes, out=out, label=self.label)

    def start_missed(self, group: ProcessGroup) -> CollectiveTensor:
        """Take part in what another rank of the group has started, with zeros."""
        shape = list(self.shape)
        if self.name == "all_gather":
            shape[self.axis] = self.sizes[group.rank or 0]
        xp = sys.modules["cupy"] if self.on_device else np
        return self.start(group, xp.zeros(shape, self.dtype))


class TensorWatch:
    """A step's record of the collectives of its layers on this rank, which go through it.

    It is given to the layers as their group, see :func:`mpimesh.nn.split.stand_in`.

    Args:
        group: The ranks that share the layers, for their collectives in this step.
        look: Raises if the step is to be left.
    """

    def __init__(self, group: ProcessGroup, look: Callable[[], None]) -> None:
        self.group = group
        self.name, self.ranks, self.world_rank = group.name, group.ranks, group.world_rank
        self.size, self.rank = group.size, group.rank
        self._look = look
        self._count = 0
        self._recent: deque[_Call] = deque(maxlen=_REMEMBERED)
        self._open: dict[int, CollectiveTensor] = {}

    def all_reduce(self, x: Array, op: str, *, out: Array | None, label: str) -> _Watched:
        """Start to reduce `x` over the ranks. Collective."""
        return self._start(_Call.of("all_reduce", x, label, op=op), x, out)

    def all_gather(
        self, x: Array, *, axis: int, sizes: Sequence[int], label: str, out: Array | None = None
    ) -> _Watched:
        """Start to join the blocks of all ranks along an axis. Collective."""
        return self._start(_Call.of("all_gather", x, label, axis=axis, sizes=sizes), x, out)

    def reduce_scatter(self, x: Array, *, axis: int, sizes: Sequence[int], label: str) -> _Watched:
        """Start to sum `x` and give each rank its block along an axis. Collective."""
        return self._start(_Call.of("reduce_scatter", x, label, axis=axis, sizes=sizes), x)

    def _start(self, call: _Call, x: Array, out: Array | None = None) -> _Watched:
        handle = call.start(self.group, x, out)
        self._count += 1
        self._recent.append(call)
        self._open[id(handle)] = handle
        return _Watched(handle, self)

    def resolve(self, handle: CollectiveTensor) -> Array:
        """Wait for `handle` and return its result, or leave the step.

        Raises:
            Exception: What ends the step, if another rank has failed in it.
        """
        if not handle.done():
            self.group._core.wait_for(_Waiting(handle, self._look), what=handle)
        value = handle.resolve()
        self._open.pop(id(handle), None)
        return value

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
    """The result of a collective of a layer that may be under way."""

    __slots__ = ("_handle", "_value", "_watch")

    def __init__(self, handle: CollectiveTensor, watch: TensorWatch) -> None:
        self._handle: CollectiveTensor | None = handle
        self._value: Array = None
        self._watch = watch

    def resolve(self) -> Array:
        """Wait for the result and return it; see :meth:`TensorWatch.resolve`."""
        if self._handle is not None:
            self._value = self._watch.resolve(self._handle)
            self._handle = None
        return self._value


class _Waiting:
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
