from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from mpimesh.core.node import Window

def slot_bytes(size: int) -> int: ...

class Mail:
    window: Window
    rings: list[NDArray[Any]]
    def __init__(
        self,
        window: Window,
        memories: Sequence[NDArray[Any]],
        slots: Sequence[int],
        ranks: Sequence[int],
        size: int,
        arena: Any,
        rings: list[NDArray[Any]],
        rendezvous: bool = False,
    ) -> None: ...
    def reaches(self, rank: int) -> bool: ...
    def send(
        self, buffer: NDArray[Any], dest: int, tag: int, head: int = 0, text: bytes | None = None
    ) -> Message: ...
    def receive(
        self,
        buffer: NDArray[Any] | None,
        source: int,
        tag: int,
        head: int = 0,
        receiver: Receiver | None = None,
    ) -> Message: ...
    def probe(self, tag: int) -> tuple[int, int] | None: ...
    @property
    def idle(self) -> bool: ...
    def close(self) -> None: ...

class Receiver(Protocol):
    def take(self, message: Message) -> None: ...

class Message:
    buffer: NDArray[Any] | None
    receiver: Receiver | None
    value: Any
    rest: Any
    error: Exception | None
    @property
    def head(self) -> int: ...
    @property
    def text(self) -> bytes: ...
    def accept(self, array: NDArray[Any] | None) -> None: ...
    def comes_before(self, other: Message) -> bool: ...
    def test(self) -> bool: ...
    def received_bytes(self) -> int: ...
    def cancel(self) -> bool: ...
