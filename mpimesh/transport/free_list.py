"""Which parts of a row of bytes are free: first fit, with neighbours joined again."""

from __future__ import annotations

from bisect import bisect_right, insort

__all__ = ["FreeList"]


class FreeList:
    """Free and used parts of ``size`` bytes.

    Args:
        size: How many bytes there are.
    """

    __slots__ = ("_free", "_used", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # (start, end) in order; no two touch, so the row is as short as it can be.
        self._free = [(0, size)] if size else []
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return sum(end - start for start, end in self._used.items())

    def take(self, nbytes: int, alignment_bytes: int) -> int | None:
        """Return where `nbytes` begin from now on; None if no gap is large enough.

        The first gap that is large enough is used, so that the far end stays untouched.
        """
        nbytes = max(nbytes, 1)  # every part has a place of its own
        for number, (start, end) in enumerate(self._free):
            at = -(-start // alignment_bytes) * alignment_bytes
            if at + nbytes <= end:
                rest = [(start, at), (at + nbytes, end)]
                self._free[number : number + 1] = [part for part in rest if part[0] < part[1]]
                self._used[at] = at + nbytes
                return at
        return None

    def size_of(self, at: int) -> int:
        """Return the bytes of the part that begins at `at`.

        Raises:
            KeyError: If no part begins there.
        """
        return self._used[at] - at

    def give(self, at: int) -> tuple[int, int]:
        """Free the part that begins at `at`; return where it began and ended.

        Raises:
            KeyError: If no part begins there.
        """
        part = start, end = at, self._used.pop(at)
        place = bisect_right(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            start = self._free.pop(place - 1)[0]
        insort(self._free, (start, end))
        return part
