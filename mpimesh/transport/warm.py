"""Parts of the arena that nobody uses, and whose pages are there already.

The first touch of a page costs more than copying into it. A program that makes one
array after another of the same size, as a redistribution in a loop does, gets the pages of the
last but one again. What is kept so is limited; beyond that the oldest goes.
"""

from __future__ import annotations

from collections import deque

__all__ = ["WarmParts"]


class WarmParts:
    """Where such parts begin, by their size and by the multiple that they begin at.

    Args:
        limit_bytes: Most bytes that are kept.

    Attributes:
        nbytes: Bytes that are kept.
    """

    __slots__ = ("_by_kind", "_limit_bytes", "_order", "nbytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._by_kind: dict[tuple[int, int], list[int]] = {}
        self._order: deque[tuple[int, tuple[int, int]]] = deque()
        self.nbytes = 0

    def take(self, size: int, unit: int) -> int | None:
        """Return where the part of just this size begins that was kept last; None for none."""
        found = self._by_kind.get((size, unit))
        if not found:
            return None
        self.nbytes -= size
        at = found.pop()
        self._order.remove((at, (size, unit)))
        return at

    def keep(self, at: int, size: int, unit: int) -> list[int]:
        """Keep a part; return which have to go for it, the oldest first."""
        self._by_kind.setdefault((size, unit), []).append(at)
        self._order.append((at, (size, unit)))
        self.nbytes += size
        return self._drop(self._limit_bytes)

    def clear(self) -> list[int]:
        """Keep none; return which have to go."""
        return self._drop(0)

    def _drop(self, limit_bytes: int) -> list[int]:
        gone = []
        while self.nbytes > limit_bytes:
            at, kind = self._order.popleft()
            self._by_kind[kind].remove(at)
            self.nbytes -= kind[0]
            gone.append(at)
        return gone
