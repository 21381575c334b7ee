"""Inputs of operations under way, made read-only so that a write to one raises.

One array may be the input of several operations, and an array and views of it may be
inputs together. So locks are counted, and a view stays locked as long as the array that
it belongs to: NumPy makes no view writable before its base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays import HostArray

__all__ = ["InputLocks"]


@dataclass(slots=True)
class _Held:
    """A locked array, how many operations read it, and the first of them."""

    array: HostArray
    reader: object
    count: int = 0


class InputLocks:
    """The locked arrays of one rank."""

    __slots__ = ("_due", "_held")

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._due: list[int] = []

    def lock(self, x: HostArray, reader: object = None) -> Callable[[], None] | None:
        """Make `x` read-only until the returned function is called; None if it is so already.

        Args:
            x: The input.
            reader: The operation; its `str` names it.
        """
        held = self._held.get(id(x))
        if held is None:
            if not x.flags.writeable:
                return None
            x.flags.writeable = False
            held = self._held[id(x)] = _Held(x, reader)
        held.count += 1
        return lambda: self._release(id(x))

    def holder(self, x: HostArray) -> object:
        """Return the operation for which `x` is read-only; None if it is so without one."""
        for held in self._held.values():
            if np.may_share_memory(held.array, x):
                return held.reader
        return None

    def _release(self, key: int) -> None:
        held = self._held[key]
        held.count -= 1
        if held.count == 0:
            self._due.append(key)
        # A base that is freed may free views that have waited for it.
        freed = True
        while freed:
            freed = sum(map(self._unlock, self._due)) > 0
            self._due = [key for key in self._due if key in self._held]
        if not any(held.count for held in self._held.values()):
            # What is left has a base that the program itself made read-only meanwhile.
            self._held.clear()
            self._due.clear()

    def _unlock(self, key: int) -> bool:
        """Make an array writable that nobody reads any more; False if it is not possible yet."""
        held = self._held.get(key)
        if held is None or held.count:
            return False
        try:
            held.array.flags.writeable = True
        except ValueError:
            return False
        del self._held[key]
        return True
