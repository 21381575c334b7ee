"""Many operations under way at once, resolved in an order that differs from rank to rank."""

from __future__ import annotations

import random
from typing import Any

from tests.contract.cases import same


class Flight:
    """Handles with what they must give.

    Args:
        seed: Decides the order of resolving; give each rank its own.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._handles: list[tuple[Any, Any, object, Any]] = []

    def add(self, handle: Any, expected: Any, what: object, *, into: Any = None) -> None:
        """Take a started operation; `into` is the array that the result must be."""
        self._handles.append((handle, expected, what, into))

    def land(self) -> None:
        """Resolve all, and compare."""
        self._random.shuffle(self._handles)
        for handle, expected, what, into in self._handles:
            got = handle.resolve()
            same(got, expected, what)
            assert into is None or got is into, f"{what}: out= was not returned"
            assert handle.resolve() is got, f"{what}: a second resolve() gave another object"
            assert handle.done()
        self._handles.clear()
