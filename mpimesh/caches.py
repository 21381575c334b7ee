"""A dict of limited size."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Cache"]

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dict of at most `limit` entries: a new one takes the place of the oldest.

    Set by ``cache[key] = value`` alone.
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        """Keep a value."""
        if len(self) >= self.limit and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
