from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

MOST_BYTES: int

class Pool:
    def __init__(self, more: Callable[[int], int]) -> None: ...
    @property
    def free_bytes(self) -> int: ...
    def empty(self, nbytes: int) -> NDArray[Any] | None: ...
